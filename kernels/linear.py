"""Elementwise half of the backward of `linear` in Triton:  dz = dy act'(z),  dbias = sum over rows of dz.

A program owns BLOCK_C columns and one of SLOTS ranges of rows, and walks its rows in order with the sums of its
columns in registers; torch adds the partial sums of the slots in a fixed order, so repeats are bit-equal.
Bytes per element: 3s (s without activation; s = element size). Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl

from ._activation import activation_slope

SLOTS = 32  # times N / BLOCK_C programs: enough to fill the GPU from a few thousand columns on
BLOCK_C, BLOCK_ROWS = 128, 16


@triton.jit
def _linear_bwd_kernel(
    dy_ptr, pre_ptr, dz_ptr, partial_ptr, N, C, rows_per_slot,
    ACTIVATION: tl.constexpr, WITH_BIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.program_id(1).to(tl.int64)
    begin = slot * rows_per_slot
    end = tl.minimum(begin + rows_per_slot, N)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for first in range(begin, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (c < C)[None, :]
        at = row[:, None] * C + c[None, :]
        d = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION != 0:
            z = tl.load(pre_ptr + at, mask=mask, other=0.0).to(tl.float32)
            d = d * activation_slope(z, ACTIVATION)
            tl.store(dz_ptr + at, d.to(dz_ptr.dtype.element_ty), mask=mask)
        if WITH_BIAS:
            total += tl.sum(d, axis=0)
    if WITH_BIAS:
        tl.store(partial_ptr + slot * C + c, total, mask=c < C)


def linear_bwd(dy, pre, activation, with_bias):
    N, C = dy.shape
    dz = dy.new_empty(0) if pre is None else torch.empty_like(dy)
    partial = dy.new_zeros((SLOTS if with_bias else 0, C), dtype=torch.float32)
    if N and C:
        _linear_bwd_kernel[(triton.cdiv(C, BLOCK_C), SLOTS)](
            dy, pre, dz, partial, N, C, triton.cdiv(N, SLOTS), ACTIVATION=activation, WITH_BIAS=with_bias,
            BLOCK_C=BLOCK_C, BLOCK_ROWS=BLOCK_ROWS, num_warps=4,
        )  # fmt: skip
    return dz, partial.sum(0) if with_bias else partial


AOT = [
    (
        _linear_bwd_kernel,
        {"dy_ptr": "*bf16", "pre_ptr": "*bf16", "dz_ptr": "*bf16", "partial_ptr": "*fp32", "N": "i32", "C": "i32",
         "rows_per_slot": "i32"},
        {"ACTIVATION": activation, "WITH_BIAS": True, "BLOCK_C": BLOCK_C, "BLOCK_ROWS": BLOCK_ROWS},
        4,
        [],
    )
    for activation in (0, 2, 3)
]  # fmt: skip
