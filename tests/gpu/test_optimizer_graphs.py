"""Steps of the optimizers inside captured CUDA graphs, and how many kernels a step is, on a GPU."""

import pytest
import torch
import trainwright as tw
from numerics import same_bits

pytestmark = pytest.mark.gpu

FORMATS = {
    "fp32": (torch.float32, {}),
    "fp32 masters": (torch.bfloat16, {"max_grad_norm": 0.5}),
    "int8": (torch.bfloat16, {"master_weights": "none", "state_dtype": "int8", "stochastic_rounding": True}),
}  # fmt: skip


def leaves(dtype, count=300):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1 + 37 * (i % 9),) for i in range(count)] + [(513, 257)]
    made = [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]
    return [p.requires_grad_() for p in made]


def set_gradients(params, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    for p in params:
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))


def contents(params, optimizer):
    states = [v for p in params for v in optimizer.state[p].values()]
    return [t.detach() for t in [*params, *states]]


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "RMSprop", "Lamb"])
def test_a_replayed_step_is_a_step(name, label):
    """With other gradients and another learning rate in each, and steps outside of the graph in between."""
    dtype, options = FORMATS[label]

    def run(captured):
        params, lr = leaves(dtype), torch.tensor(0.1, device="cuda")
        optimizer = getattr(tw.optim, name)(params, lr=lr, backend="cuda", **options)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(2):
                set_gradients(params, step)
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        ours = [p.grad for p in params]
        for step in range(2, 8):
            lr.fill_(0.1 / (1 + step))
            if step == 5:  # other tensors, at other addresses
                for p in params:
                    p.grad = torch.empty_like(p)
            set_gradients(params, step)
            if captured and step != 5:
                graph.replay()
            else:
                optimizer.step()
            if step == 5:
                for p, g in zip(params, ours):
                    p.grad = g
        return contents(params, optimizer)

    for i, (a, b) in enumerate(zip(run(True), run(False), strict=True)):
        assert same_bits(a, b), i


def test_a_first_step_is_not_captured():
    params = leaves(torch.float32, 3)
    set_gradients(params, 0)
    optimizer = tw.optim.AdamW(params, lr=0.1, backend="cuda")
    with (
        pytest.raises(RuntimeError, match="run a step before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_a_thousand_tensors_are_one_kernel():
    params = leaves(torch.float32, 1000)
    set_gradients(params, 0)
    optimizer = tw.optim.AdamW(params, lr=0.1, backend="cuda")
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1 and "optimizer_kernel" in kernels[0]
