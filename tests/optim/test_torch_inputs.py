"""Our optimizers against torch's for-loop ones over the inputs with which torch tests its own."""

import pytest
import torch

from optim.classes import TORCH, assert_close_run, copies, give_gradients, leaf, parameters

FLAGS = ("capturable", "fused", "foreach")


def configurations(optimizer, dtype):
    """The inputs for both devices: those for CUDA add tensors and `capturable`; and the implementations."""
    inputs = optimizer.inputs("cpu", dtype) + optimizer.inputs("cuda", dtype)
    kwargs = [i.kwargs for i in inputs] + [{"foreach": True}]
    return kwargs + [{"fused": True}] * (optimizer.name != "RMSprop")


def number(value):
    if isinstance(value, tuple):
        return tuple(map(number, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def test_the_inputs_are_there():
    counts = {o.name: len(configurations(o, torch.float32)) for o in TORCH}
    assert counts == {"AdamW": 17, "Adam": 17, "SGD": 20, "RMSprop": 20}
    assert [o.name for o in TORCH if not hasattr(__import__("trainwright").optim, o.name)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", TORCH, ids=str)
def test_torch_s_own_optimizer_inputs(optimizer, dtype):
    """Seven steps in two groups, with gradients that are transposed, zero, missing, and missing at first. bf16
    parameters: their fp32 masters are torch's fp32 run."""
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    for kwargs in configurations(optimizer, dtype):
        plain_kwargs = {k: number(v) for k, v in kwargs.items() if k not in FLAGS}
        a = parameters(dtype)
        b = [leaf(p.detach().to(wide, copy=True)) for p in a]
        groups = [
            [{"params": x[:2]}, {"params": x[2:], "lr": 0.05, "weight_decay": 0.25, **optimizer.changes}]
            for x in (a, b)
        ]  # fmt: skip
        if "betas" in kwargs and isinstance(kwargs["betas"][0], torch.Tensor):
            for group in groups:
                group[1].pop("betas", None)  # torch wants tensors everywhere then
        ours = optimizer.ours(groups[0], **kwargs)
        theirs = optimizer.plain(groups[1], foreach=False, **plain_kwargs)
        for step in range(7):
            give_gradients(a, step)
            if step == 2:
                a[0].grad.zero_()
            if step in (3, 4):
                a[1].grad = None  # frozen for a while
            if step < 2:
                a[4].grad = None  # its first gradient is late
            for p, q in zip(a, b):
                contiguous = torch.contiguous_format
                q.grad = None if p.grad is None else p.grad.to(wide).clone(memory_format=contiguous)
            ours.step()
            theirs.step()
            exact = [ours.state[p].get("master", p.detach()) if p in ours.state else p for p in a]
            # 0.25 · p is exact, so that g + wd·p cancels alike in both
            for p, q, e in zip(a, b, exact):
                torch.testing.assert_close(e.to(wide).detach(), q.detach())
                assert torch.equal(p.detach(), e.detach().to(dtype))
                count = theirs.state[q].get("step") if q in theirs.state else None
                if count is not None:
                    assert ours.state[p]["step"].item() == float(count)
            if dtype is not torch.bfloat16:
                assert_close_run(a, ours, b, theirs, optimizer.states)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", TORCH, ids=str)
def test_torch_s_own_error_inputs(optimizer):
    inputs = optimizer.errors("cpu", torch.float32)
    assert len(inputs) >= 7
    for error in inputs:
        spec = error.optimizer_error_input
        params = spec.params if spec.params is not None else [leaf(torch.ones(2))]
        # torch only warns about a parameter that is listed twice; here it is an error
        kind = ValueError if error.error_type is UserWarning else error.error_type
        with pytest.raises(kind) as caught:
            optimizer.ours(params, **spec.kwargs)
        if error.error_type is not UserWarning:
            caught.match(error.error_regex)


@pytest.mark.parametrize("optimizer", TORCH, ids=str)
def test_low_precision_without_a_master_is_no_worse_than_torch(optimizer):
    """bf16 and fp16 parameters, updated themselves: error against an fp64 run at most twice that of torch's."""
    for dtype in (torch.bfloat16, torch.float16):
        a = parameters(dtype)
        b, exact = copies(a), [leaf(p.detach().double()) for p in a]
        ours = optimizer.ours(a, master_weights="none", **optimizer.options)
        theirs = optimizer.plain(b, foreach=False, **optimizer.options)
        oracle = optimizer.plain(exact, foreach=False, **optimizer.options)
        for step in range(5):
            give_gradients(a, step)
            for p, q, e in zip(a, b, exact):
                q.grad, e.grad = p.grad.clone(), p.grad.double()
            for o in (ours, theirs, oracle):
                o.step()

        errors = [
            max(
                (p.detach().double() - e.detach()).abs().max()
                for p, e in zip(x, exact)
                if p.numel()
            )
            for x in (a, b)
        ]
        assert errors[0] <= 2 * errors[1]
