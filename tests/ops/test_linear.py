"""tw.linear and the matrix product under it: one table of cases for every backend."""

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
from torch.nn import functional as F
from trainwright import dispatch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.linear)
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
gemm = torch.ops.trainwright.gemm.default
gemm_add_ = torch.ops.trainwright.gemm_add_.default
gemm_out_ = torch.ops.trainwright.gemm_out_.default

# id: (shape of x, N, bias, activation, residual)
CASES = {
    "plain": ((5, 24), 40, False, None, False),
    "bias": ((3, 7, 33), 19, True, None, False),
    "relu": ((4, 9, 20), 31, True, "relu", False),
    "relu, residual": ((6, 20), 31, True, "relu", True),
    "gelu, residual": ((2, 13, 48), 50, True, "gelu", True),
    "gelu_tanh": ((37, 30), 65, True, "gelu_tanh", False),
    "silu, no bias": ((30, 29), 17, False, "silu", True),
    "one of everything": ((1, 1), 1, True, "relu", True),
    "1-d": ((70,), 33, True, None, True),
    "primes, three K blocks": ((31, 523), 67, True, "silu", True),
    "tall": ((67, 37), 5, True, None, True),
    "wide": ((3, 41), 130, True, "gelu", False),
    "K = 0": ((4, 0), 6, True, "gelu", True),
    "no rows": ((0, 8), 6, True, "gelu", True),
    "no columns": ((5, 8), 0, True, "relu", True),
}


def reference(x, weight, bias=None, residual=None, activation=None):
    y = F.linear(x, weight, bias)
    if activation is not None:
        tanh = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
        y = getattr(F, activation.split("_")[0])(y, **tanh)
    return y if residual is None else y + residual


def make(case, dtype=torch.float32):
    shape, N, has_bias, activation, has_residual = CASES[case]
    K = shape[-1]
    inputs = {
        "x": torch.randn(shape, dtype=torch.float64),
        "weight": torch.randn(N, K, dtype=torch.float64) / max(K, 1) ** 0.5,
    }
    if has_bias:
        inputs["bias"] = torch.randn(N, dtype=torch.float64)
    if has_residual:
        inputs["residual"] = torch.randn(*shape[:-1], N, dtype=torch.float64)
    return {k: v.to(dtype) for k, v in inputs.items()}, {"activation": activation}


def can_run(backend, dtype):
    return backend not in ("triton", "vgpu") or dtype != torch.float64


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(d, b) for d in DTYPES for b in BACKENDS if can_run(b, d)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype, backend):
    inputs, options = make(case, dtype)
    check_reference(tw.linear, reference, inputs, options, backend=backend)


def integers(*shape):
    """Small integers: every order of summation gives the exact sum."""
    return torch.randint(-4, 5, shape).double()


# One more and one less than: a micro-kernel's rows, a skinny product's panels, a register, a K block.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 2, 5, 6, 7, 13, 14, 15, 23, 24, 25, 56, 57, 200])
def test_edges_of_the_blocking(M, dtype):
    for N, K in ((1, 1), (15, 255), (16, 256), (33, 257), (31, 513), (129, 17)):
        a, b = integers(M, K), integers(N, K)
        a_low, b_low = a.to(dtype), b.to(dtype)
        for x in (a_low, a_low.t().contiguous().t()):
            for w in (b_low.t(), b_low.t().contiguous()):
                got, _ = gemm(x, w, None, None, 0, dtype, False)
                assert torch.equal(got, (a @ b.t()).to(dtype))


def test_product_of_several_tasks_and_chunks():
    a, b = integers(131, 3000).float(), integers(3000, 3001).float()
    exact = (a.double() @ b.double()).float()
    for x, y in ((a, b), (a, b.t().contiguous().t()), (a.t().contiguous().t(), b)):
        assert torch.equal(gemm(x, y, None, None, 0, torch.float32, False)[0], exact)
    low, _ = gemm(a.bfloat16(), b.bfloat16(), None, None, 0, torch.float32, False)
    assert torch.equal(low, exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout(backend):
    inputs, options = make("gelu, residual")
    check_layouts(tw.linear, inputs, options, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_does_not_depend_on_its_neighbours_threads_or_strides(dtype):
    """Serving and gradient accumulation rely on it: a row of the result has the same bits in any batch."""
    x, w = torch.randn(130, 700).to(dtype), torch.randn(90, 700).to(dtype)
    whole = tw.linear(x, w, backend="cpu")
    for rows in (1, 2, 5, 17, 64):
        assert same_bits(tw.linear(x[:rows], w, backend="cpu"), whole[:rows])
    assert same_bits(tw.linear(x, w[5:8], backend="cpu"), whole[:, 5:8].contiguous())
    assert same_bits(tw.linear(x.t().contiguous().t(), w, backend="cpu"), whole)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            assert same_bits(tw.linear(x, w, backend="cpu"), whole)
    finally:
        torch.set_num_threads(threads)


def test_gradients_do_not_depend_on_the_number_of_threads():
    inputs, options = make("primes, three K blocks", torch.bfloat16)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            leaves = {k: v.clone().requires_grad_() for k, v in inputs.items()}
            tw.linear(**leaves, **options, backend="cpu").square().sum().backward()
            results.append([v.grad for v in leaves.values()])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, backend):
    inputs = {
        "x": torch.randn(2, 3, 5),
        "weight": torch.randn(4, 5),
        "bias": torch.randn(4),
        "residual": torch.randn(2, 3, 4),
    }
    check_gradcheck(tw.linear, inputs, {"activation": activation}, backend=backend)


# Not torch: its libraries choose a kernel by the strides.
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
def test_expanded_operands_are_read_in_place(backend):
    x = torch.randn(1, 40).expand(9, 40)
    w = torch.randn(12, 1).expand(12, 40)
    r = torch.randn(12).expand(9, 12)
    got = tw.linear(x, w, residual=r, backend=backend)
    want = tw.linear(x.contiguous(), w.contiguous(), residual=r.contiguous(), backend=backend)
    assert same_bits(got, want)


@pytest.mark.parametrize("case", ["gelu, residual", "relu", "plain"])
def test_compiles_without_graph_break(case):
    inputs, options = make(case, torch.bfloat16)
    check_compile(lambda **t: tw.linear(**t, **options), inputs)


def test_opcheck():
    a, b, bias, r = torch.randn(3, 5), torch.randn(5, 4), torch.randn(4), torch.randn(3, 4)
    check_opcheck(gemm, a, b.t().contiguous().t(), bias, r, 2, torch.float32, True)
    check_opcheck(gemm_add_, torch.randn(3, 4), a, b)
    check_opcheck(gemm_out_, torch.randn(3, 4), a, b, bias)
    linear_bwd = torch.ops.trainwright.linear_bwd.default
    check_opcheck(linear_bwd, r, torch.randn(3, 4), 2, True)
    check_opcheck(linear_bwd, r, None, 0, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_product_of_mixed_dtypes_in_fp32(dtype):
    """What losses and weight gradients use: 16-bit operands, fp32 result, sums into an existing tensor."""
    a, b = integers(50, 300), integers(300, 40)
    got, _ = gemm(a.to(dtype), b.float(), None, None, 0, torch.float32, False)
    assert got.dtype == torch.float32 and torch.equal(got.double(), a @ b)
    c = torch.ones(50, 40)
    gemm_add_(c, a.to(dtype), b.float())
    assert torch.equal(c.double(), 1 + a @ b)
    bias = integers(40)
    gemm_out_(c, a.to(dtype), b.float(), bias.to(dtype))
    assert torch.equal(c.double(), a @ b + bias)
    low = torch.empty(50, 40, dtype=dtype)
    gemm_out_(low, a.to(dtype), b.float(), None)
    assert torch.equal(low, (a @ b).to(dtype))


def test_fp64_does_not_mix():
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="fp64 does not mix"):
        gemm(a.double(), b, None, None, 0, torch.float64, False)
    with pytest.raises(RuntimeError, match="fp64 does not mix"):
        gemm(a, b, None, None, 0, torch.float64, False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_reach_their_row_only(activation, backend):
    x, w = torch.randn(20, 40), torch.randn(30, 40)
    x[3, 5], x[7, 9] = float("nan"), float("inf")
    y = tw.linear(x, w, activation=activation, backend=backend)
    clean = tw.linear(x.nan_to_num(0.0, 0.0), w, activation=activation, backend=backend)
    assert y[3].isnan().all()
    if (backend, activation) != ("torch", "gelu"):  # torch's gelu(inf) is inf or NaN, by the lane
        up = w[:, 9] > 0  # of -inf: 0, or inf * 0
        assert (y[7, up] == torch.inf).all()
        low = y[7, ~up]
        assert (low == (-torch.inf if activation is None else 0)).all() or low.isnan().all()
    others = [i for i in range(20) if i not in (3, 7)]
    assert torch.equal(y[others], clean[others])
    assert tw.linear(torch.ones(2, 40), w * float("nan"), backend=backend).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_activations_have_finite_slopes(backend):
    for activation in ACTIVATIONS[1:]:
        x = torch.tensor([[-1e30], [-200.0], [-40.0], [0.0], [40.0], [200.0], [1e30]])
        x.requires_grad_()
        tw.linear(x, torch.ones(1, 1), activation=activation, backend=backend).sum().backward()
        want = [0.0, 0.0, 0.0, 0.0 if activation == "relu" else 0.5, 1.0, 1.0, 1.0]
        assert torch.allclose(x.grad.flatten(), torch.tensor(want), atol=1e-6), activation


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_gradients_that_are_needed(backend):
    tensors = {
        "x": torch.randn(5, 8),
        "weight": torch.randn(6, 8),
        "bias": torch.randn(6),
        "residual": torch.randn(5, 6),
    }
    full = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    tw.linear(**full, activation="silu", backend=backend).sum().backward()
    for name in tensors:
        some = {k: v.clone().requires_grad_(k == name) for k, v in tensors.items()}
        tw.linear(**some, activation="silu", backend=backend).sum().backward()
        assert torch.equal(some[name].grad, full[name].grad)
        assert all(v.grad is None for k, v in some.items() if k != name)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_result_may_be_changed_in_place(shape):
    x, w = torch.randn(shape, requires_grad=True), torch.randn(6, 8)
    tw.linear(x, w).mul_(2).sum().backward()
    assert torch.allclose(x.grad, 2 * w.sum(0).expand(shape))
    y = tw.linear(x, w, activation="relu", backend="cpu")  # its backward reads the result
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_to_its_dtype_and_gradients_come_back_in_their_own(backend):
    x, w = torch.randn(3, 5, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    b, r = torch.randn(8, requires_grad=True), torch.randn(3, 5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tw.linear(x, w, b, activation="gelu", residual=r, backend=backend)
        same = tw.linear(x.bfloat16(), w, b, activation="gelu", residual=r, backend=backend)
    assert y.dtype == torch.bfloat16 and same_bits(y, same)
    low = [t.bfloat16() for t in (x, w, b)]
    assert same_bits(y, tw.linear(*low, activation="gelu", residual=r.bfloat16(), backend=backend))
    y.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, w, b, r))


def test_autocast_leaves_fp64_alone():
    x, w = torch.randn(3, 16).double(), torch.randn(8, 16).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.linear(x, w).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": [1.0]}, TypeError, "linear: x: expected a torch.Tensor, got list"),
        ({"x": torch.ones(2, 3).int()}, TypeError, "x: expected dtype"),
        ({"x": torch.ones(())}, ValueError, "x: expected at least 1 dimension"),
        ({"weight": torch.ones(4, 2)}, ValueError, r"weight: expected shape \(any, 3\), got"),
        ({"weight": torch.ones(3)}, ValueError, r"weight: expected shape \(any, 3\), got"),
        ({"weight": torch.ones(4, 3).bfloat16()}, TypeError, "weight: expected dtype float32"),
        ({"bias": torch.ones(3)}, ValueError, r"bias: expected shape \(4\), got \(3,\)"),
        ({"bias": torch.ones(4).double()}, TypeError, "bias: expected dtype float32, got float64"),
        ({"residual": torch.ones(4)}, ValueError, r"residual: expected shape \(2, 4\)"),
        ({"residual": torch.ones(2, 4).half()}, TypeError, "residual: expected dtype float32"),
        ({"activation": "tanh"}, ValueError, "activation: expected None or one of relu, gelu"),
        ({"activation": torch.relu}, TypeError, "activation: expected a str or None"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of cpu, cuda, triton, torch"),
        ({"backend": "cuda"}, tw.BackendError, "cuda: needs CUDA tensors, got cpu"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        tw.linear(**{"x": torch.ones(2, 3), "weight": torch.ones(4, 3), **arguments})


@pytest.mark.parametrize("native", [False, True])
def test_automatic_choice_leaves_to_torch_what_torch_runs_faster(native, monkeypatch):
    monkeypatch.setattr(dispatch, "native_bf16", lambda: native)
    monkeypatch.setattr(dispatch, "mkl_is_faster", lambda: True)
    dispatch._choose.cache_clear()
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    r = torch.randn(3, 4)

    def choice(*tensors, **options):
        lines = tw.explain(tw.linear, *tensors, **options).splitlines()
        return next(line.split(":")[0].strip() for line in lines if line.endswith(": chosen"))

    try:
        assert choice(x, w) == "torch"
        assert choice(x, w, activation="gelu") == choice(x, w, residual=r) == "cpu"
        assert choice(x.bfloat16(), w.bfloat16()) == ("torch" if native else "cpu")
        assert choice(x.half(), w.half()) == "cpu"
        assert choice(x, w, backend="cpu") == "cpu"
        text = tw.explain(tw.linear, x, w)
        assert "cpu: left to torch: MKL is faster in fp32 without activation and residual" in text
        monkeypatch.setenv("TRAINWRIGHT_STRICT", "1")
        assert choice(x, w) == choice(x.bfloat16(), w.bfloat16()) == "cpu"
        monkeypatch.delenv("TRAINWRIGHT_STRICT")
        monkeypatch.setattr(dispatch, "mkl_is_faster", lambda: False)
        dispatch._choose.cache_clear()
        assert choice(x, w) == "cpu" and choice(x.double(), w.double()) == "torch"
    finally:
        dispatch._choose.cache_clear()


@pytest.mark.parametrize(
    ("variable", "value", "native"),
    [("TRAINWRIGHT_CPU_ISA", "avx2", False), ("ONEDNN_MAX_CPU_ISA", "AVX2", False),
     ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", True), ("ONEDNN_MAX_CPU_ISA", "", True)],
)  # fmt: skip
def test_a_cpu_made_to_look_smaller_counts_as_the_smaller_one(variable, value, native, monkeypatch):
    monkeypatch.delenv("TRAINWRIGHT_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv(variable, value)
    assert dispatch.native_bf16.__wrapped__() == native


def test_module_has_torch_s_state_dict():
    ours, theirs = tw.nn.Linear(16, 8), torch.nn.Linear(16, 8)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16)
    assert (ours(x) - theirs(x)).abs().max() < 1e-6
    gated = tw.nn.Linear(16, 8, bias=False, activation="silu")
    r = torch.randn(3, 8)
    want = F.silu(x @ gated.weight.t()) + r
    assert (gated(x, residual=r) - want).abs().max() < 1e-6
    assert "activation='silu'" in repr(gated) and list(gated.state_dict()) == ["weight"]
