"""The discrete-event model of schedules: how long they take on ranks that compute and links that carry messages."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

from trainwright.parallel.schedule import Action, Schedule


class Simulation:
    """One run of a schedule against the clock: `Schedule.makespan`."""

    def __init__(
        self, schedule: Schedule, per_cost: float, per_message: float, per_size: float
    ) -> None:
        self.schedule, self.per_cost = schedule, per_cost
        self.per_message, self.per_size = per_message, per_size
        self.position = [0] * schedule.world
        self.end = [0.0] * schedule.world
        self.waiting: dict[int, int] = {}  # rank -> tag
        self.started: dict[tuple[int, int, int], int] = defaultdict(
            int
        )  # ends that have started a message
        self.under: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        self.arrived: set[tuple[int, int, int]] = set()
        # Messages that may move: since when, the place of the send among its rank's actions, message, size.
        self.ready: list[tuple[float, int, tuple[int, int, int], int]] = []
        self.sent_at: dict[tuple[int, int, int], int] = {}
        self.busy: set[tuple[str, int]] = set()  # lanes
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.order = itertools.count()

    def run(self) -> float:
        for rank in range(self.schedule.world):
            self._at(0.0, "rank", (rank,))
        now = 0.0
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, kind, what = heapq.heappop(self.events)
                if kind == "rank":
                    self._advance(what[0], now)
                else:
                    self._arrive((what[0], what[1], what[2]), now)
            self._move(now)
        stuck = [r for r, p in enumerate(self.position) if p < len(self.schedule.ranks[r])]
        if stuck:
            raise ValueError(f"makespan: rank {stuck[0]} never ends; validate the schedule first")
        return max(self.end, default=0.0)

    def _at(self, time: float, kind: str, what: tuple[int, ...]) -> None:
        heapq.heappush(self.events, (time, next(self.order), kind, what))

    def _advance(self, rank: int, now: float) -> None:
        """Carry out actions of `rank` until one takes time."""
        actions = self.schedule.ranks[rank]
        self.end[rank] = now
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.kind == "wait" and not self._through(rank, action.tag):
                self.waiting[rank] = action.tag
                return
            self.position[rank] += 1
            if action.kind == "compute":
                self._at(now + action.cost * self.per_cost, "rank", (rank,))
                return
            if action.kind in ("send", "recv"):
                self._start(rank, action, now)

    def _through(self, rank: int, tag: int) -> bool:
        return all(m in self.arrived for m in self.under[rank, tag])

    def _start(self, rank: int, action: Action, now: float) -> None:
        sending = action.kind == "send"
        message = (*((rank, action.peer) if sending else (action.peer, rank)), action.tag)
        if sending:
            self.sent_at[message] = self.position[rank]
        self.under[rank, action.tag].append(message)
        self.started[message] += 1
        if self.started[message] == 2:
            self.ready.append((now, self.sent_at[message], message, action.size))

    def _move(self, now: float) -> None:
        self.ready.sort()
        for entry in list(self.ready):
            *_, message, size = entry
            lanes = {("out", message[0]), ("in", message[1])}
            if lanes & self.busy:
                continue
            self.busy |= lanes
            self.ready.remove(entry)
            self._at(now + self.per_message + size * self.per_size, "message", message)

    def _arrive(self, message: tuple[int, int, int], now: float) -> None:
        self.busy -= {("out", message[0]), ("in", message[1])}
        self.arrived.add(message)
        for rank in message[:2]:
            if rank in self.waiting and self._through(rank, self.waiting[rank]):
                del self.waiting[rank]
                self._at(now, "rank", (rank,))
