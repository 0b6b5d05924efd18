"""Exposed communication of a data-parallel step, ours against torch DDP; run on every host by bench/netlab.sh.

    bench/netlab.sh -n 2 -r 450mbit -- bench/overlap.py [--layers 8 --width 1024 --rows 1024 --rounds 9]
    bench/netlab.sh -n 2 -r 450mbit -- bench/overlap.py --sleep-ms 900

Per round, in turn on the same machine: the bare model (forward, backward: compute only), DDP, and
tw.parallel.DataParallel, as it is and over the int8 wire. `comm` is an all-reduce of all gradients at once, alone. The
model is plain torch in all cases, so only the reducer differs. A time is that of the slowest rank in its round: a
synchronous step cannot end earlier. exposed = step - bare, round by round. Rank 0 prints one JSON line with medians.

All hosts share this machine's cores, and its network is work for them too. With --sleep-ms the layers sleep instead of
computing (a third of the time forward, two thirds backward): what is exposed then is the schedule's own share, as on
hosts whose computation does not compete with their network. `tail` is the least that any schedule exposes: the share
of the bytes that the last layer of the backward has, whose gradient is there only at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainwright.parallel import DataParallel


class _Sleep(torch.autograd.Function):
    """A layer's work as time alone: its gradient is there when as much of it has gone by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(ctx.seconds * 2 / 3)
        return upstream[0], torch.ones(ctx.shape), None


class Sleeper(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self.seconds)


def model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if options.sleep_ms:
        seconds = options.sleep_ms / 1e3 / options.layers
        return nn.Sequential(*[Sleeper(options.width, seconds) for _ in range(options.layers)])
    layers = [nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.GELU())])


def set_up(rounds: int) -> tuple[argparse.Namespace, torch.Tensor]:
    """The options of the command, with a process group of one thread a rank; and this rank's batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--sleep-ms", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = 1 if options.sleep_ms else options.rows
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(rows, options.width, generator=generator)
    return options, x.requires_grad_(
        rows == 1
    )  # a layer that sleeps has a backward only below some gradient


def machine_cpu_s() -> float:
    """CPU time that this machine has spent, on whatever: the kernel's work for the network is no process's."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    options, x = set_up(rounds=9)
    bare = model(options)
    theirs, ours = DistributedDataParallel(model(options)), DataParallel(model(options))
    rounded = DataParallel(model(options), wire_dtype="int8")
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
    work: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(options.rounds + 2):
        for name, call in calls.items():
            dist.barrier()
            begin, busy = time.perf_counter(), machine_cpu_s()
            call()
            if round_ >= 2:  # the first two rounds warm up; DDP rebuilds its buckets in them
                times[name].append(time.perf_counter() - begin)
                work[name].append(machine_cpu_s() - busy)
    every: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, times)
    slowest = {name: [max(t) for t in zip(*(e[name] for e in every))] for name in calls}
    same = all(
        torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7)
        for a, b in zip(theirs.parameters(), ours.parameters())
    )
    if dist.get_rank() == 0:
        row = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in slowest.items()}
        for name, values in work.items():  # ticks of 10 ms: a mean
            row[f"{name}_cpu_ms"] = 1e3 * statistics.mean(values) / dist.get_world_size()
        for name in ("ddp", "trainwright", "int8"):
            exposed = [a - b for a, b in zip(slowest[name], slowest["compute"])]
            row[f"{name}_exposed_ms"] = 1e3 * statistics.median(exposed)
            row[f"{name}_exposed_fraction"] = row[f"{name}_exposed_ms"] / row["comm_ms"]
        row.update(
            hosts=dist.get_world_size(),
            rate=os.environ.get("NETLAB_RATE", "none"),
            gradient_bytes=gradients.numel() * 4,
            tail=1 / options.layers,
            comm_over_compute=row["comm_ms"] / row["compute_ms"],
            gradients_agree=same,
        )
        print("OVERLAP " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
