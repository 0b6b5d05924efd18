"""A virtual GPU: runs the PTX that nvcc and Triton emit, on CPU tensors, without a GPU.

>>> from trainwright import vgpu
>>> device = vgpu.Device("sm_80")
>>> module = device.load_ptx(ptx_text)                                             # doctest: +SKIP
>>> module.launch("vector_add", grid=4, block=256, args=(x, y, out, x.numel()))    # doctest: +SKIP

Results are those of the PTX ISA; functions that hardware approximates are at least as accurate here. It is a tool for
correctness and for counting: the time it takes says nothing about a GPU.
"""

from trainwright.vgpu.counters import Bound, Counters, Counts, KernelCounters
from trainwright.vgpu.device import Device, LaunchReport, Module
from trainwright.vgpu.errors import (
    AsyncError,
    BarrierError,
    DeadlockError,
    Fault,
    LaunchError,
    MemoryFault,
    PtxSyntaxError,
    RaceError,
    TrapError,
    UninitialisedError,
    UnsupportedError,
    VgpuError,
)
from trainwright.vgpu.tensor_map import tensor_map

__all__ = [
    "AsyncError",
    "BarrierError",
    "Bound",
    "Counters",
    "Counts",
    "DeadlockError",
    "Device",
    "Fault",
    "KernelCounters",
    "LaunchError",
    "LaunchReport",
    "MemoryFault",
    "Module",
    "PtxSyntaxError",
    "RaceError",
    "TrapError",
    "UninitialisedError",
    "UnsupportedError",
    "VgpuError",
    "tensor_map",
]
