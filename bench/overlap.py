"""Exposed communication of a data-parallel step, ours against torch DDP; run on every host by bench/netlab.sh.

    bench/netlab.sh -n 2 -r 450mbit -- bench/overlap.py [--layers 8 --width 1024 --rows 1024 --rounds 9]

Per round, in turn on the same machine: the bare model (forward, backward: compute only), DDP, and
tw.parallel.DataParallel, as it is and over the int8 wire. `comm` is an all-reduce of all gradients at once, alone. The
model is plain torch in all cases, so only the reducer differs. A time is that of the slowest rank in its round: a
synchronous step cannot end earlier. exposed = step - bare, round by round. Rank 0 prints one JSON line with medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainwright.parallel import DataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [
            nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)
        ]
        return nn.Sequential(*[m for layer in layers for m in (layer, nn.GELU())])

    x = torch.randn(
        options.rows, options.width, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    bare, theirs, ours = model(), DistributedDataParallel(model()), DataParallel(model())
    rounded = DataParallel(model(), wire_dtype="int8")
    gradients = torch.zeros(sum(p.numel() for p in bare.parameters()))

    def step(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(x).square().mean().backward()

        return run

    calls = {
        "compute": step(bare),
        "comm": lambda: dist.all_reduce(gradients),
        "ddp": step(theirs),
        "trainwright": step(ours),
        "int8": step(rounded),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(options.rounds + 2):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            if round_ >= 2:  # the first two rounds warm up; DDP rebuilds its buckets in them
                times[name].append(time.perf_counter() - begin)
    every: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, times)
    slowest = {name: [max(t) for t in zip(*(e[name] for e in every))] for name in calls}
    same = all(
        torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7)
        for a, b in zip(theirs.parameters(), ours.parameters())
    )
    if dist.get_rank() == 0:
        row = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in slowest.items()}
        for name in ("ddp", "trainwright", "int8"):
            exposed = [a - b for a, b in zip(slowest[name], slowest["compute"])]
            row[f"{name}_exposed_ms"] = 1e3 * statistics.median(exposed)
            row[f"{name}_exposed_fraction"] = row[f"{name}_exposed_ms"] / row["comm_ms"]
        row.update(
            hosts=dist.get_world_size(),
            rate=os.environ.get("NETLAB_RATE", "none"),
            gradient_bytes=gradients.numel() * 4,
            comm_over_compute=row["comm_ms"] / row["compute_ms"],
            gradients_agree=same,
        )
        print("OVERLAP " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
