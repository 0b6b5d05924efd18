"""Rows of int8 codes with error feedback: compiled code against the reference, bit for bit, and what users rely on."""

import pytest
import torch
from numerics import parallel_close, same_bits
from trainwright.ops import int8_wire

BLOCK = int8_wire.BLOCK
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 70_001]


def encoded(function, x, error, scale=1.0):
    row = torch.zeros(int8_wire.row_bytes(x.numel()), dtype=torch.uint8)
    error = error.clone()
    function(row, error, x, scale)
    return row, error


def decoded(row, n, function=int8_wire.sum_):
    out = torch.empty(n)
    function(out, [row], 1.0)
    return out


@pytest.mark.parametrize("n", SIZES)
def test_compiled_and_reference_agree(n):
    torch.manual_seed(n)
    x, error = torch.randn(n) * torch.logspace(-3, 3, max(n, 1))[:n], torch.randn(n) / 100
    if n > 600:
        x[256:512] = 0.0
        error[256:512] = 1e-38  # too small to divide by
        x[513] = float("inf")
    ours = encoded(int8_wire.encode_, x, error, 0.3)
    theirs = encoded(int8_wire._encode_reference, x, error, 0.3)
    assert torch.equal(ours[0][:n], theirs[0][:n])
    steps = (row[-(-n // 4) * 4 :].view(torch.float32) for row in (ours[0], theirs[0]))
    assert same_bits(*(s.nan_to_num(nan=-1.0) for s in steps))
    assert same_bits(ours[1], theirs[1])
    rows = [ours[0], encoded(int8_wire.encode_, -2 * x, error)[0], theirs[0]]
    sums = [torch.empty(n) for _ in range(2)]
    for out, function in zip(sums, (int8_wire.sum_, int8_wire._sum_reference)):
        function(out, rows, 0.25)
    assert same_bits(*(s.nan_to_num(nan=-1.0) for s in sums))


def test_what_rounding_loses_is_in_the_error():
    """Each value is off by half a step of its block at most, and value + error is what went in."""
    torch.manual_seed(0)
    x, before = torch.randn(1000), torch.randn(1000) / 50
    row, error = encoded(int8_wire.encode_, x, before)
    values = decoded(row, 1000)
    assert parallel_close("int8 value and error", values + error, x + before)
    for block in range(0, 1000, BLOCK):
        part = slice(block, block + BLOCK)
        step = (x + before)[part].abs().max() / 127
        assert error[part].abs().max() <= 0.5001 * step


def test_nothing_is_lost_over_time():
    """A gradient far smaller than its neighbours' step arrives all the same, summed over steps."""
    x = torch.full((BLOCK,), 0.001)
    x[0] = 100.0
    error, total = torch.zeros(BLOCK), torch.zeros(BLOCK)
    for _ in range(1000):
        row = torch.zeros(int8_wire.row_bytes(BLOCK), dtype=torch.uint8)
        int8_wire.encode_(row, error, x, 1.0)
        total += decoded(row, BLOCK)
    assert (total[1:] + error[1:] - 1.0).abs().max() < 1e-3
    assert total[1:].min() > 0.5


def test_what_is_not_finite_arrives_as_nan_and_leaves_no_error():
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(600)
        x[5 * BLOCK - 1] = bad
        row, error = encoded(int8_wire.encode_, x, torch.zeros(600))
        values = decoded(row, 600)
        spoilt = slice(4 * BLOCK, 5 * BLOCK)
        assert values[spoilt].isnan().all() and values.isnan().sum() == BLOCK
        assert error.isfinite().all() and error[spoilt].eq(0).all()


def test_rows_of_the_wrong_size_are_refused():
    with pytest.raises(RuntimeError, match="a row of 108 bytes expected for 100 elements, got 100"):
        int8_wire.encode_(
            torch.zeros(100, dtype=torch.uint8), torch.zeros(100), torch.zeros(100), 1.0
        )
