"""Tensor-parallel linear layers: one weight split over the ranks of a group, communication under the matrix products.

Shape letters: T rows along the first dimension, K in_features, N out_features, W ranks. A subscript _r marks this
rank's shard. Uneven sizes are split as evenly as possible, larger shards first; an empty shard is legal.

| layer                     | forward                       | backward                                             |
|---------------------------|-------------------------------|------------------------------------------------------|
| column                    | x W_r'                        | dy_r W_r -> all-reduce, under dW_r                   |
| column, sequence parallel | all-gather x -> x W_r'        | dy_r W_r -> reduce-scatter, x gathered again for dW_r |
| row                       | x_r W_r' -> all-reduce        | dy W_r, dW_r                                         |
| row, sequence parallel    | x_r W_r' -> reduce-scatter    | all-gather dy -> dy W_r, dW_r                        |

Partial products are summed over ranks in fp32 (fp64 for fp64) in rank order (`reduce="ordered"`) and rounded once;
`overlap` never changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from trainwright.parallel._exchange import How, gather_sizes
from trainwright.parallel._schedule_runtime import Group
from trainwright.parallel._sizes import shard_slice, split_evenly

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "column_linears"]

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shard:
    """Which part of an unsharded parameter every rank holds: along `dim`, rank r from ranges[r][0] to ranges[r][1]."""

    dim: int
    ranges: Ranges

    def of(self, whole: Tensor, rank: int) -> Tensor:
        begin, end = self.ranges[rank]
        return whole.narrow(self.dim, begin, end - begin)

    @property
    def length(self) -> int:
        return max(end for _, end in self.ranges)


def even_ranges(total: int, world: int) -> Ranges:
    slices = [shard_slice(split_evenly(total, world), rank) for rank in range(world)]
    return tuple((s.start, s.stop) for s in slices)


class _ParallelLinear(nn.Module):
    """What both layers share: the group, the sharded parameters, argument checks, autocast."""

    weight: Tensor
    bias: Tensor | None
    shards: dict[str, Shard]  # of the parameters that are split

    def __init__(
        self, in_features: int, out_features: int, bias: bool, sequence_parallel: bool, how: How, whole: nn.Linear |
            None,
        device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = type(self).__name__
        for argument, value in (("in_features", in_features), ("out_features", out_features)):
            check_int(self.name, argument, value, minimum=0)
        check_bool(self.name, "bias", bias)
        check_bool(self.name, "sequence_parallel", sequence_parallel)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.how, self.group = sequence_parallel, how, how.group
        self.world, self.rank = how.world, how.rank
        self.shards = self._shards(bias)
        if whole is None:
            whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(whole)

    def _shards(self, bias: bool) -> dict[str, Shard]:
        raise NotImplementedError

    def _take(self, whole: nn.Linear) -> None:
        """Start from the unsharded layer of the group's first rank, and keep this rank's part."""
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        for name in ("weight", "bias"):
            given = getattr(whole, name)
            if given is None:
                self.register_parameter(name, None)
                continue
            values = given.detach().contiguous()
            if self.world > 1 and values.numel():
                dist.broadcast(values, source, group=self.group)
            shard = self.shards.get(name)
            mine = values if shard is None else shard.of(values, self.rank)
            parameter = nn.Parameter(mine.clone(), requires_grad=given.requires_grad)
            setattr(self, name, parameter)

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
        overlap: "auto" hides communication under the products where the cost model of the group says that it pays
            (`calibrate`); "off" runs them one after the other. The bits are the same.
        wire_dtype: float32, bfloat16 or float16, in which partial sums (and, in sequence parallel, rows of a wider
            dtype) travel; None is fp32 for sums (fp64 for fp64).
        reduce: "ordered" adds partial sums in rank order where they are needed; "ring" on their way around, in less
            memory (`all_gather_matmul` has the details).
        ranges: by rank, the first out feature that it holds and the one after its last, instead of an even split.
            Ranges may overlap, as those of key/value heads that serve the query heads of several ranks: the gradients
            of what they share are summed over its holders by this layer, in rank order.
        whole: a linear layer whose parameters, as the group's first rank has them, are taken instead of new ones.

    Without `sequence_parallel`, x (..., K) must be the same on every rank, and its gradient is summed over ranks.
    `column_linears` runs several layers on one x.

    The parameters start as torch.nn.Linear's on the group's first rank. fp32 accumulation, also over ranks.

    Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022 (sequence parallel); Wang et al., "Overlap Communication with Dependent Computation via
    Decomposition in Large Deep Learning Models", ASPLOS 2023 (overlap).

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: a wrong argument.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Group = None, gather_output: bool =
            False,
        sequence_parallel: bool = False, overlap: str = "auto", wire_dtype: torch.dtype | None = None,
        reduce: str = "ordered", ranges: Sequence[tuple[int, int]] | None = None, whole: nn.Linear | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        op = "ColumnParallelLinear"
        check_bool(op, "gather_output", gather_output)
        how = How.checked(op, group, overlap, wire_dtype, reduce)
        check_int(op, "out_features", out_features, minimum=0)
        given = None if ranges is None else tuple((int(a), int(b)) for a, b in ranges)
        even = even_ranges(out_features, how.world)
        self._ranges = _checked_ranges(op, given, out_features, how.world) if given else even
        self._shared = _overlapping(self._ranges)
        if self._shared and gather_output:
            raise value_error(op, "gather_output", "False with ranges that overlap", True)
        super().__init__(
            in_features, out_features, bias, sequence_parallel, how, whole, device, dtype
        )
        self.gather_output = gather_output
        self.how = replace(how, width=max(self.out_sizes))

    def _shards(self, bias: bool) -> dict[str, Shard]:
        names = ("weight", "bias") if bias else ("weight",)
        return dict.fromkeys(names, Shard(0, self._ranges))

    @property
    def out_sizes(self) -> list[int]:
        return [end - begin for begin, end in self._ranges]

    def forward(self, x: Tensor) -> Tensor:
        return column_linears(x, [self])[0]


def _checked_ranges(op: str, ranges: Ranges, total: int, world: int) -> Ranges:
    """Every out feature is on some rank; the parts come in the order of the ranks."""
    covered = 0
    right = len(ranges) == world
    for begin, end in ranges:
        right = right and 0 <= begin <= end <= total and (begin == end or begin <= covered)
        covered = max(covered, end)
    if not right or covered != total:
        expected = f"{world} ranges (first, end) in rising order that cover 0 to {total}"
        raise value_error(op, "ranges", expected, ranges)
    return ranges


def _overlapping(ranges: Ranges) -> bool:
    return sum(end - begin for begin, end in ranges) > max(end for _, end in ranges)


def column_linears(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[Tensor]:
    """``[layer(x) for layer in layers]`` with x gathered once, and one sum over ranks for its gradient: query, key and
    value projections, or gate and up.

    Args:
        x: as each layer takes it.
        layers: of equal in_features, group, dtype, sequence_parallel, overlap, wire_dtype and reduce.

    Returns:
        The output of each layer.

    Raises:
        TypeError, ValueError: a layer is of another kind, or differs from the first.
    """
    op = "column_linears"
    if not layers:
        raise value_error(op, "layers", "at least one layer", "none")
    first = layers[0]
    for i, layer in enumerate(layers):
        if not isinstance(layer, ColumnParallelLinear):
            raise type_error(op, f"layers[{i}]", "a ColumnParallelLinear", type(layer).__name__)
        ours, theirs = (_common(each) for each in (first, layer))
        if ours != theirs:
            name = next(n for n in ours if ours[n] != theirs[n])
            raise value_error(op, f"layers[{i}]", f"the {name} of layers[0], {ours[name]}", theirs[name])  # fmt: skip
    prepared = [layer._prepare(x, first.in_features) for layer in layers]
    rows = prepared[0][0]
    how = replace(first.how, width=sum(layer.how.width for layer in layers))
    shares = [layer._ranges if layer._shared else None for layer in layers]
    parameters = [w for _, w, _ in prepared] + [b for _, _, b in prepared]
    lead = list(x.shape[:-1])
    if first.sequence_parallel:
        per_row = math.prod(lead[1:])
        firsts = gather_sizes(lead[0], first.group, x.device)
        lead[0] = sum(firsts)
        sizes = [n * per_row for n in firsts]
        ys = _sharded_linear.ColumnSequence.apply(rows, how, shares, sizes, *parameters)
    else:
        ys = _sharded_linear.Column.apply(rows, how, shares, *parameters)
    outputs = []
    for layer, y in zip(layers, ys):
        if layer.gather_output:
            exact = replace(layer.how, wire_dtype=None)
            y = _sharded_linear.GatherColumns.apply(y, layer.out_sizes, exact)
        outputs.append(y.view(*lead, y.shape[-1]))
    return outputs


def _common(layer: ColumnParallelLinear) -> dict[str, Any]:
    how = layer.how
    return {
        "in_features": layer.in_features, "group": how.group, "dtype": layer.weight.dtype,
        "sequence_parallel": layer.sequence_parallel, "overlap": how.overlap, "wire_dtype": how.wire_dtype,
        "reduce": how.reduce,
    }  # fmt: skip


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
        overlap, wire_dtype, reduce: as in ColumnParallelLinear.
        ranges: by rank, the first in feature that it holds and the one after its last, instead of an even split; they
            do not overlap.
        whole: as in ColumnParallelLinear.

    Under `sequence_parallel` the bias gradient is summed over the ranks by this layer. Numerics and sources as
    ColumnParallelLinear's.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Group = None,
        input_is_parallel: bool = True, sequence_parallel: bool = False, overlap: str = "auto",
        wire_dtype: torch.dtype | None = None, reduce: str = "ordered",
        ranges: Sequence[tuple[int, int]] | None = None, whole: nn.Linear | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        op = "RowParallelLinear"
        check_bool(op, "input_is_parallel", input_is_parallel)
        how = How.checked(op, group, overlap, wire_dtype, reduce)
        check_int(op, "in_features", in_features, minimum=0)
        given = None if ranges is None else tuple((int(a), int(b)) for a, b in ranges)
        even = even_ranges(in_features, how.world)
        self._ranges = _checked_ranges(op, given, in_features, how.world) if given else even
        if _overlapping(self._ranges):
            raise value_error(op, "ranges", "ranges that do not overlap", given)
        super().__init__(
            in_features, out_features, bias, sequence_parallel, how, whole, device, dtype
        )
        self.input_is_parallel = input_is_parallel
        self.how = replace(how, width=max(self.in_sizes))

    def _shards(self, bias: bool) -> dict[str, Shard]:
        return {"weight": Shard(1, self._ranges)}

    @property
    def in_sizes(self) -> list[int]:
        return [end - begin for begin, end in self._ranges]

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.shape[1] if self.input_is_parallel else self.in_features
        rows, weight, bias = self._prepare(x, width)
        lead = list(x.shape[:-1])
        if not self.input_is_parallel:
            exact = replace(self.how, wire_dtype=None)
            rows = _sharded_linear.SplitColumns.apply(rows, self.in_sizes, exact)
        if self.sequence_parallel:
            per_row = math.prod(lead[1:])
            firsts = split_evenly(lead[0], self.world)
            lead[0] = firsts[self.rank]
            sizes = [first * per_row for first in firsts]
            y = _sharded_linear.RowSequence.apply(rows, weight, bias, self.how, sizes)
        else:
            y = _sharded_linear.Row.apply(rows, weight, bias, self.how)
        return y.view(*lead, self.out_features)
