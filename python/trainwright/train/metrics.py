"""What a run measures (loss, tokens/s, MFU, exposed communication), where it is written, and how it is drawn."""

from __future__ import annotations

import collections
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.parallel.buckets import StepStats
from trainwright.train.model import GPTConfig


def matmul_parameters(config: GPTConfig) -> int:
    """Parameters in a matmul for every token: all but the norms and the embedding look-up (the head counts)."""
    attention = config.dim * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlp = 3 * config.dim * config.hidden
    return config.layers * (attention + mlp) + config.dim * config.vocab


def flops_per_token(config: GPTConfig) -> float:
    """Forward and backward FLOPs of the model per token, recomputation not counted.

    3 · (2 · matmul parameters + attention), backward being twice forward; attention is two matmuls of 2·H·D FLOPs per
    (query, key) pair per layer, and a causal row sees (T + 1)/2 keys on average.
    """
    attention = config.layers * 4 * config.heads * config.head_dim * (config.context + 1) / 2
    return 3 * (2 * matmul_parameters(config) + attention)


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of this rank's square matmul in plain torch, the yardstick of MFU: the best call made in `seconds`.

    On a CPU it is measured in fp32 for every dtype (most CPUs have no bf16 units), on a GPU in the training dtype.
    """
    size = 1024 if device.type == "cpu" else 8192
    kind = torch.float32 if device.type == "cpu" else dtype
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=kind)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds or best == float("inf"):
        synchronise(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MetricsFile:
    """metrics.jsonl: one JSON object per report. A resume drops what lies after its checkpoint."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [r for r in read_metrics(path) if r["step"] <= first_step] if path.exists() else []
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(temporary, path)
        self.file = path.open("a", buffering=1)  # a line at a time

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on either side, those there are at the ends."""
    near = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(n) / len(n) for n in near]


def plot_loss(records: list[dict[str, Any]], path: Path, title: str, note: str) -> None:
    """Train and held-out loss over tokens, in nats per token, as a PNG."""
    logging.getLogger("matplotlib.font_manager").setLevel(
        logging.ERROR
    )  # a first use says it is slow
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    train = [(r["tokens"], r["loss"]) for r in records if "loss" in r]
    held = [(r["tokens"], r["heldout_loss"]) for r in records if "heldout_loss" in r]
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    if train:
        x, y = zip(*train)
        axes.plot(x, y, color="#9db8d9", linewidth=1.0, label="train, each step")
        axes.plot(
            x, smooth(y, len(y) // 40), color="#1f4e8c", linewidth=2.0, label="train, smoothed"
        )
    if held:
        x, y = zip(*held)
        axes.plot(x, y, "o-", color="#c8551b", linewidth=1.6, markersize=5, label="held-out")
        axes.annotate(
            f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(0, 9), textcoords="offset points",
            ha="center", color="#c8551b", fontweight="bold",
        )  # fmt: skip
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss (nats per byte)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.text(1.0, 1.02, note, transform=axes.transAxes, ha="right", fontsize=8.5, color="#555555")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=150)
    plt.close(figure)
    os.replace(temporary, path)


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


class Meter:
    """Averages over the last `window` steps."""

    def __init__(self, flops_per_token: float, peak_flops: float, window: int) -> None:
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.recent: collections.deque[tuple[float, ...]] = collections.deque(maxlen=window)

    def update(
        self, seconds: float, tokens: int, link: StepStats, compute_ms: Sequence[float]
    ) -> dict[str, float]:
        """What one more step makes of the averages.

        Args:
            seconds, tokens: of the step, over all ranks.
            link: what its communication cost this rank.
            compute_ms: each rank's time without the waiting; `imbalance` is the slowest over their mean, minus 1.
        """
        mean = sum(compute_ms) / len(compute_ms)
        imbalance = max(compute_ms) / mean - 1.0 if mean > 0 else 0.0
        self.recent.append(
            (seconds, tokens, link.exposed_ms, link.busy_ms, link.sent_bytes, imbalance)
        )
        time, count, exposed, busy, sent, unequal = (sum(column) for column in zip(*self.recent))
        rate, steps = count / time, len(self.recent)
        return {
            "step_ms": 1e3 * seconds,
            "tokens_per_s": rate,
            "mfu": rate * self.flops_per_token / self.peak_flops,
            "exposed_comm_ms": exposed / steps,
            "comm_busy_ms": busy / steps,
            "comm_overlap": max(0.0, 1.0 - exposed / busy) if busy else 1.0,
            "comm_bytes": sent / steps,
            "imbalance": unequal / steps,
        }
