"""What a run shows: a progress bar on a terminal, else one line per report. Only rank 0 speaks."""

from __future__ import annotations

import sys
from typing import Any


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def describe(record: dict[str, Any]) -> str:
    text = (
        f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"MFU {100 * record['mfu']:.1f}%  exposed comm {record['exposed_comm_ms']:.1f} ms"
    )
    if not record["comm_bytes"]:
        return text
    return text + (
        f" of {record['comm_busy_ms']:.1f} ({100 * record['comm_overlap']:.0f}% hidden)  "
        f"{record['comm_bytes'] / 2**20:.1f} MiB sent  imbalance {100 * record['imbalance']:.0f}%"
    )


class Reporter:
    def __init__(self, speaks: bool, first_step: int, steps: int, every: int) -> None:
        self.speaks, self.steps, self.every = speaks, steps, every
        self.bar: Any = None
        if speaks and sys.stdout.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self.bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"),
                TimeRemainingColumn(), expand=False,
            )  # fmt: skip
            self.task = self.bar.add_task("", total=steps, completed=first_step)
            self.bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """Called after every step with the averages since the last report."""
        if self.bar is not None:
            self.bar.update(self.task, completed=record["step"], description=describe(record))
        elif self.speaks and (
            record["step"] % self.every == 0 or record["step"] in (1, self.steps)
        ):
            self.say(
                f"step {record['step']:>{len(str(self.steps))}}/{self.steps}  {describe(record)}"
            )

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        elif self.speaks:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
