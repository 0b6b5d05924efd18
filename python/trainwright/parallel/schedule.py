"""Schedules of split matrix products as data: what every rank sends, receives and computes, in order.

A schedule holds no tensor. `Schedule.validate` proves that it is right, `Schedule.makespan` predicts how long it takes,
and the layers carry it out over torch.distributed (`_schedule_runtime`): all three read the same actions.

Kinds of actions (`Action.kind`), executed by a rank in order:

    send     start sending the contents of a buffer to a peer
    recv     start receiving into a buffer from a peer
    wait     until the messages that this rank started under a tag have left or arrived
    compute  read buffers, write at most one; `cost` in the unit of the products (rows, FLOPs, ...)

A message is known to both ends by (sender, receiver, tag). Messages of size 0 do not appear. Sizes are in one unit of
the caller's choice (rows, bytes); what the layers carry out is in bytes and FLOPs. `schedules` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Action", "Schedule", "ScheduleError"]


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

        >>> from trainwright.parallel import all_gather_matmul_schedule
        >>> all_gather_matmul_schedule([1, 1, 1]).makespan(per_cost=2, per_message=0, per_size=3)
        8.0
        """
        from trainwright.parallel._schedule_model import Simulation

        return Simulation(self, per_cost, per_message, per_size).run()

    def to_text(self) -> str:
        """One line per buffer and action; `from_text` reads it back.

        >>> from trainwright.parallel import all_gather_matmul_schedule
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
