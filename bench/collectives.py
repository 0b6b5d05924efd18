"""What the reducer is made of, on ranks of one machine: run by bench_collectives.py, or

    torchrun --standalone --nproc-per-node 2 bench/collectives.py [--rounds 30]

Reduce-scatter of 16 MiB: ours (messages, then one sum in rank order) against torch's `reduce_scatter_single` on Gloo.
Cost per step with 200 small parameters: CPU time of all threads of a process, and of the thread that runs the backward,
in a backward with `DataParallel` or torch DDP, over that of the bare module; the data are few, so it is the reducer's
own. Providers take turns; medians, of the slowest rank. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainwright.parallel import DataParallel
from trainwright.parallel._job import run_op
from trainwright.parallel._wire import connect

MIB = 1 << 20
PARAMETERS = 200


def reduce_scatters(
    dtype: torch.dtype, wire: Any
) -> tuple[dict[str, Callable[[], None]], dict[str, torch.Tensor]]:
    """Both averages of 16 MiB, and their results."""
    world, rank = dist.get_world_size(), dist.get_rank()
    n = 16 * MIB // dtype.itemsize
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(n, generator=generator).to(dtype)
    received, send = torch.empty_like(x), x.clone()
    outs = {name: torch.empty(n // world, dtype=dtype) for name in ("ours", "gloo")}
    torchs = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def ours() -> None:
        wire.scatter.all_to_all(received, send).wait()
        parts = list(received.view(world, -1))
        parts[rank] = send.view(world, -1)[rank]
        run_op("ordered_sum", outs["ours"], parts, 1.0, None)

    def gloo() -> None:
        torchs(outs["gloo"], x)

    return {"ours": ours, "gloo": gloo}, outs


def modules() -> dict[str, nn.Module]:
    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(PARAMETERS // 2)])

    return {
        "bare": small(),
        "trainwright": DataParallel(small()),
        "ddp": DistributedDataParallel(small()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wire = connect("bench", None, torch.device("cpu"), 60.0, 60.0)
    row: dict[str, Any] = {"world": dist.get_world_size()}

    def slowest(times: dict[str, list[float]]) -> dict[str, float]:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, times)
        return {k: 1e3 * statistics.median(map(max, zip(*(e[k] for e in every)))) for k in times}

    for dtype in (torch.float32, torch.bfloat16):
        calls, outs = reduce_scatters(dtype, wire)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(rounds + 3):
            for name, call in calls.items():
                dist.barrier()
                begin = time.perf_counter()
                call()
                if i >= 3:
                    times[name].append(time.perf_counter() - begin)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        row[f"agree_{dtype}"] = torch.allclose(
            outs["ours"].float(), outs["gloo"].float(), rtol=tolerance, atol=tolerance
        )
        row[f"reduce_scatter_{dtype}"] = slowest(times)

    runs, x = modules(), torch.ones(1, 8)
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    own: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(4 * rounds + 10):
        for name, module in runs.items():
            module.zero_grad()
            loss = module(x).sum()
            dist.barrier()
            begin, begin_own = time.process_time(), time.thread_time()
            loss.backward()
            if i >= 10:
                own[name].append(time.thread_time() - begin_own)
                cpu[name].append(time.process_time() - begin)
    row["cpu_ms"], row["backward_thread_ms"] = slowest(cpu), slowest(own)
    if dist.get_rank() == 0:
        print("COLLECTIVES " + json.dumps(row), flush=True)
    dist.barrier()
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
