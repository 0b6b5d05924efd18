"""Layer norm in Triton:  y = (h - mean) * rstd * w + b,  rstd = 1 / sqrt(var + eps),  h = x + residual.

Forward: one program per row, the row in registers, so the second pass over it (deviations from the mean, their squares)
costs no memory. Backward: a fixed number of programs, each walking its rows in order and keeping its dw and db partials
in registers; the partials are summed by torch in a fixed order, so repeats are bit-equal. Saved for each row: mean, the
mean of x - mean ("low", what rounding took from the mean) and rstd.
Bytes per element: forward 2s (4s with residual), backward 3s (s = element size). Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl
from trainwright.kernels._tl import acc_type, whole_row

BWD_PROGRAMS = 256  # about two per SM of an H100, and the partials stay small


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, stats_ptr, C, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_C: tl.constexpr,
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
    mean = tl.sum(h, axis=0) / C
    d = tl.where(mask, h - mean, 0.0)
    low = tl.sum(d, axis=0) / C
    d = tl.where(mask, d - low, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, axis=0) / C + eps)
    tl.store(stats_ptr + row * 3, mean)
    tl.store(stats_ptr + row * 3 + 1, low)
    tl.store(stats_ptr + row * 3 + 2, rstd)
    y = d * rstd
    if HAS_WEIGHT:
        y = y * tl.load(w_ptr + c, mask=mask, other=0.0).to(ACC)
    if HAS_BIAS:
        y = y + tl.load(b_ptr + c, mask=mask, other=0.0).to(ACC)
    tl.store(y_ptr + row * C + c, y.to(x.dtype), mask=mask)


@triton.jit
def _layer_norm_bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, dw_ptr, db_ptr, N, C, rows_per_program,
    HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + c, mask=mask, other=0.0).to(ACC)
    if NEED_DW:
        dw = tl.zeros((BLOCK_C,), dtype=ACC)
        db = tl.zeros((BLOCK_C,), dtype=ACC)
    for row in range(first, last):
        x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0)
        g = tl.load(dy_ptr + row * C + c, mask=mask, other=0.0).to(ACC)
        mean = tl.load(stats_ptr + row * 3)
        low = tl.load(stats_ptr + row * 3 + 1)
        rstd = tl.load(stats_ptr + row * 3 + 2)
        xhat = tl.where(mask, ((x.to(ACC) - mean) - low) * rstd, 0.0)
        if NEED_DW:
            dw += g * xhat
            db += g
        if NEED_DX:
            if HAS_WEIGHT:
                g = g * w
            mean_g = tl.sum(g, axis=0) / C
            mean_gx = tl.sum(g * xhat, axis=0) / C
            dx = rstd * (g - mean_g - xhat * mean_gx)
            if HAS_DSUM:
                dx += tl.load(dsum_ptr + row * C + c, mask=mask, other=0.0).to(ACC)
            tl.store(dx_ptr + row * C + c, dx.to(x.dtype), mask=mask)
    if NEED_DW:
        tl.store(dw_ptr + program * C + c, dw, mask=mask)
        tl.store(db_ptr + program * C + c, db, mask=mask)


def layer_norm_fwd(x, residual, weight, bias, eps):
    C = x.shape[-1]
    N = x.numel() // C if C else 0
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    stats = x.new_empty(N, 3, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if N:
        _layer_norm_fwd_kernel[(N,)](
            x, residual, weight, bias, y, total, stats, C, eps, HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, ACC=acc_type(x.dtype), **whole_row(C),
        )  # fmt: skip
    return y, total, stats


def layer_norm_bwd(dy, dsum, x, weight, stats, need_dx, need_dw):
    C = x.shape[-1]
    N = x.numel() // C if C else 0
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    programs = min(N, BWD_PROGRAMS)
    partials = x.new_empty((2, programs, C if need_dw else 0), dtype=stats.dtype)
    if N:
        _layer_norm_bwd_kernel[(programs,)](
            dy, dsum, x, weight, stats, dx, partials[0], partials[1], N, C, triton.cdiv(N, programs),
            HAS_DSUM=dsum is not None, HAS_WEIGHT=weight is not None, NEED_DX=need_dx, NEED_DW=need_dw,
            ACC=acc_type(x.dtype), **whole_row(C),
        )  # fmt: skip
    dw, db = partials.sum(1)
    return dx, dw, db.clone()  # outputs of one op must not share storage


# Configurations that the tests compile ahead of time for every architecture: (kernel, argument types, constants, warps,
# instructions that the PTX must contain).
AOT = [
    (
        _layer_norm_fwd_kernel,
        {"x_ptr": "*bf16", "r_ptr": "*bf16", "w_ptr": "*fp32", "b_ptr": "*fp32", "y_ptr": "*bf16", "s_ptr": "*bf16",
         "stats_ptr": "*fp32", "C": "i32", "eps": "fp32"},
        {"HAS_RESIDUAL": True, "HAS_WEIGHT": True, "HAS_BIAS": True, "ACC": tl.float32, "BLOCK_C": 4096},
        8,
        [],
    ),
    (
        _layer_norm_bwd_kernel,
        {"dy_ptr": "*bf16", "dsum_ptr": "*bf16", "x_ptr": "*bf16", "w_ptr": "*fp32", "stats_ptr": "*fp32",
         "dx_ptr": "*bf16", "dw_ptr": "*fp32", "db_ptr": "*fp32", "N": "i32", "C": "i32", "rows_per_program": "i32"},
        {"HAS_DSUM": True, "HAS_WEIGHT": True, "NEED_DX": True, "NEED_DW": True, "ACC": tl.float32, "BLOCK_C": 4096},
        8,
        [],
    ),
]  # fmt: skip
