"""Dropout of tensors that are split over ranks: what is dropped depends on the place in the whole tensor alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright.errors import check_int, check_number, check_tensor, value_error
from trainwright.ops._attention_reference import uniform_bits

__all__ = ["sharded_dropout"]


def _kept(x: Tensor, p: float, seed: int, first_row: int, first_column: int) -> Tensor:
    """In the shape of x: 0 for what is dropped, else one over the share that is kept."""
    columns, drop = x.shape[-1], round(p * 2**32)
    rows = math.prod(x.shape[:-1])
    key = torch.tensor(seed, dtype=torch.int64, device=x.device)
    bits = uniform_bits(key, rows, 1, 1, first_column + columns, first_row)[..., first_column:]
    return ((bits >= drop).to(x.dtype) * (2**32 / max(2**32 - drop, 1))).view(x.shape)


class _Dropout(torch.autograd.Function):
    """The mask is made again for the backward, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *options: Any) -> Tensor:
        ctx.options = options
        return _drop(x, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _drop(dy, ctx.options), None, None, None, None


def _drop(x: Tensor, options: tuple[Any, ...]) -> Tensor:
    kept = _kept(x, *options)
    return torch.where(kept == 0, 0.0, x * kept)  # a dropped NaN is gone


def sharded_dropout(
    x: Tensor, p: float, *, seed: int, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Drop elements of x with probability p and scale the rest by 1 / (1 - p).

    Element (i, j) of the whole tensor, all leading dimensions folded into rows, is dropped if word j % 4 of
    ``philox(seed, counter (j // 4, 0, 0, i))`` is below round(p · 2^32): ranks that hold the same element drop the
    same, and the shards of any split are those of one process.

    Args:
        x: (..., C_r), this rank's part of a tensor (..., C): some of its rows, or of its columns; floating.
        p: 0 <= p <= 1.
        seed: the same on every rank; another one for every layer and step.
        first_row: place of this part's first row in the whole; in sequence parallel the rows of the ranks before.
        first_column: place of its first column; behind a column-parallel layer the columns of the ranks before.

    Returns:
        As x. The gradient is dropped and scaled alike; no mask is kept for it.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox4x32-10).

    >>> whole = sharded_dropout(torch.ones(4, 6), 0.5, seed=1)
    >>> part = sharded_dropout(torch.ones(2, 3), 0.5, seed=1, first_row=2, first_column=3)
    >>> torch.equal(part, whole[2:, 3:])
    True
    """
    op = "sharded_dropout"
    check_tensor(op, "x", x, min_dim=1)
    check_number(op, "p", p, minimum=0.0)
    if p > 1:
        raise value_error(op, "p", "at most 1", p)
    check_int(op, "seed", seed)
    check_int(op, "first_row", first_row, minimum=0)
    check_int(op, "first_column", first_column, minimum=0)
    if p == 0 or not x.numel():
        return x.clone()
    return _Dropout.apply(x, float(p), seed, first_row, first_column)
