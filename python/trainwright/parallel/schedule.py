"""Schedules of split matrix products as data: what every rank sends, receives and computes, in order.

A schedule holds no tensor. `Schedule.validate` proves that it is right, `Schedule.makespan` predicts how long it takes,
and the layers carry it out over torch.distributed (`_schedule_runtime`): all three read the same actions.

Kinds of actions (`Action.kind`), executed by a rank in order:

    send     start sending the contents of a buffer to a peer
    recv     start receiving into a buffer from a peer
    wait     until the messages that this rank started under a tag have left or arrived
    compute  read buffers, write at most one; `cost` in the unit of the products (rows, FLOPs, ...)

A message is known to both ends by (sender, receiver, tag). Messages of size 0 do not appear. Sizes are in one unit of
the caller's choice (rows, bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.parallel._sizes import split_evenly

__all__ = [
    "Action",
    "Schedule",
    "ScheduleError",
    "all_gather_matmul_schedule",
    "matmul_reduce_scatter_schedule",
]


class ScheduleError(ValueError):
    """A schedule breaks a rule; the message names rank, action and rule."""


@dataclass(frozen=True)
class Action:
    """One step of one rank.

    Attributes:
        kind: "send", "recv", "wait" or "compute".
        tag: of the message or of the wait.
        peer: the other end of a message.
        reads, writes: names of buffers.
        needs: of a compute: what the buffers it reads have to hold, in the same order.
        content: what the written buffer then holds, or what a sent buffer must hold; for a compute without a written
            buffer, the name of its result.
        size: of a message or of what is written; cost: of a compute.
    """

    kind: str
    tag: int = -1
    peer: int = -1
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    writes: str = ""
    content: str = ""
    size: int = 0
    cost: float = 0.0

    def __str__(self) -> str:
        if self.kind == "send":
            return f"send {self.reads[0]} to {self.peer} tag {self.tag} holds {self.content} size {self.size}"
        if self.kind == "recv":
            return f"recv {self.writes} from {self.peer} tag {self.tag} holds {self.content} size {self.size}"
        if self.kind == "wait":
            return f"wait {self.tag}"
        into = f" into {self.writes} size {self.size}" if self.writes else ""
        reads, needs = (",".join(names) or "-" for names in (self.reads, self.needs))
        return f"compute {self.content} reads {reads} needs {needs}{into} cost {self.cost:g}"


@dataclass(frozen=True)
class Schedule:
    """Actions of every rank, and the buffers they work on.

    Attributes:
        name: of the operation.
        ranks: the actions, by rank.
        buffers: by rank, the capacity of every buffer.
        holds: by rank, what some buffers hold at the start.
        results: by rank, the computes that have to happen, each once.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    buffers: tuple[dict[str, int], ...]
    holds: tuple[dict[str, str], ...]
    results: tuple[frozenset[str], ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def validate(self) -> None:
        """Raise `ScheduleError` unless the schedule is right whatever the timing: messages match in size, content and
        order, buffers are neither read early nor written over nor overfilled, every result is computed once from what
        it needs, and no rank waits for ever even if a message only moves once both ends have started it."""
        from trainwright.parallel._schedule_check import validate

        validate(self)

    def makespan(self, *, per_cost: float, per_message: float, per_size: float) -> float:
        """Seconds until the last rank is done, by a discrete-event model.

        A rank does one compute at a time. A message moves once both ends have started it and the sender's outgoing and
        the receiver's incoming lane are free. Of several that could move, the one that could first goes first, then
        the one that its sender started first. Posting and waiting take no time.

        Args:
            per_cost: seconds per unit of cost of a compute.
            per_message, per_size: seconds per message, and per unit of its size.

        >>> all_gather_matmul_schedule([1, 1, 1]).makespan(per_cost=2, per_message=0, per_size=3)
        8.0
        """
        from trainwright.parallel._schedule_model import Simulation

        return Simulation(self, per_cost, per_message, per_size).run()

    def to_text(self) -> str:
        """One line per buffer and action; `from_text` reads it back.

        >>> print(all_gather_matmul_schedule([1, 1]).to_text().splitlines()[6])
          send x to 1 tag 0 holds x0.0 size 1
        """
        lines = [f"schedule {self.name} world {self.world}"]
        for rank in range(self.world):
            results = ",".join(sorted(self.results[rank])) or "-"
            lines.append(f"rank {rank} results {results}")
            for buffer, size in self.buffers[rank].items():
                lines.append(
                    f"  buffer {buffer} size {size} holds {self.holds[rank].get(buffer, '-')}"
                )
            lines += [f"  {action}" for action in self.ranks[rank]]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Schedule:
        """The schedule that `to_text` wrote.

        Raises:
            ValueError: a line that no schedule has, with its number.
        """
        reader = _Reader()
        for number, line in enumerate(text.splitlines(), 1):
            try:
                reader.read(line.split())
            except (ValueError, IndexError, KeyError):
                expected = "expected a buffer or an action"
                raise ValueError(f"schedule: line {number}: {expected}, got {line!r}") from None
        return reader.schedule()


@dataclass
class _Reader:
    name: str = ""
    ranks: list[list[Action]] = field(default_factory=list)
    buffers: list[dict[str, int]] = field(default_factory=list)
    holds: list[dict[str, str]] = field(default_factory=list)
    results: list[frozenset[str]] = field(default_factory=list)

    def read(self, words: list[str]) -> None:
        if not words:
            return
        kind, named = words[0], dict(zip(words[2::2], words[3::2], strict=True))
        if kind == "schedule":
            self.name = words[1]
        elif kind == "rank":
            self.ranks.append([])
            self.buffers.append({})
            self.holds.append({})
            names = named["results"]
            self.results.append(frozenset() if names == "-" else frozenset(names.split(",")))
        elif kind == "buffer":
            self.buffers[-1][words[1]] = int(named["size"])
            if named["holds"] != "-":
                self.holds[-1][words[1]] = named["holds"]
        else:
            self.ranks[-1].append(self._action(kind, words, named))

    @staticmethod
    def _action(kind: str, words: list[str], named: dict[str, str]) -> Action:
        if kind == "wait":
            return Action("wait", tag=int(words[1]))
        if kind == "compute":
            reads, needs = (
                () if named[key] == "-" else tuple(named[key].split(","))
                for key in ("reads", "needs")
            )
            return Action(
                "compute", reads=reads, needs=needs, writes=named.get("into", ""), content=words[1],
                size=int(named.get("size", 0)), cost=float(named["cost"]),
            )  # fmt: skip
        tag, content, size = int(named["tag"]), named["holds"], int(named["size"])
        if kind == "send":
            return Action(
                "send", tag, int(named["to"]), reads=(words[1],), content=content, size=size
            )
        if kind == "recv":
            return Action(
                "recv", tag, int(named["from"]), writes=words[1], content=content, size=size
            )
        raise ValueError(kind)

    def schedule(self) -> Schedule:
        return Schedule(
            self.name, tuple(map(tuple, self.ranks)), tuple(self.buffers), tuple(self.holds), tuple(self.results)
        )  # fmt: skip


def _product(buffer: str, shard: int, part: int, rows: int) -> Action:
    """Multiply part `part` of the shard of rank `shard`, which lies in `buffer`."""
    needs = (f"x{shard}.{part}",)
    return Action("compute", reads=(buffer,), needs=needs, content=f"y{shard}.{part}", cost=rows)


def all_gather_matmul_schedule(
    sizes: Sequence[int], *, chunks: int = 1, overlap: bool = True
) -> Schedule:
    """Every rank multiplies the shards of all ranks: its own first, then those of rank - 1, rank - 2, ... .

    In step k a rank sends its own shard to rank + k and receives that of rank - k, in `chunks` parts of rows. With
    `overlap` two parts are on their way or being multiplied at a time, and the parts of the own shard are spread among
    them. With equal shards, t_c for the product of one and t_x for its message, this takes
    ``t_c + (W - 1) max(t_c, t_x)`` at chunks = 1, the least that messages of whole shards allow; on two ranks with s
    chunks and a message overhead of α ``max(2 t_c, s α + t_x + t_c / s)``.

    Args:
        sizes: rows of every rank's shard.
        chunks: parts of a shard, at least 1.
        overlap: False starts a message only when the products before it are done.
    """
    world = len(sizes)
    parts = [[n for n in split_evenly(size, chunks) if n] for size in sizes]
    capacity = max((n for p in parts for n in p), default=0)
    plans = [_GatherPlan(me, parts, chunks) for me in range(world)]
    return Schedule(
        "all_gather_matmul",
        tuple(tuple(plan.overlapped() if overlap else plan.serial()) for plan in plans),
        tuple({**plan.own, "in0": capacity, "in1": capacity} for plan in plans),
        tuple({name: f"x{me}.{j}" for j, name in enumerate(plans[me].own)} for me in range(world)),
        (frozenset(f"y{r}.{j}" for r in range(world) for j in range(len(parts[r]))),) * world,
    )


class _GatherPlan:
    """One rank of `all_gather_matmul_schedule`: the moves (step, part) in order, and the actions around each."""

    def __init__(self, me: int, parts: list[list[int]], chunks: int) -> None:
        self.me, self.parts, self.chunks, world = me, parts, chunks, len(parts)
        mine = parts[me]
        names = ["x"] if len(mine) == 1 else [f"x.{j}" for j in range(len(mine))]
        self.own = dict(zip(names, mine, strict=True))
        self.moves = [
            (step, j)
            for step in range(1, world)
            for j in range(max(len(parts[(me - step) % world]), len(mine)))
        ]

    def _own_product(self, j: int) -> Action:
        name = list(self.own)[j]
        return _product(name, self.me, j, self.own[name])

    def _start(self, index: int) -> list[Action]:
        if index >= len(self.moves):
            return []
        step, j = self.moves[index]
        world, tag = len(self.parts), self._tag(index)
        source, to = (self.me - step) % world, (self.me + step) % world
        started = []
        if j < len(self.parts[source]):
            size, content = self.parts[source][j], f"x{source}.{j}"
            started.append(
                Action("recv", tag, source, writes=f"in{index % 2}", content=content, size=size)
            )
        if j < len(self.own):
            name, size = list(self.own.items())[j]
            content = f"x{self.me}.{j}"
            started.append(Action("send", tag, to, reads=(name,), content=content, size=size))
        return started

    def _tag(self, index: int) -> int:
        step, j = self.moves[index]
        return (step - 1) * self.chunks + j

    def _finish(self, index: int) -> list[Action]:
        step, j = self.moves[index]
        source = (self.me - step) % len(self.parts)
        finished = [Action("wait", self._tag(index))]
        if j < len(self.parts[source]):
            finished.append(_product(f"in{index % 2}", source, j, self.parts[source][j]))
        return finished

    def overlapped(self) -> list[Action]:
        moves, own = len(self.moves), len(self.own)
        actions = [*self._start(0), *self._start(1)]
        placed = 0
        for index in range(moves):
            while placed < own and placed * moves <= index * own:
                actions.append(self._own_product(placed))
                placed += 1
            actions += [*self._finish(index), *self._start(index + 2)]
        return actions + [self._own_product(j) for j in range(placed, own)]

    def serial(self) -> list[Action]:
        actions = [self._own_product(j) for j in range(len(self.own))]
        for index in range(len(self.moves)):
            actions += [*self._start(index), *self._finish(index)]
        return actions


def matmul_reduce_scatter_schedule(sizes: Sequence[int], *, overlap: bool = True) -> Schedule:
    """Every rank multiplies its part of K for the rows of rank + 1, rank + 2, ..., sends each to its owner while it
    goes on, and its own rows last; then it adds what it got in the order of the ranks.

    Two products wait to be sent at a time. With equal shards this takes ``t_c + (W - 1) max(t_c, t_x)``.

    Args:
        sizes: rows that every rank keeps.
        overlap: False waits for each message before the next product.
    """
    world, largest = len(sizes), max(sizes)
    return Schedule(
        "matmul_reduce_scatter",
        tuple(tuple(_scatter_actions(me, sizes, overlap)) for me in range(world)),
        tuple(
            {f"part{r}": size for r in range(world)} | {"out0": largest, "out1": largest}
            for size in sizes
        ),
        tuple({} for _ in sizes),
        tuple(frozenset([f"y{me}"] if size else []) for me, size in enumerate(sizes)),
    )


def _scatter_actions(me: int, sizes: Sequence[int], overlap: bool) -> list[Action]:
    world, mine = len(sizes), sizes[me]
    actions: list[Action] = []
    flying: list[int] = []  # tags of messages, oldest first
    for step in range(1, world):
        source, to, out = (me - step) % world, (me + step) % world, f"out{step % 2}"
        theirs, content = sizes[to], f"p{me}>{to}"
        if len(flying) == 2:
            actions.append(Action("wait", flying.pop(0)))
        if theirs:
            actions.append(Action("compute", writes=out, content=content, size=theirs, cost=theirs))
        if mine:
            name, part = f"part{source}", f"p{source}>{me}"
            actions.append(Action("recv", step, source, writes=name, content=part, size=mine))
        if theirs:
            actions.append(Action("send", step, to, reads=(out,), content=content, size=theirs))
        if mine or theirs:
            flying.append(step)
        if not overlap and flying:
            actions.append(Action("wait", flying.pop(0)))
    if mine:
        name, content = f"part{me}", f"p{me}>{me}"
        actions.append(Action("compute", writes=name, content=content, size=mine, cost=mine))
    actions += [Action("wait", tag) for tag in flying]
    if mine:
        names = tuple(f"part{r}" for r in range(world))
        needs = tuple(f"p{r}>{me}" for r in range(world))
        actions.append(Action("compute", reads=names, needs=needs, content=f"y{me}"))
    return actions
