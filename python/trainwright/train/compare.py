"""``--compare``: the same model from the same seed on the same batches, ours beside plain torch.

Each side is a group of processes of its own (`world` ranks), so that its peak memory is its own; the sides take
their steps in turn, so that a busy machine disturbs all of them alike. Tokens/s is the median over the steps after
the first, which compiles and warms up and is the only one counted if a side is too slow for a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.train import data
from trainwright.train.config import Config, RunError
from trainwright.train.loop import Trainer, learning_rate, model_config, parameter_groups
from trainwright.train.ranks import Ranks, quiet_stdout, thread_count
from trainwright.train.reference import PlainGPT
from trainwright.train.report import plural

START_TIMEOUT_S = 300.0


@dataclass
class Side:
    """One way to train the model, and what was measured of it."""

    name: str
    ours: bool
    dtype: str
    compiled: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str = ""

    def tokens_per_s(self, tokens_per_step: int) -> float:
        timed = self.seconds[1:] or self.seconds
        return tokens_per_step / statistics.median(timed) if timed else 0.0


SIDES = (
    Side("ours bfloat16", True, "bfloat16"),
    Side("ours float32", True, "float32"),
    Side("torch eager float32", False, "float32"),
    Side("torch.compile float32", False, "float32", compiled=True),
    Side("torch autocast bfloat16", False, "bfloat16"),
)


class PlainTrainer:
    """`Trainer` in plain torch: eager or compiled, DDP, fused AdamW, autocast for bf16."""

    def __init__(self, config: Config, ranks: Ranks, folder: Path, side: Side) -> None:
        self.config, self.ranks, self.side = config, ranks, side
        self.accumulation = config.accumulation(ranks.world)
        self.model = PlainGPT(model_config(config), config.seed).to(ranks.device)
        self.parallel: Any = self.model
        if ranks.world > 1:
            self.parallel = torch.nn.parallel.DistributedDataParallel(self.model)
        if side.compiled:
            self.parallel = torch.compile(self.parallel)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config.weight_decay), lr=config.lr, betas=(config.beta1, config.beta2),
            fused=True,
        )  # fmt: skip
        self.blocks = data.Blocks(folder / "train.bin", config.context)
        self.sampler = data.TrainSampler(len(self.blocks), config.seed)

    def step(self, step: int) -> tuple[float, int]:
        config, total, targets = self.config, 0.0, 0
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        batches = data.microbatches(
            self.blocks, self.sampler, step * config.global_batch, config.micro_batch, self.accumulation,
            self.ranks.rank, self.ranks.world,
        )  # fmt: skip
        for i, (x, y) in enumerate(batches):
            waits = self.ranks.world > 1 and i + 1 < self.accumulation
            with self.parallel.no_sync() if waits else contextlib.nullcontext():
                with torch.autocast(
                    self.ranks.device.type, torch.bfloat16, self.side.dtype == "bfloat16"
                ):
                    loss: Tensor = self.parallel(x.to(self.ranks.device), y.to(self.ranks.device))
                (loss / self.accumulation).backward()
            total += loss.item() * y.numel()
            targets += y.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, targets


def status_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process, from /proc; the peak of getrusage where there is none."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def build(side: Side, config: Config, ranks: Ranks, folder: Path) -> Any:
    return (
        Trainer(config, ranks, folder) if side.ours else PlainTrainer(config, ranks, folder, side)
    )


def worker(
    side: Side, config: Config, folder: Path, rank: int, world: int, threads: int, pipe: Any
) -> None:
    """A rank of a side: sets up, then takes one step per message until the message is None."""
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)  # what torch has to say about compiling is not about this run
        torch.set_num_threads(threads)
        cuda = torch.cuda.is_available() and config.device != "cpu"
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        with quiet_stdout():
            dist.init_process_group(
                "nccl" if cuda else "gloo", init_method=f"file://{folder}/{side.name.replace(' ', '-')}", rank=rank,
                world_size=world, timeout=timedelta(seconds=START_TIMEOUT_S),
            )  # fmt: skip
            dist.barrier()
        ranks = Ranks(rank, world, device, threads)
        config = dataclasses.replace(config, dtype=side.dtype)
        tiny = dataclasses.replace(config, layers=1, dim=64, heads=1, kv_heads=1, hidden=64, context=8,
                                   global_batch=world, micro_batch=1)  # fmt: skip
        build(side, tiny, ranks, folder).step(
            0
        )  # libraries start up, and are not this model's memory
        gc.collect()
        before = status_bytes("VmRSS")
        trainer = build(side, config, ranks, folder)
        pipe.send(("ready",))
        while (step := pipe.recv()) is not None:
            if step == 1:  # the first step may compile
                reset_peak()
            dist.barrier()
            start = time.perf_counter()
            total, targets = trainer.step(step)
            loss_sum, count = ranks.sum([total, float(targets)])
            seconds = time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated() if cuda else status_bytes("VmHWM") - before
            pipe.send(("step", loss_sum / count, seconds, peak))
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"))
    finally:
        os._exit(0)


class Group:
    """The processes of a side."""

    def __init__(self, side: Side, config: Config, folder: Path, world: int, threads: int) -> None:
        self.side = side
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        spawn = multiprocessing.get_context("spawn")
        for rank in range(world):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=worker, args=(side, config, folder, rank, world, threads, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.answers(START_TIMEOUT_S)

    def answers(self, timeout: float) -> list[Any]:
        """One message of each rank, or the reason why there is none in `side.failure`."""
        got = []
        for pipe in self.pipes:
            try:
                message = (
                    pipe.recv()
                    if pipe.poll(timeout)
                    else ("error", f"no answer in {timeout:.0f} s")
                )
            except EOFError:
                message = ("error", "a process died")
            if message[0] == "error":
                self.side.failure = message[1]
                self.close()
                return []
            got.append(message)
        return got

    def step(self, step: int, timeout: float) -> None:
        for pipe in self.pipes:
            pipe.send(step)
        got = self.answers(timeout)
        if got:
            self.side.losses.append(got[0][1])
            self.side.seconds.append(max(m[2] for m in got))
            self.side.peak_bytes = max(
                self.side.peak_bytes if step > 1 else 0, *(m[3] for m in got), 0
            )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def compare(config: Config) -> int:
    """Run all sides and print the table. Only rank 0 of a torchrun works; it starts the ranks of each side itself."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    world = int(os.environ.get("WORLD_SIZE", 1))
    config.accumulation(world)
    threads = thread_count(config.threads, world)
    sides = [dataclasses.replace(s, losses=[], seconds=[]) for s in SIDES]
    with tempfile.TemporaryDirectory(prefix="trainwright-") as name:
        folder = Path(name)
        data.prepare(config.data, config.text_column, config.heldout, config.context, folder)
        print(f"comparing {len(sides)} sides, {plural(world, 'rank')} x {plural(threads, 'thread')} each, "
              f"up to {config.compare_steps} steps after a first one", flush=True)  # fmt: skip
        groups = []
        try:
            for side in sides:
                groups.append(Group(side, config, folder, world, threads))
            for step in range(config.compare_steps + 1):
                for group in groups:
                    side = group.side
                    spent = sum(side.seconds[side.compiled :])  # compiling does not count
                    if not side.failure and spent < config.compare_seconds:
                        group.step(step, START_TIMEOUT_S)
        finally:
            for group in groups:
                group.close()
    print_table(sides, config)
    if all(s.failure for s in sides):
        raise RunError(f"--compare: every side failed; the first: {sides[0].failure}")
    return 0


def loss_difference(side: Side, baseline: Side) -> float:
    """Largest difference of the losses at the same step."""
    return max((abs(a - b) for a, b in zip(side.losses, baseline.losses)), default=float("nan"))


def print_table(sides: list[Side], config: Config) -> None:
    from rich.console import Console
    from rich.table import Table

    tokens = config.global_batch * config.context
    baseline = next(s for s in sides if s.name == "torch eager float32")
    base_rate = baseline.tokens_per_s(tokens)
    table = Table(title="the same model, seed and batches")
    table.add_column("side")
    for heading in ("steps", "last loss", "max |Δloss|", "tokens/s", "x eager", "peak MB/rank"):
        table.add_column(heading, justify="right")
    for side in sides:
        if side.failure:
            table.add_row(side.name, "failed", side.failure)
            continue
        rate = side.tokens_per_s(tokens)
        table.add_row(
            side.name, str(len(side.losses)), f"{side.losses[-1]:.4f}", f"{loss_difference(side, baseline):.1e}",
            f"{rate:,.0f}", f"{rate / base_rate:.2f}" if base_rate else "-", f"{side.peak_bytes / 1e6:,.0f}",
        )  # fmt: skip
    console = Console(width=None if os.isatty(1) else 110)
    console.print(table)
    console.print(
        f"{tokens} tokens per step. Δloss: to torch eager float32, same step. Peak: resident memory above what the "
        "process held before it built the model.", soft_wrap=True, highlight=False,
    )  # fmt: skip
