"""RMS norm in Triton:  y = h * rstd * (w + offset),  rstd = 1 / sqrt(mean(h^2) + eps),  h = x + residual.

Forward: one program per row, the row in registers. Backward: a fixed number of programs, each walking its rows in order
and keeping its dw partial in registers; the partials are summed by torch in a fixed order, so repeats are bit-equal.
Bytes per element: forward 2s (4s with residual), backward 3s (s = element size). Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl
from trainwright.kernels._tl import acc_type, whole_row

BWD_PROGRAMS = (
    256  # about two per SM of an H100: enough to fill it, few enough that the partials stay small
)


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, C, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        # Added in fp32 and rounded to the storage dtype: the norm sees the sum as it is stored.
        r = tl.load(r_ptr + row * C + c, mask=mask, other=0.0)
        x = (x.to(ACC) + r.to(ACC)).to(x.dtype)
        tl.store(s_ptr + row * C + c, x, mask=mask)
    h = x.to(ACC)
    rstd = 1.0 / tl.sqrt(tl.sum(h * h, axis=0) / C + eps)
    tl.store(rstd_ptr + row, rstd)
    y = h * rstd
    if HAS_WEIGHT:
        y = y * (tl.load(w_ptr + c, mask=mask, other=0.0).to(ACC) + weight_offset)
    tl.store(y_ptr + row * C + c, y.to(x.dtype), mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, N, C, rows_per_program, weight_offset,
    HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, ACC: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + c, mask=mask, other=0.0).to(ACC) + weight_offset
    if NEED_DW:
        dw = tl.zeros((BLOCK_C,), dtype=ACC)
    for row in range(first, last):
        x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0)
        h = x.to(ACC)
        g = tl.load(dy_ptr + row * C + c, mask=mask, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + row)
        if NEED_DW:
            dw += g * h * rstd
        if NEED_DX:
            if HAS_WEIGHT:
                g = g * w
            dx = rstd * (g - h * (rstd * rstd * (tl.sum(g * h, axis=0) / C)))
            if HAS_DSUM:
                dx += tl.load(dsum_ptr + row * C + c, mask=mask, other=0.0).to(ACC)
            tl.store(dx_ptr + row * C + c, dx.to(x.dtype), mask=mask)
    if NEED_DW:
        tl.store(dw_ptr + program * C + c, dw, mask=mask)


def rms_norm_fwd(x, residual, weight, eps, weight_offset):
    C = x.shape[-1]
    N = x.numel() // C if C else 0
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    rstd = x.new_empty(N, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if N:
        _rms_norm_fwd_kernel[(N,)](
            x, residual, weight, y, total, rstd, C, eps, weight_offset,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, ACC=acc_type(x.dtype), **whole_row(C),
        )  # fmt: skip
    return y, total, rstd


def rms_norm_bwd(dy, dsum, x, weight, rstd, weight_offset, need_dx, need_dw):
    C = x.shape[-1]
    N = x.numel() // C if C else 0
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    programs = min(N, BWD_PROGRAMS)
    dw = x.new_empty((programs, C if need_dw else 0), dtype=rstd.dtype)
    if N:
        rows = triton.cdiv(N, programs)
        _rms_norm_bwd_kernel[(programs,)](
            dy, dsum, x, weight, rstd, dx, dw, N, C, rows, weight_offset, HAS_DSUM=dsum is not None,
            HAS_WEIGHT=weight is not None, NEED_DX=need_dx, NEED_DW=need_dw, ACC=acc_type(x.dtype), **whole_row(C),
        )  # fmt: skip
    return dx, dw.sum(0)


# Configurations that the tests compile ahead of time for every architecture: (kernel, argument types, constants, warps,
# instructions that the PTX must contain).
AOT = [
    (
        _rms_norm_fwd_kernel,
        {"x_ptr": "*bf16", "r_ptr": "*bf16", "w_ptr": "*fp32", "y_ptr": "*bf16", "s_ptr": "*bf16", "rstd_ptr": "*fp32",
         "C": "i32", "eps": "fp32", "weight_offset": "fp32"},
        {"HAS_RESIDUAL": True, "HAS_WEIGHT": True, "ACC": tl.float32, "BLOCK_C": 4096},
        8,
        [],
    ),
    (
        _rms_norm_bwd_kernel,
        {"dy_ptr": "*bf16", "dsum_ptr": "*bf16", "x_ptr": "*bf16", "w_ptr": "*fp32", "rstd_ptr": "*fp32",
         "dx_ptr": "*bf16", "dw_ptr": "*fp32", "N": "i32", "C": "i32", "rows_per_program": "i32",
         "weight_offset": "fp32"},
        {"HAS_DSUM": True, "HAS_WEIGHT": True, "NEED_DX": True, "NEED_DW": True, "ACC": tl.float32, "BLOCK_C": 4096},
        8,
        [],
    ),
]  # fmt: skip
