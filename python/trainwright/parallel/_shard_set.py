"""This rank's ranges of the parameters as 1-D parameters of their own, and the all-gather after an optimizer step.

A range of a contiguous parameter is a view of it, so an optimizer that updates the range updates the parameter. A
strided parameter's range is a copy, brought up to date before each step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright import dispatch
from trainwright.errors import check_number
from trainwright.ops.grad_norm import GRAD_SCALE, GRAD_STATS, check_norm_type, norm_of
from trainwright.parallel._checks import Place
from trainwright.parallel._driver import DEPTH, Driver
from trainwright.parallel._job import Pool, run_op
from trainwright.parallel._shards import OwnedBucket, Range, by_owner
from trainwright.parallel._wire import Arrival, Wire
from trainwright.parallel.layout import FlatLayout, Piece


@dataclass
class Cost:
    """What sending parameters cost this rank in a step."""

    exposed_ms: float = 0.0
    busy_ms: float = 0.0
    sent_bytes: int = 0


class _Sent(NamedTuple):
    """A bucket of parameters under way; `flat` is where it arrives, if that is not the parameters' own memory."""

    owned: OwnedBucket
    flat: Tensor | None
    work: Any


class Shard(nn.Parameter):
    """Elements [shard_offset, shard_offset + numel) of a parameter, row-major."""

    shard_offset: (
        int  # read by the optimizer: random bits and blocks count elements of the whole parameter
    )


class ShardSet:
    """Parameters, in order of registration, and what this rank owns of each.

    Args:
        places: of the module.
        ranges: per parameter, who owns what of it.
        block: elements of a parameter that must not be separated.
        layout: of all parameters, frozen ones too: how they are sent after a step.
    """

    shards: list[list[Shard]]

    def __init__(
        self,
        places: Sequence[Place],
        ranges: Sequence[Sequence[Range]],
        wire: Wire,
        driver: Driver,
        device: torch.device,
        block: int,
        layout: FlatLayout | None = None,
    ) -> None:
        self.names = [name for name, _, _, _ in places]
        self.params = [p for _, p, _, _ in places]
        self.wire, self.driver = wire, driver
        self.block = block
        self.ranges = ranges
        self._owners: dict[int, nn.Parameter] = {}
        self.index = {id(p): i for i, p in enumerate(self.params)}
        self._pool = Pool(device)
        self.cost = self.last_cost = Cost()  # of this step so far, and of the last one
        self.graded: set[int] = set()  # stage 2: parameters that have a gradient, on whichever rank
        # Stage 2: not a parameter of the module. Its gradient is 0, or inf on all ranks if any rank's range has an
        # element that is not finite: whoever looks for overflow in this rank's gradients finds that of all.
        self.witness = nn.Parameter(torch.zeros(1, device=device), requires_grad=False)
        self.late = False  # parameters arrive when they are used, see `_late_parameters`
        self.coming: dict[int, _Sent] = {}  # by bucket
        self._arrived = 0.0
        if layout is not None:
            self._buckets_of: list[list[int]] = [[] for _ in self.params]
            for bucket in layout.buckets:
                for piece in bucket.pieces:
                    self._buckets_of[self._param(piece.slot)].append(bucket.index)
            by_slot = ranges[::-1]  # a slot is a parameter, from the last one
            self._buckets = [by_owner(bucket, by_slot, wire.world) for bucket in layout.buckets]
            self.shards = [
                [
                    new_shard(_flat(p)[r.begin : r.end], r.begin)
                    for r in of_p
                    if r.owner == wire.rank
                ]
                for p, of_p in zip(self.params, ranges)
            ]

    def of(self, p: Tensor) -> list[Shard]:
        """This rank's ranges of a parameter, in ascending order."""
        return self.shards[self.index[id(p)]]

    def owner_of(self, shard: Shard) -> nn.Parameter:
        """The parameter that a range is of."""
        if len(self._owners) != sum(map(len, self.shards)):
            self._owners = {id(s): p for p, shards in zip(self.params, self.shards) for s in shards}
        return self._owners[id(shard)]

    def refresh(self) -> None:
        """Let the ranges hold the parameters' values, wherever those now lie."""
        self.complete()
        for p, shards in zip(self.params, self.shards):
            if not shards:
                continue
            flat = _flat(p)
            for shard in shards:
                value = flat[shard.shard_offset : shard.shard_offset + shard.numel()]
                if not p.is_contiguous():
                    shard.data.copy_(value)
                elif shard.data_ptr() != value.data_ptr():
                    shard.data = value

    def end_step(self) -> None:
        """The optimizer's step is done."""
        self.last_cost, self.cost = self.cost, Cost()

    def vote(self) -> None:
        """Let the witness tell of the gradients as they are now. Collective."""
        grads = [s.grad for shards in self.shards for s in shards if s.grad is not None]
        odd = self.of_all_ranks(stats_of(grads, 2.0)[1:].cpu()).any()
        self.witness.grad = torch.full_like(self.witness, float("inf") if odd else 0.0)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """`clip_grad_norm_` on the ranges' gradients of all ranks. Collective."""
        p = check_norm_type("Zero.clip_grad_norm", norm_type)
        check_number("Zero.clip_grad_norm", "max_norm", max_norm)
        grads = [s.grad for shards in self.shards for s in shards if s.grad is not None]
        totals = self.of_all_ranks(stats_of(grads, p)[:1].cpu())
        norm = norm_of(list(totals.flatten()), p).to(self.witness.device)
        if grads:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            chosen = dispatch.resolve("grad_norm", None, grads[0].device, grads[0].dtype)
            GRAD_SCALE[chosen](grads, factor)
            torch.autograd.graph.increment_version(grads)
        return norm.float()

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum, in rank order, of a small CPU tensor of each rank."""
        return self.of_all_ranks(x).sum(0)

    def of_all_ranks(self, x: Tensor) -> Tensor:
        """(W, *x.shape): a small CPU tensor of each rank. Collective."""
        return self.driver.of_all_ranks(x)

    # ---- all-gather

    def gather(self, wanted: set[int]) -> None:
        """Set the parameters with these indices to what their owners have, now or when they arrive. Collective."""
        begun = time.perf_counter()
        self._arrived = begun
        flying: deque[_Sent] = deque()
        # Late ones in about the order of the next forward.
        for owned in self._buckets[::-1] if self.late else self._buckets:
            if any(self._param(piece.slot) in wanted for piece in owned.bucket.pieces):
                flying.append(self._send(owned))
                if not self.late and len(flying) == DEPTH:
                    self._receive(flying.popleft())
        torch.autograd.graph.increment_version([self.params[i] for i in sorted(wanted)])
        if self.late:
            self.coming = {sent.owned.bucket.index: sent for sent in flying}
            return
        while flying:
            self._receive(flying.popleft())
        if self.wire.world > 1:
            self.cost.busy_ms += 1e3 * (time.perf_counter() - begun)

    def arrive(self, p: Tensor) -> None:
        """Wait for a parameter, if it is under way."""
        index = self.index.get(id(p))
        if index is not None:
            self._take_in([b for b in self._buckets_of[index] if b in self.coming])

    def complete(self) -> None:
        """Wait for all parameters that are under way."""
        self._take_in(list(self.coming))

    @torch.no_grad()
    def _take_in(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            sent = self.coming.pop(bucket)
            self._receive(sent)
            if isinstance(sent.work, Arrival):
                # Time that the link was in use: the buckets are sent at once and come one after the other.
                before, self._arrived = self._arrived, max(self._arrived, sent.work.arrived)
                self.cost.busy_ms += 1e3 * (self._arrived - before)

    def _param(self, slot: int) -> int:
        return len(self.params) - 1 - slot

    def _send(self, owned: OwnedBucket) -> _Sent:
        world, rank, bucket = self.wire.world, self.wire.rank, owned.bucket
        parts = self._where_they_lie(owned)
        flat = None
        if parts is None:
            flat = self._pool.take(bucket.numel, getattr(torch, bucket.dtype))
            parts = [flat[owned.cuts[r] : owned.cuts[r + 1]] for r in range(world)]
            pieces, start = owned.pieces_of(rank), owned.cuts[rank]
            sources = [self._own(piece) for piece in pieces]
            if parts[rank].numel():
                ends = [*(piece.offset - start for piece in pieces), parts[rank].numel()]
                run_op("bucket_pack", parts[rank], sources, ends, 1.0, None, False)
        work = None
        if world > 1 and bucket.numel:
            doing = f"bucket {bucket.index}, all-gather of {bucket.numel} parameters"
            self.driver.announce(doing, bucket.index, "all-gather")
            assert self.wire.gather is not None
            total = bucket.numel * parts[rank].itemsize
            work = self.wire.gather.exchange(parts, [parts[rank]] * world, total)
            self.cost.sent_bytes += parts[rank].nbytes * (world - 1)
            if self.late:
                work = Arrival(self.wire.gather, work)
        return _Sent(owned, flat, work)

    def _receive(self, sent: _Sent) -> None:
        owned, flat, work = sent
        if work is not None:
            begun = time.perf_counter()
            self.driver.wait_for(work)
            self.cost.exposed_ms += 1e3 * (time.perf_counter() - begun)
        if flat is None:
            return
        outs, offsets, strided = [], [], {}
        for piece, owner in zip(owned.bucket.pieces, owned.owners):
            index = self._param(piece.slot)
            p = self.params[index]
            if p.is_contiguous():
                if owner == self.wire.rank:
                    continue
                target = p.data.view(-1)
            else:
                if index not in strided:
                    strided[index] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
                target = strided[index]
            if piece.begin < piece.end:
                outs.append(target[piece.begin : piece.end])
                offsets.append(piece.offset)
        if outs:
            run_op("bucket_unpack", flat, outs, offsets, 1.0, None)
        for index, values in strided.items():
            p = self.params[index]
            p.data.copy_(values.view(p.shape))
        self._pool.give(flat)

    def _own(self, piece: Piece) -> Tensor:
        shards = self.shards[self._param(piece.slot)]
        shard = next(s for s in reversed(shards) if s.shard_offset <= piece.begin)
        return shard.data[piece.begin - shard.shard_offset : piece.end - shard.shard_offset]

    def _where_they_lie(self, owned: OwnedBucket) -> list[Tensor] | None:
        """The parts in the parameter's own memory, if the bucket is (part of) one contiguous parameter."""
        pieces = owned.bucket.pieces
        p = self.params[self._param(pieces[0].slot)]
        if len({piece.slot for piece in pieces}) > 1 or not p.is_contiguous():
            return None
        if len(set(owned.owners)) < len(pieces):
            return None
        flat = p.data.view(-1)
        parts = [flat[:0]] * self.wire.world
        for piece, owner in zip(pieces, owned.owners):
            parts[owner] = flat[piece.begin : piece.end]
        return parts


def stats_of(tensors: list[Tensor], p: float) -> Tensor:
    """(2,) fp64: what the norm of order p is made of, and whether an element is not finite."""
    if not tensors:
        neutral = float("inf") if p == -float("inf") else 0.0
        return torch.tensor([neutral, 0.0], dtype=torch.float64)
    chosen = dispatch.resolve("grad_norm", None, tensors[0].device, tensors[0].dtype)
    return GRAD_STATS[chosen](tensors, p)


def _flat(p: Tensor) -> Tensor:
    return p.data.view(-1) if p.is_contiguous() else p.data.reshape(-1)


def new_shard(value: Tensor, begin: int) -> Shard:
    shard = Shard(value, requires_grad=False)
    shard.shard_offset = begin
    return shard
