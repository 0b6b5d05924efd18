"""Tensor-parallel linear layers: one weight split over the ranks of a group, communication under the matrix products.

Shape letters: T rows along the first dimension, K in_features, N out_features, W ranks. A subscript _r marks this
rank's shard. Uneven sizes are split as evenly as possible, larger shards first; an empty shard is legal.

| layer                     | forward                       | backward                                             |
|---------------------------|-------------------------------|------------------------------------------------------|
| column                    | x W_r'                        | dy_r W_r -> all-reduce, under dW_r                   |
| column, sequence parallel | all-gather x -> x W_r'        | dy_r W_r -> reduce-scatter, x gathered again for dW_r |
| row                       | x_r W_r' -> all-reduce        | dy W_r, dW_r                                         |
| row, sequence parallel    | x_r W_r' -> reduce-scatter    | all-gather dy -> dy W_r, dW_r                        |

Partial products are summed over ranks in fp32 (fp64 for fp64) in rank order and rounded once; `overlap` never changes
a bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.errors import FLOAT_DTYPES, check_bool, check_tensor, type_error, value_error
from trainwright.ops.gemm import gemm, gemm_add_
from trainwright.parallel._exchange import (
    Group,
    RowAllReduce,
    ScatteredSum,
    acc_dtype,
    gather_sizes,
    gathered_shards,
    ordered_all_reduce,
    shard_slice,
    split_evenly,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


def _product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a (M, K) · b (K, N) + bias, rounded to `dtype` once."""
    return gemm(a, b, bias, None, 0, dtype, False)[0]


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return _product(dy.t(), x, None, dy.dtype)


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=acc_dtype(dy.dtype))


class _Column(torch.autograd.Function):
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


class _ColumnSequence(torch.autograd.Function):
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
                x.shape,
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


class _Row(torch.autograd.Function):
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


class _RowSequence(torch.autograd.Function):
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
                (sizes[me], weight.shape[0]),
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


class _GatherColumns(torch.autograd.Function):
    """(M, N_r) of every rank -> (M, N). The gradient of the replicated result is taken as the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _all_columns(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy[:, shard_slice(ctx.sizes, dist.get_rank(ctx.group))].contiguous(), None, None


class _SplitColumns(torch.autograd.Function):
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
    shards = dict(gathered_shards(x.contiguous(), shapes, group, overlap=True))
    return torch.cat([shards[rank] for rank in range(len(sizes))], dim=1)


class _ParallelLinear(nn.Module):
    """What both layers share: the group, the sharded parameters, argument checks, autocast."""

    name: str
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        overlap: str,
        flags: dict[str, bool],
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        for argument, value in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise type_error(self.name, argument, "an int", type(value).__name__)
            if value < 0:
                raise value_error(self.name, argument, "at least 0", value)
        for argument, flag in flags.items():
            check_bool(self.name, argument, flag)
        if overlap not in ("auto", "off"):
            raise value_error(self.name, "overlap", "'auto' or 'off'", repr(overlap))
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{self.name}: torch.distributed is not initialised: call torch.distributed.init_process_group "
                "first, in a program started with torchrun"
            )
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.overlap = overlap == "auto"
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.rank < 0:
            raise value_error(
                self.name, "group", "a group that this rank is in", "a group without it"
            )

    def _make_parameters(
        self,
        bias: bool,
        shard_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Start from the unsharded layer that torch would make on the group's first rank, and keep this rank's part."""
        whole = nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        for parameter in whole.parameters():
            if self.world > 1 and parameter.numel():
                dist.broadcast(parameter.detach(), source, group=self.group)
        sizes = self.out_sizes if shard_dim == 0 else self.in_sizes
        mine = shard_slice(sizes, self.rank)
        weight = whole.weight.detach()
        self.weight = nn.Parameter((weight[mine] if shard_dim == 0 else weight[:, mine]).clone())
        if not bias:
            self.register_parameter("bias", None)
        else:
            b = whole.bias.detach()
            self.bias = nn.Parameter((b[mine] if shard_dim == 0 else b).clone())

    @property
    def out_sizes(self) -> list[int]:
        return split_evenly(self.out_features, self.world)

    @property
    def in_sizes(self) -> list[int]:
        return split_evenly(self.in_features, self.world)

    def _prepare(self, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Checked and cast (x as rows, weight, bias)."""
        check_tensor(self.name, "x", x, dtypes=FLOAT_DTYPES, min_dim=2, device=self.weight.device)
        if x.shape[-1] != width:
            raise value_error(self.name, "x", f"last dimension {width}", tuple(x.shape))
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        elif x.dtype != weight.dtype:
            raise type_error(self.name, "x", f"the weight's dtype {weight.dtype}", x.dtype)
        return x.reshape(math.prod(x.shape[:-1]), width), weight, bias

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, rank={self.rank} of {self.world}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose out_features are split over the ranks: y_r = x · W_rᵀ + b_r.

    Args:
        in_features, out_features: sizes K and N of the unsharded layer; rank r holds weight (N_r, K) and bias (N_r,).
        bias: with a bias.
        group: process group; None is the default group.
        gather_output: return y (..., N) on every rank instead of y_r (..., N_r). The gradient of that replicated result
            is taken as the same on every rank.
        sequence_parallel: x is this rank's rows (T_r, ..., K), T_r of any size; they are gathered under the product,
        and
            y has all T rows. The gradient of x is reduce-scattered back.
        overlap: "auto" hides communication under the products where it can; "off" runs them one after the other, with
            the same bits.

    Without `sequence_parallel`, x (..., K) must be the same on every rank, and its gradient is summed over ranks.

    The parameters start as torch.nn.Linear's on the group's first rank. fp32 accumulation, also over ranks, in rank
    order.

    Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022 (sequence parallel); Wang et al., "Overlap Communication with Dependent Computation via
    Decomposition in Large Deep Learning Models", ASPLOS 2023 (overlap).

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: a wrong argument.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        flags = {
            "bias": bias,
            "gather_output": gather_output,
            "sequence_parallel": sequence_parallel,
        }
        super().__init__(in_features, out_features, group, overlap, flags)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self._make_parameters(bias, 0, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight, bias = self._prepare(x, self.in_features)
        lead = list(x.shape[:-1])
        if self.sequence_parallel:
            per_row = math.prod(lead[1:])
            firsts = gather_sizes(lead[0], self.group, x.device)
            lead[0] = sum(firsts)
            sizes = [first * per_row for first in firsts]
            y = _ColumnSequence.apply(rows, weight, bias, self.group, self.overlap, sizes)
        else:
            y = _Column.apply(rows, weight, bias, self.group, self.overlap)
        if self.gather_output:
            y = _GatherColumns.apply(y, self.out_sizes, self.group)
        return y.view(*lead, y.shape[-1])


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose in_features are split over the ranks: y = Σ_r x_r · W_rᵀ + b, the bias added once.

    Args:
        in_features, out_features: sizes K and N of the unsharded layer; rank r holds weight (N, K_r) and bias (N,).
        bias: with a bias, the same on every rank.
        group: process group; None is the default group.
        input_is_parallel: x is this rank's part (..., K_r), as ColumnParallelLinear leaves it; otherwise x (..., K) is
            the same on every rank and each takes its part.
        sequence_parallel: keep only this rank's rows of the result, (T_r, ..., N), with T = x.shape[0] split as
        evenly as
            possible; otherwise every rank gets y (..., N), and the gradient of y is taken as the same on every rank.
        overlap: as in ColumnParallelLinear.

    Under `sequence_parallel` the bias gradient is summed over the ranks by this layer. Numerics and sources as
    ColumnParallelLinear's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        flags = {
            "bias": bias,
            "input_is_parallel": input_is_parallel,
            "sequence_parallel": sequence_parallel,
        }
        super().__init__(in_features, out_features, group, overlap, flags)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self._make_parameters(bias, 1, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.shape[1] if self.input_is_parallel else self.in_features
        rows, weight, bias = self._prepare(x, width)
        lead = list(x.shape[:-1])
        if not self.input_is_parallel:
            rows = _SplitColumns.apply(rows, self.in_sizes, self.group)
        if self.sequence_parallel:
            per_row = math.prod(lead[1:])
            firsts = split_evenly(lead[0], self.world)
            lead[0] = firsts[self.rank]
            sizes = [first * per_row for first in firsts]
            y = _RowSequence.apply(rows, weight, bias, self.group, self.overlap, sizes)
        else:
            y = _Row.apply(rows, weight, bias, self.group, self.overlap)
        return y.view(*lead, self.out_features)
