"""Attention in Triton without the (Tq, Tk) matrix (formulas in csrc/include/trainwright/flash_attention.h).

forward     one program per (block of queries, b, h); online softmax in base 2 over the blocks of keys it sees.
backward    delta = sum dout * out - dlse, one program per block of rows; then dk and dv, one program per (block of
            keys, b, g), walking the query heads of the group and their blocks of queries; then dq, one program per
            (block of queries, b, h). Seven products instead of five, but no atomics: repeats are bit-equal.
Blocks that every pair sees run in a loop without masks; only the blocks on the edge of the band compare. There, inf and
NaN of V (of dout, for dv) are taken as 0, since 0 * NaN would reach a query that does not see them, and the program
raises a flag; the fix kernels, which return at once without it, add them where they are seen.
FLOPs: forward 4 Tq Tk D per head, backward 2.5 times that (3.5 with the recomputation), halved if causal. Bound: tensor
cores. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import os

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _batch_and_head(heads):
    """Of the second axis of the grid: batch, then head."""
    return (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)


@triton.jit
def _load(
    ptr, rows, stride, columns, size, width, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr
):
    """rows x columns of a matrix, 0 past `size` rows or `width` columns."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(at, mask=(rows[:, None] < size) & (columns[None, :] < width), other=0.0)
    if MASK_ROWS:
        return tl.load(at, mask=rows[:, None] < size, other=0.0)
    if MASK_COLUMNS:
        return tl.load(at, mask=columns[None, :] < width, other=0.0)
    return tl.load(at)


@triton.jit
def _sees(rows, keys, Tk, offset, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether query `rows` (a column or a row) sees `keys` (the other)."""
    seen = keys < Tk
    if LEFT:
        seen = seen & (keys >= rows + offset - left)
    if RIGHT:
        seen = seen & (keys <= rows + offset + right)
    return seen


@triton.jit
def _dot(acc, a, b, PRECISION: tl.constexpr):
    if PRECISION == "upcast":  # the interpreter multiplies bf16 as the integers that store it
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _key_ranges(
    i0, Tk, offset, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The keys of queries i0 .. i0 + BM - 1: masks needed in [first, inner) and [outer, last), none between."""
    first, inner, outer, last = 0, 0, Tk // BN * BN, Tk
    if LEFT:
        first = tl.maximum(i0 + offset - left, 0) // BN * BN
        inner = tl.maximum(tl.cdiv(i0 + BM - 1 + offset - left, BN) * BN, first)
    if RIGHT:
        last = tl.minimum(i0 + BM + offset + right, Tk)
        outer = tl.minimum(tl.maximum(i0 + offset + right + 1, 0) // BN * BN, outer)
    return first, inner, tl.maximum(outer, inner), last


@triton.jit
def _query_ranges(
    n0, Tq, Tk, offset, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The queries that see keys n0 .. n0 + BN - 1, as `_key_ranges`."""
    first, inner, outer, last = 0, 0, Tq // BM * BM, Tq
    if RIGHT:
        first = tl.maximum(n0 - offset - right, 0) // BM * BM
        inner = tl.maximum(tl.cdiv(tl.maximum(n0 + BN - 1 - offset - right, 0), BM) * BM, first)
    if LEFT:
        last = tl.minimum(n0 + BN - offset + left, Tq)
        outer = tl.minimum(tl.maximum(n0 + left - offset + 1, 0) // BM * BM, outer)
    if n0 + BN > Tk:
        inner, outer = first, first
    return first, inner, tl.maximum(outer, inner), last


@triton.jit
def _steps(first, split, second, last, BLOCK: tl.constexpr):
    """Blocks in [first, split), and in that and [second, last) together."""
    n = tl.cdiv(tl.maximum(split - first, 0), BLOCK)
    return n, n + tl.cdiv(tl.maximum(last - second, 0), BLOCK)


@triton.jit
def _clean(x):
    """x with 0 for inf and NaN, and how many there were.

    On the bits: a conversion to fp32 makes the compiler do this in the registers of the product's operand, and spill.
    """
    if x.dtype == tl.float32:
        odd = (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    elif x.dtype == tl.bfloat16:
        odd = (x.to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80
    else:
        odd = (x.to(tl.int16, bitcast=True) & 0x7C00) == 0x7C00
    return tl.where(odd, 0.0, x).to(x.dtype), tl.sum(tl.where(odd, 1, 0))


@triton.jit
def _odd_row(ptr, row, stride, columns, width):
    """One row in fp32, which of its elements are inf or NaN, and their number."""
    x = tl.load(
        ptr + tl.cast(row, tl.int64) * stride + columns, mask=columns < width, other=0.0
    ).to(tl.float32)
    odd = x - x != 0.0
    return x, odd, tl.sum(tl.where(odd, 1, 0))


@triton.jit
def _fwd_range(
    acc, m, l, bad, q, k_ptr, v_ptr, rows, first, split, second, last, k_row, v_row, Tk, D, Dv, c, offset, left, right,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    n, steps = _steps(first, split, second, last, BN)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = step * BN + tl.where(step < n, first, second - n * BN)
        keys = start + tl.arange(0, BN)
        k = _load(k_ptr, keys, k_row, d, Tk, D, MASKED, not EVEN_D)
        s = _product(q, tl.trans(k), PRECISION) * c
        if MASKED:
            seen = _sees(rows[:, None], keys[None, :], Tk, offset, left, right, LEFT, RIGHT)
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.math.exp2(s - base[:, None])
        alpha = tl.math.exp2(m - base)
        l = l * alpha + tl.sum(p, 1)
        m = top
        v = _load(v_ptr, keys, v_row, dv, Tk, Dv, MASKED, not EVEN_DV)
        if MASKED:
            v, odd = _clean(v)
            bad += odd
        acc = _dot(acc * alpha[:, None], p.to(v.dtype), v, PRECISION)
    return acc, m, l, bad


@triton.jit
def _flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bad_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
    v_head, H, group, Tq, Tk, D, Dv, scale, offset, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The last block of queries first: under a causal mask it has the most work.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b, h = _batch_and_head(H)
    g = h // group
    rows = i0 + tl.arange(0, BM)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    q_ptr += b * q_batch + h * q_head
    k_ptr += b * k_batch + g * k_head
    v_ptr += b * v_batch + g * v_head
    q = _load(q_ptr, rows, q_row, d, Tq, D, True, not EVEN_D)
    first, inner, outer, last = _key_ranges(i0, Tk, offset, left, right, LEFT, RIGHT, BM, BN)
    acc = tl.zeros((BM, BDV), dtype=tl.float32)
    m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BM,), dtype=tl.float32)
    c = scale * LOG2E
    bad = 0
    acc, m, l, bad = _fwd_range(
        acc, m, l, bad, q, k_ptr, v_ptr, rows, first, tl.minimum(inner, last), outer, last, k_row, v_row, Tk, D, Dv, c,
        offset, left, right, True, LEFT, RIGHT, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, 1,
    )  # fmt: skip
    acc, m, l, bad = _fwd_range(
        acc, m, l, bad, q, k_ptr, v_ptr, rows, inner, tl.minimum(outer, last), 0, 0, k_row, v_row, Tk, D, Dv, c,
        offset, left, right, False, LEFT, RIGHT, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, STAGES,
    )  # fmt: skip
    tl.store(bad_ptr + tl.program_id(1) * tl.num_programs(0) + i0 // BM, bad)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(l)) * LN2)
    tl.store(lse_ptr + (b * H + h) * Tq + rows, lse, mask=rows < Tq)
    out = tl.where(empty[:, None], 0.0, acc / l[:, None])
    at = out_ptr + ((b * Tq + rows) * H + h)[:, None] * Dv + dv[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < Tq) & (dv[None, :] < Dv))


@triton.jit
def _flash_attention_fwd_fix_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bad_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
    v_head, H, group, Tq, Tk, D, Dv, scale, offset, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Adds to out what the forward's `_clean` left out: p * v of each inf or NaN in v, for the queries that see it."""
    if tl.load(bad_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) == 0:
        return
    i0 = tl.program_id(0) * BM
    b, h = _batch_and_head(H)
    rows = i0 + tl.arange(0, BM)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    k_ptr += b * k_batch + (h // group) * k_head
    v_ptr += b * v_batch + (h // group) * v_head
    q = _load(q_ptr + b * q_batch + h * q_head, rows, q_row, d, Tq, D, True, True).to(tl.float32)
    lse = tl.load(lse_ptr + (b * H + h) * Tq + rows, mask=rows < Tq, other=0.0) * LOG2E
    out_at = out_ptr + ((b * Tq + rows) * H + h)[:, None] * Dv + dv[None, :]
    inside = (rows[:, None] < Tq) & (dv[None, :] < Dv)
    out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    first, inner, outer, last = _key_ranges(i0, Tk, offset, left, right, LEFT, RIGHT, BM, BN)
    for key in tl.range(first, last):
        v, odd, count = _odd_row(v_ptr, key, v_row, dv, Dv)
        if (count > 0) & ((key < inner) | (key >= outer)):
            k = tl.load(k_ptr + tl.cast(key, tl.int64) * k_row + d, mask=d < D, other=0.0).to(
                tl.float32
            )
            p = tl.math.exp2(tl.sum(q * k[None, :], 1) * (scale * LOG2E) - lse)
            keys = key + tl.zeros_like(rows)
            seen = _sees(rows, keys, Tk, offset, left, right, LEFT, RIGHT)
            out += tl.where(seen[:, None] & odd[None, :], p[:, None] * v[None, :], 0.0)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _flash_attention_delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, do_batch, do_row, do_head, H, Tq, Dv,
    HAS_DLSE: tl.constexpr, BM: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    b, h = _batch_and_head(H)
    dv = tl.arange(0, BDV)
    out = _load(out_ptr + (b * Tq * H + h) * Dv, rows, H * Dv, dv, Tq, Dv, True, True)
    dout = _load(dout_ptr + b * do_batch + h * do_head, rows, do_row, dv, Tq, Dv, True, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (b * H + h) * Tq + rows
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=rows < Tq, other=0.0)
    tl.store(delta_ptr + at, delta, mask=rows < Tq)


@triton.jit
def _row_statistics(lse_ptr, delta_ptr, rows, Tq):
    """lse in base 2, +inf (so that p = 0) for rows past the end or with nothing to attend to; delta."""
    lse = tl.load(lse_ptr + rows, mask=rows < Tq, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    return lse, tl.load(delta_ptr + rows, mask=rows < Tq, other=0.0)


@triton.jit
def _dkv_range(
    dk, dv, bad, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, keys, first, split, second, last, q_row, do_row, Tq, Tk,
    D, Dv, c, offset, left, right,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    n, steps = _steps(first, split, second, last, BM)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = step * BM + tl.where(step < n, first, second - n * BM)
        rows = start + tl.arange(0, BM)
        q = _load(q_ptr, rows, q_row, d, Tq, D, MASKED, not EVEN_D)
        if (
            MASKED
        ):  # lse is NaN where q is, and delta where dout is: ds of the keys that see them stays NaN
            q, odd = _clean(q)
        lse, delta = _row_statistics(lse_ptr, delta_ptr, rows, Tq)
        p = tl.math.exp2(_product(k, tl.trans(q), PRECISION) * c - lse[None, :])
        dout = _load(dout_ptr, rows, do_row, e, Tq, Dv, MASKED, not EVEN_DV)
        if MASKED:
            dout, odd = _clean(dout)
            bad += odd
        ds = p * (_product(v, tl.trans(dout), PRECISION) - delta[None, :])
        if MASKED:
            seen = _sees(rows[None, :], keys[:, None], Tk, offset, left, right, LEFT, RIGHT)
            seen = seen & (rows[None, :] < Tq)
            p = tl.where(seen, p, 0.0)
            ds = tl.where(seen, ds, 0.0)
        dv = _dot(dv, p.to(dout.dtype), dout, PRECISION)
        dk = _dot(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv, bad


@triton.jit
def _flash_attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, bad_ptr, q_batch, q_row, q_head, k_batch, k_row,
    k_head, v_batch, v_row, v_head, do_batch, do_row, do_head, H, G, Tq, Tk, D, Dv, scale, offset, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BN
    b, g = _batch_and_head(G)
    keys = n0 + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    k_ptr += b * k_batch + g * k_head
    v_ptr += b * v_batch + g * v_head
    k = _load(k_ptr, keys, k_row, d, Tk, D, True, not EVEN_D)
    v = _load(v_ptr, keys, v_row, e, Tk, Dv, True, not EVEN_DV)
    first, inner, outer, last = _query_ranges(n0, Tq, Tk, offset, left, right, LEFT, RIGHT, BM, BN)
    dk = tl.zeros((BN, BD), dtype=tl.float32)
    dv = tl.zeros((BN, BDV), dtype=tl.float32)
    c = scale * LOG2E
    bad = 0
    group = H // G
    for h in tl.range(g * group, (g + 1) * group):
        q_h = q_ptr + b * q_batch + h * q_head
        do_h = dout_ptr + b * do_batch + h * do_head
        lse_h, delta_h = lse_ptr + (b * H + h) * Tq, delta_ptr + (b * H + h) * Tq
        dk, dv, bad = _dkv_range(
            dk, dv, bad, k, v, q_h, do_h, lse_h, delta_h, keys, first, tl.minimum(inner, last), outer, last, q_row,
            do_row, Tq, Tk, D, Dv, c, offset, left, right, True, LEFT, RIGHT, BM, BD, BDV, EVEN_D, EVEN_DV,
            PRECISION, 1,
        )  # fmt: skip
        dk, dv, bad = _dkv_range(
            dk, dv, bad, k, v, q_h, do_h, lse_h, delta_h, keys, inner, tl.minimum(outer, last), 0, 0, q_row, do_row,
            Tq, Tk, D, Dv, c, offset, left, right, False, LEFT, RIGHT, BM, BD, BDV, EVEN_D, EVEN_DV, PRECISION, STAGES,
        )  # fmt: skip
    tl.store(bad_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), bad)
    at = ((b * Tk + keys) * G + g)[:, None]
    inside = keys[:, None] < Tk
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + at * D + d[None, :], dk, mask=inside & (d[None, :] < D))
    tl.store(
        dv_ptr + at * Dv + e[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=inside & (e[None, :] < Dv),
    )


@triton.jit
def _flash_attention_dv_fix_kernel(
    q_ptr, k_ptr, dout_ptr, lse_ptr, dv_ptr, bad_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, do_batch, do_row,
    do_head, H, G, Tq, Tk, D, Dv, scale, offset, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Adds to dv what `_clean` left out: p * dout of each inf or NaN in dout, for the keys that its query sees."""
    if tl.load(bad_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) == 0:
        return
    n0 = tl.program_id(0) * BN
    b, g = _batch_and_head(G)
    keys = n0 + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    k = _load(k_ptr + b * k_batch + g * k_head, keys, k_row, d, Tk, D, True, True).to(tl.float32)
    dv_at = dv_ptr + ((b * Tk + keys) * G + g)[:, None] * Dv + e[None, :]
    inside = (keys[:, None] < Tk) & (e[None, :] < Dv)
    dv = tl.load(dv_at, mask=inside, other=0.0).to(tl.float32)
    first, inner, outer, last = _query_ranges(n0, Tq, Tk, offset, left, right, LEFT, RIGHT, BM, BN)
    group = H // G
    for h in tl.range(g * group, (g + 1) * group):
        for row in tl.range(first, last):
            dout, odd, count = _odd_row(dout_ptr + b * do_batch + h * do_head, row, do_row, e, Dv)
            if (count > 0) & ((row < inner) | (row >= outer)):
                q_at = q_ptr + b * q_batch + h * q_head + tl.cast(row, tl.int64) * q_row + d
                q = tl.load(q_at, mask=d < D, other=0.0).to(tl.float32)
                lse = tl.load(lse_ptr + (b * H + h) * Tq + row) * LOG2E
                p = tl.math.exp2(tl.sum(k * q[None, :], 1) * (scale * LOG2E) - lse)
                seen = _sees(row, keys, Tk, offset, left, right, LEFT, RIGHT)
                dv += tl.where(seen[:, None] & odd[None, :], p[:, None] * dout[None, :], 0.0)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dq_range(
    dq, q, dout, lse, delta, k_ptr, v_ptr, rows, first, split, second, last, k_row, v_row, Tk, D, Dv, c, offset, left,
    right, MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    n, steps = _steps(first, split, second, last, BN)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = step * BN + tl.where(step < n, first, second - n * BN)
        keys = start + tl.arange(0, BN)
        k = _load(k_ptr, keys, k_row, d, Tk, D, MASKED, not EVEN_D)
        if MASKED:  # lse of the queries that see a NaN is NaN
            k, _odd = _clean(k)
        v = _load(v_ptr, keys, v_row, e, Tk, Dv, MASKED, not EVEN_DV)
        p = tl.math.exp2(_product(q, tl.trans(k), PRECISION) * c - lse[:, None])
        ds = p * (_product(dout, tl.trans(v), PRECISION) - delta[:, None])
        if MASKED:
            seen = _sees(rows[:, None], keys[None, :], Tk, offset, left, right, LEFT, RIGHT)
            ds = tl.where(seen, ds, 0.0)
        dq = _dot(dq, ds.to(k.dtype), k, PRECISION)
    return dq


@triton.jit
def _flash_attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, do_batch, do_row, do_head, H, group, Tq, Tk, D, Dv, scale, offset, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b, h = _batch_and_head(H)
    g = h // group
    rows = i0 + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    q = _load(q_ptr + b * q_batch + h * q_head, rows, q_row, d, Tq, D, True, not EVEN_D)
    dout = _load(dout_ptr + b * do_batch + h * do_head, rows, do_row, e, Tq, Dv, True, not EVEN_DV)
    k_ptr += b * k_batch + g * k_head
    v_ptr += b * v_batch + g * v_head
    lse, delta = _row_statistics(lse_ptr + (b * H + h) * Tq, delta_ptr + (b * H + h) * Tq, rows, Tq)
    first, inner, outer, last = _key_ranges(i0, Tk, offset, left, right, LEFT, RIGHT, BM, BN)
    dq = tl.zeros((BM, BD), dtype=tl.float32)
    c = scale * LOG2E
    dq = _dq_range(
        dq, q, dout, lse, delta, k_ptr, v_ptr, rows, first, tl.minimum(inner, last), outer, last, k_row, v_row, Tk, D,
        Dv, c, offset, left, right, True, LEFT, RIGHT, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, 1,
    )  # fmt: skip
    dq = _dq_range(
        dq, q, dout, lse, delta, k_ptr, v_ptr, rows, inner, tl.minimum(outer, last), 0, 0, k_row, v_row, Tk, D, Dv,
        c, offset, left, right, False, LEFT, RIGHT, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, STAGES,
    )  # fmt: skip
    at = dq_ptr + ((b * Tq + rows) * H + h)[:, None] * D + d[None, :]
    tl.store(
        at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(rows[:, None] < Tq) & (d[None, :] < D)
    )


# Tiles: (block of queries, block of keys, warps, stages) by padded head dim, for 16-bit inputs; the largest that keep
# accumulators and operands in registers without spills on sm_80. fp32 runs on FMA units in 32 x 32 tiles.
TILES = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    "dkv": {64: (16, 64, 4, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
    "dq": {64: (64, 32, 4, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
}


def _padded(D):
    return max(16, triton.next_power_of_2(D))


def _launch(kind, D, Dv, dtype):
    BD, BDV = _padded(D), _padded(Dv)
    wide = max(64, BD, BDV)
    upcast = dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
    BM, BN, warps, stages = (32, 32, 4, 1) if dtype == torch.float32 else TILES[kind][wide]
    return {
        "BM": BM, "BN": BN, "BD": BD, "BDV": BDV, "EVEN_D": BD == D, "EVEN_DV": Dv == BDV,
        "PRECISION": "upcast" if upcast else "ieee", "STAGES": stages, "num_warps": warps,
    }  # fmt: skip


def _fix(launch):
    return {name: launch[name] for name in ("BM", "BN", "BD", "BDV")} | {"num_warps": 4}


def _band(q, k, left, right, top_left):
    """offset, left, right and the flags LEFT, RIGHT of the kernels."""
    offset = 0 if top_left else k.shape[1] - q.shape[1]
    # A side longer than the sequence is no limit; it must also fit 32 bits.
    reach = q.shape[1] + k.shape[1]
    left, right = (-1 if side > reach else side for side in (left, right))
    return (offset, max(left, 0), max(right, 0)), {"LEFT": left >= 0, "RIGHT": right >= 0}


def _inner_contiguous(*tensors):
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def _refuse_options(*options):
    """The kernels know the band alone, none of these."""
    if any(isinstance(x, torch.Tensor) or x for x in options):
        raise NotImplementedError(
            "flash_attention: the Triton kernels have no cu_seqlens, alibi_slopes, bias, sinks, softcap, dropout_p"
        )


def flash_attention_fwd(
    q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, seed, max_seqlen_q, max_seqlen_k, scale, left,
    right, top_left, softcap, dropout_p,
):  # fmt: skip
    _refuse_options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, softcap, dropout_p)
    q, k, v = _inner_contiguous(q, k, v)
    B, Tq, H, D = q.shape
    Tk, G, Dv = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(B, Tq, H, Dv)
    lse = q.new_empty(B, H, Tq, dtype=torch.float32)
    if out.numel():
        band, flags = _band(q, k, left, right, top_left)
        launch = _launch("fwd", D, Dv, q.dtype)
        grid = (triton.cdiv(Tq, launch["BM"]), B * H)
        bad = q.new_empty(grid, dtype=torch.int32)
        arguments = (
            q, k, v, out, lse, bad, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            H, H // G, Tq, Tk, D, Dv, scale, *band,
        )  # fmt: skip
        _flash_attention_fwd_kernel[grid](*arguments, **flags, **launch)
        _flash_attention_fwd_fix_kernel[grid](*arguments, **flags, **_fix(launch))
    return out, lse


def flash_attention_bwd(
    dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, seed, max_seqlen_q,
    max_seqlen_k, scale, left, right, top_left, softcap, dropout_p, need,
):  # fmt: skip
    _refuse_options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, softcap, dropout_p)
    need_dq, need_dk, need_dv = need[:3]
    dout, q, k, v = _inner_contiguous(dout, q, k, v)
    B, Tq, H, D = q.shape
    Tk, G, Dv = k.shape[1], k.shape[2], v.shape[3]
    band, flags = _band(q, k, left, right, top_left)
    strides = [s for x in (q, k, v, dout) for s in x.stride()[:3]]
    delta = torch.empty_like(lse)
    if delta.numel():
        BM = 64
        _flash_attention_delta_kernel[(triton.cdiv(Tq, BM), B * H)](
            out, dout, dlse, delta, *dout.stride()[:3], H, Tq, Dv,
            HAS_DLSE=dlse is not None, BM=BM, BDV=_padded(Dv), num_warps=4,
        )  # fmt: skip
    dq, dk, dv = q.new_empty(0), q.new_empty(0), q.new_empty(0)
    if need_dk or need_dv:
        new_dk, new_dv = k.new_empty(k.shape), v.new_empty(v.shape)
        if new_dk.numel():
            launch = _launch("dkv", D, Dv, q.dtype)
            grid = (triton.cdiv(Tk, launch["BN"]), B * G)
            bad = q.new_empty(grid, dtype=torch.int32)
            sizes = (H, G, Tq, Tk, D, Dv, scale, *band)
            _flash_attention_dkv_kernel[grid](
                q, k, v, dout, lse, delta, new_dk, new_dv, bad, *strides, *sizes, **flags, **launch
            )
            if need_dv:
                _flash_attention_dv_fix_kernel[grid](
                    q,
                    k,
                    dout,
                    lse,
                    new_dv,
                    bad,
                    *strides[:6],
                    *strides[9:],
                    *sizes,
                    **flags,
                    **_fix(launch),
                )
        dk, dv = new_dk if need_dk else dk, new_dv if need_dv else dv
    if need_dq:
        dq = q.new_empty(q.shape)
        if dq.numel():
            launch = _launch("dq", D, Dv, q.dtype)
            _flash_attention_dq_kernel[(triton.cdiv(Tq, launch["BM"]), B * H)](
                q, k, v, dout, lse, delta, dq, *strides,
                H, H // G, Tq, Tk, D, Dv, scale, *band, **flags, **launch,
            )  # fmt: skip
    return dq, dk, dv, *(lse.new_empty(0) for _ in range(3))


def _aot(
    kind,
    kernel,
    D,
    warps=None,
    patterns=("80:mma.sync", "90:wgmma", "100:tcgen05|mma.sync"),
    heads=16,
):
    """One ahead-of-time configuration: bf16, causal, contiguous, as a model of that head dim has it."""
    BM, BN, tile_warps, stages = TILES[kind][D]
    names = set(kernel.arg_names)
    types = {n: "*bf16" for n in names if n.endswith("_ptr")}
    types |= {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "bad_ptr": "*i32", "scale": "fp32"}
    types |= {n: "i32" for n in ("H", "Tq", "Tk", "offset", "left", "right")}
    constants = {n: heads * D for n in ("q_row", "k_row", "v_row", "do_row")}
    constants |= {n: 4096 * heads * D for n in ("q_batch", "k_batch", "v_batch", "do_batch")}
    constants |= {n: D for n in ("q_head", "k_head", "v_head", "do_head", "D", "Dv", "BD", "BDV")}
    constants |= {
        "group": 1, "G": heads, "LEFT": False, "RIGHT": True, "BM": BM, "BN": BN, "EVEN_D": True, "EVEN_DV": True,
        "PRECISION": "ieee", "STAGES": stages,
    }  # fmt: skip
    return (
        kernel,
        {n: t for n, t in types.items() if n in names},
        {n: c for n, c in constants.items() if n in names},
        warps or tile_warps,
        list(patterns),
    )


AOT = [
    _aot("fwd", _flash_attention_fwd_kernel, 64),
    _aot("fwd", _flash_attention_fwd_kernel, 128),
    _aot("dkv", _flash_attention_dkv_kernel, 64),
    _aot("dkv", _flash_attention_dkv_kernel, 128),
    _aot("dq", _flash_attention_dq_kernel, 64),
    _aot("dq", _flash_attention_dq_kernel, 128),
    _aot("fwd", _flash_attention_fwd_fix_kernel, 64, 4, ()),
    _aot("dkv", _flash_attention_dv_fix_kernel, 64, 4, ()),
]
