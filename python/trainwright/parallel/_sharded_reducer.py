"""The reducer of ZeRO's stages 2 and 3: averages reach the owner of their elements alone, as its ranges' gradients.

Buckets are those of the reducer, with their pieces cut at the ranges and sorted by owner, so that each rank's part is
contiguous; the exchange stops after the ordered sum. A parameter has no gradient after the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.parallel import _gradients
from trainwright.parallel._job import Job
from trainwright.parallel._shards import Range, by_owner
from trainwright.parallel._step import Backward, Plan
from trainwright.parallel.buckets import Reducer
from trainwright.parallel.layout import Bucket

if TYPE_CHECKING:
    from trainwright.parallel._checks import Place
    from trainwright.parallel._shard_set import Shard, ShardSet


class ShardedReducer(Reducer):
    """`home` is set before the first backward. `divide` gives the parameters' ranges, in order of registration."""

    home: ShardSet

    def __init__(
        self,
        *args: Any,
        divide: Callable[[Sequence[Place], int], Sequence[Sequence[Range]]],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._ranges = divide(self._places, self.wire.world)

    def plan(self) -> Plan:
        plan = super().plan()
        if not plan.cuts:
            ranges = [self._ranges[index] for index in plan.params]
            owned = [by_owner(bucket, ranges, self.wire.world) for bucket in plan.layout.buckets]
            layout = dataclasses.replace(plan.layout, buckets=tuple(o.bucket for o in owned))
            mask = next(mask for mask, known in self._plans.items() if known is plan)
            plan = self._plans[mask] = Plan(layout, plan.params[::-1], self._parameters)
            plan.cuts = [o.cuts for o in owned]
        return plan

    def _average(self, b: Backward, bucket: Bucket) -> Tensor:
        cuts, rank = b.plan.cuts[bucket.index], self.wire.rank
        dtype = getattr(torch, bucket.dtype)
        return torch.empty(cuts[rank + 1] - cuts[rank], dtype=dtype, device=self._device)

    def _job(self, b: Backward, bucket: Bucket) -> Job:
        job = super()._job(b, bucket)
        job.cuts = b.plan.cuts[bucket.index]
        if b.mode == "sync":
            job.average = b.averages[bucket.index] = self._average(b, bucket)
        return job

    def _take(self, b: Backward, slot: int) -> tuple[Tensor | None, Tensor | None]:
        name, p, _, _ = self._places[b.plan.params[slot]]
        return _gradients.take(name, p, averaged=False, contiguous=b.plan.cut[slot])[0], None

    def _averages_return(self, b: Backward) -> bool:
        return False

    def _late_jobs(self, b: Backward, slots: set[int]) -> tuple[list[Job], dict[int, Tensor]]:
        fresh = {slot: self._take(b, slot)[0] for slot in slots}
        jobs = []
        for bucket in b.plan.layout.buckets:
            if any(piece.slot in slots for piece in bucket.pieces):
                grads = [_gradients.cut(fresh.get(piece.slot), piece) for piece in bucket.pieces]
                missing = any(g is None for g in grads)
                job = Job(bucket, grads, [], missing=missing, cuts=b.plan.cuts[bucket.index])
                job.average = self._average(b, bucket)
                jobs.append(job)
        return jobs, {}

    def _add_late(self, b: Backward, jobs: list[Job], outs: dict[int, Tensor]) -> None:
        for job in jobs:
            assert job.average is not None
            b.averages[job.bucket.index].add_(job.average)

    def _give(self, b: Backward, anywhere: bytes, zero: bool) -> None:
        places: dict[int, list[tuple[int, Tensor]]] = {}  # slot -> (begin, averages) of this rank
        for bucket, cuts in zip(b.plan.layout.buckets, b.plan.cuts):
            begin, end = cuts[self.wire.rank : self.wire.rank + 2]
            for piece in bucket.pieces:
                size = piece.end - piece.begin
                if (
                    begin <= piece.offset
                    and piece.offset + size <= end
                    and bucket.index in b.averages
                ):
                    mine = b.averages[bucket.index][
                        piece.offset - begin : piece.offset - begin + size
                    ]
                    places.setdefault(piece.slot, []).append((piece.begin, mine))
        for slot, index in enumerate(b.plan.params):
            grad = b.taken.get(slot, (None,))[0]
            if grad is None and not zero and not anywhere[slot]:
                continue
            self.home.graded.add(index)
            for shard in self.home.shards[index]:
                _add(shard, _values(shard, places.get(slot, [])))
        for index, before in self._sums.base.items():
            self.home.graded.add(index)
            for shard in self.home.shards[index]:
                begin = shard.shard_offset
                _add(shard, before.reshape(-1)[begin : begin + shard.numel()].clone())
        self.home.vote()


def _values(shard: Shard, parts: list[tuple[int, Tensor]]) -> Tensor:
    """The averages of a range, which may lie in several buckets."""
    first, last = shard.shard_offset, shard.shard_offset + shard.numel()
    inside = [(begin, x) for begin, x in parts if first <= begin and begin + x.numel() <= last]
    if len(inside) == 1:
        return inside[0][1]
    values = torch.empty_like(shard, dtype=inside[0][1].dtype)
    for begin, x in inside:
        values[begin - first : begin - first + x.numel()] = x
    return values


def _add(shard: Shard, values: Tensor) -> None:
    if shard.grad is not None:
        shard.grad.add_(values)
        return
    if values.dtype != shard.dtype:
        shard.grad_dtype = values.dtype
    shard.grad = values
