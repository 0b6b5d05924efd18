"""Norm of a list of tensors in one read, and their scaling, in Triton.

One launch per dtype, one program per block of elements of any tensor (kernels/_multi_tensor.py). Each program writes
its own sum in fp64; torch adds them in a fixed order, so repeats are bit-equal. Powers: 2, 1, 0, ±inf; any other goes
through exp2 and log2 in fp64.
Bytes per element: s for the norm, 2s for the scaling. Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import math

import torch
import triton
import triton.language as tl
from trainwright.kernels._cast import cast
from trainwright.kernels._multi_tensor import TL_DTYPES, block_table, by_dtype, number_table
from trainwright.kernels._tl import acc_type

BLOCK = 4096  # 16 elements per thread of 8 warps
POWER_BLOCK = 1024  # exp2 and log2 in fp64 need many registers
TWO, ONE, COUNT, LARGEST, SMALLEST, POWER = range(6)


@triton.jit
def _grad_stats_kernel(
    table_ptr, blocks_ptr, partial_ptr, p, T: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + 2 * tl.load(blocks_ptr + 2 * program)
    n = tl.load(row + 1)
    i = tl.load(blocks_ptr + 2 * program + 1) + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(tl.load(row).to(tl.pointer_type(T)) + i, mask=mask, other=0.0)
    if tl.float64 != T:
        x = x.to(tl.float32)
    a = tl.abs(x).to(tl.float64)
    odd = tl.max(tl.where(a - a == 0.0, 0.0, 1.0).to(tl.float64), axis=0)
    if KIND == 0:
        total = tl.sum(a * a, axis=0)
    elif KIND == 1:
        total = tl.sum(a, axis=0)
    elif KIND == 2:
        total = tl.sum(tl.where(a != 0.0, 1.0, 0.0).to(tl.float64), axis=0)
    elif KIND == 3:
        total = tl.max(a, axis=0)
    elif KIND == 4:
        total = tl.min(tl.where(mask, a, float("inf")), axis=0)
    else:
        power = tl.where(mask & (a != 0.0), tl.exp2(p * tl.log2(a)), 0.0)
        total = tl.sum(tl.where(mask & (a == 0.0) & (p < 0.0), float("inf"), power), axis=0)
    if (KIND == 3) or (KIND == 4):  # max and min pass NaN by
        nan = tl.max(tl.where(a == a, 0.0, 1.0).to(tl.float64), axis=0)
        total = tl.where(nan != 0.0, float("nan"), total)
    tl.store(partial_ptr + 2 * program, total)
    tl.store(partial_ptr + 2 * program + 1, odd)


@triton.jit
def _grad_scale_kernel(
    table_ptr, blocks_ptr, factor_ptr, T: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + 2 * tl.load(blocks_ptr + 2 * program)
    factor = tl.load(factor_ptr)
    n = tl.where(factor != 1.0, tl.load(row + 1), 0)  # nothing to do: nothing is written
    i = tl.load(blocks_ptr + 2 * program + 1) + tl.arange(0, BLOCK)
    mask = i < n
    x_ptr = tl.load(row).to(tl.pointer_type(T)) + i
    x = tl.load(x_ptr, mask=mask, other=0.0).to(ACC)
    tl.store(x_ptr, cast(x * factor.to(ACC), T), mask=mask)


def _flat(t):
    """t as dense memory, in whatever order; a copy if it is not dense."""
    t = t.permute(sorted(range(t.dim()), key=lambda d: -t.stride(d)))
    return t.contiguous()


def _kind(p):
    named = {2.0: TWO, 1.0: ONE, 0.0: COUNT, math.inf: LARGEST, -math.inf: SMALLEST}
    return named.get(p, POWER)


def grad_stats(tensors, p):
    kind, partials = _kind(p), []
    block = POWER_BLOCK if kind == POWER else BLOCK
    device = tensors[0].device
    for dtype, members in by_dtype(tensors).items():
        dense = [_flat(tensors[i]) for i in members]
        blocks = block_table(tuple(t.numel() for t in dense), block, device)
        if not len(blocks):
            continue
        partial = torch.empty((len(blocks), 2), dtype=torch.float64, device=device)
        rows = tuple((t.data_ptr(), t.numel()) for t in dense)
        _grad_stats_kernel[(len(blocks),)](
            number_table(rows, device), blocks, partial, p if kind == POWER else 0.0,
            T=TL_DTYPES[dtype], KIND=kind, BLOCK=block, num_warps=8,
        )  # fmt: skip
        partials.append(partial)
    if not partials:
        start = math.inf if kind == SMALLEST else 0.0
        return torch.tensor([start, 0.0], dtype=torch.float64, device=device)
    partial = torch.cat(partials)
    reduce = {LARGEST: torch.amax, SMALLEST: torch.amin}.get(kind, torch.sum)
    return torch.stack([reduce(partial[:, 0], 0), partial[:, 1].amax()])


def grad_scale_(tensors, factor):
    device = tensors[0].device
    factor = factor.to(torch.float64)
    for dtype, members in by_dtype(tensors).items():
        dense = [_flat(tensors[i]) for i in members]
        blocks = block_table(tuple(t.numel() for t in dense), BLOCK, device)
        if not len(blocks):
            continue
        rows = tuple((t.data_ptr(), t.numel()) for t in dense)
        _grad_scale_kernel[(len(blocks),)](
            number_table(rows, device), blocks, factor,
            T=TL_DTYPES[dtype], ACC=acc_type(dtype), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        for i, t in zip(members, dense):
            original = tensors[i]
            if t.data_ptr() != original.data_ptr():
                order = sorted(range(original.dim()), key=lambda d: -original.stride(d))
                original.permute(order).copy_(t)


AOT = [
    (
        _grad_stats_kernel,
        {"table_ptr": "*i64", "blocks_ptr": "*i64", "partial_ptr": "*fp64", "p": "fp32"},
        {"T": tl.bfloat16, "KIND": kind, "BLOCK": POWER_BLOCK if kind == POWER else BLOCK},
        8,
        [],
    )
    for kind in (TWO, LARGEST, POWER)
] + [
    (
        _grad_scale_kernel,
        {"table_ptr": "*i64", "blocks_ptr": "*i64", "factor_ptr": "*fp64"},
        {"T": tl.bfloat16, "ACC": tl.float32, "BLOCK": BLOCK},
        8,
        [],
    )
]
