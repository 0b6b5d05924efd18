"""The int8 wire over 25 MB of gradients: codes with error feedback, and the sum of two ranks, against torch's ops."""

import pytest
import torch
from trainwright.ops import int8_wire

N = 25 * 2**18
SCALE = 1 / 3


def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int8_wire.row_bytes(N), dtype=torch.uint8, device=x.device)


@pytest.mark.parametrize("what", ["encode", "sum"])
def test_int8_wire(compare, device, what):
    xs = [torch.randn(N, device=device) for _ in range(2)]
    error, out = torch.zeros(N, device=device), torch.empty(N, device=device)

    def encode(backend):
        row = rows(xs[0])

        def run():
            error.zero_()  # so that every round has the same answer; both sides pay for it
            int8_wire.encode_(row, error, xs[0], SCALE, backend=backend)
            return [error]

        return run

    received = [rows(x) for x in xs]
    for row, x in zip(received, xs):
        int8_wire.encode_(row, torch.zeros_like(x), x, 1.0)

    def add(backend):
        def run():
            int8_wire.sum_(out, received, SCALE, backend=backend)
            return [out]

        return run

    def exact():
        if what == "sum":
            int8_wire.sum_(out, received, SCALE, backend="torch")
            return [out.clone()]
        error.zero_()
        int8_wire.encode_(rows(xs[0]), error, xs[0], SCALE, backend="torch")
        return [error.clone()]

    side = encode if what == "encode" else add
    calls = {"trainwright": side(None), "torch eager": side("torch")}
    row_bytes = int8_wire.row_bytes(N)
    moved = 16 * N + row_bytes if what == "encode" else 2 * row_bytes + 4 * N
    compare("int8_wire", what, "25 MB of gradients", torch.float32, calls, exact, bytes_moved=moved)
