"""The rows of bench/results/<op>.csv: their columns, reading and writing them, and one of them as a line of text."""

from __future__ import annotations

import csv
import datetime
import functools
import pathlib
import platform
import subprocess
from typing import Any

import torch
from trainwright.info import chosen_isa, cpu_name

RESULTS = pathlib.Path(__file__).parent / "results"
BASELINE = "torch eager"
OURS = "trainwright"
COLUMNS = [
    "op", "provider", "backend", "mode", "shape", "dtype", "bytes", "flops", "median_ms", "spread", "gbps", "gflops",
    "fraction", "bound", "ratio_eager", "ratio_peer", "best_peer", "error", "peak_bytes", "rounds", "device", "isa",
    "threads", "torch", "python", "git", "date", "load",
]  # fmt: skip
KEY = ["op", "provider", "mode", "shape", "dtype", "device", "isa", "threads"]


@functools.lru_cache(maxsize=4)
def machine(device: torch.device, ours: bool) -> dict[str, Any]:
    """The columns that say where and with what a row was measured."""
    root = pathlib.Path(__file__).parents[1]
    sha = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True
    )
    if device.type == "cuda":
        name, major_minor = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
        )
        isa = "sm_{}{}".format(*major_minor)
    else:
        name, isa = cpu_name(), torch.backends.cpu.get_cpu_capability().lower()
        if ours:
            isa = chosen_isa()
    return {
        "device": name, "isa": isa, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "git": sha.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def load_rows(path: pathlib.Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(op: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows to bench/results/<op>.csv, in the place of older rows with the same key."""
    path = RESULTS / f"{op}.csv"
    new = [{c: _text(row[c]) for c in COLUMNS} for row in rows]
    keys = {tuple(row[k] for k in KEY) for row in new}
    kept = [row for row in load_rows(path) if tuple(row[k] for k in KEY) not in keys]
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + new)
    temporary.replace(path)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def line(row: dict[str, Any]) -> str:
    """One row as a line for the terminal."""
    parts = [
        f"{row['op']} {row['mode']} {row['shape']} {row['dtype']}".ljust(44),
        row["provider"].ljust(14),
    ]
    parts.append(f"{row['median_ms']:9.3f} ms ±{row['spread']:4.0%}")
    parts.append(
        f"{row['ratio_eager']:6.2f}x eager" if row["ratio_eager"] is not None else " " * 13
    )
    parts.append(f"{row['fraction']:5.0%} of {row['bound']}" if row["bound"] else " " * 13)
    parts.append(f"error {row['error']:.1e}" if row["error"] is not None else "")
    parts.append(
        f"peak {row['peak_bytes'] / 2**20:.1f} MiB" if row["peak_bytes"] is not None else ""
    )
    return "  ".join(parts).rstrip()
