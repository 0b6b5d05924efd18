"""tw.newton_schulz: against fp64 and torch's own, for every shape, scale and rank; batches bit for bit."""

import itertools

import pytest
import torch
import trainwright as tw
from numerics import (
    assert_within_rule,
    backends_for_tests,
    check_compile,
    check_layouts,
    check_opcheck,
    check_reference,
    interpreted,
    same_bits,
)
from torch.optim._muon import _zeropower_via_newtonschulz
from trainwright.ops.newton_schulz import COEFFICIENTS, EPS

BACKENDS = backends_for_tests(tw.newton_schulz)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FP32, BF16, FP16, FP64 = DTYPES
CUBIC = (1.5, -0.5, 0.0)  # converges to exactly 1
SHAPES = [(1, 1), (1, 9), (9, 1), (8, 13), (13, 8), (16, 16), (67, 90), (70, 66)]
SHAPES += [(3, 20, 33), (2, 2, 33, 20)]
# Of those, what Triton's interpreter runs.
FEW = [((n, k), BF16) for n, k in ((1, 9), (9, 1), (8, 13), (13, 8), (16, 16), (70, 66))]
FEW += [((2, 2, 33, 20), BF16), ((13, 8), FP32), ((70, 66), FP32), ((8, 13), FP16)]
LARGE = [(129, 513), (300, 299), (257, 900), (900, 257), (512, 1408)]


def rows(names, every, few=None):
    """A table for each backend: `few` of it for one that is interpreted, and no fp64 in Triton."""
    every = list(every)
    table = [
        (*(row if isinstance(row, tuple) else (row,)), b)
        for b in BACKENDS
        for row in (few if few and interpreted(b) else every)
    ]
    table = [row for row in table if not (row[-1] == "triton" and FP64 in row)]
    return pytest.mark.parametrize((*names, "backend"), table, ids=str)


def plain(x, steps=5, coefficients=COEFFICIENTS, eps=EPS):
    """The formula in x's dtype, as a user would write it."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y


@rows(("shape", "dtype"), itertools.product(SHAPES, DTYPES), FEW)
def test_reference(shape, dtype, backend):
    x = torch.randn(shape).to(dtype)
    check_reference(tw.newton_schulz, plain, {"x": x}, backend=backend, no_grad=("x",))
    y = tw.newton_schulz(x, backend=backend)
    assert y.is_contiguous() and y.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_reference_of_large_matrices(shape, dtype):
    """Several tiles and blocks of the products in every direction; dion#76: NaN for [512, 1408]."""
    x = torch.randn(shape).to(dtype)
    check_reference(tw.newton_schulz, plain, {"x": x}, backend="cpu", no_grad=("x",))


@pytest.mark.parametrize("shape", LARGE[:4], ids=str)
def test_large_matrices_in_fp64(shape):
    """Plain torch is no more exact there: the truth is the polar factor, from the decomposition."""
    u, s, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s = torch.linspace(0.1, 1.0, len(s), dtype=torch.float64)
    y = tw.newton_schulz(u * s @ v, steps=40, coefficients=CUBIC, backend="cpu")
    torch.testing.assert_close(y, u @ v, atol=2e-14, rtol=0)


@rows(
    ("dtype", "steps"),
    itertools.product((FP32, BF16), (0, 1, 2, 3, 6)),
    [(FP32, 2), *((BF16, n) for n in range(4))],
)
def test_steps_and_coefficients(dtype, steps, backend):
    for shape in ((12, 20), (20, 12)):
        options = {"steps": steps, "coefficients": CUBIC, "eps": 1e-3}
        inputs = {"x": torch.randn(shape).to(dtype)}
        check_reference(tw.newton_schulz, plain, inputs, options, backend=backend, no_grad=("x",))


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (40, 40)], ids=str)
def test_as_near_to_fp64_as_torch_s_own(shape):
    """Root mean square over several matrices; torch's works in bf16 whatever the dtype of the gradient."""

    def error(result, exact):
        return (result.double() - exact).square().mean().sqrt().item()

    x = torch.randn(8, *shape).bfloat16()
    exact = plain(x.double())
    # clone: torch's divides a bf16 argument by its norm in place
    results = [_zeropower_via_newtonschulz(m.clone(), COEFFICIENTS, 5, EPS) for m in x]
    theirs = error(torch.stack(results), exact)
    for backend in BACKENDS:
        # Triton's intermediate matrices are bf16 too; the others are rounded once.
        allowed = 1.05 if backend == "triton" else 0.5
        assert error(tw.newton_schulz(x, backend=backend), exact) <= allowed * theirs
        assert error(tw.newton_schulz(x.float(), backend=backend), exact) <= 1e-3 * theirs


@rows(("shape",), [((24, 40),), ((40, 24),), ((32, 32),)], [((40, 24),)])
def test_rows_or_columns_become_orthonormal(shape, backend):
    """With a polynomial that converges, X is the orthogonal polar factor U Vᵀ."""
    u, s, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s = torch.linspace(0.3, 1.0, len(s), dtype=torch.float64)
    x = (u * s @ v).float()
    y = tw.newton_schulz(x, steps=30, coefficients=CUBIC, backend=backend)
    torch.testing.assert_close(y.double(), u @ v, atol=3e-6, rtol=0)
    # The default coefficients bring singular values near 1 in five steps, and keep the vectors.
    y = tw.newton_schulz(x, backend=backend).double()
    spectrum = u.mT @ y @ v.mT
    assert spectrum.diagonal().min() > 0.65 and spectrum.diagonal().max() < 1.25
    assert (spectrum - spectrum.diagonal().diag()).abs().max() < 1e-5


@rows(
    ("shape", "dtype"),
    itertools.product([(5, 9, 20), (3, 70, 65), (7, 1, 4)], (FP32, BF16)),
    [((5, 9, 20), FP32), ((2, 70, 65), BF16)],
)
def test_a_matrix_has_the_same_bits_alone_and_in_a_batch(shape, dtype, backend):
    x = torch.randn(shape).to(dtype)
    batch = tw.newton_schulz(x, backend=backend)
    for one, matrix in zip(batch, x):
        if backend == "torch":  # torch's batched products promise no bits
            assert_within_rule("matrix", one, plain(matrix), plain(matrix.double()))
        else:
            assert same_bits(one, tw.newton_schulz(matrix, backend=backend))


@pytest.mark.parametrize("shape", [(300, 420), (2, 257, 300), (9, 30, 40)], ids=str)
def test_same_bits_for_any_thread_count(shape):
    x, results = torch.randn(shape), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(tw.newton_schulz(x, backend="cpu"))
    finally:
        torch.set_num_threads(2)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
def test_any_layout(backend):
    for shape, dtype in (((3, 9, 20), FP32), ((2, 20, 9), BF16)):
        x = torch.randn(shape).to(dtype)
        expected = tw.newton_schulz(x, backend=backend)
        for order in ((0, 2, 1), (1, 2, 0)):
            back = [order.index(d) for d in range(3)]
            strided = x.permute(order).contiguous().permute(back)
            assert same_bits(tw.newton_schulz(strided, backend=backend), expected)
    x = torch.randn(1, 20).bfloat16().expand(9, 20)  # stride 0, rank 1
    assert same_bits(
        tw.newton_schulz(x, backend=backend), tw.newton_schulz(x.contiguous(), backend=backend)
    )


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
def test_slices_and_transposes(backend):
    check_layouts(tw.newton_schulz, {"x": torch.randn(9, 20)}, backend=backend, no_grad=("x",))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_scale_does_not_matter(dtype, backend):
    """Squares overflow in fp32 from 1.8e19 on, in fp16 from 256, and vanish below 1e-23."""
    x = torch.randn(12, 20).to(dtype)
    expected = tw.newton_schulz(x, eps=0.0, backend=backend)
    scales = (2.0**10, 2.0**-4) if dtype == torch.float16 else (2.0**120, 2.0**-100)
    for scale in scales:
        scaled = (x.double() * scale).to(dtype)
        assert torch.equal(scaled.double(), x.double() * scale)
        assert same_bits(tw.newton_schulz(scaled, eps=0.0, backend=backend), expected)


@rows(("dtype",), DTYPES)
def test_zero_low_rank_and_tiny_matrices(dtype, backend):
    assert (tw.newton_schulz(torch.zeros(9, 20, dtype=dtype), backend=backend) == 0).all()
    column = torch.tensor([3.0, 0.0, 4.0]).to(dtype)
    y = tw.newton_schulz(torch.outer(column, torch.ones(5).to(dtype)), backend=backend).double()
    expected = torch.outer(column, torch.ones(5).to(dtype)).double() / 5 / 5**0.5
    factor = plain(torch.ones(1, 1, dtype=torch.float64)).item()  # one singular value, at 1
    torch.testing.assert_close(y, expected * factor, atol=20 * torch.finfo(dtype).eps, rtol=0)
    # Below eps the result shrinks with the matrix.
    tiny = torch.full((2, 2), 1e-7).to(dtype)
    y = tw.newton_schulz(tiny, eps=1.0, backend=backend).double()
    torch.testing.assert_close(
        y, tiny.double() * COEFFICIENTS[0] ** 5, rtol=1e-7 + 30 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_spreads_over_its_own_matrix_only(bad, backend):
    x = torch.randn(3, 6, 9)
    clean = tw.newton_schulz(x, backend=backend)
    x[1, 2, 3] = bad
    y = tw.newton_schulz(x, backend=backend)
    assert y[1].isnan().all()
    assert torch.equal(y[0], clean[0]) and torch.equal(y[2], clean[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4), (2, 0, 3)], ids=str)
def test_no_elements(shape, backend):
    y = tw.newton_schulz(torch.empty(shape), backend=backend)
    assert y.shape == shape


def test_compiles_without_graph_break_and_opcheck():
    for x in (torch.randn(2, 8, 13), torch.randn(13, 8).mT):
        check_compile(tw.newton_schulz, {"x": x}, no_grad=("x",))
    for x in (torch.randn(2, 8, 13), torch.randn(2, 13, 8).mT):
        check_opcheck(torch.ops.trainwright.newton_schulz_fwd.default, x, [*COEFFICIENTS] * 2, 1e-7)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tw.newton_schulz(torch.ones(3)), ValueError, "x: expected at least 2 dimension"),
        (lambda: tw.newton_schulz(torch.ones(3, 3).long()), TypeError, "x: expected dtype"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), steps=-1), ValueError, "steps: expected at least 0"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), steps=100), ValueError, "steps: expected at most 99"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), steps=5.0), TypeError, "steps: expected an int"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), coefficients=(1.0, 2.0)), ValueError, "three numbers"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), coefficients=1.0), TypeError, "three numbers"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), coefficients=(1, float("inf"), 2)), ValueError, "finite"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), eps=-1.0), ValueError, "eps: expected at least 0"),
        (lambda: tw.newton_schulz(torch.ones(3, 3, requires_grad=True)), ValueError, "x: expected a tensor without"),
        (lambda: tw.newton_schulz(torch.ones(3, 3), backend="cuda"), tw.BackendError, "not implemented"),
        (lambda: tw.newton_schulz(torch.ones(3, 3).double(), backend="triton"), tw.BackendError, "float64"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()
