"""Triton on the virtual GPU: inside ``with Device("sm_90a"):`` a JIT kernel is compiled to PTX and run on CPU tensors.

A Triton driver stands in for that of CUDA, and a compiler backend that stops at PTX for that of NVIDIA, so neither a
GPU nor libcuda nor ptxas is needed. Kernels, options and launches are unchanged; what Triton caches for a real GPU is
kept apart. Written against Triton 3.6 to 3.9.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver as triton_driver
from triton.runtime.jit import JITFunction

from trainwright import _vgpu
from trainwright.vgpu.device import Device, Module
from trainwright.vgpu.errors import LaunchError, UnsupportedError, VgpuError

_PTX_VERSION = 86  # asked of Triton's code generator if it cannot ask ptxas
_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # a block's, at most
_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132}
_FIRST_DEVICE = 1000  # Triton caches by device number; a real GPU has a small one
# CUtensorMapDataType of tensormap.replace's numbers, where they differ.
_DRIVER_TYPES = {8: 10, 9: 8, 10: 9}
_TF32 = 11
_UNFENCED_COPIES = triton.__version__.startswith("3.6.")  # of cp.async, for wgmma
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d", "fp16": "<e", "f16": "<e"}

_active: tuple[Device, Any, dict[str, Any]] | None = None  # device, driver before, backends before


def activate(device: Device) -> None:
    """Make `device` the one that Triton compiles for and launches on."""
    global _active
    if _active is not None:
        raise VgpuError(f"Device: `with` does not nest: one of {_active[0].arch} is active already")
    if device.arch == "sm_90":
        raise VgpuError("Device: Triton compiles for sm_90a, which sm_90 does not run; use sm_90a")
    if not isinstance(tl.sum, JITFunction):
        raise VgpuError(
            "Device: this process runs Triton in its interpreter; unset TRITON_INTERPRET before triton is imported"
        )
    before = dict(backends)
    target = _Driver(device).get_current_target()
    for name, backend in before.items():
        if backend.compiler.supports_target(target):
            backends[name] = type(backend)(compiler=_PtxBackend, driver=backend.driver)
    _active = (device, getattr(triton_driver, "_active", None), before)
    triton_driver.set_active(_Driver(device))


def deactivate() -> None:
    """Undo `activate`: the driver before it is the active one again."""
    global _active
    if _active is None:
        return
    _, driver, before = _active
    backends.update(before)
    triton_driver._active = driver
    _active = None


class _PtxBackend(CUDABackend):  # type: ignore[misc]
    """NVIDIA's compiler without its last step: what it calls machine code is the PTX."""

    def parse_options(self, opts: dict[str, Any]) -> Any:
        if opts.get("ptx_version") is None:
            try:
                _ = triton.knobs.nvidia.ptxas.version
            except Exception:  # it raises what it likes if there is none
                opts = {**opts, "ptx_version": _PTX_VERSION}
        return super().parse_options(opts)

    def add_stages(self, stages: dict[str, Any], *args: Any) -> None:
        super().add_stages(stages, *args)
        stages[self.binary_ext] = lambda ptx, metadata: ptx.encode()

    def hash(self) -> str:  # of the compiler, for Triton's cache
        return f"trainwright.vgpu-{self.target.arch}"


class _Kernel:
    """A compiled kernel: its PTX, and what each device has made of it."""

    def __init__(self, name: str, ptx: bytes) -> None:
        if ptx[:4] == b"\x7fELF":
            raise LaunchError(
                f"{name}: compiled to machine code; compile it inside `with Device(...)`, which keeps the PTX"
            )
        self.name, self.ptx = name, ptx.decode()
        self.modules: WeakKeyDictionary[Device, Module] = WeakKeyDictionary()

    def module(self, device: Device) -> Module:
        if device not in self.modules:
            try:
                module = device.load_ptx(self.ptx)
                module._unfenced_copies = _UNFENCED_COPIES
                self.modules[device] = module
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.name}: {error}") from None
        return self.modules[device]


class _Utils:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """(module, function, registers, spills, most threads). No module: there is nothing to unload."""
        return None, _Kernel(name, binary), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        number = device - _FIRST_DEVICE
        return {
            "max_shared_mem": _SHARED_BYTES[number],
            "max_num_regs": 65536,
            "multiprocessor_count": _MULTIPROCESSORS[number],
            "warpSize": 32,
            "sm_clock_rate": 1_000_000,
            "mem_clock_rate": 1_000_000,
            "mem_bus_width": 5120,
        }


class _Driver(DriverBase):  # type: ignore[misc]
    def __init__(self, device: Device) -> None:
        self.device = device
        self.number = int(device.arch.removeprefix("sm_").rstrip("a"))
        self.utils = _Utils()
        self.launcher_cls = _Launcher

    @staticmethod
    def is_active() -> bool:
        return False  # never by itself

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)

    def get_current_device(self) -> int:
        return _FIRST_DEVICE + self.number

    def set_current_device(self, device: int) -> None:
        if device != self.get_current_device():
            raise VgpuError(f"the virtual GPU is the only device, got {device}")

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.number // 10, self.number % 10

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise VgpuError("the virtual GPU has no compiled launcher")

    def get_device_interface(self) -> Any:
        raise VgpuError("the virtual GPU has no clock: nothing can be timed on it")

    def get_benchmarker(self) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise VgpuError(
                "the virtual GPU has no clock, so it cannot choose between the configurations of an autotuned kernel: "
                "leave one of them (kernel.configs = kernel.configs[:1])"
            )

        return refuse


class _Launcher:
    """Packs a launch's arguments as Triton's ABI wants them, and runs it on the active device."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.signature = tuple(src.signature.values())
        names = src.fn.arg_names if hasattr(src, "fn") else [str(i) for i in src.signature]
        self.names = tuple(names)

    def __call__(
        self, x: int, y: int, z: int, stream: Any, kernel: _Kernel, packed_metadata: Any, launch_metadata: Any,
        enter_hook: Any, exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        if _active is None:
            raise LaunchError(f"{kernel.name}: launched outside of `with Device(...)`")
        device = _active[0]
        module = kernel.module(device)
        memory: list[torch.Tensor] = []
        values = list(self._pack(kernel.name, args, memory))
        grid = (int(x) * self.metadata.num_ctas, int(y), int(z))
        programs = grid[0] * grid[1] * grid[2]
        hidden = len(module._native.parameters(kernel.name)) - len(values)
        for kind in ("global", "profile")[:hidden]:
            values.append(self._scratch(kind, programs, memory))
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if programs > 0:
            block = tuple(module._native.required_block(kernel.name))
            module.launch(
                kernel.name,
                grid,
                block if block[0] else 32 * self.metadata.num_warps,
                values,
                smem=self.metadata.shared,
                memory=memory,
            )
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _scratch(self, kind: str, programs: int, memory: list[torch.Tensor]) -> int:
        """Address of the memory that each program has a part of, or 0."""
        size = getattr(self.metadata, f"{kind}_scratch_size", 0) * programs
        if not size:
            return 0
        align = max(getattr(self.metadata, f"{kind}_scratch_align", 1), 1)
        buffer = torch.empty(size + align, dtype=torch.uint8)
        start = -buffer.data_ptr() % align
        memory.append(buffer[start : start + size])
        return memory[-1].data_ptr()

    # ---- arguments: one value (address, bytes) for each parameter of the PTX

    def _pack(self, kernel: str, args: Sequence[Any], memory: list[torch.Tensor]) -> Iterator[Any]:
        maps = iter(getattr(self.metadata, "tensordesc_meta", None) or ())
        for name, kind, value in zip(self.names, self.signature, args):
            yield from self._flatten(f"{kernel}: argument {name}", kind, value, maps, memory)

    def _flatten(
        self, what: str, kind: Any, value: Any, maps: Iterator[Any], memory: list[torch.Tensor]
    ) -> Iterator[Any]:
        if isinstance(kind, tuple):
            for i, (k, v) in enumerate(zip(kind, value)):
                yield from self._flatten(f"{what}[{i}]", k, v, maps, memory)
        elif kind == "constexpr":
            return
        elif kind.startswith("*"):
            yield _address(what, value, memory)
        elif kind.startswith("tensordesc"):
            yield from _descriptor(what, value, next(maps, None), memory)
        else:
            yield _scalar(what, kind, value)


def _address(what: str, value: Any, memory: list[torch.Tensor]) -> int:
    tensor = getattr(value, "base", value)  # triton.reinterpret wraps a tensor
    if not isinstance(tensor, torch.Tensor):
        raise LaunchError(f"{what}: expected a CPU tensor, got {type(value).__name__}")
    if tensor.device.type != "cpu":
        raise LaunchError(f"{what}: expected a CPU tensor, got one on {tensor.device}")
    memory.append(tensor)
    return int(value.data_ptr())


def _scalar(what: str, kind: str, value: Any) -> bytes:
    if kind in _FLOATS:
        return struct.pack(_FLOATS[kind], value)
    if kind == "bf16":
        return struct.pack("<h", torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item())
    if kind[0] not in "iu" or not kind[1:].isdigit():
        raise UnsupportedError(f"{what}: arguments of type {kind} are not supported")
    size = max(int(kind[1:]) // 8, 1)
    return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def _descriptor(what: str, value: Any, info: Any, memory: list[torch.Tensor]) -> Iterator[Any]:
    """A TensorDescriptor: as a tensor map if the kernel uses TMA, else as what describes it; then, either way, its
    shape and strides."""
    shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
    address = _address(what, value.base, memory)
    if info is None:
        yield address
        for n in (*shape, *strides):
            yield _scalar(what, "i64", n)
        yield _scalar(what, "i1", value.padding == "nan")
        if hasattr(value, "round_f32_to_tf32"):  # Triton 3.7 and later
            yield _scalar(what, "i1", value.round_f32_to_tf32)
    else:
        yield _tensor_map(what, value, info, address, shape, strides)
    for n in shape:
        yield _scalar(what, "i32", n)
    for n in strides:
        yield _scalar(what, "i64", n)


def _tensor_map(
    what: str, value: Any, info: Any, address: int, shape: list[int], strides: list[int]
) -> bytes:
    if info.get("is_im2col"):
        raise UnsupportedError(f"{what}: im2col descriptors are not supported")
    element = _DRIVER_TYPES.get(info["elem_type"], info["elem_type"])
    if getattr(value, "round_f32_to_tf32", False):
        element = _TF32
    size = info["elem_size"]
    dims = [*shape[:-1], shape[-1] * 2] if info["fp4_padded"] else shape
    try:
        encoded: bytes = _vgpu.encode_tiled(
            type=element,
            address=address,
            dims=dims[::-1],
            strides=[s * size for s in strides[-2::-1]] if len(strides) > 1 else [],
            box=list(info["block_size"])[::-1],
            element_strides=[1] * len(shape),
            interleave=0,
            swizzle=info["swizzle"],
            fill=int(value.padding == "nan"),
        )
    except ValueError as error:
        raise LaunchError(f"{what}: {error}") from None
    return encoded
