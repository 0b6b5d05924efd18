"""Rows of int8 codes with error feedback: each backend against the reference, bit for bit, and what users rely on."""

import pytest
import torch
from numerics import backends_for_tests, parallel_close, same_bits
from trainwright.ops import int8_wire

BLOCK = int8_wire.BLOCK
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 70_001]
BACKENDS = backends_for_tests(int8_wire.encode_)


def encoded(x, error, scale=1.0, backend=None):
    row = torch.zeros(int8_wire.row_bytes(x.numel()), dtype=torch.uint8)
    # begins where x does: x may not begin at 16 bytes
    error = torch.cat([error[:1], error])[1:] if x.data_ptr() % 16 else error.clone()
    int8_wire.encode_(row, error, x, scale, backend=backend)
    return row, error


def decoded(row, n):
    out = torch.empty(n)
    int8_wire.sum_(out, [row], 1.0)
    return out


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("n", SIZES)
def test_each_backend_has_the_bits_of_the_reference(n, begin, backend):
    torch.manual_seed(n)
    x, error = torch.randn(n) * torch.logspace(-3, 3, max(n, 1))[:n], torch.randn(n) / 100
    if n > 600:
        x[256:512] = 0.0
        error[256:512] = 1e-38  # too small to divide by
        x[513] = float("inf")
        x[600:602] = torch.tensor([float("nan"), -3.0])
    x = torch.cat([x[:begin], x])[begin:]
    ours, theirs = encoded(x, error, 0.3, backend), encoded(x, error, 0.3, "torch")
    assert torch.equal(ours[0][:n], theirs[0][:n])
    steps = (row[-(-n // 4) * 4 :].view(torch.float32) for row in (ours[0], theirs[0]))
    assert same_bits(*(s.nan_to_num(nan=-1.0) for s in steps))
    assert same_bits(ours[1], theirs[1])
    rows = [ours[0], encoded(-2 * x, error)[0], theirs[0]]
    sums = [torch.empty(n + begin)[begin:] for _ in range(2)]
    for out, name in zip(sums, (backend, "torch")):
        int8_wire.sum_(out, rows, 0.25, backend=name)
    assert same_bits(*(s.nan_to_num(nan=-1.0) for s in sums))


def test_what_rounding_loses_is_in_the_error():
    """Each value is off by half a step of its block at most, and value + error is what went in."""
    torch.manual_seed(0)
    x, before = torch.randn(1000), torch.randn(1000) / 50
    row, error = encoded(x, before)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_arrives_as_nan_and_leaves_no_error(backend):
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(600)
        x[5 * BLOCK - 1] = bad
        row, error = encoded(x, torch.zeros(600), backend=backend)
        values = decoded(row, 600)
        spoilt = slice(4 * BLOCK, 5 * BLOCK)
        assert values[spoilt].isnan().all() and values.isnan().sum() == BLOCK
        assert error.isfinite().all() and error[spoilt].eq(0).all()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b in ("cpu", "cuda", "vgpu")])
def test_rows_of_the_wrong_size_are_refused(backend):
    with pytest.raises(RuntimeError, match="a row of 108 bytes expected for 100 elements, got 100"):
        int8_wire.encode_(
            torch.zeros(100, dtype=torch.uint8),
            torch.zeros(100),
            torch.zeros(100),
            1.0,
            backend=backend,
        )
