"""A step of `Zero` against `DataParallel` with the same optimizer; run on every host by bench/netlab.sh.

    bench/netlab.sh -n 2 -r 600mbit -- bench/zero.py [--layers 8 --width 1024 --rows 1024 --rounds 5]
    bench/netlab.sh -n 2 -r 600mbit -- bench/zero.py --sleep-ms 900

Forward, backward, `optimizer.step()`, `zero_grad()`, in turn: DataParallel with AdamW; Zero stages 1 and 2; both with
overlap="forward", whose parameters arrive under the next forward. What a step leaves to the next is part of the time:
each call is a few steps in a row. The model, and --sleep-ms, are those of bench/overlap.py. Rank 0 prints one JSON line
with medians over the rounds of the slowest rank's time per step.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import trainwright as tw
from overlap import model, set_up
from trainwright.parallel import DataParallel, Zero

STEPS = 3  # in a row


def main() -> None:
    options, x = set_up(rounds=5)
    data_parallel = DataParallel(model(options))
    runs: dict[str, tuple[Any, Any]] = {
        "data_parallel": (
            data_parallel,
            tw.optim.AdamW(data_parallel.parameters(), lr=1e-4),
        )
    }
    for stage in (1, 2):
        for overlap in ("auto", "forward"):
            zero = Zero(model(options), lr=1e-4, stage=stage, overlap=overlap)
            runs[f"zero_{stage}_{overlap}"] = zero, zero.optimizer
    gradients = torch.zeros(sum(p.numel() for p in data_parallel.parameters()))

    def train(module: Any, optimizer: Any) -> None:
        for _ in range(STEPS):
            module(x).square().mean().backward()
            optimizer.step()
            module.zero_grad()

    times: dict[str, list[float]] = {name: [] for name in [*runs, "comm"]}
    for round_ in range(options.rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            started = time.perf_counter()
            train(*run)
            if round_ >= 1:
                times[name].append((time.perf_counter() - started) / STEPS)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(gradients)
        times["comm"].append(time.perf_counter() - started)
    every: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, times)
    slowest = {name: [max(t) for t in zip(*(e[name] for e in every))] for name in times}
    states = [module.state_dict() for module, _ in runs.values()]
    same = all(torch.equal(x, state[name]) for state in states for name, x in states[0].items())
    if dist.get_rank() == 0:
        row: dict[str, Any] = {
            f"{name}_ms": 1e3 * statistics.median(values) for name, values in slowest.items()
        }
        row.update(
            hosts=dist.get_world_size(),
            rate=os.environ.get("NETLAB_RATE", "none"),
            gradient_bytes=gradients.numel() * 4,
            parameters_equal=same,
        )
        print("ZERO " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
