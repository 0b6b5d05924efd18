"""The processes of a run: who they are, how they agree, and how a signal stops all of them at the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainwright.parallel.errors import CollectiveError
from trainwright.train.config import Config, RunError

T = TypeVar("T")
HEARTBEAT_S = 2.0


class RankLost(RunError):
    """Another rank died or stopped answering."""


@contextlib.contextmanager
def lost_rank() -> Iterator[None]:
    """A collective that fails means that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise RankLost(f"another rank died or stopped answering: {first}") from error


@dataclass
class Ranks:
    """This process among the `world` of a run."""

    rank: int
    world: int
    device: torch.device
    threads: int

    def first(self, function: Callable[..., T], *args: Any) -> T:
        """Call on rank 0 and give its result to all; its RunError or OSError is raised on all.

        The others wait however long it takes, for rank 0 shows every HEARTBEAT_S that it is alive.
        """
        outcome: list[Any] = [None, None]

        def work() -> None:
            try:
                outcome[0] = function(*args)
            except RunError as error:
                outcome[1] = error
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                outcome[1] = RunError(f"{where}{error.strerror or error}")
            except BaseException as error:
                traceback.print_exc()
                outcome[1] = RunError(f"rank 0: {type(error).__name__}: {error}")

        if self.world == 1:
            work()
        else:
            thread = threading.Thread(target=work, daemon=True) if self.rank == 0 else None
            if thread is not None:
                thread.start()
            while True:
                if thread is not None:
                    thread.join(HEARTBEAT_S)
                if self.sum([float(thread is not None and not thread.is_alive())])[0]:
                    break
            with lost_rank():
                dist.broadcast_object_list(outcome, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks, in fp64."""
        return [sum(column) for column in zip(*self.all(values))]

    def all(self, values: list[float]) -> list[list[float]]:
        """The values of each rank."""
        if self.world == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        with lost_rank():
            dist.all_gather(every, mine)
        return [x.tolist() for x in every]


@contextlib.contextmanager
def start(config: Config) -> Iterator[Ranks]:
    """The process group that torchrun describes, or one of this process alone; left on the way out."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, local_world = (
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    cuda = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not cuda:
        raise RunError("--device: cuda was asked for, but torch finds no CUDA GPU", 2)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(thread_count(config.threads, local_world))
    backend, limit = "nccl" if cuda else "gloo", timedelta(seconds=config.timeout)
    with lost_rank(), quiet_stdout():
        if world > 1:
            dist.init_process_group(backend, timeout=limit)
            dist.barrier()  # gloo connects, and reports it, at the first collective
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
    lost = False
    try:
        yield Ranks(rank, world, device, torch.get_num_threads())
    except (RankLost, CollectiveError) as error:
        lost = True
        raise error if isinstance(error, RankLost) else RankLost(str(error)) from error
    finally:
        if not lost:  # else leaving could wait for peers that are gone
            dist.destroy_process_group()


def thread_count(asked: int, local_world: int) -> int:
    """Threads of this rank. torchrun sets OMP_NUM_THREADS=1 when it is unset, so a 1 under torchrun counts as unset."""
    if asked:
        return asked
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0 and not (said == "1" and local_world > 1):
        return int(said)
    return max(1, len(os.sched_getaffinity(0)) // local_world)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """gloo announces its connections on stdout from C++; a run's output is its own."""
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


class StopSignal:
    """Ctrl-C or SIGTERM asks for a stop after the current step; Ctrl-C again, GRACE_S later or more, ends at once."""

    GRACE_S = 2.0  # torchrun passes on to its workers what they may have got already

    def __init__(self) -> None:
        self.name, self.since = "", 0.0

    def __enter__(self) -> StopSignal:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if not self.name:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > self.GRACE_S:
            raise KeyboardInterrupt

    @property
    def requested(self) -> bool:
        return bool(self.name)
