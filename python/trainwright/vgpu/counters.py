"""What launches on a virtual GPU cost, as counts: no time is measured, and none is claimed.

Counts are of PTX instructions; the assembler may merge, drop or add some. Memory counts are exact for the addresses
that the program used. `Bound` says how fast a real GPU could be at best, given these counts and its data sheet.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR_BYTES = 32


@dataclass
class Traffic:
    """Warp-wide accesses to global memory: how many, the bytes they ask for, the 32-byte sectors these lie in."""

    requests: int = 0
    bytes: int = 0
    sectors: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests, self.bytes + other.bytes, self.sectors + other.sectors
        )

    @property
    def efficiency(self) -> float:
        """Bytes asked for per byte moved in sectors; 1 if nothing was accessed."""
        return self.bytes / (SECTOR_BYTES * self.sectors) if self.sectors else 1.0


@dataclass
class Counts:
    """Sums over some instructions: of a kernel, of a source line, of one PTX instruction."""

    warp_instructions: int = 0
    thread_instructions: int = 0
    load: Traffic = field(default_factory=Traffic)
    store: Traffic = field(default_factory=Traffic)
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_ideal: int = 0
    local_bytes: int = 0
    barriers: int = 0
    flops: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        flops = dict(self.flops)
        for kind, n in other.flops.items():
            flops[kind] = flops.get(kind, 0) + n
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name != "flops"
        }
        return Counts(**sums, flops=flops)

    @property
    def issue_slots(self) -> int:
        """One for each warp instruction."""
        return self.warp_instructions

    @property
    def lane_efficiency(self) -> float:
        """Active lanes per lane issued."""
        return self.thread_instructions / (32 * self.warp_instructions) if self.warp_instructions else 1.0  # fmt: skip

    @property
    def global_traffic(self) -> Traffic:
        return self.load + self.store

    @property
    def global_bytes(self) -> int:
        return self.global_traffic.bytes

    @property
    def global_sectors(self) -> int:
        return self.global_traffic.sectors

    @property
    def sectors_per_request(self) -> float:
        t = self.global_traffic
        return t.sectors / t.requests if t.requests else 0.0

    @property
    def sector_efficiency(self) -> float:
        return self.global_traffic.efficiency

    @property
    def bank_conflicts(self) -> int:
        """Shared-memory wavefronts beyond one for each group of lanes that is served together."""
        return self.shared_wavefronts - self.shared_ideal

    @property
    def tensor_flops(self) -> int:
        """Of tensor-core instructions: 2 m n k each, whatever was multiplied."""
        return sum(n for kind, n in self.flops.items() if kind.startswith("tensor"))


@dataclass(frozen=True)
class InstructionCount:
    """One PTX instruction of a kernel and what it did."""

    ptx_line: int
    text: str
    kind: str
    file: str
    line: int
    counts: Counts

    @property
    def source(self) -> tuple[str, int]:
        """(file, line), or ("", 0) where the PTX has no .loc."""
        return (self.file, self.line) if self.line else ("", 0)


@dataclass(frozen=True)
class Shape:
    """What one launch asks of a multiprocessor."""

    blocks: int
    threads: int
    shared_bytes: int


class KernelCounters:
    """Everything that was counted for one kernel, over its launches."""

    def __init__(self, name: str, target: str, ptx: str, shape: Shape) -> None:
        self.name, self.target, self.shape = name, target, shape
        self.launches = 0
        self.footprint_read = 0
        self.footprint_written = 0
        self._ptx = ptx
        self._rows: dict[int, InstructionCount] = {}

    def _record(self, rows: Iterable[Any], sectors: tuple[int, int]) -> None:
        self.launches += 1
        self.footprint_read += SECTOR_BYTES * sectors[0]
        self.footprint_written += SECTOR_BYTES * sectors[1]
        for row in rows:
            pc, ptx_line, text, kind, file, line, issues, lanes, load, store = row[:10]
            requests, wavefronts, ideal, local_bytes = row[10:]
            barrier = re.match(r"(@!?\S+ )?(bar|barrier)\.", text)
            counts = Counts(
                issues, lanes, Traffic(*load), Traffic(*store), requests, wavefronts, ideal, local_bytes,
                issues if barrier else 0, _flops(text, issues, lanes),
            )  # fmt: skip
            before = self._rows.get(pc)
            if before is not None:
                counts = before.counts + counts
            self._rows[pc] = InstructionCount(ptx_line, text, kind, file, line, counts)

    @property
    def instructions(self) -> list[InstructionCount]:
        """Those that were issued, in program order."""
        return [self._rows[pc] for pc in sorted(self._rows)]

    @property
    def total(self) -> Counts:
        return sum((r.counts for r in self._rows.values()), Counts())

    @property
    def mix(self) -> dict[str, int]:
        """Warp instructions by class, most first."""
        classes: dict[str, int] = {}
        for row in self._rows.values():
            classes[row.kind] = classes.get(row.kind, 0) + row.counts.warp_instructions
        return dict(sorted(classes.items(), key=lambda item: -item[1]))

    @property
    def lines(self) -> dict[tuple[str, int], Counts]:
        """By source line, in order."""
        found: dict[tuple[str, int], Counts] = {}
        for row in self.instructions:
            found[row.source] = found.get(row.source, Counts()) + row.counts
        return dict(sorted(found.items()))

    @property
    def footprint_bytes(self) -> int:
        """Sectors that a launch reads, and those that it writes, each once, in bytes: traffic that no cache avoids."""
        return self.footprint_read + self.footprint_written

    def __getattr__(self, name: str) -> Any:
        """Sums over the kernel: what `Counts` has."""
        if not name.startswith("_") and (
            name in Counts.__dataclass_fields__ or hasattr(Counts, name)
        ):
            return getattr(self.total, name)
        raise AttributeError(f"KernelCounters has no attribute {name!r}")

    def assembled(self) -> Assembled | None:
        """Registers, shared memory and spills by ptxas' report; None if there is no ptxas for this target."""
        return _assemble(self._ptx, self.target).get(self.name)

    def occupancy(self, gpu: str) -> Occupancy | None:
        """Warps of this kernel that fit on one multiprocessor; None where `assembled` is."""
        code = self.assembled()
        return None if code is None else _occupancy(self.shape, code, preset(gpu))

    def bound(self, gpu: str) -> Bound:
        """The time that no run of these launches on this GPU can beat."""
        return Bound(self, preset(gpu))


class Counters:
    """What a device has counted. Iterates over kernels; `counters[name]` is one of them."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], KernelCounters] = {}

    def _of(self, name: str, target: str, ptx: str, shape: Shape) -> KernelCounters:
        key = (name, ptx)
        if key not in self._kernels:
            self._kernels[key] = KernelCounters(name, target, ptx, shape)
        self._kernels[key].shape = shape
        return self._kernels[key]

    def __iter__(self) -> Iterator[KernelCounters]:
        return iter(self._kernels.values())

    def __len__(self) -> int:
        return len(self._kernels)

    def __getitem__(self, name: str) -> KernelCounters:
        """The kernel of that name.

        Raises:
            KeyError: it was not launched, or in several compiled variants (iterate to see them).
        """
        found = [k for k in self if k.name == name]
        if len(found) == 1:
            return found[0]
        names = ", ".join(dict.fromkeys(k.name for k in self)) or "none"
        if found:
            raise KeyError(
                f"{len(found)} compiled variants of {name} were launched: iterate to see each"
            )
        raise KeyError(f"no launch of {name} was counted; there are: {names}")

    def clear(self) -> None:
        """Forget everything."""
        self._kernels.clear()

    @property
    def total(self) -> Counts:
        """Over all kernels."""
        return sum((k.total for k in self), Counts())


# ---- floating-point work, from the text of an instruction

_TENSOR = re.compile(r"(?:mma|wgmma)\.\S*?\.?m(\d+)n(\d+)k(\d+)\S*")
_TYPES = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8", "e5m2": "f8", "s8": "i8", "u8": "i8",
          "s4": "i4", "u4": "i4", "b1": "b1", "f64": "f64"}  # fmt: skip


def _flops(text: str, issues: int, lanes: int) -> dict[str, int]:
    opcode = re.sub(r"^@!?\S+ ", "", text).split(" ")[0]
    found = _TENSOR.match(opcode)
    if found:
        m, n, k = map(int, found.groups())
        if opcode.startswith("wgmma"):
            m //= 4  # each of the four warps does its quarter
        types = [_TYPES[t] for t in opcode.split(".") if t in _TYPES]
        # .d.a.b(.c): the type of A decides the rate.
        kind = types[1] if len(types) > 1 else types[0] if types else "f32"
        return {f"tensor {kind}": 2 * m * n * k * (issues if lanes else 0)}
    parts = opcode.split(".")
    if parts[-1] in ("f32", "f64") and parts[0] in ("add", "sub", "mul", "fma"):
        return {parts[-1]: lanes * (2 if parts[0] == "fma" else 1)}
    return {}


# ---- what the assembler says


@dataclass(frozen=True)
class Assembled:
    """ptxas' report of a kernel."""

    registers: int
    static_shared: int
    spill_bytes: int


@dataclass(frozen=True)
class Occupancy:
    """Warps per multiprocessor, of `limit`; `limited_by` names what runs out first."""

    warps: int
    limit: int
    limited_by: str

    @property
    def fraction(self) -> float:
        return self.warps / self.limit


def _assemblers() -> list[str]:
    """ptxas of the CUDA toolkit and those that Triton brings."""
    found = [shutil.which("ptxas"), "/usr/local/cuda/bin/ptxas"]
    if nvcc := shutil.which("nvcc"):
        found.append(str(Path(nvcc).resolve().parent / "ptxas"))
    try:
        import triton

        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        found += [str(tools / "ptxas"), str(tools / "ptxas-blackwell")]
    except ImportError:
        pass
    return [path for path in dict.fromkeys(found) if path and os.access(path, os.X_OK)]


@functools.lru_cache(maxsize=64)
def _assemble(ptx: str, target: str) -> dict[str, Assembled]:
    """By kernel; empty if no assembler takes this target."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        for tool in _assemblers():
            command = [
                tool,
                "-v",
                f"--gpu-name={target}",
                str(source),
                "-o",
                str(source.with_suffix(".cubin")),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return _parse_report(done.stdout + done.stderr)
    return {}


def _parse_report(report: str) -> dict[str, Assembled]:
    found: dict[str, Assembled] = {}
    for part in re.split(r"Compiling entry function '", report)[1:]:
        name = part.split("'")[0]
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        if registers:
            found[name] = Assembled(
                int(registers[1]), int(shared[1]) if shared else 0, sum(map(int, spills))
            )
    return found


# ---- devices. Rates are dense: data sheets print tensor rates with 2:4 sparsity, which are halved here.


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU. `tflops` by kind of work, as in `Counts.flops`."""

    name: str
    multiprocessors: int
    clock_ghz: float
    gbps: float
    tflops: dict[str, float]
    warps: int = 64
    registers: int = 65536
    shared_bytes: int = 228 << 10
    blocks: int = 32


PRESETS = {
    # NVIDIA A100 Tensor Core GPU data sheet (2021) and A100 architecture white paper, table 1: 108 SMs, 1410 MHz boost.
    "A100": Gpu(
        "A100 SXM 80 GB", 108, 1.41, 2039,
        {"tensor f16": 312, "tensor tf32": 156, "tensor i8": 624, "tensor f64": 19.5, "f32": 19.5, "f64": 9.7},
        shared_bytes=164 << 10,
    ),
    # NVIDIA H100 data sheet, column SXM (BF16 1979, TF32 989, FP8 and INT8 3958 with sparsity; 3.35 TB/s); 132 SMs:
    # H100 architecture white paper. 1980 MHz is the highest clock; the tensor rates are those of 1830 MHz.
    "H100": Gpu(
        "H100 SXM", 132, 1.98, 3350,
        {"tensor f16": 989.5, "tensor tf32": 494.5, "tensor f8": 1979, "tensor i8": 1979, "tensor f64": 67, "f32": 67,
         "f64": 34},
    ),
    # NVIDIA H200 data sheet, column SXM: H100 with 4.8 TB/s.
    "H200": Gpu(
        "H200 SXM", 132, 1.98, 4800,
        {"tensor f16": 989.5, "tensor tf32": 494.5, "tensor f8": 1979, "tensor i8": 1979, "tensor f64": 67, "f32": 67,
         "f64": 34},
    ),
    # NVIDIA HGX B200 data sheet, an eighth of 8 GPUs (BF16 36, TF32 18, FP8 and INT8 72 PFLOPS with sparsity; FP32 600,
    # FP64 296 TFLOPS); up to 8 TB/s. Shared memory, SMs and clock as the driver reports them: 148 SMs, 1965 MHz.
    "B200": Gpu(
        "B200 (HGX)", 148, 1.965, 8000,
        {"tensor f16": 2250, "tensor tf32": 1125, "tensor f8": 4500, "tensor i8": 4500, "tensor f64": 37, "f32": 75,
         "f64": 37},
    ),
}  # fmt: skip


def preset(gpu: str) -> Gpu:
    """The peak rates of "A100", "H100", "H200" or "B200"."""
    if gpu not in PRESETS:
        raise ValueError(f"gpu: expected {', '.join(PRESETS)}, got {gpu!r}")
    return PRESETS[gpu]


def _occupancy(shape: Shape, code: Assembled, gpu: Gpu) -> Occupancy:
    """Registers are given to warps in units of 256, shared memory in units of 128 bytes and 1 KiB more per block."""
    warps = -(-shape.threads // 32)
    per_warp = -(-code.registers * 32 // 256) * 256
    shared = -(-(code.static_shared + shape.shared_bytes) // 128) * 128 + 1024
    limits = {
        "warps": gpu.warps // warps,
        "registers": gpu.registers // max(per_warp, 1) // warps,
        "shared memory": gpu.shared_bytes // shared,
        "blocks": gpu.blocks,
    }
    reason = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[reason] * warps, gpu.warps, reason)


class Bound:
    """A bound, never a time: each entry of `microseconds` is the least that one resource needs for what was counted, at
    the peak rate of the data sheet. The largest is the bound; real runs take longer.
    """

    def __init__(self, kernel: KernelCounters, gpu: Gpu) -> None:
        self.gpu = gpu
        total = kernel.total
        wavefronts_per_us = gpu.multiprocessors * gpu.clock_ghz * 1e3
        self.microseconds = {
            "DRAM (each sector once)": kernel.footprint_bytes / gpu.gbps / 1e3,
            "shared memory": total.shared_wavefronts / wavefronts_per_us,
        }
        for kind, n in total.flops.items():
            if kind in gpu.tflops:
                self.microseconds[kind] = n / gpu.tflops[kind] / 1e6
        self.unbounded = [kind for kind in total.flops if kind not in gpu.tflops]
        """Kinds of work that the data sheet has no rate for."""

    @property
    def limited_by(self) -> str:
        return max(self.microseconds, key=lambda name: self.microseconds[name])

    @property
    def total_us(self) -> float:
        return max(self.microseconds.values())

    def __str__(self) -> str:
        return (
            f"bound: no faster than {self.total_us:.3g} us on {self.gpu.name}, by {self.limited_by}"
        )


def intensity(kernel: KernelCounters) -> float:
    """FLOPs per byte of footprint; infinite without memory."""
    flops = sum(kernel.total.flops.values())
    return flops / kernel.footprint_bytes if kernel.footprint_bytes else math.inf
