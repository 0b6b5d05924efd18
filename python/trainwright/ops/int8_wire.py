"""Gradients as int8 for the network: codes with one fp32 step per block of 64 elements, and error feedback.

A row of bytes holds n elements: their codes, padding to a multiple of 4, and the steps. Compiled for the CPU; elsewhere
the torch reference runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


encode_ = _library.define(ENCODE, _encode_reference, _nothing)
sum_ = _library.define(SUM, _sum_reference, _nothing)
