"""Shards on the move: the collectives that the tensor-parallel layers overlap with their matrix products.

All are built from point-to-point messages and torch.distributed collectives, run the same on Gloo and NCCL, take
shards of any size (also empty ones), and sum in fp32 (fp64 for fp64) in rank order, so that overlap, chunk count and
timing never change a bit. Every rank of the group must call them in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.errors import value_error
from trainwright.ops._library import acc_dtype

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


def split_evenly(total: int, parts: int) -> list[int]:
    """Sizes of `parts` shards of `total`, larger ones first: 7 over 3 is [3, 2, 2]."""
    base, extra = divmod(total, parts)
    return [base + (rank < extra) for rank in range(parts)]


def shard_slice(sizes: Sequence[int], rank: int) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def gather_sizes(size: int, group: Group, device: torch.device) -> list[int]:
    """The `size` of every rank."""
    world = dist.get_world_size(group)
    if world == 1:
        return [size]
    mine = torch.tensor([size], dtype=torch.int64, device=device)
    every = mine.new_empty(world)
    _all_gather(every, mine, group=group)
    return [int(s) for s in every.tolist()]


_tags: dict[Group, Iterator[int]] = {}


def _send_and_receive(
    send: Tensor, to: int, receive: Tensor, source: int, group: Group
) -> list[dist.Work]:
    """Start one message each way. An empty tensor is not sent; both ends know its size.

    Every exchange has a tag of its own (the ranks count alike), so that Gloo cannot confuse two messages in flight
    between the same ranks. NCCL knows no tags and keeps their order.
    """
    tag = next(_tags.setdefault(group, itertools.cycle(range(1, 1 << 20))))

    def peer(rank: int) -> int:
        return rank if group is None else dist.get_global_rank(group, rank)

    operations = []
    if send.numel():
        operations.append(dist.P2POp(dist.isend, send, peer(to), group, tag))
    if receive.numel():
        operations.append(dist.P2POp(dist.irecv, receive, peer(source), group, tag))
    return dist.batch_isend_irecv(operations) if operations else []


def gathered_shards(
    mine: Tensor, shapes: Sequence[Sequence[int]], group: Group, overlap: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, shard) for every rank: this rank's own first, then those of rank-1, rank-2, ... as they arrive.

    With `overlap` the next shard is on its way while the caller works on this one; two received shards are alive at a
    time.

    Args:
        mine: this rank's shard; contiguous, and not to be modified before the iterator ends.
        shapes: shape of every rank's shard.
    """
    world, me = dist.get_world_size(group), dist.get_rank(group)

    def start(step: int) -> tuple[Tensor, list[dist.Work]]:
        source, to = (me - step) % world, (me + step) % world
        buffer = mine.new_empty(tuple(shapes[source]))
        return buffer, _send_and_receive(mine, to, buffer, source, group)

    coming = start(1) if overlap and world > 1 else None
    yield me, mine
    for step in range(1, world):
        buffer, works = coming if coming is not None else start(step)
        for work in works:
            work.wait()
        coming = start(step + 1) if overlap and step + 1 < world else None
        yield (me - step) % world, buffer


class ScatteredSum:
    """Rows of a sum over ranks, computed where they are needed: matmul -> reduce-scatter.

    `partial(target)` computes this rank's contribution, in the accumulation dtype, to the rows that rank `target`
    keeps. The rows of the other ranks are computed and sent first, this rank's own last; `finish` returns them,
    summed in rank order.
    """

    def __init__(
        self, partial: Callable[[int], Tensor], shape: Sequence[int], group: Group, overlap: bool
    ) -> None:
        world, me = dist.get_world_size(group), dist.get_rank(group)
        self.parts: list[Tensor | None] = [None] * world
        self.works: list[dist.Work] = []
        self.sent: list[Tensor] = []  # alive until the messages are through
        for step in range(1, world):
            source, to = (me - step) % world, (me + step) % world
            part = partial(to)
            buffer = part.new_empty(tuple(shape))
            works = _send_and_receive(part, to, buffer, source, group)
            self.parts[source] = buffer
            self.sent.append(part)
            if overlap:
                self.works += works
            else:  # a Gloo work must not be waited for twice
                for work in works:
                    work.wait()
        self.parts[me] = partial(me)

    def finish(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.sent.clear()
        total, *rest = [p for p in self.parts if p is not None]
        for part in rest:
            total = total.add_(part)
        return total


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
