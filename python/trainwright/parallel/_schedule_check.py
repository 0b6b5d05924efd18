"""The validator of schedules: matching, order, buffers, and no deadlock when nothing is buffered on the way."""

from __future__ import annotations

from collections import defaultdict

from trainwright.parallel.schedule import Action, Schedule, ScheduleError


def validate(schedule: Schedule) -> None:
    """`Schedule.validate`. Messages between two ranks have to start in one order at both ends: NCCL knows no tags."""
    for rank in range(schedule.world):
        _Rank(schedule, rank).run()
    _match(schedule)
    _replay(schedule)


class _Rank:
    """One rank's actions in order, and what its buffers hold."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.capacity = schedule.buffers[rank]
        self.holds = dict(schedule.holds[rank])
        self.leaving: dict[str, set[int]] = defaultdict(set)  # buffer -> tags of sends
        self.arriving: dict[str, int] = {}  # buffer -> tag of a receive
        self.started: dict[int, list[Action]] = defaultdict(list)
        self.waited: set[int] = set()
        self.done: set[str] = set()

    def run(self) -> None:
        for action in self.schedule.ranks[self.rank]:
            getattr(self, "_" + action.kind, self._unknown)(action)
        late = sorted(set(self.started) - self.waited)
        if late:
            raise ScheduleError(f"rank {self.rank}: never waits for tag {late[0]}")
        missing = sorted(self.schedule.results[self.rank] - self.done)
        if missing:
            raise ScheduleError(f"rank {self.rank}: never computes {missing[0]}")

    def _fault(self, action: Action, rule: str) -> ScheduleError:
        return ScheduleError(f"rank {self.rank}: {action}: {rule}")

    def _unknown(self, action: Action) -> None:
        raise self._fault(action, "no such kind of action")

    def _readable(self, action: Action, buffer: str, content: str) -> None:
        if buffer not in self.capacity:
            raise self._fault(action, f"no buffer {buffer}")
        if buffer in self.arriving:
            raise self._fault(action, f"{buffer} is read before tag {self.arriving[buffer]} is waited for")  # fmt: skip
        held = self.holds.get(buffer, "nothing")
        if held != content:
            raise self._fault(action, f"{buffer} holds {held}, needed is {content}")

    def _writable(self, action: Action) -> None:
        buffer = action.writes
        if buffer not in self.capacity:
            raise self._fault(action, f"no buffer {buffer}")
        if action.size > self.capacity[buffer]:
            raise self._fault(action, f"{buffer} has room for {self.capacity[buffer]} only")
        if buffer in self.arriving:
            raise self._fault(action, f"tag {self.arriving[buffer]} still arrives in {buffer}")
        if self.leaving[buffer]:
            raise self._fault(action, f"tag {min(self.leaving[buffer])} still leaves {buffer}")

    def _start(self, action: Action) -> None:
        if not 0 <= action.peer < self.schedule.world or action.peer == self.rank:
            raise self._fault(action, f"no peer {action.peer}")
        if action.size < 1:
            raise self._fault(action, "an empty message")
        if action.tag in self.waited:
            raise self._fault(action, f"tag {action.tag} was waited for before")
        self.started[action.tag].append(action)

    def _send(self, action: Action) -> None:
        self._start(action)
        (buffer,) = action.reads
        self._readable(action, buffer, action.content)
        if action.size > self.capacity[buffer]:
            raise self._fault(action, f"{buffer} has {self.capacity[buffer]} only")
        self.leaving[buffer].add(action.tag)

    def _recv(self, action: Action) -> None:
        self._start(action)
        self._writable(action)
        self.holds.pop(action.writes, None)
        self.arriving[action.writes] = action.tag

    def _wait(self, action: Action) -> None:
        if action.tag in self.waited:
            raise self._fault(action, "waited for before")
        if action.tag not in self.started:
            raise self._fault(action, "nothing was started under this tag")
        self.waited.add(action.tag)
        for begun in self.started[action.tag]:
            if begun.kind == "recv":
                del self.arriving[begun.writes]
                self.holds[begun.writes] = begun.content
            else:
                self.leaving[begun.reads[0]].discard(action.tag)

    def _compute(self, action: Action) -> None:
        if len(action.reads) != len(action.needs):
            raise self._fault(action, "reads and needs differ in number")
        for buffer, content in zip(action.reads, action.needs, strict=True):
            self._readable(action, buffer, content)
        if action.content in self.done:
            raise self._fault(action, "computed before")
        self.done.add(action.content)
        if action.writes:
            self._writable(action)
            self.holds[action.writes] = action.content
        elif action.content not in self.schedule.results[self.rank]:
            raise self._fault(action, "is not among the results")


def _messages(schedule: Schedule, kind: str) -> dict[tuple[int, int], list[tuple[int, Action]]]:
    """(sender, receiver) -> (rank that says so, action), in the order of that rank."""
    found: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind == kind:
                pair = (rank, action.peer) if kind == "send" else (action.peer, rank)
                found[pair].append((rank, action))
    return found


def _match(schedule: Schedule) -> None:
    sends, receives = _messages(schedule, "send"), _messages(schedule, "recv")
    for pair in sorted(set(sends) | set(receives)):
        out, into = sends[pair], receives[pair]
        for (sender, sent), (receiver, received) in zip(out, into, strict=False):
            for name in ("tag", "size", "content"):
                a, b = getattr(sent, name), getattr(received, name)
                if a != b:
                    raise ScheduleError(
                        f"rank {sender}: {sent}: meets rank {receiver}: {received}: {name} differs"
                    )
        tags = [action.tag for _, action in out]
        if len(set(tags)) != len(tags):
            raise ScheduleError(f"ranks {pair[0]} to {pair[1]}: a tag is used twice")
        longer = out[len(into) :] or into[len(out) :]
        if longer:
            raise ScheduleError(f"rank {longer[0][0]}: {longer[0][1]}: the other end never starts it")  # fmt: skip


def _replay(schedule: Schedule) -> None:
    """Rendezvous: a message moves when both ends have started it, and a wait ends when its messages have moved."""
    position = [0] * schedule.world
    started: set[tuple[str, int, int, int]] = set()

    def ends(rank: int, action: Action) -> tuple[int, int, int]:
        return (
            (rank, action.peer, action.tag)
            if action.kind == "send"
            else (action.peer, rank, action.tag)
        )

    under: list[dict[int, list[tuple[int, int, int]]]] = [defaultdict(list) for _ in position]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action.kind in ("send", "recv"):
                    message = ends(rank, action)
                    started.add((action.kind, *message))
                    under[rank][action.tag].append(message)
                elif action.kind == "wait" and not all(
                    ("send", *m) in started and ("recv", *m) in started
                    for m in under[rank][action.tag]
                ):
                    break
                position[rank] += 1
                moved = True
    stuck = [r for r in range(schedule.world) if position[r] < len(schedule.ranks[r])]
    if stuck:
        where = "; ".join(f"rank {r} at {schedule.ranks[r][position[r]]}" for r in stuck)
        raise ScheduleError(f"deadlock: {where}")
