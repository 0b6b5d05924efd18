"""tw.rms_norm: one table of cases for every backend."""

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
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.rms_norm)
# Triton's interpreter is slow, and its kernels treat all dtypes alike but for the accumulator.
RUNS = [(b, d) for b in BACKENDS for d in DTYPES if b != "triton" or d in DTYPES[:2]]

# id: (shape, weight, residual, eps, weight_offset)
CASES = {
    "plain": ((4, 3, 96), True, False, 1e-6, 0.0),
    "odd width": ((5, 97), True, False, 1e-6, 0.0),
    "one column": ((7, 1), True, False, 1e-6, 0.0),
    "one row, 1-d": ((33,), True, False, 1e-5, 0.0),
    "no weight": ((6, 64), False, False, 1e-6, 0.0),
    "gemma offset": ((6, 40), True, False, 1e-6, 1.0),
    "residual": ((3, 5, 72), True, True, 1e-6, 0.0),
    "residual, no weight": ((9, 31), False, True, 1e-3, 0.0),
    "no rows": ((0, 16), True, True, 1e-6, 0.0),
    "wide": ((3, 4099), True, True, 1e-6, 0.0),
}


def reference(x, weight=None, residual=None, eps=1e-6, weight_offset=0.0):
    h = x if residual is None else x + residual
    w = torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight + weight_offset
    y = torch.nn.functional.rms_norm(h, (x.shape[-1],), w, eps)
    return y if residual is None else (y, h)


def make(case, dtype=torch.float32):
    shape, has_weight, has_residual, eps, offset = CASES[case]
    inputs = {"x": torch.randn(shape, dtype=torch.float64)}
    if has_weight:
        inputs["weight"] = torch.randn(shape[-1], dtype=torch.float64)
    if has_residual:
        inputs["residual"] = torch.randn(shape, dtype=torch.float64)
    return {k: v.to(dtype) for k, v in inputs.items()}, {"eps": eps, "weight_offset": offset}


@pytest.mark.parametrize(("backend", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, backend, dtype):
    inputs, options = make(case, dtype)
    check_reference(tw.rms_norm, reference, inputs, options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout(backend):
    inputs, options = make("residual")
    inputs = {k: v[..., :5].contiguous() for k, v in inputs.items()}
    check_layouts(tw.rms_norm, inputs, options, backend=backend)


@pytest.mark.parametrize("case", ["plain", "residual, no weight", "gemma offset"])
def test_gradcheck(case):
    inputs, options = make(case)
    check_gradcheck(tw.rms_norm, {k: v[..., :7] for k, v in inputs.items()}, options, backend="cpu")


@pytest.mark.parametrize("case", ["plain", "residual"])
def test_compiles_without_graph_break(case):
    inputs, options = make(case, torch.bfloat16)
    check_compile(tw.rms_norm, inputs, options)


def test_opcheck():
    x, w, r = torch.randn(3, 5), torch.randn(5), torch.randn(3, 5)
    check_opcheck(torch.ops.trainwright.rms_norm_fwd.default, x, r, w, 1e-6, 0.0)
    check_opcheck(
        torch.ops.trainwright.rms_norm_bwd.default, x, None, r, w, torch.ones(3), 0.0, True, True
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_weight_with_bf16_input_keeps_its_gradient_dtype(backend):
    x = torch.randn(4, 24, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(24, requires_grad=True)
    y = tw.rms_norm(x, w, backend=backend)
    y.float().sum().backward()
    assert (
        y.dtype == torch.bfloat16
        and w.grad.dtype == torch.float32
        and x.grad.dtype == torch.bfloat16
    )
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    reference(x64, w64).sum().backward()
    assert (w.grad - w64.grad).abs().max() <= 1e-6 * w64.grad.abs().max() + 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_row_stays_in_that_row(backend):
    x = torch.randn(4, 40)
    x[2, 7] = float("nan")
    y = tw.rms_norm(x, backend=backend)
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


def test_autocast_keeps_the_input_dtype():
    x = torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.rms_norm(x).dtype == torch.float32


def test_only_the_returned_sum_is_used():
    x, r = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    tw.rms_norm(x, residual=r)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 8)) and torch.equal(r.grad, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": [1.0]}, TypeError, "rms_norm: x: expected a torch.Tensor, got list"),
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, TypeError, "x: expected dtype"),
        ({"x": torch.ones(())}, ValueError, "x: expected at least 1 dimension"),
        (
            {"x": torch.ones(2, 3), "weight": torch.ones(4)},
            ValueError,
            r"weight: expected shape \(3\), got \(4,\)",
        ),
        (
            {"x": torch.ones(2, 3), "residual": torch.ones(2, 2)},
            ValueError,
            "residual: expected shape",
        ),
        (
            {"x": torch.ones(2, 3), "residual": torch.ones(2, 3).double()},
            TypeError,
            "residual: expected dtype float32",
        ),
        ({"x": torch.ones(2, 3), "eps": -1.0}, ValueError, "eps: expected at least 0.0, got -1.0"),
        ({"x": torch.ones(2, 3), "eps": "1"}, TypeError, "eps: expected a number, got str"),
        (
            {"x": torch.ones(2, 3), "backend": "gpu"},
            ValueError,
            "backend: expected one of cpu, cuda, triton, torch",
        ),
        (
            {"x": torch.ones(2, 3), "backend": "cuda"},
            tw.BackendError,
            "cuda: needs CUDA tensors, got cpu",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        tw.rms_norm(**arguments)


def test_module_has_torch_s_state_dict():
    ours, theirs = tw.nn.RMSNorm(16, eps=1e-5), torch.nn.RMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16)
    assert (ours(x) - theirs(x)).abs().max() < 1e-6
