"""Device and Module: load PTX, launch kernels on CPU tensors or raw host addresses."""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainwright.vgpu.counters import Counters, Shape
from trainwright.vgpu.errors import LaunchError, UnsupportedError, VgpuError

try:
    from trainwright import _vgpu
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "trainwright.vgpu needs the compiled module _vgpu, which is built from source only: "
        "pip install --no-build-isolation --editable '.[vgpu]' in the repository"
    ) from error

CHECKS = {
    False: _vgpu.Check.off,
    True: _vgpu.Check.on,
    "strict": _vgpu.Check.strict,
    "global": _vgpu.Check.global_,
}
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")

Dimension = int | Sequence[int]
Memory = torch.Tensor | tuple[int, int]


@dataclass(frozen=True)
class LaunchReport:
    """What a launch did: warp instructions executed, and host seconds (which say nothing about a GPU)."""

    warp_instructions: int
    seconds: float


class Device:
    """A virtual GPU of one architecture.

    ``with device:`` makes it the one that Triton compiles for and launches on: ``kernel[grid](...)`` runs there on CPU
    tensors, as it would on a GPU.

    Args:
        arch: "sm_80", "sm_86", "sm_89", "sm_90" or "sm_90a". PTX for a later architecture is
            refused; architecture-specific PTX ("sm_90a") runs on exactly that one.
        threads: host threads that run blocks; default: the number of CPUs. With 1 the order of blocks is
            fixed, so floating-point atomics give the same bits each time.
        check: what is looked for beside access out of bounds, misaligned access, mismatched barriers and
            deadlock, which are always found. True: in shared memory, reads of what nobody wrote, data races,
            asynchronous data touched before its wait and missing proxy fences; and wgmma registers touched in flight.
            "strict": also what PTX forbids but compilers do around wgmma: f16 accumulators unpacked before the wait,
            accumulators copied and operands computed after wgmma.fence; and data of cp.async that wgmma reads without
            a proxy fence in PTX of LLVM. Triton 3.6 emits that, so that it cannot be told from a fence that was lost;
            elsewhere (nvcc, later Triton inside ``with device:``) True finds it too.
            "global": as True, and data races between blocks in global memory (slow). False: nothing more.
        count: count what launches do, for `counters`. Costs time; nothing when False.
    """

    def __init__(
        self,
        arch: str = "sm_90a",
        *,
        threads: int | None = None,
        check: bool | Literal["strict", "global"] = True,
        count: bool = False,
    ) -> None:
        if arch not in ARCHITECTURES:
            raise ValueError(f"Device: arch: expected {', '.join(ARCHITECTURES)}, got {arch!r}")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ValueError(f"Device: threads: expected a positive int, got {threads!r}")
        if check not in CHECKS or (isinstance(check, int) and not isinstance(check, bool)):
            raise ValueError(
                f"Device: check: expected True, False, 'strict' or 'global', got {check!r}"
            )
        self.arch = arch
        self.check = check
        self.threads = threads or os.cpu_count() or 1
        self._memory: list[Memory] = []
        self._counters = Counters() if count else None

    def __enter__(self) -> Device:
        from trainwright.vgpu import driver

        driver.activate(self)
        return self

    def __exit__(self, *exception: object) -> None:
        from trainwright.vgpu import driver

        driver.deactivate()

    @contextlib.contextmanager
    def memory(self, *memory: Memory) -> Iterator[None]:
        """Memory that launches inside this context may touch beyond their arguments: tensors, or (address, bytes).

        For kernels that find addresses in a table.
        """
        before = self._memory
        self._memory = [*before, *memory]
        try:
            yield
        finally:
            self._memory = before

    @property
    def counters(self) -> Counters:
        """What the launches so far have cost, by kernel.

        Raises:
            VgpuError: the device was made without ``count=True``.
        """
        if self._counters is None:
            raise VgpuError(
                f"this device does not count; make it Device({self.arch!r}, count=True)"
            )
        return self._counters

    def load_ptx(self, text: str) -> Module:
        """Parse a PTX module. Kernels are decoded at their first use.

        Raises:
            PtxSyntaxError: the text is not PTX.
            UnsupportedError: it is for an architecture that this device cannot run.
        """
        if not isinstance(text, str):
            raise TypeError(f"load_ptx: text: expected str, got {type(text).__name__}")
        native = _vgpu.Module(text)
        target = native.target
        match = re.fullmatch(r"(?:sm|compute)_(\d+)([af]?)", target)
        if match is None:
            raise UnsupportedError(f"load_ptx: unknown target {target!r}")
        number, specific = int(match[1]), match[2]
        own = int(self.arch.removeprefix("sm_").rstrip("a"))
        if number > own or (specific and self.arch != f"sm_{number}{specific}"):
            raise UnsupportedError(f"load_ptx: PTX for {target} does not run on {self.arch}")
        return Module(self, native, text)


class Module:
    """Kernels and variables of one PTX text. Made by `Device.load_ptx`."""

    def __init__(self, device: Device, native: Any, text: str) -> None:
        self.device = device
        self._native = native
        self._text = text
        # Whether its compiler may hand data of cp.async to wgmma without a proxy fence: Triton 3.6, for all that LLVM
        # says of itself.
        self._unfenced_copies = "LLVM NVPTX" in text[:200]

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels."""
        return list(self._native.kernels)

    def decode(self, name: str) -> None:
        """Decode a kernel without running it; raises UnsupportedError if it has an unsupported instruction."""
        self._native.decode(name)

    def variable(self, name: str) -> tuple[int, int]:
        """(host address, bytes) of a .global or .const variable."""
        address, size = self._native.variable(name)
        return int(address), int(size)

    def launch(
        self,
        name: str,
        grid: Dimension,
        block: Dimension,
        args: Sequence[Any] = (),
        *,
        smem: int = 0,
        cluster: Dimension | None = None,
        memory: Iterable[Memory] = (),
        reverse_warps: bool = False,
    ) -> LaunchReport:
        """Run a kernel to its end.

        Args:
            name: of the kernel in this module.
            grid, block: blocks and threads, one to three numbers.
            args: one per parameter. A CPU tensor is passed by address, and the kernel may touch exactly its elements'
                span; an int, a bool or a float is packed as the parameter's size asks for; bytes are a struct by value.
            smem: bytes of dynamic shared memory.
            cluster: blocks per cluster; default: what the kernel requires, else 1.
            memory: further memory that the kernel may touch: tensors, or (address, bytes). Needed for addresses
                passed as ints, or inside structs.
            reverse_warps: run the warps of a block in the reverse order, to find what depends on it.

        Raises:
            LaunchError: the launch does not fit the kernel.
            UnsupportedError: the kernel has an instruction that is not supported.
            Fault: what the kernel did wrong, as one of its subclasses.
        """
        ranges: list[tuple[int, int, bool]] = []
        parameters = self._pack(name, args, ranges)
        for item in (*self.device._memory, *memory):
            ranges.append(_range("memory", item))
        required = self._native.required_cluster(name)
        shape = cluster if cluster is not None else (tuple(required) if required[0] else 1)
        blocks, threads = _dimension("grid", grid), _dimension("block", block)
        counters = None if self.device._counters is None else self._native.counters(name)
        instructions, seconds = self._native.launch(
            name=name,
            grid=blocks,
            block=threads,
            cluster=_dimension("cluster", shape),
            dynamic_shared=_natural("smem", smem),
            parameters=parameters,
            memory=ranges,
            threads=self.device.threads,
            reverse_warps=bool(reverse_warps),
            check=CHECKS[self.device.check],
            unfenced_copies=self._unfenced_copies,
            counters=counters,
        )
        if self.device._counters is not None and counters is not None:
            kernel = self.device._counters._of(
                name,
                self._native.target,
                self._text,
                Shape(math.prod(blocks), math.prod(threads), smem),
            )
            kernel._record(counters.rows(), counters.sectors)
        return LaunchReport(int(instructions), float(seconds))

    def _pack(self, name: str, args: Sequence[Any], ranges: list[tuple[int, int, bool]]) -> bytes:
        declared = self._native.parameters(name)
        if len(args) != len(declared):
            raise LaunchError(f"{name}: expected {len(declared)} arguments, got {len(args)}")
        buffer = bytearray(self._native.parameter_bytes(name))
        for i, (value, (_, kind, offset, size, aggregate)) in enumerate(zip(args, declared)):
            what = f"{name}: argument {i}"
            if isinstance(value, torch.Tensor):
                ranges.append(_range(what, value))
                value = value.data_ptr()
                if size != 8 or aggregate:
                    raise LaunchError(
                        f"{what}: a tensor needs a pointer parameter, this is .{kind} of {size} bytes"
                    )
            buffer[offset : offset + size] = _bytes_of(what, value, kind, size, aggregate)
        return bytes(buffer)


def _bytes_of(what: str, value: Any, kind: str, size: int, aggregate: bool) -> bytes:
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise LaunchError(f"{what}: expected {size} bytes, got {len(value)}")
        return bytes(value)
    if aggregate:
        raise LaunchError(
            f"{what}: expected bytes (a struct of {size} bytes), got {type(value).__name__}"
        )
    if isinstance(value, float) or (isinstance(value, int) and kind in ("f32", "f64")):
        formats = {2: "<e", 4: "<f", 8: "<d"}
        if kind[0] in "us" or size not in formats:
            raise LaunchError(f"{what}: expected an int for .{kind}, got {value!r}")
        return struct.pack(formats[size], value)
    if isinstance(value, int):
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise LaunchError(f"{what}: {value} does not fit .{kind}")
        return (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    raise LaunchError(f"{what}: expected a tensor, int, float or bytes, got {type(value).__name__}")


def _range(what: str, item: Memory) -> tuple[int, int, bool]:
    """(address, bytes, read-only) of a tensor's span, or of an (address, bytes) pair."""
    if isinstance(item, torch.Tensor):
        if item.device.type != "cpu":
            raise LaunchError(f"{what}: expected a CPU tensor, got one on {item.device}")
        if item.layout is not torch.strided:
            raise LaunchError(f"{what}: expected a dense tensor, got {item.layout}")
        if item.numel() == 0:
            return item.data_ptr(), 0, False
        last = sum((n - 1) * s for n, s in zip(item.shape, item.stride()))
        return item.data_ptr(), (last + 1) * item.element_size(), False
    if (
        isinstance(item, tuple)
        and len(item) == 2
        and all(isinstance(n, int) and n >= 0 for n in item)
    ):
        return item[0], item[1], False
    raise LaunchError(f"{what}: expected a tensor or (address, bytes), got {item!r}")


def _natural(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise LaunchError(f"{what}: expected a non-negative int, got {value!r}")
    return value


def _dimension(what: str, value: Any) -> tuple[int, int, int]:
    items = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(items) <= 3:
        raise LaunchError(f"{what}: expected one to three numbers, got {value!r}")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 1 <= item < 1 << 31:
            raise LaunchError(f"{what}: expected positive ints, got {value!r}")
    padded = (*items, 1, 1)[:3]
    return padded[0], padded[1], padded[2]
