"""Whether to hide communication under a split product: a model of the links and the processor, measured once per group.

A product is worth overlapping where its schedule, played against the clock by `Schedule.makespan`, ends sooner than the
plain one. What the model needs is measured by all ranks of a group together at the first call that is large enough to
ask, and made the same on every rank, so that all decide alike. Nothing here touches a value: a decision changes how
long a call takes, never a bit of its result.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainwright import dispatch
from trainwright.errors import type_error
from trainwright.ops.gemm import gemm
from trainwright.parallel._schedule_runtime import Group, world_of
from trainwright.parallel.schedule import Schedule

__all__ = ["CostModel", "Decision", "calibrate", "decisions"]

logger = logging.getLogger("trainwright.parallel")
SMALLEST_BYTES = (
    1 << 16
)  # a rank that sends less waits for latency alone: plain, and nothing is measured for it
WORTHWHILE = 0.97  # of the plain time: what a prediction has to stay below, as it has errors too
CANDIDATES = (1, 2, 4, 8)
MOST_MESSAGES = 64  # of a rank in one call: more chunks are not considered
KEPT = 256  # decisions


@dataclass(frozen=True)
class CostModel:
    """What a group of ranks can do, the same numbers on every rank.

    Attributes:
        latency_s: α, seconds that a message takes beside its bytes.
        bytes_per_s: B, of one direction of a rank's link, while all ranks send.
        flops_per_s: P, of a rank's matrix product in one dtype, while all ranks compute.
        hidden: share of the shorter of a message and a product that disappears under the longer, 0 to 1. On hosts of
            their own it is near 1; on ranks that share their cores with the network near 0.
    """

    latency_s: float
    bytes_per_s: float
    flops_per_s: float
    hidden: float

    def seconds(self, schedule: Schedule) -> float:
        """`Schedule.makespan`, for sizes in bytes and costs in FLOPs."""
        return schedule.makespan(
            per_cost=1 / self.flops_per_s,
            per_message=self.latency_s,
            per_size=1 / self.bytes_per_s,
        )


@dataclass(frozen=True)
class Decision:
    """How one kind of call is done, and how that went.

    Attributes:
        call: the operation, its sizes and ranks.
        overlap, chunks: of the schedule; without overlap it is the plain one.
        predicted_s: of the chosen schedule; plain_s: of the plain one. None where nothing was predicted.
        calls: done so; actual_s: the latest of them, host time, with what the caller did under it (CPU only).
    """

    call: str
    overlap: bool
    chunks: int
    predicted_s: float | None = None
    plain_s: float | None = None
    calls: int = 0
    actual_s: float | None = None

    def __str__(self) -> str:
        how = f"overlapped in {self.chunks} chunk(s)" if self.overlap else "plain"
        text = f"{self.call}: {how}"
        if self.predicted_s is not None and self.plain_s is not None:
            ratio = self.plain_s / self.predicted_s
            text += (
                f", predicted {1e3 * self.predicted_s:.3g} ms, {ratio:.2f} times as fast as plain"
            )
        if self.actual_s is not None:
            text += f", took {1e3 * self.actual_s:.3g} ms"
            if self.predicted_s:
                text += f", {self.actual_s / self.predicted_s:.2f} of predicted"
        return text


class _Key(NamedTuple):
    call: str
    model: CostModel | None
    candidates: tuple[int, ...]


_models: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.dtype, CostModel]]
_models = weakref.WeakKeyDictionary()
_decided: OrderedDict[_Key, Decision] = OrderedDict()
_forced: tuple[bool, int] | None = None


@contextlib.contextmanager
def forced(overlap: bool, chunks: int) -> Iterator[None]:
    """Inside, calls with overlap="auto" are done so, whatever the model says: for tests and measurements. Every rank
    must do it alike."""
    global _forced
    before, _forced = _forced, (overlap, chunks)
    try:
        yield
    finally:
        _forced = before


def decisions() -> list[Decision]:
    """The latest kinds of calls of this process that communicated under overlap="auto", the newest last.

    The first of a kind is also logged, by the logger "trainwright.parallel" at level INFO; `tw.explain` shows those of
    one call.
    """
    return list(_decided.values())


class Choice:
    """What `choose` found for one call: `overlap`, `chunks`, and `done` to say that it is over."""

    def __init__(self, key: _Key | None, overlap: bool, chunks: int, on_cpu: bool) -> None:
        self.key, self.overlap, self.chunks = key, overlap, chunks
        self.begin = time.perf_counter() if on_cpu and key is not None else None

    def done(self) -> None:
        if self.key is None or self.key not in _decided:
            return
        decision = _decided[self.key]
        took = None if self.begin is None else time.perf_counter() - self.begin
        decision = replace(decision, calls=decision.calls + 1, actual_s=took)
        _decided[self.key] = decision
        dispatch.note(str(decision))


def choose(
    call: str, sent_bytes: int, peers: int, device: torch.device, model: Callable[[], CostModel],
    build: Callable[[int, bool], Schedule], repeated_flops: float = 0.0, candidates: tuple[int, ...] = CANDIDATES,
) -> Choice:  # fmt: skip
    """How to do a call that may overlap.

    Args:
        call: names the operation and everything that `build` depends on.
        sent_bytes: what the rank that sends most sends, the same number on every rank.
        peers: ranks that it exchanges messages with.
        model: of the group and dtype; asked for only if the call is large enough.
        build: (chunks, overlap) -> schedule in bytes and FLOPs.
        repeated_flops: work that each chunk beyond the first repeats on a rank, such as packing an operand again.
        candidates: numbers of chunks; where a result depends on it, the one that is right.
    """
    on_cpu = device.type == "cpu"
    if not peers:
        return Choice(None, False, candidates[0], on_cpu)
    if _forced is not None:
        overlap, chunks = _forced
        return Choice(None, overlap, chunks if candidates is CANDIDATES else candidates[0], on_cpu)
    numbers = model() if sent_bytes >= SMALLEST_BYTES else None
    key = _Key(call, numbers, candidates)
    if key not in _decided:
        found = _decide(key, peers, build, repeated_flops)
        _decided[key] = found
        if len(_decided) > KEPT:
            _decided.popitem(last=False)
        logger.info("%s", found)
    _decided.move_to_end(key)
    decision = _decided[key]
    return Choice(key, decision.overlap, decision.chunks, on_cpu)


def _decide(
    key: _Key, peers: int, build: Callable[[int, bool], Schedule], repeated_flops: float
) -> Decision:
    plain = key.candidates[0]
    if key.model is None:
        return Decision(key.call, False, plain)
    model = key.model
    plain_s = model.seconds(build(plain, False))
    best, best_s = plain, plain_s
    overlap = False
    for chunks in key.candidates:
        if chunks > plain and chunks * peers > MOST_MESSAGES:
            continue
        hidden_s = plain_s - model.seconds(build(chunks, True))
        seconds = plain_s - model.hidden * hidden_s
        seconds += (chunks - plain) * repeated_flops / model.flops_per_s
        if seconds < min(best_s, WORTHWHILE * plain_s):
            best, best_s, overlap = chunks, seconds, True
    return Decision(key.call, overlap, best, best_s, plain_s)


# ---- measuring


def calibrate(
    group: Group = None, *, dtype: torch.dtype = torch.float32, device: Any = None, refresh: bool = False
) -> CostModel:  # fmt: skip
    """The cost model of a group; measured if it was not before, by all its ranks together (0.1 s or more).

    Args:
        group: process group; None is the default group.
        dtype: of the products.
        device: "cpu" or a CUDA device; None is the one of the group's backend.
        refresh: measure again, e.g. after the machine became busy. Every rank has to ask alike.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: dtype is not a torch.dtype.
    """
    from trainwright.parallel._exchange import check_group

    check_group("calibrate", group)
    if not isinstance(dtype, torch.dtype):
        raise type_error("calibrate", "dtype", "a torch.dtype", type(dtype).__name__)
    actual = world_of(group)
    if device is None:
        nccl = dist.get_backend(actual) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    known = _models.setdefault(actual, {})
    if refresh:
        known.clear()
    if dtype not in known:
        known[dtype] = _measure(
            actual, dtype, torch.device(device), next(iter(known.values()), None)
        )
    return known[dtype]


def _measure(
    group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, known: CostModel | None
) -> CostModel:
    world = dist.get_world_size(group)
    product, flops = _sample_product(dtype, device)
    if world == 1:
        return CostModel(0.0, float("inf"), flops / _median(product, device, 3), 0.0)
    ring = _RingOfMessages(group, device)
    ring.send(1024)
    product_s = _slowest(_median(product, device, 5), group, device)
    if known is not None:  # of another dtype: the links are the same
        return replace(known, flops_per_s=flops / product_s)
    latency_s = _slowest(_median(lambda: ring.send(1024), device, 20, 4), group, device)
    size, message_s = 1 << 18, 0.0
    while message_s < 0.05 and size < 1 << 23:  # every rank sees the same time, so the same size
        size *= 2
        ring.send(size)  # uses up the credit of a link that was idle
        message = functools.partial(ring.send, size)
        message_s = _slowest(_median(message, device, 3), group, device)
    products = max(1, round(message_s / product_s))

    def work() -> None:
        for _ in range(products):
            product()

    alone_s = _slowest(_median(work, device, 5), group, device)
    both_s = _slowest(_median(lambda: ring.send(size, work), device, 5), group, device)
    message_s = _slowest(_median(lambda: ring.send(size), device, 5), group, device)
    hidden = (message_s + alone_s - both_s) / min(message_s, alone_s)
    model = CostModel(
        latency_s,
        size / max(message_s - latency_s, 1e-9),
        flops / product_s,
        min(1.0, max(0.0, hidden)),
    )
    logger.info("%d ranks, %s: %s", world, str(dtype).removeprefix("torch."), model)
    return model


def _sample_product(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], float]:
    n = 4096 if device.type == "cuda" else 384
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return lambda: gemm(a, b, None, None, 0, dtype, False), 2.0 * n**3


def _median(
    function: Callable[[], object], device: torch.device, repeats: int, share: int = 2
) -> float:
    """Seconds of a call; the quantile 1 / share of all."""
    times = []
    function()
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // share]


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest of all ranks' times: a step ends with its slowest rank. The same bits everywhere."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value)


class _RingOfMessages:
    """Every rank sends to the next and receives from the one before, at the same time."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        world, me = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.device = group, device
        self.right, self.left = (
            dist.get_global_rank(group, (me + step) % world) for step in (1, world - 1)
        )
        self.out, self.into = (torch.zeros(1 << 23, dtype=torch.uint8, device=device) for _ in range(2))  # fmt: skip

    def send(self, size: int, under: Callable[[], None] | None = None) -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, self.into[:size], self.left, self.group),
                dist.P2POp(dist.isend, self.out[:size], self.right, self.group),
            ]
        )
        if under is not None:
            under()
        for work in works:
            work.wait()


def agree(model: CostModel, group: Group, device: torch.device) -> CostModel:
    """The worst of what the ranks of a group know: of each number the one that takes longest."""
    numbers = [model.latency_s, -model.bytes_per_s, -model.flops_per_s, -model.hidden]
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    latency_s, *rest = values.tolist()
    return CostModel(latency_s, *(-v for v in rest))
