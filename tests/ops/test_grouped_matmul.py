"""tw.grouped_matmul: one table of cases for every backend."""

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
# fp16 in the interpreter is fp32.
RUNS = {"triton": DTYPES[:2], "vgpu": DTYPES[:3]}
BACKENDS = backends_for_tests(tw.grouped_matmul)
OURS = [
    b for b in BACKENDS if b != "torch"
]  # the libraries under torch choose a kernel by the strides

# id: (N, K, C), end rows
CASES = {
    "groups": ((40, 24, 17), (9, 30, 40)),
    "empty groups": ((40, 24, 17), (0, 9, 9, 40, 40)),
    "rows past the last group": ((90, 20, 33), (5, 70)),
    "one group": ((7, 9, 5), (7,)),
    "groups of one row": ((3, 8, 8), (1, 2, 3)),
    "all groups empty": ((6, 8, 8), (0, 0)),
    "more rows than a tile": ((200, 70, 70), (3, 140, 199)),
    "no rows": ((0, 8, 6), (0, 0)),
    "no groups": ((4, 8, 6), ()),
    "K = 0": ((4, 0, 6), (1, 3)),
}


def reference(x, weights, offsets):
    parts, begin = [], 0
    for end, w in zip(offsets.tolist(), weights):
        parts.append(x[begin:end] @ w)
        begin = end
    rest = (
        (x[begin:, :1] * 0).sum(1, keepdim=True) if x.shape[1] else x.new_zeros(len(x) - begin, 1)
    )
    zeros = rest * weights.sum((0, 1))[None] * 0
    return torch.cat([*parts, zeros])


def make(case, dtype=torch.float32):
    (N, K, C), ends = CASES[case]
    return {
        "x": torch.randn(N, K, dtype=torch.float64).to(dtype),
        "weights": torch.randn(len(ends), K, C, dtype=torch.float64).to(dtype),
        "offsets": torch.tensor(ends, dtype=torch.int32),
    }


TABLE = [
    pytest.param(case, dtype, backend, id=f"{case}-{str(dtype)[6:]}-{backend}")
    for case in CASES
    for dtype in DTYPES
    for backend in BACKENDS
    if dtype in RUNS.get(backend, DTYPES)
]


@pytest.mark.parametrize(("case", "dtype", "backend"), TABLE)
def test_matches_reference(case, dtype, backend):
    check_reference(tw.grouped_matmul, reference, make(case, dtype), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_groups_and_unused_rows_get_zero_gradients(backend):
    inputs = make("empty groups")
    inputs["offsets"] = torch.tensor([0, 9, 9, 30, 30], dtype=torch.int32)
    x, w = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
    y = tw.grouped_matmul(x, w, inputs["offsets"], backend=backend)
    assert (y[30:] == 0).all() and (y[:30] != 0).any(1).all()
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert (dx[30:] == 0).all() and (dx[:30] != 0).any(1).all()
    assert (dw[[0, 2, 4]] == 0).all() and (dw[[1, 3]] != 0).any((1, 2)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_unused_rows_does_not_spread(backend):
    inputs = make("rows past the last group")
    inputs["x"][70:] = float("nan")
    x, w = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
    y = tw.grouped_matmul(x, w, inputs["offsets"], backend=backend)
    assert (y[70:] == 0).all() and y.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (x, w)))


@pytest.mark.parametrize("backend", OURS)
def test_any_layout(backend):
    check_layouts(tw.grouped_matmul, make("groups"), backend=backend)


def test_a_row_has_the_bits_of_any_other_grouping():
    x, w = torch.randn(60, 300), torch.randn(1, 300, 40).expand(4, 300, 40)
    whole = tw.grouped_matmul(x, w[:1], torch.tensor([60], dtype=torch.int32), backend="cpu")
    for ends in ([1, 30, 59, 60], [0, 0, 17, 60], [20, 40, 41, 60]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        assert same_bits(tw.grouped_matmul(x, w, offsets, backend="cpu"), whole)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no _grouped_mm")
def test_takes_what_torch_takes():
    x, w = torch.randn(48, 32).bfloat16(), torch.randn(3, 32, 16).bfloat16()
    offsets = torch.tensor([16, 16, 48], dtype=torch.int32)
    expected = torch._grouped_mm(x, w, offsets)
    torch.testing.assert_close(tw.grouped_matmul(x, w, offsets, backend="cpu"), expected)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_gradcheck(backend):
    inputs = make("rows past the last group")
    inputs = {"x": inputs["x"][:9, :5], "weights": inputs["weights"][:, :5, :3]} | {
        "offsets": torch.tensor([2, 7], dtype=torch.int32)
    }
    check_gradcheck(tw.grouped_matmul, inputs, backend=backend)


def test_compile_and_opcheck():
    inputs = make("rows past the last group")
    check_compile(tw.grouped_matmul, inputs)
    inputs = make("groups")
    op = torch.ops.trainwright
    x, w, offsets = inputs.values()
    check_opcheck(op.grouped_matmul.default, x, w, offsets, torch.float32)
    check_opcheck(op.grouped_matmul_wgrad.default, x, torch.randn(40, 17), offsets, torch.float32)


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"offsets": ends(3, 2)}, ValueError, r"end rows in ascending order within \[0, 4\], got \[3, 2\]"),
        ({"offsets": ends(3, 5)}, ValueError, r"offsets: expected end rows in ascending order"),
        ({"offsets": ends(-1, 4)}, ValueError, r"offsets: expected end rows in ascending order"),
        ({"offsets": ends(3, 4).long()}, TypeError, r"offsets: expected dtype int32, got int64"),
        ({"offsets": ends(4)}, ValueError, r"offsets: expected shape \(2\), got \(1,\)"),
        ({"weights": torch.ones(2, 3, 6)}, ValueError, r"weights: expected shape \(any, 8, any\)"),
        ({"weights": torch.ones(2, 8, 6).half()}, TypeError, r"weights: expected dtype float32"),
        ({"x": torch.ones(4)}, ValueError, r"x: expected shape \(any, any\)"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, error, message):
    good = {"x": torch.ones(4, 8), "weights": torch.ones(2, 8, 6), "offsets": ends(3, 4)}
    with pytest.raises(error, match=message):
        tw.grouped_matmul(**{**good, **arguments})


def test_raw_op_refuses_ends_outside():
    """Memory stays safe when Python's checks are skipped, as under torch.compile."""
    with pytest.raises((RuntimeError, ValueError), match="offsets"):
        torch.ops.trainwright.grouped_matmul.default(
            torch.ones(4, 8), torch.ones(2, 8, 6), ends(3, 9), torch.float32
        )
