"""tw.matmul: one table of cases for every backend."""

import os
import subprocess
import sys

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
from trainwright import dispatch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# fp16 in the interpreter is fp32.
RUNS = {"triton": DTYPES[:2], "vgpu": DTYPES[:3]}
BACKENDS = backends_for_tests(tw.matmul)
OURS = [
    b for b in BACKENDS if b != "torch"
]  # the libraries under torch choose a kernel by the strides
INF, NAN = float("inf"), float("nan")

# id: shapes of a and b, split_k
CASES = {
    "matrices": ((5, 24), (24, 40), None),
    "vector, matrix": ((24,), (24, 7), None),
    "matrix, vector": ((5, 24), (24,), None),
    "vectors": ((33,), (33,), None),
    "batch": ((3, 5, 24), (3, 24, 7), None),
    "batch of a only": ((2, 3, 5, 24), (24, 7), None),
    "batch of b only": ((5, 24), (4, 24, 7), None),
    "batches that broadcast": ((2, 1, 5, 9), (3, 9, 4), None),
    "vector, batch": ((9,), (3, 9, 4), None),
    "batch, vector": ((3, 5, 9), (9,), None),
    "one of everything": ((1, 1), (1, 1), None),
    "three parts of K": ((9, 200), (200, 11), 3),
    "parts of K, batch": ((2, 5, 131), (2, 131, 6), 2),
    "more parts than K": ((3, 2), (2, 3), 7),
    "K = 0": ((4, 0), (0, 6), 2),
    "no rows": ((0, 8), (8, 6), None),
    "no batch": ((0, 3, 8), (0, 8, 6), None),
}


def reference(a, b, split_k=None, out_dtype=None):
    if out_dtype is None or a.dtype == torch.float64:
        return a @ b
    return (a.to(out_dtype) @ b.to(out_dtype)).to(out_dtype)


def make(case, dtype=torch.float32):
    a, b, split_k = CASES[case]
    inputs = {
        "a": torch.randn(a, dtype=torch.float64).to(dtype),
        "b": torch.randn(b, dtype=torch.float64).to(dtype),
    }
    return inputs, {"split_k": split_k}


TABLE = [
    pytest.param(case, dtype, backend, id=f"{case}-{str(dtype)[6:]}-{backend}")
    for case in CASES
    for dtype in DTYPES
    for backend in BACKENDS
    if dtype in RUNS.get(backend, DTYPES)
]


@pytest.mark.parametrize(("case", "dtype", "backend"), TABLE)
def test_matches_reference(case, dtype, backend):
    inputs, options = make(case, dtype)
    check_reference(tw.matmul, reference, inputs, options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["matrices", "three parts of K", "batches that broadcast"])
def test_output_keeps_the_fp32_sums(case, backend):
    inputs, options = make(case, torch.bfloat16)
    options["out_dtype"] = torch.float32
    check_reference(tw.matmul, reference, inputs, options, backend=backend)


def integers(*shape):
    """Small integers: every order of summation gives the exact sum."""
    return torch.randint(-4, 5, shape).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split_k", [None, 1, 2, 3, 17])
def test_any_split_gives_the_exact_sum_of_integers(split_k, dtype):
    for B, M, N, K in ((1, 33, 17, 1025), (5, 7, 16, 70), (1, 1, 1, 40000), (16, 2, 3, 5)):
        a, b = integers(B, M, K), integers(B, K, N)
        got = tw.matmul(a.to(dtype), b.to(dtype), split_k=split_k, backend="cpu")
        assert torch.equal(got, (a @ b).to(dtype))


@pytest.mark.parametrize("K", [2, 64, 700, 1026, 513])
def test_bf16_in_every_layout_is_exact_on_the_cpu(K):
    """Where the CPU multiplies pairs of bf16, k goes two at a time through packing of its own; an odd K leaves one."""
    for M, N in ((130, 90), (5, 33), (57, 16)):
        a, b = integers(M, K).bfloat16(), integers(K, N).bfloat16()
        spread = torch.zeros(M, 2 * K + 3, dtype=torch.bfloat16)[:, 1 : 2 * K : 2].copy_(a)
        shifted = torch.zeros(M, K + 1, dtype=torch.bfloat16)[:, 1:].copy_(a)  # rows begin at any k
        exact = a.double() @ b.double()
        for x in (a, a.t().contiguous().t(), spread, shifted):
            for y in (b, b.t().contiguous().t()):
                got = tw.matmul(x, y, out_dtype=torch.float32, backend="cpu")
                assert torch.equal(got.double(), exact)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs AVX512-BF16")
def test_bf16_instructions_can_be_turned_off():
    """They lose subnormal operands, the fp32 path keeps them; otherwise both have the errors of fp32 sums."""
    program = """
import torch, trainwright as tw
torch.manual_seed(0)
a, b = torch.randn(40, 600).bfloat16(), torch.randn(600, 50).bfloat16()
error = (tw.matmul(a, b, out_dtype=torch.float32, backend="cpu") - a.double() @ b.double()).abs().max()
tiny = torch.full((1, 2), 2.0**-130).bfloat16()
kept = tw.matmul(tiny, torch.full((2, 1), 2.0**20).bfloat16(), out_dtype=torch.float32, backend="cpu")
print(error.item() < 1e-4, kept.item())
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRAINWRIGHT_CPU_ISA"}
    for choice, expected in (("fp32", f"True {2.0**-109}"), ("", "True 0.0")):
        command = [sys.executable, "-c", program]
        run = subprocess.run(
            command,
            env={**environment, "TRAINWRIGHT_CPU_BF16": choice},
            capture_output=True,
            text=True,
        )
        assert run.stdout.strip() == expected, run.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_sums_round_once(backend):
    """Partial sums in bf16 lose everything where they cancel; kept in fp32 they are exact here."""
    a = torch.tensor([[256.0, 1.0, -256.0, 1.0]], dtype=torch.bfloat16)
    assert tw.matmul(a, torch.ones(4, 1).bfloat16(), split_k=2, backend=backend).item() == 2.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_broadcast_argument_rounds_once(backend):
    """Summed in bf16, 256 + 1 + 1 would be 256."""
    a = torch.tensor([256.0, 1.0, 1.0]).bfloat16().view(3, 1, 1)
    b = torch.ones(1, 1, 1).bfloat16().expand(3, 1, 1)
    w = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(tw.matmul(a * b, w, backend=backend).sum(), w)
    assert grad.item() == 258.0
    v = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(tw.matmul(v, a, backend=backend).sum(), v)
    assert grad.item() == 258.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads(dtype):
    inputs = {
        n: torch.randn(s).to(dtype) for n, s in (("a", (2, 33, 20000)), ("b", (2, 20000, 40)))
    }
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(tw.matmul(**inputs, split_k=5, backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(r, results[0]) for r in results)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("case", ["batch", "three parts of K"])
def test_any_layout(case, backend):
    inputs, options = make(case)
    check_layouts(tw.matmul, inputs, options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_reach_their_row_and_column(backend):
    a, b = torch.ones(3, 70), torch.ones(70, 4)
    a[1, 69], b[3, 2] = NAN, INF
    y = tw.matmul(a, b, split_k=2, backend=backend)
    assert y[1].isnan().all() and (y[[0, 2], 2] == INF).all()
    assert (y[[0, 2]][:, [0, 1, 3]] == 70).all()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("case", ["batches that broadcast", "batch of a only", "vectors"])
def test_gradcheck(case, backend):
    inputs, options = make(case)
    check_gradcheck(tw.matmul, inputs, options, backend=backend)


def test_compile_and_opcheck():
    inputs, options = make("batches that broadcast")
    check_compile(tw.matmul, inputs, {**options, "backend": "cpu"})
    a, b = torch.randn(2, 5, 9), torch.randn(2, 9, 4)
    check_opcheck(torch.ops.trainwright.matmul.default, a, b, torch.float32, 2)


def test_autocast():
    a, b = torch.randn(5, 9, requires_grad=True), torch.randn(9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = tw.matmul(a, b)
        wide = tw.matmul(a, b, out_dtype=torch.float32)
    assert (y.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.autograd.grad(y.sum(), a)[0].dtype == torch.float32


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs Triton")
def test_streamed_blocks_of_k_are_dealt_out_once():
    """Whole tiles first, then each program's share, of two tiles at most, as the kernel's two slots want it."""
    from trainwright.kernels._product_configs import schedule_for

    streamed = 0
    for tiles in (*range(1, 30), 131, 133, 200, 264, 1000):
        for blocks in (1, 3, 8, 9, 64, 1000):
            for slots in (1, 4, 8, 132):
                plan = schedule_for(tiles, blocks, slots, persistent=True)
                rest = (tiles - plan.whole) * blocks
                assert 0 <= plan.whole <= tiles and 1 <= plan.programs <= slots
                assert plan.depth < blocks and (plan.depth > 0) == (rest > 0)
                assert rest <= plan.programs * plan.depth
                assert plan.whole == 0 or not rest or plan.programs == slots
                streamed += rest > 0
    assert streamed > 100


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"b": torch.ones(8, 2)}, ValueError, r"matmul: b: expected 9 rows.*got 8"),
        ({"b": torch.ones(9, 2).double()}, TypeError, r"matmul: b: expected dtype float32"),
        ({"a": torch.ones(3, 2, 9), "b": torch.ones(2, 9, 2)}, ValueError, r"matmul: b: expected leading dim"),
        ({"a": torch.tensor(1.0)}, ValueError, r"matmul: a: expected at least 1 dim"),
        ({"a": [1.0]}, TypeError, r"matmul: a: expected a torch.Tensor"),
        ({"out_dtype": torch.float64}, TypeError, r"matmul: out_dtype: expected None or one of"),
        ({"split_k": 0}, ValueError, r"matmul: split_k: expected at least 1, got 0"),
        ({"split_k": 1.0}, TypeError, r"matmul: split_k: expected an int"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tw.matmul(**{"a": torch.ones(3, 9), "b": torch.ones(9, 2), **arguments})


def test_automatic_choice(monkeypatch):
    monkeypatch.setattr(dispatch, "mkl_is_faster", lambda: True)
    dispatch._choose.cache_clear()
    assert "cpu: chosen" in tw.explain(tw.matmul, torch.ones(2, 3), torch.ones(3, 2), split_k=2)
    assert "cpu: left to torch" in tw.explain(tw.matmul, torch.ones(2, 3), torch.ones(3, 2))
    monkeypatch.setattr(dispatch, "mkl_is_faster", lambda: False)
    dispatch._choose.cache_clear()
    assert "cpu: chosen" in tw.explain(tw.matmul, torch.ones(2, 3), torch.ones(3, 2))
    dispatch._choose.cache_clear()
