"""Gradients as int8 for the network: codes with one fp32 step per block of 64 elements, and error feedback.

A row of bytes holds n elements: their codes, padding to a multiple of 4, and the steps. Every backend gives the same
bits. Internal: the data parallel layer calls these for each bucket, so arguments are checked by the kernels alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.ops import _library

__all__: list[str] = []

BLOCK = 64
SMALLEST = 1e-30  # a block without anything larger sends zeros and keeps its values as errors

ENCODE = "int8_encode_(Tensor(a!) row, Tensor(b!) error, Tensor x, float scale) -> ()"
SUM = "int8_sum_(Tensor(a!) out, Tensor[] rows, float scale) -> ()"


def row_bytes(n: int) -> int:
    """Bytes of a row of n elements."""
    return -(-n // 4) * 4 + 4 * -(-n // BLOCK)


def _parts(row: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The codes and the steps of a row."""
    begin = -(-n // 4) * 4
    return row[:n].view(torch.int8), row[begin:].view(torch.float32)


def _blocks(x: Tensor) -> Tensor:
    """(blocks, BLOCK), zeros at the end."""
    padded = x.new_zeros(-(-x.numel() // BLOCK) * BLOCK)
    padded[: x.numel()] = x
    return padded.view(-1, BLOCK)


def _encode_reference(row: Tensor, error: Tensor, x: Tensor, scale: float) -> None:
    """v = scale x + error; step = max|v| / 127; code = round(v / step); error = v - code step, by blocks."""
    n = x.numel()
    if n == 0:
        return
    codes, steps = _parts(row, n)
    v = _blocks(x * scale + error)
    peak = v.abs().amax(1, keepdim=True)
    finite, usable = peak.isfinite(), peak.isfinite() & (peak >= SMALLEST)
    code = torch.where(usable, v * (peak.reciprocal() * 127.0), 0.0).round()
    step = torch.where(usable, peak * (1.0 / 127.0), torch.where(finite, 0.0, float("nan")))
    left = torch.where(usable, v - code * step, torch.where(finite, v, 0.0))
    codes.copy_(code.view(-1)[:n])
    steps.copy_(step.view(-1))
    error.copy_(left.view(-1)[:n])


def _sum_reference(out: Tensor, rows: list[Tensor], scale: float) -> None:
    """out = scale (code_0 step_0 + code_1 step_1 + ...), in the order of the rows."""
    n = out.numel()
    if n == 0:
        return
    total = None
    for row in rows:
        codes, steps = _parts(row, n)
        values = (_blocks(codes.float()) * steps.view(-1, 1)).view(-1)[:n]
        total = values if total is None else total + values
    assert total is not None
    out.copy_(total * scale)


def _nothing(*_: object) -> None:
    return None


ENCODE_OPS = _library.define_backends("int8_wire", ENCODE, _encode_reference, _nothing)
SUM_OPS = _library.define_backends("int8_wire", SUM, _sum_reference, _nothing)


@dispatch.register(
    "int8_encode",
    Candidate("cpu", (torch.float32,)),
    Candidate("cuda", (torch.float32,)),
    Candidate("triton", (torch.float32,)),
    Candidate("torch", (torch.float32,)),
)
def encode_(
    row: Tensor, error: Tensor, x: Tensor, scale: float, *, backend: str | None = None
) -> None:
    """``row`` = the codes and steps of ``v = scale x + error``, and ``error`` = what they lose of it, in one pass.

    Args:
        row: `row_bytes(n)` uint8, contiguous, beginning at a multiple of 4 bytes.
        error, x: (n,) fp32, contiguous.
    """
    ENCODE_OPS[dispatch.resolve("int8_encode", backend, x.device, x.dtype)](row, error, x, scale)


@dispatch.register(
    "int8_sum",
    Candidate("cpu", (torch.float32,)),
    Candidate("cuda", (torch.float32,), limits=(("W", 1024),)),
    Candidate("triton", (torch.float32,)),
    Candidate("torch", (torch.float32,)),
)
def sum_(out: Tensor, rows: Sequence[Tensor], scale: float, *, backend: str | None = None) -> None:
    """``out = scale (row_0 + row_1 + ...)`` of the values that the rows stand for, added in this order in fp32."""
    chosen = dispatch.resolve("int8_sum", backend, out.device, out.dtype, W=len(rows))
    SUM_OPS[chosen](out, list(rows), scale)


def _example(backend: str, device: torch.device) -> tuple[Tensor, Tensor]:
    x, error = (torch.randn(300).to(device) for _ in range(2))
    row = torch.zeros(row_bytes(300), dtype=torch.uint8, device=device)
    encode_(row, error, x, 0.5, backend=backend)
    return row, error


@dispatch.self_check("int8_encode")
def _check_encode(backend: str, device: torch.device) -> list[Tensor]:
    row, error = _example(backend, device)
    return [row.float(), error]


@dispatch.self_check("int8_sum")
def _check_sum(backend: str, device: torch.device) -> list[Tensor]:
    out = torch.empty(300, device=device)
    sum_(out, [_example("torch", device)[0] for _ in range(3)], 0.5, backend=backend)
    return [out]
