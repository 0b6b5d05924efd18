"""tw.swiglu and tw.geglu: one table of cases for every backend."""

import math

import pytest
import torch
import torch.nn.functional as F
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
BACKENDS = backends_for_tests(tw.swiglu)
# Triton's interpreter is slow, and its kernels treat all dtypes alike but for the accumulator.
RUNS = [(b, d) for b in BACKENDS for d in DTYPES if b != "triton" or d in DTYPES[:2]]

# id: (our op, plain torch, options)
OPS = {
    "swiglu": (tw.swiglu, lambda gate, up: F.silu(gate) * up, {}),
    "geglu": (tw.geglu, lambda gate, up, **o: F.gelu(gate, **o) * up, {}),
    "geglu tanh": (
        tw.geglu, lambda gate, up, **o: F.gelu(gate, **o) * up, {"approximate": "tanh"},
    ),
}  # fmt: skip
SHAPES = [(4, 3, 96), (5, 97), (1,), (), (0, 16), (3, 0), (2, 4099)]


def make(shape, dtype=torch.float32):
    # In fp64 plain torch is itself the exact answer, and its tanh' cancels for large gates.
    scale = 1.0 if dtype == torch.float64 else 3.0
    gate, up = scale * torch.randn(shape).double(), torch.randn(shape).double()
    return {"gate": gate.to(dtype), "up": up.to(dtype)}


@pytest.mark.parametrize(("backend", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_matches_reference(op, shape, backend, dtype):
    ours, plain, options = OPS[op]
    check_reference(ours, plain, make(shape, dtype), options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_any_layout(op, backend):
    ours, _, options = OPS[op]
    check_layouts(ours, make((3, 4, 7)), options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 10), (10,)], ids=str)
def test_halves_of_one_tensor(shape, backend):
    both = torch.randn(*shape[:-1], 20, requires_grad=True)
    y = tw.swiglu(*both.chunk(2, -1), backend=backend)
    copies = [half.detach().clone().requires_grad_() for half in both.chunk(2, -1)]
    expected = tw.swiglu(*copies, backend=backend)
    assert y.is_contiguous() and same_bits(y, expected)
    dy = torch.randn(shape)
    (grad,) = torch.autograd.grad(y, both, dy)
    assert same_bits(grad, torch.cat(torch.autograd.grad(expected, copies, dy), -1))


@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op):
    ours, _, options = OPS[op]
    check_gradcheck(ours, make((3, 7)), options, backend="cpu")


@pytest.mark.parametrize("op", OPS)
def test_compiles_without_graph_break(op):
    ours, _, options = OPS[op]
    check_compile(ours, make((3, 33), torch.bfloat16), options)


def test_opcheck():
    x, half = torch.randn(3, 5), torch.randn(3, 10)[:, :5]
    check_opcheck(torch.ops.trainwright.glu_fwd.default, x, half, "gelu")
    check_opcheck(torch.ops.trainwright.glu_bwd.default, x, half, x, "silu", True, False)
    check_opcheck(torch.ops.trainwright.glu_bwd.default, x, x, half, "gelu_tanh", False, True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_gradient_alone_equals_the_one_among_all(wanted, backend):
    inputs, dy = make((4, 9)), torch.randn(4, 9)
    leaves = {k: v.requires_grad_() for k, v in inputs.items()}
    both = dict(
        zip(
            leaves, torch.autograd.grad(tw.geglu(**leaves, backend=backend), [*leaves.values()], dy)
        )
    )
    alone = {k: v.detach().requires_grad_(k == wanted) for k, v in inputs.items()}
    (grad,) = torch.autograd.grad(tw.geglu(**alone, backend=backend), alone[wanted], dy)
    assert same_bits(grad, both[wanted])


# Exact values of the activation by the C library, accurate in the tails (F.gelu is not: it cancels below -3).
EXACT = {
    "swiglu": lambda x: x / (1 + math.exp(-x)),
    "geglu": lambda x: x * math.erfc(-x * math.sqrt(0.5)) / 2,
    "geglu tanh": lambda x: (
        x / (1 + math.exp(-x * math.sqrt(8 / math.pi) * (1 + 0.044715 * x * x)))
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_tails_keep_their_relative_accuracy(op):
    ours, _, options = OPS[op]
    lowest = {"swiglu": -80.0, "geglu": -12.5, "geglu tanh": -9.5}[op]
    x = torch.linspace(lowest, 20, 40001)
    y = ours(x, torch.ones_like(x), **options, backend="cpu")
    exact = torch.tensor([EXACT[op](v) for v in x.tolist()], dtype=torch.float64)
    # geglu tanh's exp has a rounded argument, up to 80, whose error it magnifies.
    limit = {"swiglu": 4e-7, "geglu": 6e-7, "geglu tanh": 2e-5}[op]
    nonzero = exact != 0
    relative = ((y - exact).abs() / exact.abs())[nonzero]
    assert relative.max() < limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_huge_and_special_gates(op, backend):
    ours, _, options = OPS[op]
    gate = torch.tensor([1e30, -1e30, 0.0, float("inf"), float("nan"), 200.0, -200.0])
    gate.requires_grad_()
    y = ours(gate, torch.ones(7), **options, backend=backend)
    assert same_bits(y[3:5].isnan(), torch.tensor([False, True])) and y[3] == float("inf")
    assert y[[0, 1, 2, 5, 6]].tolist() == [gate[0].item(), 0.0, 0.0, 200.0, 0.0]
    (slope,) = torch.autograd.grad(y, gate, torch.ones(7))
    assert slope[[0, 1, 2, 5, 6]].tolist() == [1.0, 0.0, 0.5, 1.0, 0.0] and slope[4].isnan()


def test_autocast_keeps_the_input_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.swiglu(torch.randn(2, 8), torch.randn(2, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (tw.swiglu, {"gate": 1.0, "up": torch.ones(2)}, TypeError, "swiglu: gate: expected a torch.Tensor, got float"),
        (tw.swiglu, {"gate": torch.ones(2), "up": torch.ones(1)}, ValueError, r"swiglu: up: expected shape \(2\)"),
        (tw.geglu, {"gate": torch.ones(2), "up": torch.ones(2).half()}, TypeError, "up: expected dtype float32"),
        (tw.geglu, {"gate": torch.ones(2).int(), "up": torch.ones(2)}, TypeError, "geglu: gate: expected dtype"),
        (tw.geglu, {"gate": torch.ones(2), "up": torch.ones(2), "approximate": True}, ValueError,
         "geglu: approximate: expected 'none' or 'tanh', got True"),
        (tw.swiglu, {"gate": torch.ones(2), "up": torch.ones(2), "backend": "cuda"}, tw.BackendError, "needs CUDA"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(op, arguments, error, text):
    with pytest.raises(error, match=text):
        op(**arguments)


def test_modules():
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(tw.nn.SwiGLU()(gate, up), tw.swiglu(gate, up))
    assert torch.equal(tw.nn.GeGLU()(gate, up), tw.geglu(gate, up))
    assert torch.equal(tw.nn.GeGLU("tanh")(gate, up), tw.geglu(gate, up, approximate="tanh"))
