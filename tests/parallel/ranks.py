"""Run a function on several ranks: one spawned process each, Gloo over localhost, a hard timeout, no process left
behind."""

from __future__ import annotations

import datetime
import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _main(
    function: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )  # fmt: skip
        results.put((rank, None, function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0
) -> list[Any]:
    """`function(*args)` on `world` ranks of a Gloo group; its (picklable) results by rank.

    Raises:
        AssertionError: a rank raised (with its traceback), or the ranks did not finish within `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_main,
                args=(function, rank, world, f"{folder}/store", results, args),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(values) < world:
                try:
                    rank, error, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
                except queue.Empty:
                    missing = sorted(set(range(world)) - set(values))
                    raise AssertionError(
                        f"ranks {missing} did not finish within {timeout} s"
                    ) from None
                assert error is None, f"rank {rank} failed:\n{error}"
                values[rank] = value
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [values[rank] for rank in range(world)]
