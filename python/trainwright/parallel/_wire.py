"""The collectives that the reducer issues, on process groups of its own.

A strategy must not share a process group with the user: its collectives come from another thread, and two threads on
one group would pair up differently on different ranks. So each strategy makes its own groups over the store of the
user's
group: on CPU two Gloo groups, one for each phase of the ordered sum, so that the phases of successive buckets
overlap while the order within a group stays fixed; on GPU one NCCL group, and one Gloo group for what the host must
know. ZeRO's stage 3 fetches parameters while gradients travel, from another thread: over the group of the second
phase on CPU, which it has no other use for; on GPU over an NCCL group of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trainwright.errors import type_error
from trainwright.parallel.errors import CollectiveError

_joined: dict[
    str, int
] = {}  # how many wires each group has made: their names must agree across ranks


class Channel:
    """One process group whose collectives are issued in one order on all ranks. Each call returns at once, with a
    `Work` or what has its `wait`.
    """

    def __init__(self, backend: Any, rank: int, world: int) -> None:
        self._backend = backend
        self._rank, self._world = rank, world

    def all_to_all(self, out: Tensor, send: Tensor) -> Any:
        """Part j of `send` goes to rank j; part i of `out` comes from rank i, this rank's own part perhaps not."""
        return self._backend.alltoall_base(out, send, [], [])

    def all_gather(self, out: Tensor, send: Tensor) -> Any:
        """`send` becomes part `rank` of `out` on all ranks; it may lie there already."""
        return self._backend._allgather_base(out, send)

    def exchange(self, outs: Sequence[Tensor], sends: Sequence[Tensor], total: int) -> Any:
        """`sends[j]`, of any size, goes to rank j; `outs[i]` comes from rank i, this rank's own perhaps not. `total` is
        a number of bytes on which all ranks agree.
        """
        return self._backend.alltoall(list(outs), list(sends))

    def all_reduce(self, x: Tensor) -> Any:
        return self._backend.allreduce([x])

    def broadcast(self, x: Tensor, source: int) -> Any:
        """From the group's rank `source`."""
        return self._backend.broadcast(x, source)

    def abort(self) -> None:
        """After a failure: let nothing wait for the collectives in flight (on GPU, not even the stream)."""
        with contextlib.suppress(Exception):
            self._backend.abort()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._backend.shutdown()
        self._backend = None


class _Messages:
    """Messages in flight: done when all of them are."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if not work.wait():
                raise RuntimeError("the message was aborted")


class GlooChannel(Channel):
    """Gloo for host tensors. What moves much data is made of messages here, each receive posted before any send.

    Gloo's own all-to-all posts its sends first: when the other rank is ready already, this rank's announcement that it
    can receive queues behind its own data, and the link runs one direction at a time. Its all-gather takes twice the
    time of an all-to-all.
    """

    def __init__(self, backend: Any, rank: int, world: int) -> None:
        super().__init__(backend, rank, world)
        self._count = 0
        self._issued: queue.SimpleQueue[tuple[Any, Callable[[str | None], None]] | None] = (
            queue.SimpleQueue()
        )
        self._waiter: threading.Thread | None = None

    def all_to_all(self, out: Tensor, send: Tensor) -> Any:
        outs, sends = out.view(self._world, -1), send.view(self._world, -1)
        return self._exchange(outs.unbind(), sends.unbind(), out.numel() * out.itemsize)

    def exchange(self, outs: Sequence[Tensor], sends: Sequence[Tensor], total: int) -> Any:
        return self._exchange(outs, sends, total)

    def all_gather(self, out: Tensor, send: Tensor) -> Any:
        outs = out.view(self._world, -1).unbind()
        if outs[self._rank].data_ptr() != send.data_ptr():
            outs[self._rank].copy_(send)
        return self._exchange(outs, [send] * self._world, out.numel() * out.itemsize)

    def _exchange(self, outs: Sequence[Tensor], sends: Sequence[Tensor], total: int) -> _Messages:
        # The size, hashed to 20 bits, is part of the tag: messages of ranks that have diverged never meet.
        size = total * 0x9E3779B1 % (1 << 32) >> 12
        self._count = (self._count + 1) % (1 << 11)
        tag = self._count << 20 | size
        peers = [(self._rank + i) % self._world for i in range(1, self._world)]
        here = [peer for peer in reversed(peers) if outs[peer].numel()]
        works = [self._backend.recv([outs[peer]], peer, tag) for peer in here]
        works += [
            self._backend.send([sends[peer]], peer, tag) for peer in peers if sends[peer].numel()
        ]
        return _Messages(works)

    def when_done(self, work: Any, call: Callable[[str | None], None]) -> None:
        """`call(None)`, or with what went wrong, from a thread of this channel; in the order of these calls."""
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="trainwright-wire", daemon=True)
            self._waiter.start()
        self._issued.put((work, call))

    def _wait(self) -> None:
        while (item := self._issued.get()) is not None:
            work, call = item
            error = None
            try:
                work.wait()
            except Exception as failure:
                error = str(failure)
            call(error)
            del item, work, call

    def close(self) -> None:
        if self._waiter is not None:
            self._issued.put(None)
            if threading.current_thread() is not self._waiter:
                # A message that no rank will answer cannot be called off; its thread ends with the timeout.
                self._waiter.join(0.5)
        super().close()


class Arrival:
    """A collective in flight, which notes when it was done."""

    def __init__(self, channel: Channel, work: Any) -> None:
        self._work, self._error = work, ""
        self._done = threading.Event()
        self.sent = self.arrived = time.perf_counter()
        if isinstance(channel, GlooChannel):
            channel.when_done(work, self._note)
        else:
            self._done.set()

    def _note(self, error: str | None) -> None:
        self.arrived, self._error = time.perf_counter(), error or ""
        self._done.set()

    def wait(self) -> None:
        """Until it is done; on GPU until the stream may go on."""
        self._done.wait()
        if self._error:
            raise RuntimeError(self._error)
        if self.arrived == self.sent:
            self._work.wait()

    @property
    def busy_ms(self) -> float:
        return 1e3 * (self.arrived - self.sent)


@dataclass
class Wire:
    """This rank's place in a group and its channels. `ranks` are the global ranks, in the group's order."""

    rank: int
    world: int
    ranks: tuple[int, ...]
    name: str
    store: Any = None
    control: GlooChannel | None = None  # host tensors
    scatter: Channel | None = None  # first phase, in bucket order
    gather: Channel | None = None  # second phase, in bucket order
    fetch: Channel | None = (
        None  # parameters, in the order of their use, from the thread that uses them
    )

    def _channels(self) -> list[Channel]:
        channels = (self.control, self.scatter, self.gather, self.fetch)
        return list({id(c): c for c in channels if c}.values())

    def abort(self) -> None:
        for channel in self._channels():
            channel.abort()

    def close(self) -> None:
        for channel in self._channels():
            channel.close()


def _gloo(store: Any, rank: int, world: int, timeout: float) -> GlooChannel:
    backend = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout))
    return GlooChannel(backend, rank, world)


def _nccl(store: Any, rank: int, world: int, timeout: float) -> Channel:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return Channel(dist.ProcessGroupNCCL(store, rank, world, options), rank, world)


def _wait_for_all(store: Any, wire: Wire, timeout: float) -> None:
    """Every rank says that it is here; the error names those that did not within the timeout."""
    keys = [f"here/{r}" for r in range(wire.world)]
    store.set(keys[wire.rank], "1")
    deadline = time.monotonic() + timeout
    missing = list(range(wire.world))
    while True:
        missing = [r for r in missing if not store.check([keys[r]])]
        if not missing:
            return
        if time.monotonic() > deadline:
            ranks = tuple(wire.ranks[r] for r in missing)
            raise CollectiveError(
                f"{wire.name}: rank {', '.join(map(str, ranks))} did not reach its construction within {timeout:g} s",
                ranks=ranks,
                operation="construction",
            )
        time.sleep(0.002)


def connect(
    name: str, group: Any, device: torch.device, timeout: float, collective_timeout: float
) -> Wire:
    """Make the channels of a new strategy on `group` (None: all ranks). Collective over the group.

    Their collectives fail after `collective_timeout` seconds.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is not in the group.
        CollectiveError: some rank does not arrive within `timeout` seconds.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{name}: torch.distributed is not initialised; start with torchrun and call"
            " torch.distributed.init_process_group() first"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise RuntimeError(f"{name}: group: this process is not a member of the group")
        raise type_error(name, "group", "None or a process group", type(group).__name__)
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError(f"{name}: group: this process is not a member of the group")
    ranks = tuple(dist.get_process_group_ranks(group))
    wire = Wire(rank, len(ranks), ranks, name)
    if wire.world == 1:
        return wire
    backend = dist.get_backend(group)
    if device.type == "cuda" and "nccl" not in dist.get_backend_config(group):
        raise ValueError(f"{name}: group: expected NCCL for parameters on GPUs, got {backend}")
    key = f"trainwright/{group.group_name}"
    _joined[key] = _joined.get(key, 0) + 1
    base = dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"{key}/{_joined[key]}", base)
    _wait_for_all(store, wire, timeout)
    wire.store = store

    def gloo(phase: str) -> GlooChannel:
        return _gloo(PrefixStore(phase, store), rank, wire.world, collective_timeout)

    if device.type == "cuda":
        wire.control = gloo("control")
        wire.scatter = wire.gather = _nccl(
            PrefixStore("data", store), rank, wire.world, collective_timeout
        )
        # NCCL connects at the first collective: without stage 3 this costs nothing.
        wire.fetch = _nccl(PrefixStore("fetch", store), rank, wire.world, collective_timeout)
    else:
        wire.control = wire.scatter = gloo("scatter")
        wire.gather = wire.fetch = gloo("gather")
    return wire
