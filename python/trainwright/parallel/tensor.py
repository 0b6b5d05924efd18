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

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.errors import (
    FLOAT_DTYPES,
    check_bool,
    check_int,
    check_tensor,
    type_error,
    value_error,
)
from trainwright.parallel import _sharded_linear
from trainwright.parallel._exchange import Group, check_group, gather_sizes
from trainwright.parallel._sizes import shard_slice, split_evenly

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(nn.Module):
    """What both layers share: the group, the sharded parameters, argument checks, autocast."""

    shard_dim: int  # of the weight (N, K): 0 splits out_features, and the bias with them; 1 splits in_features
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: Group,
        sequence_parallel: bool,
        overlap: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        for argument, value in (("in_features", in_features), ("out_features", out_features)):
            check_int(self.name, argument, value, minimum=0)
        check_bool(self.name, "bias", bias)
        check_bool(self.name, "sequence_parallel", sequence_parallel)
        if overlap not in ("auto", "off"):
            raise value_error(self.name, "overlap", "'auto' or 'off'", repr(overlap))
        check_group(self.name, group)
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.sequence_parallel, self.overlap = sequence_parallel, overlap == "auto"
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._make_parameters(bias, device, dtype)

    def _make_parameters(
        self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Start from the unsharded layer that torch would make on the group's first rank, and keep this rank's part."""
        whole = nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        for parameter in whole.parameters():
            if self.world > 1 and parameter.numel():
                dist.broadcast(parameter.detach(), source, group=self.group)
        split_out = self.shard_dim == 0
        mine = shard_slice(self.out_sizes if split_out else self.in_sizes, self.rank)
        weight = whole.weight.detach()
        self.weight = nn.Parameter((weight[mine] if split_out else weight[:, mine]).clone())
        if not bias:
            self.register_parameter("bias", None)
        else:
            b = whole.bias.detach()
            self.bias = nn.Parameter((b[mine] if split_out else b).clone())

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
            and y has all T rows. The gradient of x is reduce-scattered back.
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

    shard_dim = 0

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
        check_bool("ColumnParallelLinear", "gather_output", gather_output)
        super().__init__(
            in_features, out_features, bias, group, sequence_parallel, overlap, device, dtype
        )
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        rows, weight, bias = self._prepare(x, self.in_features)
        lead = list(x.shape[:-1])
        if self.sequence_parallel:
            per_row = math.prod(lead[1:])
            firsts = gather_sizes(lead[0], self.group, x.device)
            lead[0] = sum(firsts)
            sizes = [first * per_row for first in firsts]
            y = _sharded_linear.ColumnSequence.apply(
                rows, weight, bias, self.group, self.overlap, sizes
            )
        else:
            y = _sharded_linear.Column.apply(rows, weight, bias, self.group, self.overlap)
        if self.gather_output:
            y = _sharded_linear.GatherColumns.apply(y, self.out_sizes, self.group)
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
            evenly as possible; otherwise every rank gets y (..., N), and the gradient of y is taken as the same on
            every rank.
        overlap: as in ColumnParallelLinear.

    Under `sequence_parallel` the bias gradient is summed over the ranks by this layer. Numerics and sources as
    ColumnParallelLinear's.
    """

    shard_dim = 1

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
        check_bool("RowParallelLinear", "input_is_parallel", input_is_parallel)
        super().__init__(
            in_features, out_features, bias, group, sequence_parallel, overlap, device, dtype
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.shape[1] if self.input_is_parallel else self.in_features
        rows, weight, bias = self._prepare(x, width)
        lead = list(x.shape[:-1])
        if not self.input_is_parallel:
            rows = _sharded_linear.SplitColumns.apply(rows, self.in_sizes, self.group)
        if self.sequence_parallel:
            per_row = math.prod(lead[1:])
            firsts = split_evenly(lead[0], self.world)
            lead[0] = firsts[self.rank]
            sizes = [first * per_row for first in firsts]
            y = _sharded_linear.RowSequence.apply(
                rows, weight, bias, self.group, self.overlap, sizes
            )
        else:
            y = _sharded_linear.Row.apply(rows, weight, bias, self.group, self.overlap)
        return y.view(*lead, self.out_features)
