"""Who is to blame when a collective fails: each rank's last word, kept in the store of the process group.

A thread writes this rank's state (step, operation, a beat count) to the store once per period, and looks there for
the failure of another rank, so that one rank's error reaches all of them at once. Nothing here decides that something
failed; that is a collective's error or timeout. It only names the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.parallel._wire import Wire
from trainwright.parallel.errors import CollectiveError

PERIODS_TO_SILENCE = (
    3  # a rank whose beat count stands still for so many periods is dead or stopped
)


@dataclass
class Position:
    """Where a rank is in its step.

    `issued` counts its collectives: the rank that lags has the lowest. `sent` names those of the first phase: a
    rank that has diverged differs from the others at some place.
    """

    step: int = 0
    issued: int = 0
    doing: str = "construction"
    bucket: int | None = None
    operation: str | None = None
    sent: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step}, {self.doing}"

    def words(self) -> dict[str, Any]:
        return {
            "step": self.step, "issued": self.issued, "doing": self.doing, "sent": list(self.sent),
        }  # fmt: skip


class Watch:
    """The watch of one rank. `position` is set by the reducer; `on_failure` is called when another rank reports one."""

    def __init__(
        self, wire: Wire, timeout: float, on_failure: Callable[[CollectiveError], None]
    ) -> None:
        self.position = Position()
        self.period = min(1.0, timeout / 40)
        self._wire = wire
        self._on_failure = on_failure
        self._beat = 0
        self._answered = time.monotonic()  # when the store last answered
        self._stop = threading.Event()
        # Connections of our own, made while all is well: one for the thread, one to ask after a failure.
        self._store, self._ask_store = self._clone(), self._clone()
        self._thread = threading.Thread(target=self._run, name="trainwright-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    # ---- the thread

    def _run(self) -> None:
        store = self._store
        with contextlib.suppress(
            Exception
        ):  # the store is gone: so is the job's launcher or rank 0
            while True:
                stopped = self._stop.wait(self.period)
                self._write(store, closed=stopped)
                if stopped:
                    return
                if store.check(["failure"]):
                    self._on_failure(self._reported(store))
                    self._stop.wait()
                    return

    def _clone(self) -> Any:
        try:
            return self._wire.store.clone()
        except Exception:
            return self._wire.store

    def _write(self, store: Any, closed: bool = False) -> None:
        self._beat += 1
        words = {**self.position.words(), "beat": self._beat, "closed": closed}
        store.set(f"at/{self._wire.rank}", json.dumps(words))
        self._answered = time.monotonic()

    # ---- after a failure

    def blame(self, cause: str) -> CollectiveError:
        """The error of this rank's failed collective, with the ranks to blame. Takes a few periods; never hangs."""
        result: list[CollectiveError] = []
        here = self.position
        done = threading.Event()

        def ask() -> None:
            with contextlib.suppress(Exception):
                result.append(self._ask(self._ask_store, here, cause))
            done.set()

        threading.Thread(target=ask, name="trainwright-blame", daemon=True).start()
        done.wait((PERIODS_TO_SILENCE + 3) * self.period + 1.0)
        if result:
            return result[0]
        silent = time.monotonic() - self._answered
        launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = "the launcher" if launcher else "rank 0"
        return self._error(
            here, cause, () if launcher else (0,),
            f"{host}, which hosts the store, has not answered for {silent:.1f} s: it is dead or stopped",
        )  # fmt: skip

    def _ask(self, store: Any, here: Position, cause: str) -> CollectiveError:
        if store.check(["failure"]):
            return self._reported(store)
        before = self._words(store)
        self._stop.wait(PERIODS_TO_SILENCE * self.period)
        if store.check(
            ["failure"]
        ):  # another rank was faster; ranks that have raised may be gone by now
            return self._reported(store)
        after = self._words(store)
        others = [r for r in range(self._wire.world) if r != self._wire.rank]
        closed = [r for r in others if after[r].get("closed")]
        silent = [r for r in others if r not in closed and after[r]["beat"] == before[r]["beat"]]
        behind = [
            r for r in others if (after[r]["step"], after[r]["issued"]) < (here.step, here.issued)
        ]
        after[self._wire.rank] = here.words()
        diverged, another = self._diverged(after)
        guilty = closed or silent or diverged or behind
        how = (
            "has closed its side" if closed
            else "is dead or stopped" if silent
            else another if diverged
            else "is alive but did not take part"
        )  # fmt: skip
        ranks = tuple(self._wire.ranks[r] for r in guilty)
        seen = [f"step {w['step']}, {w['doing']}" for w in after]
        words = "; ".join(
            f"rank {self._wire.ranks[r]} {how} (last seen at {seen[r]})" for r in guilty
        ) or "no rank is known to lag: " + "; ".join(
            f"rank {self._wire.ranks[r]} was last seen at {seen[r]}" for r in others
        )  # fmt: skip
        error = self._error(here, cause, ranks, words)
        record = {"message": str(error), "ranks": ranks, "step": here.step}
        record |= {"bucket": here.bucket, "operation": here.operation}
        store.compare_set("failure", "", json.dumps(record))
        return error

    def _diverged(self, words: list[dict[str, Any]]) -> tuple[list[int], str]:
        """Ranks whose sequence of collectives in this step differs from that of most, and how."""
        sequences = {
            r: w["sent"] for r, w in enumerate(words) if w["step"] == words[self._wire.rank]["step"]
        }
        for place in range(max(map(len, sequences.values()))):
            tags = {r: sent[place] for r, sent in sequences.items() if place < len(sent)}
            if len(set(tags.values())) > 1:
                counts = Counter(tags.values()).most_common(2)
                tie = counts[0][1] == counts[1][1]
                usual = tags.get(self._wire.rank) if tie else counts[0][0]
                odd = [r for r, tag in tags.items() if tag != usual]
                return odd, f"sent {tags[odd[0]]} where others sent {usual}"
        return [], ""

    def _words(self, store: Any) -> list[dict[str, Any]]:
        nothing = {"beat": -1, **Position(step=-1).words()}
        result = []
        for r in range(self._wire.world):
            key = f"at/{r}"
            result.append(json.loads(store.get(key)) if store.check([key]) else nothing)
        return result

    def _error(
        self, here: Position, cause: str, ranks: tuple[int, ...], words: str
    ) -> CollectiveError:
        me = self._wire.ranks[self._wire.rank]
        return CollectiveError(
            f"{self._wire.name}: {words}. Rank {me} was at {here}. Cause: {cause}",
            ranks=ranks, step=here.step, bucket=here.bucket, operation=here.operation,
        )  # fmt: skip

    def _reported(self, store: Any) -> CollectiveError:
        record = json.loads(store.get("failure"))
        return CollectiveError(
            record["message"],
            ranks=tuple(record["ranks"]),
            step=record["step"],
            bucket=record["bucket"],
            operation=record["operation"],
        )

    def report(self, error: CollectiveError) -> None:
        """Tell the other ranks of a failure that was found here."""

        def tell() -> None:
            with contextlib.suppress(Exception):
                record = {"message": str(error), "ranks": error.ranks, "step": error.step}
                record |= {"bucket": error.bucket, "operation": error.operation}
                self._ask_store.compare_set("failure", "", json.dumps(record))

        teller = threading.Thread(target=tell, name="trainwright-report", daemon=True)
        teller.start()
        teller.join(1.0)
