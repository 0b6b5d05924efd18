"""Two partial results of attention put together, forward and backward (csrc/include/trainwright/merge_attention.h).

A program has a block of rows (b, t, h). Bytes of a row of Dv elements: forward Dv (s_a + s_b + s_out) + 12, backward
Dv (s_out + 2 s_a + 2 s_b) + 20. Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100
without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl
from trainwright.kernels._cast import cast
from trainwright.kernels._tl import acc_type

TILE = 2048  # elements of a program: 16 per thread of 4 warps


@triton.jit
def _weights(lse_a, lse_b):
    """Weights of both parts, and their lse."""
    nothing = float("-inf")
    top = tl.where((lse_a > lse_b) | (lse_a != lse_a), lse_a, lse_b)  # NaN stays
    shift = tl.where(top == nothing, 0.0, top)
    a, b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = tl.where(top == nothing, 1.0, a + b)
    lse = tl.where(top == nothing, nothing, shift + tl.log(total))
    weight_a = tl.where(lse_a == nothing, 0.0, a / total)
    weight_b = tl.where(lse_b == nothing, 0.0, b / total)
    return weight_a, weight_b, lse


@triton.jit
def _places(rows, T, H, Dv, ROWS: tl.constexpr, BD: tl.constexpr):
    """Of this program's rows: which exist, where their lse lie, where their elements do and which exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    at = (row // (T * H) * H + row % H) * T + row // H % T
    column = tl.arange(0, BD)
    return here, at, row[:, None] * Dv + column[None, :], here[:, None] & (column < Dv)[None, :]


@triton.jit
def _part(ptr, at, mask, lse, ACC: tl.constexpr):
    """Elements of a part, 0 where it counts for nothing."""
    x = tl.load(ptr + at, mask=mask, other=0.0).to(ACC)
    return tl.where((lse == float("-inf"))[:, None], 0.0, x)


@triton.jit
def _merge_attention_fwd_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, rows, T, H, Dv,
    ACC: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    here, at, elements, mask = _places(rows, T, H, Dv, ROWS, BD)
    lse_a = tl.load(lse_a_ptr + at, mask=here, other=0.0)
    lse_b = tl.load(lse_b_ptr + at, mask=here, other=0.0)
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    a = _part(out_a_ptr, elements, mask, lse_a, ACC)
    b = _part(out_b_ptr, elements, mask, lse_b, ACC)
    out = weight_a[:, None] * a + weight_b[:, None] * b
    tl.store(out_ptr + elements, cast(out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + at, lse, mask=here)


@triton.jit
def _merge_attention_bwd_kernel(
    dout_ptr, dlse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, dout_a_ptr, dlse_a_ptr, dout_b_ptr, dlse_b_ptr,
    rows, T, H, Dv, HAS_DLSE: tl.constexpr, NEED_OUT_A: tl.constexpr, NEED_LSE_A: tl.constexpr,
    NEED_OUT_B: tl.constexpr, NEED_LSE_B: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    here, at, elements, mask = _places(rows, T, H, Dv, ROWS, BD)
    lse_a = tl.load(lse_a_ptr + at, mask=here, other=0.0)
    lse_b = tl.load(lse_b_ptr + at, mask=here, other=0.0)
    weight_a, weight_b, _lse = _weights(lse_a, lse_b)
    no_a, no_b = lse_a == float("-inf"), lse_b == float("-inf")
    dout = tl.load(dout_ptr + elements, mask=mask, other=0.0).to(ACC)
    if NEED_OUT_A:
        x = tl.where(no_a[:, None], 0.0, weight_a[:, None] * dout)
        tl.store(dout_a_ptr + elements, cast(x, dout_a_ptr.dtype.element_ty), mask=mask)
    if NEED_OUT_B:
        x = tl.where(no_b[:, None], 0.0, weight_b[:, None] * dout)
        tl.store(dout_b_ptr + elements, cast(x, dout_b_ptr.dtype.element_ty), mask=mask)
    if NEED_LSE_A or NEED_LSE_B:
        a = _part(out_a_ptr, elements, mask, lse_a, ACC)
        b = _part(out_b_ptr, elements, mask, lse_b, ACC)
        dot = tl.sum(dout * (a - b), 1)
        up = dot * 0.0
        if HAS_DLSE:
            up = tl.load(dlse_ptr + at, mask=here, other=0.0)
        if NEED_LSE_A:
            x = tl.where(no_a, 0.0, weight_a * (up + weight_b * dot))
            tl.store(dlse_a_ptr + at, x, mask=here)
        if NEED_LSE_B:
            x = tl.where(no_b, 0.0, weight_b * (up - weight_a * dot))
            tl.store(dlse_b_ptr + at, x, mask=here)


def _sizes(out, lse):
    BD = triton.next_power_of_2(max(out.shape[3], 1))
    ROWS = max(1, TILE // BD)
    programs = triton.cdiv(lse.numel(), ROWS)
    numbers = (lse.numel(), out.shape[1], out.shape[2], out.shape[3])
    return programs, numbers, {"ACC": acc_type(lse.dtype), "ROWS": ROWS, "BD": BD, "num_warps": 4}


def merge_attention_fwd(out_a, lse_a, out_b, lse_b):
    out = out_a.new_empty(out_a.shape, dtype=torch.promote_types(out_a.dtype, out_b.dtype))
    lse = torch.empty_like(lse_a)
    programs, numbers, constants = _sizes(out, lse)
    if programs:
        _merge_attention_fwd_kernel[(programs,)](
            out_a, lse_a, out_b, lse_b, out, lse, *numbers, **constants
        )
    return out, lse


def merge_attention_bwd(dout, dlse, out_a, lse_a, out_b, lse_b, need):
    inputs = (out_a, lse_a, out_b, lse_b)
    grads = [x.new_empty(x.shape if n else 0) for x, n in zip(inputs, need)]
    programs, numbers, constants = _sizes(out_a, lse_a)
    flags = dict(zip(("NEED_OUT_A", "NEED_LSE_A", "NEED_OUT_B", "NEED_LSE_B"), need))
    if programs:
        _merge_attention_bwd_kernel[(programs,)](
            dout, dlse, *inputs, *grads, *numbers, HAS_DLSE=dlse is not None, **flags, **constants
        )
    return tuple(grads)


_SIZES = {"rows": "i32", "T": "i32", "H": "i32", "Dv": "i32:16"}
_INPUTS = {"out_a_ptr": "*fp32", "lse_a_ptr": "*fp32", "out_b_ptr": "*bf16", "lse_b_ptr": "*fp32"}
_CONSTANTS = {"ACC": tl.float32, "ROWS": TILE // 128, "BD": 128}
AOT = [
    (
        _merge_attention_fwd_kernel,
        {**_INPUTS, "out_ptr": "*fp32", "lse_ptr": "*fp32", **_SIZES},
        _CONSTANTS,
        4,
        [r"ld.global[.\w]*.v4", r"st.global[.\w]*.v4"],
    ),
    (
        _merge_attention_bwd_kernel,
        {"dout_ptr": "*fp32", "dlse_ptr": "*fp32", **_INPUTS, "dout_a_ptr": "*fp32", "dlse_a_ptr": "*fp32",
         "dout_b_ptr": "*bf16", "dlse_b_ptr": "*fp32", **_SIZES},
        {"HAS_DLSE": True, "NEED_OUT_A": True, "NEED_LSE_A": True, "NEED_OUT_B": True, "NEED_LSE_B": True,
         **_CONSTANTS},
        4,
        [r"ld.global[.\w]*.v4", r"st.global[.\w]*.v4"],
    ),
]  # fmt: skip
