"""bench/results/*.csv -> bench/results/README.md (tables) and one picture per op (SVG and PNG).

``python -m bench.report`` makes them again from the CSV files; nothing is measured here.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from itertools import groupby

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.rows import BASELINE, OURS, RESULTS, load_rows

matplotlib.rcParams["svg.hashsalt"] = "trainwright"  # the same rows give the same file
Row = dict[str, str]
COLOURS = ["#0b6e4f", "#8d99ae", "#d98e04", "#5b7db1", "#a05195", "#6b6b6b"]
HEAD = """# Measured results

Made by `python -m bench.report` from the CSV files beside it, one per op; how they were measured: `bench/harness.py`.
`vs eager` is the speed relative to plain torch ops in the same rounds, `vs best peer` to the fastest of the others;
`of bound` is the fraction of the speed of a copy of as many bytes (of torch's `mul_` for what is updated in place), or
of a matrix product of as many operations, in the same rounds. `peak` is extra memory during the call, results included.
Losses stand here as they were measured.
"""


def case(row: Row) -> tuple[str, str, str]:
    return row["mode"], row["shape"], row["dtype"]


def machine(row: Row) -> str:
    return (
        f"{row['device']}, {row['threads']} threads"
        if not row["isa"].startswith("sm_")
        else f"{row['device']}, {row['isa']}"
    )


def runs(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows grouped into comparisons on one machine with one instruction set of ours, which names the group."""
    for where, on_machine in groupby(sorted(rows, key=machine), machine):
        members = list(on_machine)
        ours = sorted({r["isa"] for r in members if r["provider"].startswith(OURS)})
        for isa in ours:
            mine = [r for r in members if r["provider"].startswith(OURS) and r["isa"] == isa]
            stamps = {(case(r), r["date"][:16], r["git"]) for r in mine}
            peers = [
                r
                for r in members
                if not r["provider"].startswith(OURS)
                and (case(r), r["date"][:16], r["git"]) in stamps
            ]
            cases = list(dict.fromkeys(case(r) for r in mine))
            yield f"{where}, {isa}", sorted(mine + peers, key=lambda r: cases.index(case(r)))


def number(text: str, pattern: str = "{:.2f}", scale: float = 1.0) -> str:
    return pattern.format(float(text) * scale) if text else ""


def table(rows: list[Row]) -> list[str]:
    memory = any(r["peak_bytes"] for r in rows)
    head = [
        "mode",
        "shape",
        "dtype",
        "provider",
        "backend",
        "ms",
        "±",
        "GB/s",
        "GFLOP/s",
        "of bound",
        "vs eager",
        "vs best peer",
        "error",
    ]
    head += ["peak MiB"] if memory else []
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [
            *case(r), f"**{r['provider']}**" if r["provider"].startswith(OURS) else r["provider"], r["backend"],
            number(r["median_ms"], "{:.3f}"), number(r["spread"], "{:.0%}"), number(r["gbps"], "{:.1f}"),
            number(r["gflops"], "{:.0f}") if float(r["flops"] or 0) else "",
            f"{number(r['fraction'], '{:.0%}')} {r['bound']}" if r["bound"] else "",
            number(r["ratio_eager"], "{:.2f}×"), number(r["ratio_peer"], "{:.2f}×"), number(r["error"], "{:.1e}"),
        ]  # fmt: skip
        cells += [number(r["peak_bytes"], "{:.1f}", 1 / 2**20)] if memory else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(op: str, groups: list[tuple[str, list[Row]]]) -> list[pathlib.Path]:
    """Bars of the speed relative to torch eager (without it, to the best peer), one panel per machine."""
    panels = []
    for where, rows in groups:
        cases = list(dict.fromkeys(case(r) for r in rows))
        providers = list(dict.fromkeys(r["provider"] for r in rows))
        panels.append((where, rows, cases, providers))
    heights = [
        0.8 + len(cases) * (0.25 + 0.19 * len(providers)) for _, _, cases, providers in panels
    ]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights) + 0.5), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    figure.suptitle(op, fontweight="bold")
    for axis, (where, rows, cases, providers) in zip(axes[:, 0], panels):
        values = {
            (case(r), r["provider"]): float(r["ratio_eager"] or r["ratio_peer"] or 0) for r in rows
        }
        height = 0.8 / len(providers)
        longest = max(values.values(), default=1.0)
        labelled = set()
        for i, provider in enumerate(providers):
            colour = COLOURS[i % len(COLOURS)]
            for y, c in enumerate(cases):
                if (c, provider) in values:
                    value, at = values[c, provider], y - 0.4 + (i + 0.5) * height
                    axis.barh(
                        at,
                        value,
                        height * 0.9,
                        color=colour,
                        label=None if provider in labelled else provider,
                    )
                    labelled.add(provider)
                    axis.text(value + longest * 0.01, at, f"{value:.2f}", va="center", fontsize=8)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(cases)), [" ".join(c) for c in cases], fontsize=9)
        axis.invert_yaxis()
        axis.set_xlim(0, max(longest, 1.0) * 1.1)
        base = BASELINE if any(r["ratio_eager"] for r in rows) else "best peer"
        axis.set_xlabel(f"speed relative to {base} (more is better)", fontsize=9)
        axis.set_title(where, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    paths = [RESULTS / f"{op}.svg", RESULTS / f"{op}.png"]
    for path in paths:
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def write() -> list[pathlib.Path]:
    """Make the tables and the pictures again from all CSV files; returns what was written."""
    lines, written = [HEAD], []
    for path in sorted(RESULTS.glob("*.csv")):
        groups = list(runs(load_rows(path)))
        if not groups:
            continue
        lines.append(f"## {path.stem}\n\n![{path.stem}]({path.stem}.svg)\n")
        for where, rows in groups:
            newest = max(rows, key=lambda r: r["date"])
            lines += [
                f"{where}; torch {newest['torch']}, commit {newest['git']}, {newest['date'][:10]}\n",
                *table(rows),
                "",
            ]
        written += plot(path.stem, groups)
    readme = RESULTS / "README.md"
    readme.write_text("\n".join(lines))
    return [readme, *written]


if __name__ == "__main__":
    for written in write():
        print(written)
