"""What can go wrong on the virtual GPU."""

from __future__ import annotations


class VgpuError(RuntimeError):
    """Base of everything that the virtual GPU raises."""


class PtxSyntaxError(VgpuError):
    """The text is not PTX."""


class UnsupportedError(VgpuError, NotImplementedError):
    """The kernel uses something that the virtual GPU does not execute. Raised before anything runs."""


class LaunchError(VgpuError, ValueError):
    """The launch does not fit the kernel: name, dimensions, arguments, shared memory. Raised before anything runs."""


class Fault(VgpuError):
    """The kernel did something wrong while it ran. The message has all of it; the attributes are for programs."""

    kernel: str = ""
    ptx_line: int = -1
    instruction: str = ""
    source_file: str = ""
    source_line: int = -1
    block: tuple[int, int, int] = (-1, -1, -1)
    warp: int = -1
    lane: int = -1
    address: int | None = None


class MemoryFault(Fault):
    """An access out of bounds, misaligned, or to read-only memory."""


class RaceError(Fault):
    """Two accesses to one place that nothing orders."""


class UninitialisedError(Fault):
    """A read of shared memory that nobody has written."""


class AsyncError(Fault):
    """Data of an asynchronous operation was touched before its wait."""


class BarrierError(Fault):
    """A barrier, or another instruction for several lanes, in divergent code or with mismatched counts or masks."""


class DeadlockError(Fault):
    """No warp can go on, or all that run wait for something that nobody changes."""


class TrapError(Fault):
    """The kernel stopped itself: trap or a failed assertion."""
