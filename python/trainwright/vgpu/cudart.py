"""Run what nvcc compiled on a virtual GPU: the Python side of csrc/vgpu/cudart, which stands in for libcudart.

Kernels must be there as PTX: compile with ``-gencode arch=compute_80,code=compute_80 --no-compress`` and link with
libtw_cudart.so in place of the CUDA runtime.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainwright.vgpu.device import Device, LaunchReport, Module


@dataclass(frozen=True)
class Properties:
    """What a program can ask of the device. Sizes in bytes; None: that of the architecture."""

    name: str = "virtual GPU"
    multiprocessors: int | None = None
    shared_per_multiprocessor: int | None = None
    l2_bytes: int | None = None


# By architecture: those of A100, A10, L4 and H100.
_PROPERTIES = {
    "sm_80": Properties("virtual sm_80", 108, 167936, 40 << 20),
    "sm_86": Properties("virtual sm_86", 72, 102400, 6 << 20),
    "sm_89": Properties("virtual sm_89", 58, 102400, 48 << 20),
    "sm_90": Properties("virtual sm_90", 132, 233472, 50 << 20),
}


def load_program(path: Path) -> ctypes.CDLL:
    """A library that was linked with libtw_cudart.so; bound to it even in a process that has a real libcudart."""
    # AddressSanitizer refuses RTLD_DEEPBIND.
    sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    mode = os.RTLD_NOW if sanitized else os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0)
    return ctypes.CDLL(str(path), mode=mode)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("ptx", ctypes.c_void_p),
        ("ptx_bytes", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("memory", ctypes.POINTER(_Range)),
        ("ranges", ctypes.c_uint64),
    )


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Launch), ctypes.POINTER(ctypes.c_char), ctypes.c_uint64
)
_VARIABLE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_char_p,
    ctypes.POINTER(_Range),
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_uint64,
)


class _Executor(ctypes.Structure):
    _fields_ = (("launch", _LAUNCH), ("variable", _VARIABLE))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        *(
            (name, ctypes.c_int)
            for name in (
                "major",
                "minor",
                "specific",
                "multiprocessors",
                "shared_per_multiprocessor",
                "l2_bytes",
                "memory_bus_bits",
                "clock_khz",
                "memory_clock_khz",
            )
        ),
    )


class Runtime:
    """The CUDA runtime of this process, executing on `device`.

    Args:
        library: libtw_cudart.so.
        device: where kernels run; may be replaced later by `attach`.
        properties: what programs are told of the device, where it should differ from the architecture's usual.

    A kernel that fails makes its launch fail with cudaErrorLaunchFailure and the fault's message; `fault` keeps the
    exception itself, until the next launch.
    """

    def __init__(
        self, library: Path, device: Device, *, properties: Properties | None = None
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._modules: dict[tuple[int, str], Module] = {}
        self.fault: Exception | None = None
        self.watch: Callable[[str, LaunchReport], None] | None = None
        """Called with the kernel's name and its report after each launch."""
        # Kept alive: the library calls them for as long as the process runs.
        self._executor = _Executor(_LAUNCH(self._launch), _VARIABLE(self._variable))
        self.attach(device, properties)
        self._library.tw_vgpu_set_executor(ctypes.byref(self._executor))

    def attach(self, device: Device, properties: Properties | None = None) -> None:
        """Run what is launched from now on on `device`."""
        number = int(device.arch.removeprefix("sm_").rstrip("a"))
        given = {k: v for k, v in vars(properties or Properties()).items() if v is not None}
        p = replace(_PROPERTIES[f"sm_{number}"], **given)
        self.device = device
        self._properties = _Properties(
            p.name.encode(), number // 10, number % 10, device.arch.endswith("a"), p.multiprocessors,
            p.shared_per_multiprocessor, p.l2_bytes, 5120, 1_000_000, 1_000_000,
        )  # fmt: skip
        self._library.tw_vgpu_set_properties(ctypes.byref(self._properties))

    def _module(self, ptx: int, size: int) -> Module:
        key = (ptx, self.device.arch)
        if key not in self._modules:
            self._modules[key] = self.device.load_ptx(ctypes.string_at(ptx, size).decode())
        module = self._modules[key]
        module.device = self.device
        return module

    def _launch(self, pointer: Any, message: Any, capacity: int) -> int:
        try:
            self.fault = None
            launch = pointer.contents
            module, name = self._module(launch.ptx, launch.ptx_bytes), launch.kernel.decode()
            report = module.launch(
                name,
                tuple(launch.grid),
                tuple(launch.block),
                [
                    ctypes.string_at(launch.arguments[i], size)
                    for i, (_, _, _, size, _) in enumerate(module._native.parameters(name))
                ],
                smem=launch.dynamic_shared,
                cluster=tuple(launch.cluster) if launch.cluster[0] else None,
                memory=[
                    (r.address, r.bytes) for r in (launch.memory[i] for i in range(launch.ranges))
                ],
            )
            if self.watch is not None:
                self.watch(name, report)
            return 0
        except Exception as error:
            return self._failed(error, message, capacity)

    def _variable(
        self, ptx: int, size: int, name: bytes, result: Any, message: Any, capacity: int
    ) -> int:
        try:
            result.contents.address, result.contents.bytes = self._module(ptx, size).variable(
                name.decode()
            )
            return 0
        except Exception as error:
            return self._failed(error, message, capacity)

    def _failed(self, error: Exception, message: Any, capacity: int) -> int:
        self.fault = error
        text = f"{type(error).__name__}: {error}".encode()[: capacity - 1] + b"\0"
        ctypes.memmove(message, text, len(text))
        return -1
