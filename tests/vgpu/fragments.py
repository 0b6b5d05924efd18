"""One block that runs hand-written PTX, and matrices as fragments of it, for the tests of tensor instructions."""

import itertools

import numpy as np
import torch
from trainwright import vgpu

HEADER = ".version 8.8\n.target {arch}\n.address_size 64\n"


def run(body, args, *, arch="sm_90a", threads=32, declare="", smem=0, check=True):
    """Launches one block of a kernel `k` whose arguments are pointers %a0, %a1, ... and whose lane is %lane."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(args)))
    loads = "\n".join(f"ld.param.u64 %a{i}, [p{i}];" for i in range(len(args)))
    text = (
        HEADER.format(arch=arch)
        + f"""
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k({parameters})
{{
.reg .b64 %a<{len(args) + 1}>, %rd<100>;
.reg .b32 %r<600>, %lane;
.reg .b16 %h<40>;
.reg .pred %p<20>;
{declare}
{loads}
mov.u32 %lane, %tid.x;
{body}
ret;
}}
"""
    )
    return (
        vgpu.Device(arch, threads=1, check=check)
        .load_ptx(text)
        .launch("k", 1, threads, args, smem=smem)
    )


def lane_address(to, base, bytes_per_lane):
    return f"mad.wide.u32 {to}, %lane, {bytes_per_lane}, {base};\n"


# ---- fragments, by the tables of the ISA

TYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8, "f64": torch.float64,
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64}


def index_a(lane, register, element, m, bits):
    """(row, column) of an element of A, by the tables of the ISA (sections "Matrix Fragments for mma")."""
    g, t, per = lane // 4, lane % 4, max(32 // bits, 1)
    row = g + (8 * (register % 2) if m == 16 else 0)
    group = register // 2 if m == 16 else register
    return row, group * 4 * per + t * per + element


def index_b(lane, register, element, bits):
    g, t, per = lane // 4, lane % 4, max(32 // bits, 1)
    return register * 4 * per + t * per + element, g


def index_c(lane, i):
    """i-th element of a lane's accumulator."""
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def random_matrix(kind, *shape):
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        return torch.randint(low, high, shape, dtype=torch.int32).to(TYPES[kind])
    return torch.randn(shape).to(TYPES[kind])


def values(matrix):
    """As float64; tf32 drops the low 13 bits of a float."""
    if matrix.dtype == torch.float32:
        matrix = (matrix.view(torch.int32) & -8192).view(torch.float32)
    return matrix.double()


def pack_fragment(matrix, index, registers, bits, bit_view):
    """Registers (registers, 32 lanes) of a matrix."""
    raw = matrix.view(bit_view).numpy()
    per = max(32 // bits, 1)
    out = np.zeros((registers, 32, per), raw.dtype)
    for r, lane, e in itertools.product(range(registers), range(32), range(per)):
        out[r, lane, e] = raw[index(lane, r, e)]
    return torch.from_numpy(
        out.reshape(registers, -1).view(np.int64 if bits == 64 else np.int32).copy()
    )


BIT_VIEWS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
