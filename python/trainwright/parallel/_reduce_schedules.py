"""Matmul -> reduce-scatter and matmul -> all-reduce: partial products are sent to the rank that keeps their sum.

Chunk j of target t is a part of what rank t keeps, the same part for any number of ranks that sum it. Contents:

    p<r>>t.j   the partial product of rank r         q<r>>t.j   a sum on its way around the ring, up to rank r
    y<t>.j     the sum; in an all-reduce every rank ends up with all of them
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.errors import value_error
from trainwright.parallel._sizes import check_split, split_evenly
from trainwright.parallel.schedule import Action, Schedule


def matmul_reduce_scatter_schedule(
    sizes: Sequence[int], *, columns: int = 1, chunks: int = 1, overlap: bool = True, reduce: str = "ordered",
    item_bytes: int = 1, item_cost: float = 1.0,
) -> Schedule:  # fmt: skip
    """Every rank multiplies its part of K for the rows of the others and sends each product to its owner while it goes
    on, and for its own rows last.

    "ordered": products go straight to their owner, which adds them in the order of the ranks, a chunk behind. Two
    products wait to be sent at a time. "ring": a sum travels from rank + 1 around to its owner, each rank adding its
    product. With equal shards both take ``t_c + (W - 1) max(t_c, t_x)`` at chunks = 1, and on two ranks with s chunks
    and a message overhead of α, where the link is the bound, ``t_c / s + s α + t_x``.

    Args:
        sizes: rows that every rank keeps.
        columns: of the result; chunks: parts of them, at least 1.
        overlap: False does all products before the first message.
        reduce: "ordered" or "ring".
        item_bytes, item_cost: of one element of a partial product, on its way and to compute.
    """
    _check("matmul_reduce_scatter_schedule", sizes, chunks, reduce)
    widths = split_evenly(columns, chunks)
    counts = [[rows * width for width in widths] for rows in sizes]
    return _schedule("matmul_reduce_scatter", counts, overlap, reduce, (item_bytes, 0, item_cost))


def matmul_all_reduce_schedule(
    sizes: Sequence[int], *, rows: int = 1, chunks: int = 1, overlap: bool = True, reduce: str = "ordered",
    item_bytes: int = 1, result_bytes: int = 1, item_cost: float = 1.0,
) -> Schedule:  # fmt: skip
    """`matmul_reduce_scatter_schedule` with the columns of the result divided among the ranks, each chunk of sums sent
    on to all others while the next is computed.

    Args:
        sizes: columns that every rank sums.
        rows: of the result.
        chunks, overlap, reduce: as there; chunks are parts of each rank's columns.
        item_bytes, item_cost: of one element of a partial product; result_bytes: of one of the sum.
    """
    _check("matmul_all_reduce_schedule", sizes, chunks, reduce)
    counts = [[rows * width for width in split_evenly(size, chunks)] for size in sizes]
    costs = (item_bytes, result_bytes, item_cost)
    return _schedule("matmul_all_reduce", counts, overlap, reduce, costs)


def _check(op: str, sizes: Sequence[int], chunks: int, reduce: str) -> None:
    check_split(op, sizes, chunks)
    if reduce not in ("ordered", "ring"):
        raise value_error(op, "reduce", "'ordered' or 'ring'", repr(reduce))


def _schedule(
    name: str, counts: list[list[int]], overlap: bool, reduce: str, costs: tuple[int, int, float]
) -> Schedule:
    plan = {"ordered": _Ordered, "ring": _Ring}[reduce]
    world = len(counts)
    plans = [plan(me, counts, overlap, costs) for me in range(world)]
    actions = tuple(tuple(p.actions()) for p in plans)
    own = [frozenset(f"y{me}.{j}" for j, n in enumerate(counts[me]) if n) for me in range(world)]
    return Schedule(name, actions, tuple(p.buffers for p in plans), ({},) * world, tuple(own))


class _Plan:
    """One rank: what it has started, and the buffers that this takes."""

    def __init__(
        self, me: int, counts: list[list[int]], overlap: bool, costs: tuple[int, int, float]
    ) -> None:
        self.me, self.counts, self.overlap, self.world = me, counts, overlap, len(counts)
        self.chunks = len(counts[0])
        self.item_bytes, self.result_bytes, self.item_cost = costs
        self.buffers: dict[str, int] = {}
        self.list: list[Action] = []
        self.leaving: list[int] = []  # tags of the products being sent, oldest first
        self.sent = 0
        self.open: list[int] = []  # tags to wait for at the end

    def actions(self) -> list[Action]:
        raise NotImplementedError

    def _buffer(self, name: str, size: int) -> str:
        self.buffers[name] = max(size, self.buffers.get(name, 0))
        return name

    def _tag(self, kind: int, chunk: int, sender: int, target: int) -> int:
        """kind: 0 a partial product or sum, 1 a result. A rank's sends and receives never share one."""
        return ((chunk * 2 + kind) * self.world + target) * self.world + sender

    def _compute(
        self, content: str, into: str, size: int, cost: float, reads: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.list.append(Action("compute", -1, -1, reads, needs, into, content, size, cost))

    def _product(self, target: int, chunk: int, into: str) -> None:
        count = self.counts[target][chunk]
        size = count * self.item_bytes
        content = f"p{self.me}>{target}.{chunk}"
        self._compute(content, self._buffer(into, size), size, count * self.item_cost)

    def _out(self) -> str:
        """A buffer that is free to be filled and sent."""
        while len(self.leaving) > 1:
            self._wait(self.leaving.pop(0))
        self.sent += 1
        return f"out{self.sent % 2}"

    def _wait(self, tag: int) -> None:
        self.list.append(Action("wait", tag))

    def _send(self, tag: int, to: int, buffer: str, content: str, size: int) -> None:
        self.list.append(Action("send", tag, to, reads=(buffer,), content=content, size=size))

    def _recv(self, tag: int, source: int, buffer: str, content: str, size: int) -> None:
        into = self._buffer(buffer, size)
        self.list.append(Action("recv", tag, source, writes=into, content=content, size=size))

    def _spread(self, chunk: int) -> None:
        """Send the sums of a chunk to all other ranks, and receive theirs."""
        if not self.result_bytes:
            return
        for step in range(1, self.world):
            source, to = (self.me - step) % self.world, (self.me + step) % self.world
            if size := self.counts[source][chunk] * self.result_bytes:
                tag, name = self._tag(1, chunk, source, source), f"res{source}.{chunk}"
                self._recv(tag, source, name, f"y{source}.{chunk}", size)
                self.open.append(tag)
            if size := self.counts[self.me][chunk] * self.result_bytes:
                tag, name = self._tag(1, chunk, self.me, self.me), f"res{self.me}.{chunk}"
                self._send(tag, to, name, f"y{self.me}.{chunk}", size)
                if step == 1:
                    self.open.append(tag)

    def _result(self, chunk: int, reads: tuple[str, ...], needs: tuple[str, ...]) -> None:
        """The sum of this rank; a buffer only if it is sent on."""
        size = self.counts[self.me][chunk] * self.result_bytes
        into = self._buffer(f"res{self.me}.{chunk}", size) if size else ""
        self._compute(f"y{self.me}.{chunk}", into, size, 0.0, reads=reads, needs=needs)

    def _end(self) -> list[Action]:
        for tag in [*self.leaving, *self.open]:
            self._wait(tag)
        return self.list


class _Ordered(_Plan):
    def actions(self) -> list[Action]:
        for chunk in range(self.chunks):
            if not self.overlap:
                self._serial(chunk)
                continue
            for step in range(1, self.world):
                self._contribute(chunk, step)
            if self.counts[self.me][chunk]:
                self._product(self.me, chunk, f"part{self.me}.{chunk % 2}")
            if chunk:
                self._add(chunk - 1)
        if self.overlap:
            self._add(self.chunks - 1)
        return self._end()

    def _serial(self, chunk: int) -> None:
        """All products, then all messages, then the sum."""
        others = range(1, self.world)
        for step in others:
            to = (self.me + step) % self.world
            if self.counts[to][chunk]:
                self._product(to, chunk, f"out.{step}")
        if self.counts[self.me][chunk]:
            self._product(self.me, chunk, f"part{self.me}.{chunk % 2}")
        for step in others:
            self._exchange(chunk, step, f"out.{step}")
        while self.leaving:
            self._wait(self.leaving.pop(0))
        self._add(chunk)

    def _contribute(self, chunk: int, step: int) -> None:
        """The product for rank + step, sent, and a buffer for that of rank - step."""
        to = (self.me + step) % self.world
        out = ""
        if self.counts[to][chunk]:
            out = self._out()
            self._product(to, chunk, out)
        self._exchange(chunk, step, out)

    def _exchange(self, chunk: int, step: int, out: str) -> None:
        me = self.me
        source, to = (me - step) % self.world, (me + step) % self.world
        if size := self.counts[me][chunk] * self.item_bytes:
            part, content = f"part{source}.{chunk % 2}", f"p{source}>{me}.{chunk}"
            self._recv(self._tag(0, chunk, source, me), source, part, content, size)
        if size := self.counts[to][chunk] * self.item_bytes:
            tag = self._tag(0, chunk, me, to)
            self._send(tag, to, out, f"p{me}>{to}.{chunk}", size)
            self.leaving.append(tag)

    def _add(self, chunk: int) -> None:
        """Add what arrived for a chunk, in the order of the ranks."""
        me, world = self.me, self.world
        if self.counts[me][chunk]:
            for step in range(1, world):
                source = (me - step) % world
                self._wait(self._tag(0, chunk, source, me))
            self._result(
                chunk,
                tuple(f"part{r}.{chunk % 2}" for r in range(world)),
                tuple(f"p{r}>{me}.{chunk}" for r in range(world)),
            )
        self._spread(chunk)


class _Ring(_Plan):
    """A turn is one product, for rank - 1 - step of a chunk, added to what comes from the left and sent on or kept.

    The turns of two chunks alternate, so that a sum can travel while another is added to, and the first turns of the
    next two stand before the last ones of these, which send nothing: so the link has no pause. All ranks take them in
    this order, so the messages between two of them never cross.
    """

    def actions(self) -> list[Action]:
        self.coming: dict[tuple[int, int], str] = {}  # turn -> buffer of what is added
        together = 2 if self.overlap else 1
        groups = [
            range(first, min(first + together, self.chunks))
            for first in range(0, self.chunks, together)
        ]
        orders = self._pipelined(groups) if self.overlap else self._one_by_one(groups)
        turns = [t for order in orders for t in order if self._count(*t)]
        received = [t for t in turns if t[1]]
        for chunks, order in zip(groups, orders):
            for chunk, step in order if not self.overlap else ():
                if self._count(chunk, step):
                    target = (self.me - 1 - step) % self.world
                    self._product(target, chunk, f"product{target}")
            for turn in filter(lambda t: self._count(*t), order):
                self._expect(received, chunks)
                self._turn(*turn)
                if turn[1]:
                    received.pop(0)
            self._expect(received, chunks)
            for chunk in chunks:
                self._spread(chunk)
        return self._end()

    def _count(self, chunk: int, step: int) -> int:
        return self.counts[(self.me - 1 - step) % self.world][chunk]

    def _one_by_one(self, groups: list[range]) -> list[list[tuple[int, int]]]:
        return [[(chunk, step) for step in range(self.world) for chunk in g] for g in groups]

    def _pipelined(self, groups: list[range]) -> list[list[tuple[int, int]]]:
        """By group, the turns to be taken until its chunks are done."""
        if self.world == 1:
            return self._one_by_one(groups)
        orders = []
        for number, (chunks, following) in enumerate(zip(groups, [*groups[1:], range(0)])):
            steps = range(min(number, 1), self.world - 1)
            order = [(chunk, step) for step in steps for chunk in chunks]
            for i, chunk in enumerate(chunks):
                order += [(early, 0) for early in following[i : i + 1]]
                order.append((chunk, self.world - 1))
            orders.append(order)
        return orders

    def _expect(self, received: list[tuple[int, int]], chunks: range) -> None:
        """Buffers for what comes from the left to be added in the next turns: two of them, but none that the left sends
        only after it has spread its results of these chunks.
        """
        me, world = self.me, self.world
        for chunk, step in received[: 2 if self.overlap else 1]:
            if chunk not in chunks and not (self.overlap and step == 1):
                return
            if (chunk, step) in self.coming:
                continue
            target, left = (me - 1 - step) % world, (me - 1) % world
            buffer = self.coming[chunk, step] = f"in{len(self.coming) % 2}"
            size = self.counts[target][chunk] * self.item_bytes
            tag = self._tag(0, chunk, left, target)
            self._recv(tag, left, buffer, f"q{left}>{target}.{chunk}", size)

    def _turn(self, chunk: int, step: int) -> None:
        me, world = self.me, self.world
        target, left, right = (me - 1 - step) % world, (me - 1) % world, (me + 1) % world
        size = self.counts[target][chunk] * self.item_bytes
        product = "product" if self.overlap else f"product{target}"
        if self.overlap:
            self._product(target, chunk, product)
        if step:
            self._wait(self._tag(0, chunk, left, target))
        reads = (product, self.coming[chunk, step]) if step else (product,)
        needs = (f"p{me}>{target}.{chunk}", f"q{left}>{target}.{chunk}")[: len(reads)]
        if target == me:
            self._result(chunk, reads, needs)
            return
        out, content = self._out(), f"q{me}>{target}.{chunk}"
        self._compute(content, self._buffer(out, size), size, 0.0, reads=reads, needs=needs)
        tag = self._tag(0, chunk, me, target)
        self._send(tag, right, out, content, size)
        self.leaving.append(tag)
