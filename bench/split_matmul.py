"""Split products over a slow link, overlapped against plain; run on every host by bench/netlab.sh.

    bench/netlab.sh -n 2 -r 250mbit -- bench/split_matmul.py [--rows 1024 --inner 1024 --outer 4096 --rounds 9]

Per round, in turn: the plain path (overlap="off") and what the cost model chose (overlap="auto"). A time is that of the
slowest rank in its round. The messages of `all_gather_matmul` and `matmul_reduce_scatter` are rows x inner fp32, their
products rows x inner x outer per message, so both take the same time on the link and the processor. Rank 0 prints one
JSON line. With --rounds 0 it measures the machine alone, for the caller to choose the rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from trainwright.parallel import (
    all_gather_matmul,
    calibrate,
    decisions,
    matmul_all_reduce,
    matmul_reduce_scatter,
)


def calls(rows: int, inner: int, outer: int) -> dict[str, Callable[[str], Tensor]]:
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, w = (torch.randn(s, generator=generator) for s in ((rows, inner), (inner, outer)))
    a = torch.randn(rows * world, outer, generator=generator)
    b = torch.randn(outer, inner, generator=generator)
    few = x[: max(1, rows // 256)]
    return {
        "all_gather_matmul": lambda overlap: all_gather_matmul(x, w, overlap=overlap),
        "matmul_reduce_scatter": lambda overlap: matmul_reduce_scatter(a, b, overlap=overlap),
        "matmul_all_reduce": lambda overlap: matmul_all_reduce(a[:rows], b, overlap=overlap),
        "all_gather_matmul, few rows": lambda overlap: all_gather_matmul(few, w, overlap=overlap),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--outer", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = calibrate()
    found = {"model": dataclasses.asdict(model), "rate": os.environ.get("NETLAB_RATE", "none")}
    for name, call in calls(options.rows, options.inner, options.outer).items():
        if not options.rounds:
            break
        same = torch.equal(call("off"), call("auto"))
        decision = decisions()[-1]
        times: dict[str, list[float]] = {"off": [], "auto": []}
        rounds = options.rounds * (5 if "few rows" in name else 1)
        for i in range(rounds):
            for overlap in list(times)[:: 1 if i % 2 else -1]:
                dist.barrier()
                begin = time.perf_counter()
                call(overlap)
                times[overlap].append(time.perf_counter() - begin)
        every: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, times)
        off, auto = ([max(t) for t in zip(*(e[k] for e in every))] for k in ("off", "auto"))
        found[name] = {
            "plain_ms": 1e3 * statistics.median(off),
            "auto_ms": 1e3 * statistics.median(auto),
            "ratio": statistics.median(a / b for a, b in zip(off, auto)),
            "predicted": 1.0
            if decision.predicted_s is None
            else decision.plain_s / decision.predicted_s,
            "overlap": decision.overlap,
            "chunks": decision.chunks,
            "same_bits": same,
            "decision": str(decision),
        }
    if dist.get_rank() == 0:
        print("SPLIT " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
