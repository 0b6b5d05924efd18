"""Stage 3 of ZeRO: parameters that are whole only while they are used.

Of each block this rank keeps its own part. `BlockSet.need` makes a block whole: the parts are exchanged in the block's
flat memory, of which the parameters then are views. `BlockSet.free` gives that memory back: the parameters keep their
identity and shape, but hold nothing (a NaN, expanded). Views of them that someone kept are NaN, too (`_lent_memory`),
until the block is whole again. A graph that saved a view of a parameter still refers to the same storage, which is
filled again before the backward needs it; `_uses` says when that is.

The blocks come in the same order every time, so the next one is sent for as soon as one is here: no more than one is
under way, in an order that depends on nothing but the order of use, which is the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from trainwright.parallel._blocks import Block, ranges_of
from trainwright.parallel._checks import Place
from trainwright.parallel._driver import Driver
from trainwright.parallel._lent_memory import Lent
from trainwright.parallel._shard_set import Shard, ShardSet, new_shard
from trainwright.parallel._wire import Arrival, Wire

_task_id = torch._C._current_graph_task_id
FREE, COMING, WHOLE = "free", "coming", "whole"


class Gathered:
    """A block's memory: this rank's `part`, always; `flat` and the whole parameters in it, for a time."""

    def __init__(
        self, block: Block, params: Sequence[nn.Parameter], rank: int, device: torch.device
    ) -> None:
        self.block = block
        self.params = [params[i] for i in block.params]
        self.state = FREE
        self.arrival: Arrival | None = None
        dtype = getattr(torch, block.dtype)
        self.flat = torch.empty(block.numel, dtype=dtype, device=device)
        places = [
            self.flat[begin : begin + p.numel()] for begin, p in zip(block.begins, self.params)
        ]
        self.begin, self.end = block.cuts[rank : rank + 2]
        # What a parameter's data are: a view, or memory of its own where it is strided.
        self.values, self.strided = [], []
        for p, place in zip(self.params, places):
            place.copy_(p.detach().reshape(-1))
            row_major = p.is_contiguous()
            value = place.view(p.shape) if row_major else torch.empty_like(p.detach())
            self.values.append(value)
            if not row_major:
                self.strided.append((value, place.view(p.shape)))
        self.part = self.flat[self.begin : self.end].clone()
        nothing = torch.full((), float("nan"), dtype=dtype, device=device)
        self.nothing = [nothing.expand(p.shape) for p in self.params]
        memories = [self.flat, *(value for value, _ in self.strided)]
        self._lent = [Lent(x.untyped_storage()) for x in memories]
        self.nbytes = self.held_bytes  # of the whole block
        self.release()

    @property
    def held_bytes(self) -> int:
        """Of the memory that there is now."""
        return sum(lent.nbytes for lent in self._lent)

    def allocate(self) -> None:
        for lent in self._lent:
            lent.give()

    def show(self) -> None:
        """The flat memory is complete: let the parameters be it."""
        for value, source in self.strided:
            value.copy_(source)
        for p, value in zip(self.params, self.values):
            p.data = value
        self.state = WHOLE

    def release(self) -> None:
        for p, nothing in zip(self.params, self.nothing):
            p.data = nothing
        for lent in self._lent:
            lent.take_back()
        self.state = FREE

    def keep_own_part(self) -> None:
        """Take this rank's part over from the parameters."""
        for p, begin in zip(self.params, self.block.begins):
            first, last = max(self.begin, begin), min(self.end, begin + p.numel())
            if first < last:
                values = p.detach().reshape(-1)[first - begin : last - begin]
                self.part[first - self.begin : last - self.begin].copy_(values)


class BlockSet(ShardSet):
    """The parameters of a module in blocks, all of them free. `order` records the blocks in the order of their use."""

    def __init__(
        self,
        places: Sequence[Place],
        blocks: Sequence[Block],
        wire: Wire,
        driver: Driver,
        device: torch.device,
        unit: int,
        *,
        prefetch: bool,
    ) -> None:
        sizes = [p.numel() for _, p, _, _ in places]
        super().__init__(places, ranges_of(blocks, sizes), wire, driver, device, unit)
        self._prefetch = prefetch
        self.order: list[int] = []
        self._before: list[int] = []  # `order` of the round before
        self._rounds: list[list[int]] = []  # those of this step so far ...
        self._last_rounds: list[list[int]] = []  # ... and of the step before
        self._coming: Gathered | None = None
        with torch.no_grad():
            self.blocks = [Gathered(block, self.params, wire.rank, device) for block in blocks]
        self.block_of = {
            self.index[id(p)]: gathered for gathered in self.blocks for p in gathered.params
        }
        self.shards = [self._shards_of(i) for i in range(len(self.params))]

    def _shards_of(self, i: int) -> list[Shard]:
        """Views of this rank's part of the parameter's block."""
        gathered = self.block_of[i]
        begin = gathered.block.begins[gathered.block.params.index(i)] - gathered.begin
        mine = [r for r in self.ranges[i] if r.owner == self.wire.rank]
        return [new_shard(gathered.part[begin + r.begin : begin + r.end], r.begin) for r in mine]

    def refresh(self) -> None:
        """The parts are where they always are; what is whole becomes stale with the step that now begins."""
        self.free_all()

    def gather(self, wanted: set[int]) -> None:
        """After a step nothing is sent: the parameters come when they are used."""
        torch.autograd.graph.increment_version([self.params[i] for i in sorted(wanted)])

    # ---- whole blocks

    def need(self, gathered: Gathered) -> None:
        """Make a block whole. Collective, unless it is already."""
        if gathered.state == WHOLE:
            return
        if self._coming is not None and self._coming is not gathered:
            self._drop()
        if gathered.state == FREE:
            self._send_for(gathered)
        self._arrive(gathered)
        position = len(self.order)
        self.order.append(gathered.block.index)
        if self._prefetch and position + 1 < len(self._before):
            expected, following = self._before[position : position + 2]
            if expected == gathered.block.index and self.blocks[following].state == FREE:
                self._coming = self.blocks[following]
                self._send_for(self._coming)

    def free(self, gathered: Gathered) -> None:
        if gathered.state == WHOLE:
            gathered.release()

    def free_all(self) -> None:
        self._drop()
        for gathered in self.blocks:
            self.free(gathered)

    def new_round(self, *, of_step: bool) -> None:
        """A forward begins: from now on compare with the order since the forward before. `of_step`: not evaluation."""
        self.free_all()
        if self.order:
            self._before, self.order = self.order, []
        if of_step and not any(order is self.order for order in self._rounds):
            self._rounds.append(self.order)

    def end_step(self) -> None:
        super().end_step()
        if self._rounds:
            self._last_rounds, self._rounds = self._rounds, []

    def repeat_last_step(self) -> None:
        """Make whole, for other ranks that make a step, what this one did in its last one."""
        if not self._last_rounds:
            problem = (
                "Zero: join: stage 3: expected a rank that has made a step, got one without a batch: it does not know"
                " in which order the blocks are used"
            )
            if self.wire.world > 1:
                self.driver.fail(problem)
            raise RuntimeError(problem)
        for order in self._last_rounds:
            self.new_round(of_step=False)
            for index in order:
                self.need(self.blocks[index])
                self.free(self.blocks[index])
        self.free_all()

    def _send_for(self, gathered: Gathered) -> None:
        self.driver.raise_error()
        gathered.allocate()
        block, rank, world = gathered.block, self.wire.rank, self.wire.world
        outs = [gathered.flat[a:b] for a, b in zip(block.cuts, block.cuts[1:])]
        outs[rank].copy_(gathered.part)
        gathered.state = COMING
        if world == 1 or not block.numel:
            return
        doing = f"block {block.index} ({block.anchor or 'the module'}), all-gather of {block.numel} parameters"
        self.driver.announce(doing, block.index, "all-gather")
        assert self.wire.fetch is not None
        total = block.numel * gathered.flat.itemsize
        work = self.wire.fetch.exchange(outs, [gathered.part] * world, total)
        gathered.arrival = Arrival(self.wire.fetch, work)
        if self._counts():
            self.cost.sent_bytes += gathered.part.nbytes * (world - 1)

    def _arrive(self, gathered: Gathered) -> None:
        if self._coming is gathered:
            self._coming = None
        arrival, gathered.arrival = gathered.arrival, None
        if arrival is not None:
            begun = time.perf_counter()
            self.driver.wait_for(arrival)
            if self._counts():
                self.cost.exposed_ms += 1e3 * (time.perf_counter() - begun)
                self.cost.busy_ms += arrival.busy_ms
        gathered.show()

    def _counts(self) -> bool:
        """Evaluation is no part of a step's cost."""
        return torch.is_grad_enabled() or _task_id() != -1

    def _drop(self) -> None:
        """The block under way is not the one that is needed; all ranks find that alike."""
        coming = self._coming
        if coming is not None:
            self._arrive(coming)
            self.free(coming)

    # ---- the whole module

    @torch.no_grad()
    def make_all_whole(self, *, fetch: bool) -> None:
        """All blocks at once; without `fetch`, only their memory, for values that are about to be written."""
        self._drop()
        for gathered in self.blocks:
            if fetch:
                if gathered.state == FREE:
                    self._send_for(gathered)
                    self._arrive(gathered)
            else:
                gathered.allocate()
                gathered.show()

    @torch.no_grad()
    def keep_own_parts(self) -> None:
        """Take the parameters' values over, all of which are whole, and free them."""
        for gathered in self.blocks:
            gathered.keep_own_part()
        self.free_all()
