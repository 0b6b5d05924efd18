"""Shards on the move: the collectives that the tensor-parallel layers overlap with their matrix products.

All are built from point-to-point messages, after a schedule, and torch.distributed collectives, run the same on Gloo
and NCCL, take shards of any size (also empty ones), and sum in fp32 (fp64 for fp64) in rank order, so that overlap,
chunk count and timing never change a bit. Every rank of the group must call them in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.errors import value_error
from trainwright.ops._library import acc_dtype
from trainwright.parallel._schedule_runtime import perform
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.schedule import (
    Action,
    Schedule,
    all_gather_matmul_schedule,
    matmul_reduce_scatter_schedule,
)

Group = dist.ProcessGroup | None
# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
CHUNK_BYTES = 1 << 20  # a chunk smaller than this costs more in messages than its overlap saves
MAX_CHUNKS = 4


def check_group(op: str, group: Group) -> None:
    """Raise unless torch.distributed runs and this rank is in `group`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{op}: torch.distributed is not initialised: call torch.distributed.init_process_group "
            "first, in a program started with torchrun"
        )
    if dist.get_rank(group) < 0:
        raise value_error(op, "group", "a group that this rank is in", "a group without it")


def gather_sizes(size: int, group: Group, device: torch.device) -> list[int]:
    """The `size` of every rank."""
    world = dist.get_world_size(group)
    if world == 1:
        return [size]
    mine = torch.tensor([size], dtype=torch.int64, device=device)
    every = mine.new_empty(world)
    _all_gather(every, mine, group=group)
    return [int(s) for s in every.tolist()]


@functools.lru_cache(maxsize=256)
def _gather_schedule(sizes: tuple[int, ...], overlap: bool) -> Schedule:
    return all_gather_matmul_schedule(sizes, overlap=overlap)


@functools.lru_cache(maxsize=256)
def _scatter_schedule(sizes: tuple[int, ...], overlap: bool) -> Schedule:
    return matmul_reduce_scatter_schedule(sizes, overlap=overlap)


def gathered_shards(
    mine: Tensor, shapes: Sequence[Sequence[int]], group: Group, overlap: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, shard) for every rank: this rank's own first, then those of rank-1, rank-2, ... as they arrive, and
    the empty ones last. `all_gather_matmul_schedule` says when what is sent.

    A yielded shard is valid until the next one is asked for.

    Args:
        mine: this rank's shard; contiguous, and not to be modified before the iterator ends.
        shapes: shape of every rank's shard.
    """
    sizes = tuple(math.prod(shape) for shape in shapes)
    tensors = {"x": mine.reshape(-1)}
    schedule = _gather_schedule(sizes, overlap)
    for action in perform(schedule, tensors, mine, group):
        rank = int(action.content[1:].split(".")[0])  # y<rank>.<part>
        yield rank, tensors[action.reads[0]][: sizes[rank]].view(tuple(shapes[rank]))
    for rank, size in enumerate(sizes):
        if size == 0:
            yield rank, mine.new_empty(tuple(shapes[rank]))


class ScatteredSum:
    """Rows of a sum over ranks, computed where they are needed: matmul -> reduce-scatter.

    `partial(target)` computes this rank's contribution to the rows that rank `target` keeps: (sizes[target], columns),
    in the accumulation dtype, that of `like`. `matmul_reduce_scatter_schedule` says in which order; `finish` returns
    this rank's rows, summed in rank order.
    """

    def __init__(
        self, partial: Callable[[int], Tensor], sizes: Sequence[int], columns: int, like: Tensor, group: Group,
        overlap: bool,
    ) -> None:  # fmt: skip
        self.partial, self.me = partial, dist.get_rank(group)
        self.shape, self.like = (sizes[self.me], columns), like
        self.tensors: dict[str, Tensor] = {}
        schedule = _scatter_schedule(tuple(n * columns for n in sizes), overlap)
        self.actions = perform(schedule, self.tensors, like, group)
        own = schedule.ranks[self.me]
        for _ in range(sum(bool(a.writes) for a in own if a.kind == "compute")):
            self._product(next(self.actions))
        if not sizes[
            self.me
        ]:  # nothing is left to overlap with, and the last message is to be started now
            list(self.actions)

    def _product(self, action: Action) -> None:
        target = int(action.content.split(">")[1])  # p<rank>><target>
        self.tensors[action.writes] = self.partial(target).view(-1)

    def finish(self) -> Tensor:
        total = self.like.new_empty(0)  # no rows or no columns
        for action in self.actions:
            total, *rest = [self.tensors[name] for name in action.reads]
            for part in rest:
                total.add_(part)
        self.tensors.clear()
        return total.view(self.shape)


class RowAllReduce:
    """A sum over ranks that every rank needs whole, computed and reduced by chunks of rows: matmul -> all-reduce.

    `partial(rows)` computes this rank's contribution to a slice of rows, in the accumulation dtype. While chunk j+1 is
    computed, chunk j is exchanged (all-to-all, rank-ordered sum, rounding to `dtype` once, all-gather). `finish`
    returns the (rows, columns) result; work done between construction and `finish` overlaps with the last chunk.
    """

    def __init__(
        self,
        partial: Callable[[slice], Tensor],
        rows: int,
        columns: int,
        dtype: torch.dtype,
        group: Group,
        overlap: bool,
    ) -> None:
        self.world, self.group, self.dtype, self.columns = (
            dist.get_world_size(group),
            group,
            dtype,
            columns,
        )
        self.done: list[Tensor] = []
        self.exchanging: tuple[Tensor, dist.Work, int] | None = None
        self.gathering: tuple[Tensor, dist.Work, int] | None = None
        wire_bytes = rows * columns * acc_dtype(dtype).itemsize
        chunks = min(MAX_CHUNKS, max(1, wire_bytes // CHUNK_BYTES)) if overlap else 1
        sizes = split_evenly(rows, chunks)
        for chunk in range(chunks):
            part = partial(shard_slice(sizes, chunk))
            if self.world == 1:
                self.done.append(part.to(dtype))
                continue
            self._advance()
            self._exchange(part)

    def _exchange(self, part: Tensor) -> None:
        n = part.numel()
        if n == 0:
            self.done.append(part.to(self.dtype))
            return
        flat = part.reshape(-1)
        if n % self.world:  # equal slices, the last one padded
            flat = part.new_zeros(-(-n // self.world) * self.world)
            flat[:n] = part.reshape(-1)
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=self.group, async_op=True)
        self._sent = flat
        self.exchanging = (received, work, n)

    def _advance(self) -> None:
        """Complete the all-gather in flight, then turn the exchange in flight into an all-gather."""
        if self.gathering is not None:
            whole, work, n = self.gathering
            work.wait()
            self.done.append(whole[:n].view(-1, self.columns))
            self.gathering = None
        if self.exchanging is not None:
            received, work, n = self.exchanging
            work.wait()
            slices = received.view(self.world, -1)
            total = slices[0].clone()
            for rank in range(1, self.world):
                total.add_(slices[rank])
            mine = total.to(self.dtype)
            whole = mine.new_empty(mine.numel() * self.world)
            gather = _all_gather(whole, mine, group=self.group, async_op=True)
            self._gathered_from = mine
            self.gathering = (whole, gather, n)
            self.exchanging = None

    def finish(self) -> Tensor:
        self._advance()
        self._advance()
        return self.done[0] if len(self.done) == 1 else torch.cat(self.done)


def all_gather_flat(value: Tensor, group: Group) -> Tensor:
    """(W, *shape): a small tensor of the same shape from every rank."""
    world = dist.get_world_size(group)
    if world == 1 or not value.numel():
        return value.expand(world, *value.shape)
    every = value.new_empty(world * value.numel())
    _all_gather(every, value.reshape(-1), group=group)
    return every.view(world, *value.shape)


def ordered_all_reduce(value: Tensor, group: Group) -> Tensor:
    """Sum of a small tensor over ranks, in rank order: every rank gets the same bits."""
    if dist.get_world_size(group) == 1:
        return value
    total, *rest = all_gather_flat(value, group).unbind()
    for part in rest:
        total = total.add_(part)
    return total
