"""Copies between an accelerator and the host beside the work of both, for `Offload`.

An engine starts copies in order of the calls, downward and upward ones independently of each other, and says when they
are done. `DirectCopies` is done when the call returns; `CudaCopies` uses one side stream for each direction, so that
copies overlap with each other, with the host, and with the device's own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class CopyEngine(Protocol):
    def empty_like(self, t: Tensor) -> Tensor:
        """Host memory for `t` (shape, dtype, dense strides) that this engine can copy from and to."""

    def empty_bytes(self, count: int) -> Tensor:
        """(count,) uint8 of such memory."""

    def begin(self) -> None:
        """Copies started from now on come after what the device has been given to do so far."""

    def copy_down(self, host: Sequence[Tensor], device: Sequence[Tensor]) -> Any:
        """Start copying tensors from the device to the host; returns a ticket."""

    def copy_up(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> Any:
        """Start copying tensors from the host to the device; returns a ticket."""

    def synchronize(self, ticket: Any) -> None:
        """The host waits for the copies of the ticket, and those of the same direction before it."""

    def finish(self) -> None:
        """What the device is given to do from now on comes after the copies up started so far. The host goes on."""


class DirectCopies:
    """Ordinary copies, for devices without an engine of their own (the CPU standing for one)."""

    def empty_like(self, t: Tensor) -> Tensor:
        return torch.empty_like(t, device="cpu")

    def empty_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def begin(self) -> None:
        pass

    def copy_down(self, host: Sequence[Tensor], device: Sequence[Tensor]) -> None:
        for h, d in zip(host, device):
            h.copy_(d)

    def copy_up(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        for d, h in zip(device, host):
            d.copy_(h)

    def synchronize(self, ticket: None) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaCopies:
    """Page-locked host memory, a stream for each direction, an event for each ticket."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has streams of its own: they cannot be copied."""
        return CudaCopies, (self.device,)

    def empty_like(self, t: Tensor) -> Tensor:
        return torch.empty_like(t, device="cpu", pin_memory=True)

    def empty_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        current = torch.cuda.current_stream(self.device)
        self.down.wait_stream(current)
        self.up.wait_stream(current)

    def _copy(
        self, stream: torch.cuda.Stream, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # who waits leaves the core to others
            done.record(stream)
        return done

    def copy_down(self, host: Sequence[Tensor], device: Sequence[Tensor]) -> torch.cuda.Event:
        return self._copy(self.down, host, device)

    def copy_up(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> torch.cuda.Event:
        return self._copy(self.up, device, host)

    def synchronize(self, ticket: torch.cuda.Event) -> None:
        ticket.synchronize()

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.up)


def copy_engine(device: torch.device) -> CopyEngine:
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
