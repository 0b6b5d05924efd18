"""The products of the tensor-parallel linear layers, as autograd functions: communication under the matrix products.

Shape letters: M rows (all leading dimensions folded), K in_features, N out_features. A subscript _r marks this rank's
shard. `sizes` holds every rank's count of rows. x is (M, K), a weight (N, K), a bias (N,). Column functions take
several weights, which share one gathered x and one gradient of it; their last arguments are all weights, then all
biases (None for none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.ops._library import acc_dtype
from trainwright.ops.gemm import gemm, gemm_add_, gemm_out_
from trainwright.parallel._exchange import (
    How,
    gathered_panels,
    gathered_rows,
    ordered_all_reduce,
)
from trainwright.parallel._partial_sums import AllReducedSum, ScatteredSum
from trainwright.parallel._sizes import shard_slice

Ranges = tuple[tuple[int, int], ...]  # by rank: first and end of the out_features that it holds
PANELS, PANEL_COLUMNS = 4, 64  # of dy in the backward of RowSequence
SHARED_TAG = 1 << 30  # beyond those of the schedules


def _product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a (M, K) · b (K, N) + bias, rounded to `dtype` once."""
    return gemm(a, b, bias, None, 0, dtype, False)[0]


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=acc_dtype(dy.dtype))


def _input_gradient(
    dys: Sequence[Tensor], weights: Sequence[Tensor], rows: slice, columns: slice
) -> Tensor:
    """Σ dy[rows] · W[:, columns] over the weights, in the accumulation dtype."""
    acc = acc_dtype(dys[0].dtype)
    total = _product(dys[0][rows], weights[0][:, columns], None, acc)
    for dy, weight in zip(dys[1:], weights[1:]):
        gemm_add_(total, dy[rows], weight[:, columns])
    return total


def _summed_over_holders(value: Tensor, ranges: Ranges, how: How) -> Tensor:
    """Rows of a gradient that several ranks hold, added in rank order: each gets the same bits."""
    me, world = how.rank, how.world
    begin, end = ranges[me]

    def overlap(rank: int) -> slice:
        low, high = max(begin, ranges[rank][0]), min(end, ranges[rank][1])
        return slice(low - begin, max(low, high) - begin)

    parts, operations = {me: value}, []
    for step in range(1, world):
        for rank, call in (((me - step) % world, dist.irecv), ((me + step) % world, dist.isend)):
            here = value[overlap(rank)]
            if not here.numel():
                continue
            if call is dist.irecv:
                parts[rank] = here = torch.empty_like(here, memory_format=torch.contiguous_format)
            peer = rank if how.group is None else dist.get_global_rank(how.group, rank)
            operations.append(dist.P2POp(call, here.contiguous(), peer, how.group, SHARED_TAG))
    if not operations:
        return value
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    total = torch.zeros_like(value)
    for rank in sorted(parts):
        total[overlap(rank)] += parts[rank]
    return total


class _Column(torch.autograd.Function):
    """What both column functions do with the gradients of their parameters."""

    @staticmethod
    def parameter_gradients(
        ctx: Any, dys: Sequence[Tensor], dws: Sequence[Tensor | None], needs_bias: Sequence[bool]
    ) -> list[Tensor | None]:
        """`dws` in the accumulation dtype where ranks share their weight."""
        found: list[Tensor | None] = []
        for dw, ranges, dy in zip(dws, ctx.shares, dys):
            if dw is not None and ranges is not None:
                dw = _summed_over_holders(dw, ranges, ctx.how)
            found.append(None if dw is None else dw.to(dy.dtype))
        for dy, ranges, needed in zip(dys, ctx.shares, needs_bias):
            db = _bias_gradient(dy) if needed else None
            if db is not None and ranges is not None:
                db = _summed_over_holders(db, ranges, ctx.how)
            found.append(None if db is None else db.to(dy.dtype))
        return found

    @staticmethod
    def gradient_dtypes(ctx: Any, dys: Sequence[Tensor]) -> list[torch.dtype]:
        return [acc_dtype(dy.dtype) if s is not None else dy.dtype for dy, s in zip(dys, ctx.shares)]  # fmt: skip


class Column(_Column):
    """y_r = x · W_rᵀ + b_r for replicated x (M, K), for every weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, how: How, shares: Sequence[Ranges | None], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights = parameters[:count]
        ctx.save_for_backward(x, *weights)
        ctx.how, ctx.shares = how, shares
        pairs = zip(weights, parameters[count:])
        return tuple(_product(x, w.t(), b, x.dtype) for w, b in pairs if w is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        reduction = None
        if ctx.needs_input_grad[0]:
            reduction = AllReducedSum(
                lambda columns: _input_gradient(dys, weights, slice(None), columns),
                x.shape[0], x.shape[1], dys[0], ctx.how, x.dtype, 2.0 * ctx.how.width,
            )  # fmt: skip
        dws = [  # under the last exchange
            _product(dy.t(), x, None, dtype) if needed else None
            for dy, dtype, needed in zip(dys, _Column.gradient_dtypes(ctx, dys), needs)
        ]
        found = _Column.parameter_gradients(ctx, dys, dws, needs[len(weights) :])
        return reduction.finish() if reduction else None, None, None, *found


class ColumnSequence(_Column):
    """y_r = all_gather(x_r) · W_rᵀ + b_r for rows x_r (M_r, K), for every weight. The gathered x is not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, how: How, shares: Sequence[Ranges | None], sizes: list[int],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        count = len(parameters) // 2
        weights = [w for w in parameters[:count] if w is not None]
        ctx.save_for_backward(x, *weights)
        ctx.how, ctx.shares, ctx.sizes = how, shares, sizes
        ys = [x.new_empty(sum(sizes), w.shape[0]) for w in weights]
        flops = 2.0 * x.shape[1] * how.width
        for rows, part in gathered_rows(x, sizes, how, flops):
            for y, w, b in zip(ys, weights, parameters[count:]):
                gemm_out_(y[rows], part, w.t(), b)
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        how, sizes = ctx.how, ctx.sizes
        reduction = None
        if ctx.needs_input_grad[0]:
            reduction = ScatteredSum(
                lambda target, columns: _input_gradient(
                    dys, weights, shard_slice(sizes, target), columns
                ),
                sizes, x.shape[1], dys[0], how, x.dtype, 2.0 * ctx.how.width,
            )  # fmt: skip
        dws: list[Tensor | None] = [
            w.new_zeros(w.shape, dtype=dtype) if needed else None
            for w, dtype, needed in zip(weights, _Column.gradient_dtypes(ctx, dys), needs)
        ]
        if any(dw is not None for dw in dws):
            for columns, panel in gathered_panels(x, sizes, how, 2.0 * how.width):
                for dw, dy in zip(dws, dys):
                    if dw is not None:
                        dw[:, columns] = _product(dy.t(), panel, None, dw.dtype)
        found = _Column.parameter_gradients(ctx, dys, dws, needs[len(weights) :])
        return reduction.finish() if reduction else None, None, None, None, *found


class Row(torch.autograd.Function):
    """y = Σ_r x_r · W_rᵀ + b for x_r (M, K_r). Rank 0 adds the bias to its part, in the accumulation dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        ctx.save_for_backward(x, weight)
        acc = acc_dtype(x.dtype)
        own = bias if how.rank == 0 else None
        return AllReducedSum(
            lambda columns: _product(
                x, weight[columns].t(), None if own is None else own[columns], acc
            ),
            x.shape[0], weight.shape[0], x, how, x.dtype, 2.0 * how.width,
        ).finish()  # fmt: skip

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = _product(dy, weight, None, x.dtype) if need_x else None
        dw = _product(dy.t(), x, None, dy.dtype) if need_weight else None
        db = _bias_gradient(dy).to(dy.dtype) if need_bias else None
        return dx, dw, db, None


class RowSequence(torch.autograd.Function):
    """This rank's rows of Σ_r x_r · W_rᵀ + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How, sizes: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.sizes = how, sizes
        acc = acc_dtype(x.dtype)
        own = bias if how.rank == 0 else None
        return ScatteredSum(
            lambda target, columns: _product(
                x[shard_slice(sizes, target)], weight[columns].t(), None if own is None else own[columns], acc,
            ),
            sizes, weight.shape[0], x, how, x.dtype, 2.0 * how.width,
        ).finish()  # fmt: skip

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        """One gather of dy, by panels of columns: rows of dW are whole at once, dx is added up over the panels, whose
        number depends on N alone."""
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        columns = dy.shape[1]
        dx = x.new_zeros(x.shape, dtype=acc_dtype(dy.dtype)) if need_x else None
        dw = weight.new_zeros(weight.shape) if need_weight else None
        if need_x or need_weight:
            panels = max(1, min(PANELS, columns // PANEL_COLUMNS))
            flops = 2.0 * (need_x + need_weight) * ctx.how.width
            for here, panel in gathered_panels(dy, ctx.sizes, ctx.how, flops, panels):
                if dx is not None:
                    gemm_add_(dx, panel, weight[here])
                if dw is not None:
                    dw[here] = _product(panel.t(), x, None, dw.dtype)
        db = None
        if need_bias:  # every rank saw only its own rows
            db = ordered_all_reduce(_bias_gradient(dy), ctx.how.group).to(dy.dtype)
        return None if dx is None else dx.to(x.dtype), dw, db, None, None


class GatherColumns(torch.autograd.Function):
    """(M, N_r) of every rank -> (M, N). The gradient of the replicated result is taken as the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], how: How) -> Tensor:
        ctx.sizes, ctx.how = sizes, how
        return _all_columns(x, sizes, how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy[:, shard_slice(ctx.sizes, ctx.how.rank)].contiguous(), None, None


class SplitColumns(torch.autograd.Function):
    """Replicated (M, N) -> this rank's (M, N_r); backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], how: How) -> Tensor:
        ctx.sizes, ctx.how = sizes, how
        return x[:, shard_slice(sizes, how.rank)].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _all_columns(dy, ctx.sizes, ctx.how), None, None


def _all_columns(x: Tensor, sizes: list[int], how: How) -> Tensor:
    rows = x.shape[0]
    flat = x.new_empty(rows * sum(sizes), 1)
    counts = [rows * n for n in sizes]
    for here, part in gathered_rows(x.reshape(-1, 1), counts, how, 0.0):
        flat[here] = part
    whole = x.new_empty(rows, sum(sizes))
    for rank, count in enumerate(counts):
        if count:
            whole[:, shard_slice(sizes, rank)] = flat[shard_slice(counts, rank)].view(rows, -1)
    return whole
