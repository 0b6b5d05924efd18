"""The products of the tensor-parallel linear layers, as autograd functions: communication under the matrix products.

Shape letters: M rows (all leading dimensions folded), K in_features, N out_features. A subscript _r marks this rank's
shard. `sizes` holds every rank's count along the split dimension. x is (M, K), weight (N, K), bias (N,).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.ops._library import acc_dtype
from trainwright.ops.gemm import gemm, gemm_add_
from trainwright.parallel._exchange import (
    Group,
    RowAllReduce,
    ScatteredSum,
    gathered_shards,
    ordered_all_reduce,
)
from trainwright.parallel._sizes import shard_slice


def _product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a (M, K) · b (K, N) + bias, rounded to `dtype` once."""
    return gemm(a, b, bias, None, 0, dtype, False)[0]


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return _product(dy.t(), x, None, dy.dtype)


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=acc_dtype(dy.dtype))


class Column(torch.autograd.Function):
    """y_r = x · W_rᵀ + b_r for replicated x (M, K)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, overlap: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.overlap = group, overlap
        return _product(x, weight.t(), bias, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        reduction = None
        if need_x:
            acc = acc_dtype(dy.dtype)
            reduction = RowAllReduce(
                lambda rows: _product(dy[rows], weight, None, acc),
                dy.shape[0],
                weight.shape[1],
                x.dtype,
                ctx.group,
                ctx.overlap,
            )
        dw = _weight_gradient(dy, x) if need_weight else None  # under the last chunk's exchange
        db = _bias_gradient(dy).to(dy.dtype) if need_bias else None
        return reduction.finish() if reduction else None, dw, db, None, None


class ColumnSequence(torch.autograd.Function):
    """y_r = all_gather(x_r) · W_rᵀ + b_r for rows x_r (M_r, K). The gathered x is not kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        overlap: bool,
        sizes: list[int],
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.overlap, ctx.sizes = group, overlap, sizes
        shapes = [(m, x.shape[1]) for m in sizes]
        rows: list[Tensor | None] = [None] * len(sizes)
        for rank, shard in gathered_shards(x, shapes, group, overlap):
            rows[rank] = _product(shard, weight.t(), bias, x.dtype)
        return torch.cat([r for r in rows if r is not None])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        acc = acc_dtype(dy.dtype)
        reduction = None
        if need_x:
            reduction = ScatteredSum(
                lambda target: _product(dy[shard_slice(ctx.sizes, target)], weight, None, acc),
                ctx.sizes,
                x.shape[1],
                dy.new_empty(0, dtype=acc),
                ctx.group,
                ctx.overlap,
            )
        dw = None
        if need_weight:
            total = torch.zeros(weight.shape, dtype=acc, device=weight.device)
            shapes = [(m, x.shape[1]) for m in ctx.sizes]
            for rank, shard in gathered_shards(x, shapes, ctx.group, ctx.overlap):
                gemm_add_(total, dy[shard_slice(ctx.sizes, rank)].t(), shard)
            dw = total.to(weight.dtype)
        db = _bias_gradient(dy).to(dy.dtype) if need_bias else None
        dx = reduction.finish().to(x.dtype) if reduction else None
        return dx, dw, db, None, None, None


class Row(torch.autograd.Function):
    """y = Σ_r x_r · W_rᵀ + b for x_r (M, K_r). Rank 0 adds the bias to its part, in the accumulation dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, overlap: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        acc = acc_dtype(x.dtype)
        own_bias = bias if dist.get_rank(group) == 0 else None
        return RowAllReduce(
            lambda rows: _product(x[rows], weight.t(), own_bias, acc),
            x.shape[0],
            weight.shape[0],
            x.dtype,
            group,
            overlap,
        ).finish()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = _product(dy, weight, None, x.dtype) if need_x else None
        dw = _weight_gradient(dy, x) if need_weight else None
        db = _bias_gradient(dy).to(dy.dtype) if need_bias else None
        return dx, dw, db, None, None


class RowSequence(torch.autograd.Function):
    """This rank's rows of Σ_r x_r · W_rᵀ + b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        overlap: bool,
        sizes: list[int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.overlap, ctx.sizes = group, overlap, sizes
        acc = acc_dtype(x.dtype)
        me = dist.get_rank(group)
        own_bias = bias if me == 0 else None
        return (
            ScatteredSum(
                lambda target: _product(x[shard_slice(sizes, target)], weight.t(), own_bias, acc),
                sizes,
                weight.shape[0],
                x.new_empty(0, dtype=acc),
                group,
                overlap,
            )
            .finish()
            .to(x.dtype)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        dx = x.new_empty(x.shape) if need_x else None
        acc = acc_dtype(dy.dtype)
        total = torch.zeros(weight.shape, dtype=acc, device=weight.device) if need_weight else None
        if need_x or need_weight:
            shapes = [(m, dy.shape[1]) for m in ctx.sizes]
            for rank, shard in gathered_shards(dy, shapes, ctx.group, ctx.overlap):
                rows = shard_slice(ctx.sizes, rank)
                if dx is not None:
                    dx[rows] = _product(shard, weight, None, x.dtype)
                if total is not None:
                    gemm_add_(total, shard.t(), x[rows])
        db = None
        if need_bias:  # every rank saw only its own rows
            db = ordered_all_reduce(_bias_gradient(dy), ctx.group).to(dy.dtype)
        dw = None if total is None else total.to(weight.dtype)
        return dx, dw, db, None, None, None


class GatherColumns(torch.autograd.Function):
    """(M, N_r) of every rank -> (M, N). The gradient of the replicated result is taken as the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _all_columns(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy[:, shard_slice(ctx.sizes, dist.get_rank(ctx.group))].contiguous(), None, None


class SplitColumns(torch.autograd.Function):
    """Replicated (M, N) -> this rank's (M, N_r); backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return x[:, shard_slice(sizes, dist.get_rank(group))].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _all_columns(dy, ctx.sizes, ctx.group), None, None


def _all_columns(x: Tensor, sizes: list[int], group: Group) -> Tensor:
    shapes = [(x.shape[0], n) for n in sizes]
    whole = x.new_empty((x.shape[0], sum(sizes)))
    for rank, shard in gathered_shards(x.contiguous(), shapes, group, overlap=True):
        whole[:, shard_slice(sizes, rank)] = shard
    return whole
