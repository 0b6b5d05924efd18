"""The walks of `linear_cross_entropy`: products, losses and gradients, one tile of the (N, V) logits at a time.

`forward` and `backward` walk the vocabulary: a tile is all rows, some columns. `forward_backward` walks rows: a tile
is some rows, all columns. Every tile of a walk lies in the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.ops import gemm
from trainwright.ops._cross_entropy_tiles import (
    NONE,
    SUM,
    TILE_GRAD_OPS,
    TILE_STATE_OPS,
    check_targets,
    finish,
    scale_of,
)
from trainwright.ops._library import acc_dtype

PARTS = 16  # a tile of rows is this fraction of the logits
PARTS_COLUMNS = 32  # a tile of columns; smaller, as products pack copies of hidden rows beside it
PARTS_16_BITS = 96  # the same, where fp32 sums (and tiles, mostly) are large beside 16-bit logits
# Columns come in multiples of 64, rows are at least that: narrower products run far below the machine's rate, and
# with AMX one of 523 columns takes four times as long as one of 512.
STEP = 64
# Elements: smaller tiles cost more in calls than they save (1 MiB of fp32, in a cache), larger ones are no faster.
MIN_TILE, MAX_TILE = 1 << 18, 1 << 25

Needs = list[bool]  # gradients wanted for hidden, weight, bias

F = TypeVar("F", bound=Callable[..., Any])


def _plain(function: F) -> F:
    """Runs without autocast (the wrapper has cast the inputs, the products choose their dtypes) and autograd."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        with torch.autocast(device, enabled=False), torch.no_grad():
            return function(*args)

    return run  # type: ignore[return-value]


class Products(NamedTuple):
    """How the tiles are multiplied."""

    tile_dtype: torch.dtype
    out_: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]  # c = a·b + bias
    add_: Callable[[Tensor, Tensor, Tensor], None]  # c += a·b, c of the accumulator dtype


def _torch_out(c: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    torch.mm(a, b, out=c) if bias is None else torch.addmm(bias, a, b, out=c)


def _torch_add(c: Tensor, a: Tensor, b: Tensor) -> None:
    if c.dtype == a.dtype:
        c.addmm_(a, b)
    else:
        c += torch.mm(a, b)


def products_for(hidden: Tensor, backend: str) -> Products:
    """Torch's, but on a CPU where ours are faster: for fp32 one that MKL was not made for, for 16-bit inputs one that
    does not multiply them in hardware. There tiles are fp32, and our own product widens the inputs as it packs
    them, so that no copy of hidden or weight is kept."""
    torchs = hidden.device.type != "cpu" or hidden.dtype == torch.float64
    if hidden.dtype == torch.float32:
        torchs = torchs or backend != "cpu" or dispatch.mkl_is_faster()
    elif hidden.dtype == torch.bfloat16:
        torchs = torchs or dispatch.native_bf16()
    if torchs:
        return Products(hidden.dtype, _torch_out, _torch_add)
    if backend == "cpu":
        return Products(torch.float32, gemm.gemm_out_, gemm.gemm_add_)
    return Products(torch.float32, gemm.gemm_out_reference, gemm.gemm_add_reference)


def _kept(
    hidden: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows that count, their targets, and their indices (None: all rows).

    Ignored rows must not meet a product: 0 * NaN is NaN. On a GPU they are zeroed, which needs no synchronisation.
    """
    keep = target != ignore_index
    if hidden.device.type != "cpu":
        return torch.where(keep[:, None], hidden, 0), target, None
    index = None if bool(keep.all()) else keep.nonzero()[:, 0]
    if index is not None:
        hidden, target = hidden[index], target[index]
    return hidden, target, index


def _spread(values: Tensor, index: Tensor | None, N: int) -> Tensor:
    """Rows back at their places, zeros elsewhere."""
    if index is None:
        return values
    return values.new_zeros((N, *values.shape[1:])).index_copy_(0, index, values)


def _tiles(
    h: Tensor, weight: Tensor, bias: Tensor | None, products: Products
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Walks the vocabulary: (first column, rows of the weight, logits), every tile in the same memory."""
    n, V = len(h), len(weight)
    parts = PARTS_COLUMNS if h.dtype == acc_dtype(h.dtype) else PARTS_16_BITS
    columns = min(max(V // parts, MIN_TILE // max(n, 1)), MAX_TILE // max(n, 1)) // STEP * STEP
    columns = min(max(columns, STEP), max(V // 2, 1))
    buffer = h.new_empty(n * columns, dtype=products.tile_dtype)
    for first in range(0, V if n else 0, columns):
        w = weight[first : first + columns]
        b = None if bias is None else bias[first : first + columns]
        tile = buffer[: n * len(w)].view(n, len(w))
        products.out_(tile, h, w.t(), b)
        yield first, w, tile


@_plain
def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    V = len(weight)
    check_targets(target, V, ignore_index, "linear_cross_entropy")
    h, t, index = _kept(hidden, target, ignore_index)
    state = h.new_empty((len(h), 4), dtype=torch.float64)
    for first, _, tile in _tiles(h, weight, bias, products_for(h, backend)):
        TILE_STATE_OPS[backend](
            state, tile, t, class_weight, first, V, ignore_index, label_smoothing, softcap
        )
    scale = scale_of(t, class_weight, ignore_index, reduction)
    loss, lse = finish(
        state, t, class_weight, scale, V, ignore_index, label_smoothing, z_loss, reduction
    )
    if reduction == NONE:
        loss = _spread(loss, index, len(hidden))
    return loss.to(acc_dtype(hidden.dtype)), _spread(lse, index, len(hidden)), scale


@_plain
def backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    lse: Tensor, scale: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    backend: str, needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N, V = len(hidden), len(weight)
    h, t, index = _kept(hidden, target, ignore_index)
    if index is not None:
        lse, dloss = lse[index], dloss[index] if dloss.dim() else dloss
    products, acc = products_for(h, backend), acc_dtype(h.dtype)
    dh = h.new_zeros(h.shape if needs[0] else 0, dtype=acc)
    dw = weight.new_empty(weight.shape if needs[1] else 0)
    db = weight.new_empty(V if needs[2] else 0)
    if not len(h):
        dw.zero_(), db.zero_()
    for first, w, g in _tiles(h, weight, bias, products):
        TILE_GRAD_OPS[backend](
            g, dloss, g, t, class_weight, lse, scale, first, V, ignore_index, label_smoothing, z_loss, softcap
        )  # fmt: skip
        last = first + len(w)
        if needs[0]:
            products.add_(dh, g, w)
        if needs[1]:
            products.out_(dw[first:last], g.t(), h, None)
        if needs[2]:
            db[first:last] = g.sum(0, dtype=acc)
    return _spread(dh.to(hidden.dtype), index, N) if needs[0] else dh.to(hidden.dtype), dw, db


def _rows_per_tile(n: int, V: int) -> int:
    """Rows of a tile of all columns; all tiles but the last have as many."""
    most = max(min(max(n // PARTS, MIN_TILE // V), max(MAX_TILE // V, STEP), n // 2), 1)
    tiles = max(-(-n // most), 1)
    return -(-n // tiles)


def walks_rows(hidden: Tensor, n: int, V: int) -> bool:
    """Whether a scalar loss makes its gradients in forward: many rows, gradients that are their own accumulators."""
    return n >= PARTS * STEP and hidden.dtype == acc_dtype(hidden.dtype)


@_plain
def forward_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: int, backend: str,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A scalar loss and its gradients for an upstream gradient of 1."""
    N, V = len(hidden), len(weight)
    options = (ignore_index, label_smoothing, z_loss, softcap)
    check_targets(target, V, ignore_index, "linear_cross_entropy")
    h, t, index = _kept(hidden, target, ignore_index)
    rows, acc = _rows_per_tile(len(h), V), acc_dtype(hidden.dtype)
    products = products_for(hidden, backend)
    one = h.new_ones((), dtype=acc)
    if not walks_rows(hidden, len(h), V):
        inputs = (hidden, weight, bias, target, class_weight)
        loss, lse, scale = forward(*inputs, *options, reduction, backend)
        return loss, *backward(one, *inputs, lse, scale, *options, backend, needs)
    scale = scale_of(t, class_weight, ignore_index, reduction)
    loss = h.new_zeros((), dtype=torch.float64)
    dh = h.new_empty(h.shape if needs[0] else 0)
    dw = h.new_empty(weight.shape if needs[1] else 0)  # the first tile writes, the others add
    db = h.new_zeros(V if needs[2] else 0)
    buffer = h.new_empty(rows * V)
    state = h.new_empty((rows, 4), dtype=torch.float64)
    for first in range(0, len(h), rows):
        hr, tr = h[first : first + rows], t[first : first + rows]
        g = buffer[: len(hr) * V].view(len(hr), V)
        products.out_(g, hr, weight.t(), bias)
        sr = state[: len(hr)]
        TILE_STATE_OPS[backend](
            sr, g, tr, class_weight, 0, V, ignore_index, label_smoothing, softcap
        )
        part, lse = finish(
            sr, tr, class_weight, scale, V, ignore_index, label_smoothing, z_loss, SUM
        )
        loss += part
        TILE_GRAD_OPS[backend](g, one, g, tr, class_weight, lse, scale, 0, V, *options)
        if needs[0]:
            products.out_(dh[first : first + rows], g, weight, None)
        if needs[1]:
            if first:
                products.add_(dw, g.t(), hr)
            else:
                products.out_(dw, g.t(), hr, None)
        if needs[2]:
            db += g.sum(0)
    return loss.to(acc), _spread(dh, index, N) if needs[0] else dh, dw, db
