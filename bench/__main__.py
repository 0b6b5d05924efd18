"""``python -m bench [OP ...] [--quick] [--device cpu|cuda] [--seconds S]``: run benchmarks, write CSV, table and plots.

``python -m bench`` runs all, ``python -m bench rms_norm`` one. Results lie in bench/results.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report

HERE = pathlib.Path(__file__).parent


class Reporter:
    """pytest plugin: a progress bar on a terminal, and a line per result in any case."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, disable=not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("benchmarks", total=None)

    def pytest_configure(self, config: Any) -> None:
        config.bench_report = lambda text: self.console.print(text, markup=False)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        return ("passed", "", "") if report.passed else None  # the lines of results are enough

    def pytest_collection_finish(self, session: Any) -> None:
        self.progress.update(self.task, total=len(session.items))
        self.progress.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.progress.update(self.task, description=nodeid.split("::")[-1])

    def pytest_runtest_logfinish(self) -> None:
        self.progress.advance(self.task)

    def pytest_sessionfinish(self) -> None:
        self.progress.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    ops = sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))
    parser.add_argument("op", nargs="*", help=f"one or more of: {', '.join(ops)}")
    arguments, rest = parser.parse_known_args()
    unknown = [op for op in arguments.op if op not in ops]
    if unknown:
        parser.error(f"op: expected some of {', '.join(ops)}, got {', '.join(unknown)}")
    files = [str(HERE / f"bench_{op}.py") for op in arguments.op or ops]
    options = [
        "-s",
        "-q",
        "--no-header",
        "--benchmark-quiet",
        "--timeout=1800",
        "-W",
        "ignore::DeprecationWarning",
        "-o",
        "console_output_style=classic",
    ]
    code = pytest.main([*options, *rest, *files], plugins=[Reporter()])
    if code == 0:
        for path in report.write():
            print(path)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
