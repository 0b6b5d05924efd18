"""The CUDA kernels on the virtual GPU where they differ from the other backends: long and short rows, pointers that are
not aligned, weights of another dtype, lists longer than one launch takes. The ops' own tables of cases run on them too:
the backend "vgpu" in tests/ops and tests/optim."""

import math

import pytest
import torch
import trainwright as tw
import vgpu_backend
from numerics import check_reference, same_bits, vgpu_close

BACKENDS = ["vgpu"]  # for conftest.py, which loads the kernels or skips
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def norm(op, x, weight, bias=None, residual=None):
    h = x if residual is None else x + residual
    if op is tw.rms_norm:
        y = torch.nn.functional.rms_norm(h, h.shape[-1:], weight.to(h.dtype), 1e-5)
    else:
        b = None if bias is None else bias.to(h.dtype)
        y = torch.nn.functional.layer_norm(h, h.shape[-1:], weight.to(h.dtype), b, 1e-5)
    return y if residual is None else (y, h)


# Columns: one pack and less; several rows in a block, the last not full; one pack per thread; several; more than
# registers hold; not of whole packs.
@pytest.mark.parametrize(
    "shape", [(3, 2), (7, 24), (9, 256), (6, 2048), (5, 4096), (3, 8208), (2, 8203)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [tw.rms_norm, tw.layer_norm], ids=lambda f: f.__name__)
def test_norms_of_rows_of_any_length(op, dtype, shape, backend):
    if dtype == torch.float64 and op is tw.layer_norm and shape[1] > 6144:
        shape = (shape[0], 4100 + shape[1] % 2)
    inputs = {"x": torch.randn(shape), "weight": torch.randn(shape[-1]), "residual": torch.randn(shape)}  # fmt: skip
    if op is tw.layer_norm:
        inputs["bias"] = torch.randn(shape[-1])
    inputs = {k: v.to(dtype) for k, v in inputs.items()}
    check_reference(
        op, lambda **k: norm(op, **{n: v for n, v in k.items() if n != "eps"}), inputs, {"eps": 1e-5}, backend=backend
    )  # fmt: skip


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "C", [8, 40, 72, 1032]
)  # an odd number of packs, where two lanes load together
def test_weights_of_any_dtype(C, w_dtype, x_dtype, backend):
    x, w, b = torch.randn(5, C).to(x_dtype), torch.randn(C).to(w_dtype), torch.randn(C).to(w_dtype)
    wide = torch.float64 if x_dtype == torch.float64 else torch.float32
    for op, more in ((tw.rms_norm, {}), (tw.layer_norm, {"bias": b})):
        got = op(x, w, eps=1e-5, backend=backend, **more)
        exact = norm(op, x.double(), w.double(), **{k: v.double() for k, v in more.items()})
        limit = 4 * torch.finfo(x_dtype).eps + 8 * torch.finfo(wide).eps
        assert ((got.double() - exact).abs() <= limit * exact.abs().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pointers_that_are_not_aligned(dtype, backend):
    """A view that begins in the middle of 16 bytes gives the values of an aligned copy."""

    def shifted(*shape):
        storage = torch.randn(math.prod(shape) + 1).to(dtype)
        return storage[1:].view(shape)

    x, dy, w = shifted(6, 64), shifted(6, 64), shifted(64)
    for op in (tw.rms_norm, tw.layer_norm):
        results = []
        for inputs in ((x, w, dy), (x.clone(), w.clone(), dy.clone())):
            leaves = [v.detach().requires_grad_() for v in inputs[:2]]
            y = op(*leaves, backend=backend)
            results.append([y, *torch.autograd.grad(y, leaves, inputs[2])])
        for a, b in zip(*results):
            assert (a - b).abs().max() <= 8 * torch.finfo(dtype).eps * b.abs().max()
    assert same_bits(tw.swiglu(x, dy, backend=backend), tw.swiglu(x.clone(), dy.clone(), backend=backend))  # fmt: skip
    target = torch.arange(6)
    leaf, aligned = x.detach().requires_grad_(), x.clone().requires_grad_()
    for t in (leaf, aligned):
        tw.cross_entropy(t, target, backend=backend).backward()
    assert (leaf.grad - aligned.grad).abs().max() <= 4 * torch.finfo(dtype).eps
    flat, out = torch.full((460,), 7.0, dtype=dtype), torch.zeros_like(x)
    tw.bucket_pack([x, w], flat, [1, 389, 453], backend=backend)
    zeros, rest = torch.zeros(4, dtype=dtype), torch.full((7,), 7.0, dtype=dtype)
    assert same_bits(flat, torch.cat((rest[:1], x.flatten(), zeros, w, rest)))
    tw.bucket_unpack(flat, [out], [1], backend=backend)
    assert same_bits(out, x)


@pytest.mark.parametrize("V", [1, 7, 8, 9, 31, 1000, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_of_rows_that_begin_anywhere(dtype, V, backend):
    x, target = torch.randn(3, V).to(dtype), torch.tensor([V - 1, 0, V // 2])

    def plain(logits, target):
        loss = torch.nn.functional.cross_entropy(logits, target)
        return loss.to(torch.promote_types(loss.dtype, torch.float32))

    check_reference(tw.cross_entropy, plain, {"logits": x, "target": target}, backend=backend)


def test_target_out_of_range_gives_nan(backend):
    x = torch.randn(3, 5, requires_grad=True)
    loss = tw.cross_entropy(x, torch.tensor([1, 9, -3]), reduction="none", backend=backend)
    assert loss.isnan().tolist() == [False, True, True]


def test_more_tensors_than_one_launch_takes(backend):
    """Kernel arguments hold some 400 rows of adamw, 1300 of the norm, 500 of the bucket."""
    count = 1500
    sizes = [1 + i % 7 for i in range(count)]
    grads = [torch.randn(n) for n in sizes]
    exact = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    assert vgpu_close("norm of many", tw.grad_norm(grads, backend=backend), exact)
    offsets = [sum(sizes[:i]) for i in range(count)]
    flat = torch.empty(sum(sizes))
    squares, bad = tw.bucket_pack(grads, flat, offsets, backend=backend)
    assert same_bits(flat, torch.cat(grads)) and bad.item() == 0
    assert vgpu_close("squares of many", squares, exact**2)

    def steps(backend):
        params = [torch.ones(n) for n in sizes]
        state = [[torch.zeros(n) for n in sizes] for _ in range(2)]
        counts = [torch.zeros((), dtype=torch.float64) for _ in sizes]
        tw.adamw_(params, grads, *state, counts, lr=0.1, backend=backend)
        return [*params, *state[0], *state[1], *counts]

    for ours, reference in zip(steps(backend), steps("torch")):
        assert vgpu_close("adamw of many", ours, reference)


def test_sums_do_not_depend_on_the_device(backend):
    """The same bits of norm, bucket and gradients for any number of multiprocessors but the norms' weight gradients."""
    from trainwright.vgpu.cudart import Properties

    runtime = vgpu_backend.runtime()
    grads = [torch.randn(n) for n in (30000, 3, 8192)]
    x, t = torch.randn(6, 3000), torch.arange(6)
    results = []
    try:
        for multiprocessors in (1, 4, 132):
            runtime.attach(runtime.device, Properties(multiprocessors=multiprocessors))
            flat = torch.empty(38195)
            stats = tw.bucket_pack(grads, flat, [0, 30000, 30003], scale=0.3, backend=backend)
            norm, loss = (
                tw.grad_norm(grads, backend=backend),
                tw.cross_entropy(x, t, backend=backend),
            )
            results.append([flat, *stats, norm, loss])
    finally:
        runtime.attach(runtime.device, vgpu_backend.properties())
    assert all(same_bits(a, b) for r in results[1:] for a, b in zip(r, results[0]))


def test_faults_name_the_kernel(backend):
    """A kernel that is told of more rows than there are stops at the first element past the tensor."""
    x, stats = torch.randn(4, 64), torch.randn(2)  # one rstd for each row expected
    from trainwright.vgpu import MemoryFault

    with pytest.raises(MemoryFault, match=r"norm_bwd_kernel.*RmsNorm"):
        vgpu_backend.op("rms_norm_bwd")(x, None, x, None, stats, 0.0, True, False)
