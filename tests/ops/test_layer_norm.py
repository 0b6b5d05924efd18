"""tw.layer_norm: one table of cases for every backend."""

import pytest
import torch
import trainwright as tw
from numerics import (
    backends_for_tests,
    check_compile,
    check_gradcheck,
    check_layouts,
    check_opcheck,
    check_reference,
    same_bits,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.layer_norm)
# Triton's interpreter is slow, and its kernels treat all dtypes alike but for the accumulator.
RUNS = [(b, d) for b in BACKENDS for d in DTYPES if b != "triton" or d in DTYPES[:2]]

# id: (shape, weight, bias, residual, eps)
CASES = {
    "plain": ((4, 3, 96), True, True, False, 1e-5),
    "odd width": ((5, 97), True, True, False, 1e-5),
    "one column": ((7, 1), True, True, False, 1.0),
    "one row, 1-d": ((33,), True, True, False, 1e-6),
    "neither weight nor bias": ((6, 64), False, False, False, 1e-5),
    "weight alone": ((6, 40), True, False, False, 1e-5),
    "bias alone": ((6, 41), False, True, True, 1e-5),
    "residual": ((3, 5, 72), True, True, True, 1e-5),
    "no rows": ((0, 16), True, True, True, 1e-5),
    "wide": ((3, 4099), True, True, True, 1e-5),
}


def reference(x, weight=None, bias=None, residual=None, eps=1e-5):
    h = x if residual is None else x + residual
    y = torch.nn.functional.layer_norm(h, (x.shape[-1],), weight, bias, eps)
    return y if residual is None else (y, h)


def make(case, dtype=torch.float32):
    shape, has_weight, has_bias, has_residual, eps = CASES[case]
    inputs = {"x": torch.randn(shape, dtype=torch.float64)}
    if has_weight:
        inputs["weight"] = torch.randn(shape[-1], dtype=torch.float64)
    if has_bias:
        inputs["bias"] = torch.randn(shape[-1], dtype=torch.float64)
    if has_residual:
        inputs["residual"] = torch.randn(shape, dtype=torch.float64)
    return {k: v.to(dtype) for k, v in inputs.items()}, {"eps": eps}


@pytest.mark.parametrize(("backend", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, backend, dtype):
    inputs, options = make(case, dtype)
    check_reference(tw.layer_norm, reference, inputs, options, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows(dtype):
    inputs = {
        "x": torch.randn(1031, 9, dtype=dtype),
        "weight": torch.randn(9, dtype=dtype),
        "bias": torch.randn(9, dtype=dtype),
    }
    check_reference(tw.layer_norm, reference, inputs, backend="cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout(backend):
    inputs, options = make("residual")
    inputs = {k: v[..., :5].contiguous() for k, v in inputs.items()}
    check_layouts(tw.layer_norm, inputs, options, backend=backend)


@pytest.mark.parametrize("case", ["plain", "residual", "bias alone"])
def test_gradcheck(case):
    inputs, options = make(case)
    check_gradcheck(
        tw.layer_norm, {k: v[..., :7] for k, v in inputs.items()}, options, backend="cpu"
    )


@pytest.mark.parametrize("case", ["plain", "residual"])
def test_compiles_without_graph_break(case):
    inputs, options = make(case, torch.bfloat16)
    check_compile(tw.layer_norm, inputs, options)


def test_opcheck():
    x, w, r, stats = torch.randn(3, 5), torch.randn(5), torch.randn(3, 5), torch.ones(3, 3)
    check_opcheck(torch.ops.trainwright.layer_norm_fwd.default, x, r, w, None, 1e-6)
    backward = torch.ops.trainwright.layer_norm_bwd.default
    check_opcheck(backward, x, None, r, w, stats, True, True)
    check_opcheck(backward, x, r, r, None, stats, True, False)
    check_opcheck(backward, x, r, r, w, stats, False, True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [1e4, -3e5])
def test_a_large_common_offset_costs_no_accuracy(offset, backend):
    x = (offset + torch.randn(6, 768)).requires_grad_()
    w, dy = torch.randn(768), torch.randn(6, 768)
    y = tw.layer_norm(x, w, backend=backend)
    (dx,) = torch.autograd.grad(y, x, dy)
    x64 = x.detach().double().requires_grad_()
    y64 = reference(x64, w.double())
    (dx64,) = torch.autograd.grad(y64, x64, dy.double())
    # Not "twice plain torch": its error here is 1e-3 and more.
    assert (y - y64).abs().max() < 4e-6
    assert (dx - dx64).abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_rows_give_the_bias(backend):
    x = torch.tensor([[3.1], [0.0], [-1e30]]).expand(3, 50)
    bias = torch.randn(50)
    y = tw.layer_norm(x, torch.randn(50), bias, eps=1e-30, backend=backend)
    assert torch.allclose(y, bias.expand(3, 50), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_and_bias_of_other_dtypes_keep_their_gradient_dtype(backend):
    x = torch.randn(4, 24, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(24, requires_grad=True)
    b = torch.randn(24, dtype=torch.float16, requires_grad=True)
    y = tw.layer_norm(x, w, b, backend=backend)
    y.float().sum().backward()
    assert [t.dtype for t in (y, x.grad, w.grad, b.grad)] == [
        torch.bfloat16, torch.bfloat16, torch.float32, torch.float16,
    ]  # fmt: skip
    leaves = [t.detach().double().requires_grad_() for t in (x, w, b)]
    reference(*leaves).sum().backward()
    assert (w.grad - leaves[1].grad).abs().max() <= 1e-6 * leaves[1].grad.abs().max() + 1e-6
    assert torch.equal(b.grad.double(), leaves[2].grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual"])
def test_one_gradient_alone_equals_the_one_among_all(wanted, backend):
    inputs, options = make("residual")
    leaves = {k: v.requires_grad_() for k, v in inputs.items()}
    outs = tw.layer_norm(**leaves, **options, backend=backend)
    torch.autograd.backward([o.square().sum() for o in outs])
    alone = {k: v.detach().requires_grad_(k == wanted) for k, v in inputs.items()}
    outs = tw.layer_norm(**alone, **options, backend=backend)
    torch.autograd.backward([o.square().sum() for o in outs if o.requires_grad])
    assert same_bits(alone[wanted].grad, leaves[wanted].grad)
    assert all(v.grad is None for k, v in alone.items() if k != wanted)


def test_the_same_bits_for_any_number_of_threads():
    inputs = {"x": torch.randn(2500, 70), "weight": torch.randn(70), "bias": torch.randn(70)}
    leaves = [v.requires_grad_() for v in inputs.values()]
    dy = torch.randn(2500, 70)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = tw.layer_norm(*leaves, backend="cpu")
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
    finally:
        torch.set_num_threads(2)
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], result))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_row_stays_in_that_row(backend):
    x = torch.randn(4, 40)
    x[2, 7] = float("nan")
    y = tw.layer_norm(x, backend=backend)
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


def test_streamed_stores_give_the_bits_of_plain_ones():
    # 8 MiB and more of output goes past the cache; the first rows alone do not.
    x, w, dy = torch.randn(4100, 512), torch.randn(512), torch.randn(4100, 512)
    x.requires_grad_()
    y = tw.layer_norm(x, w, backend="cpu")
    (dx,) = torch.autograd.grad(y, x, dy)
    few = x.detach()[:100].requires_grad_()
    y_few = tw.layer_norm(few, w, backend="cpu")
    assert same_bits(y[:100], y_few)
    assert same_bits(dx[:100], torch.autograd.grad(y_few, few, dy[:100])[0])


def test_autocast_keeps_the_input_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.layer_norm(torch.randn(2, 8)).dtype == torch.float32


def test_only_the_returned_sum_is_used():
    x, r = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    tw.layer_norm(x, residual=r)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 8)) and torch.equal(r.grad, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": [1.0]}, TypeError, "layer_norm: x: expected a torch.Tensor, got list"),
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, TypeError, "x: expected dtype"),
        ({"x": torch.ones(())}, ValueError, "x: expected at least 1 dimension"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(4)}, ValueError, r"weight: expected shape \(3\), got \(4,\)"),
        ({"x": torch.ones(2, 3), "bias": torch.ones(3, 1)}, ValueError, r"bias: expected shape \(3\)"),
        ({"x": torch.ones(2, 3), "residual": torch.ones(2, 2)}, ValueError, "residual: expected shape"),
        ({"x": torch.ones(2, 3), "residual": torch.ones(2, 3).half()}, TypeError, "residual: expected dtype float32"),
        ({"x": torch.ones(2, 3), "eps": -1.0}, ValueError, "eps: expected at least 0.0, got -1.0"),
        ({"x": torch.ones(2, 3), "eps": None}, TypeError, "eps: expected a number, got NoneType"),
        ({"x": torch.ones(2, 3), "backend": "cuda"}, tw.BackendError, "cuda: needs CUDA tensors, got cpu"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        tw.layer_norm(**arguments)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_module_has_torch_s_state_dict(options):
    ours, theirs = tw.nn.LayerNorm(16, **options), torch.nn.LayerNorm(16, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16)
    assert (ours(x) - theirs(x)).abs().max() < 1e-6
    fresh = tw.nn.LayerNorm(16, **options).state_dict()
    wanted = torch.nn.LayerNorm(16, **options).state_dict()
    assert fresh.keys() == wanted.keys() and all(torch.equal(fresh[k], wanted[k]) for k in fresh)
