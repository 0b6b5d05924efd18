"""What the other ranks see when one dies, stops, stalls, skips a bucket or is interrupted. Run in ranks of their
own."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import trainwright as tw
from case_tools import batch, mlp
from torch import nn
from trainwright.parallel import CollectiveError, DataParallel, Zero

TIMEOUT = 6.0


class Interrupt(torch.autograd.Function):
    """Identity whose backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if Interrupt.armed:
            raise KeyError("data went bad")
        return g


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(4, 4), mlp(4, 4, 4)

    def forward(self, x):
        return self.second(Interrupt.apply(self.first(x)))


def one_rank_fails(rank, world, how, victim):
    """Two good steps, then the fault on rank `victim`. The others raise; returns (seconds, message, attributes)."""
    dp = DataParallel(Model(), timeout=TIMEOUT, bucket_mb=1e-4)

    def step(seed):
        dp.zero_grad()
        dp(batch(2, 4, seed=seed)).sum().backward()

    step(0)
    step(1)
    if rank == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "stall":
            time.sleep(2.5 * TIMEOUT)
            return None
        elif how == "skip":
            driver = dp._reducer.driver
            driver.reduce = lambda job, go=driver.reduce: go(job) if job.bucket.index != 2 else None
        elif how == "interrupt":
            Interrupt.armed = True
            with pytest.raises(KeyError, match="data went bad"):
                step(2)
            Interrupt.armed = False
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        step(2)
    seconds = time.monotonic() - start
    error = caught.value
    with pytest.raises(CollectiveError):  # and stays so
        step(3)
    return seconds, str(error), error.ranks, error.step


def one_rank_is_absent(rank, world):
    if rank == 1:
        time.sleep(2 * TIMEOUT)
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 1 did not reach its construction") as caught:
        DataParallel(mlp(2, 2), timeout=TIMEOUT)
    assert caught.value.ranks == (1,)
    return time.monotonic() - start


def any_moment(rank, world, seed):
    """Training goes on until rank `victim` is killed or stopped, at a moment drawn from `seed`: in a forward, a
    backward, between buckets, in the optimizer's step. Returns as `one_rank_fails`.
    """
    draw = random.Random(seed)
    victim, stage = draw.randrange(world), draw.randrange(4)
    sign = signal.SIGSTOP if seed % 2 else signal.SIGKILL
    delay = draw.uniform(0.0, 0.3)
    options = {"timeout": TIMEOUT, "bucket_mb": draw.choice((1e-4, 1.0))}
    if stage:
        model = Zero(Model(), stage=stage, **options)
        optimizer = model.optimizer
    else:
        model = DataParallel(Model(), **options)
        optimizer = tw.optim.AdamW(model.parameters())

    def step(seed):
        optimizer.zero_grad()
        model(batch(2, 4, seed=seed)).sum().backward()
        optimizer.step()

    step(0)
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), sign)).start()
    with pytest.raises(CollectiveError) as caught:
        for number in range(1, 1_000_000):
            start = time.monotonic()
            step(number)
    seconds = time.monotonic() - start
    error = caught.value
    with pytest.raises(CollectiveError):  # and stays so
        step(0)
    return seconds, str(error), error.ranks, error.step, victim
