"""Attention, backward, without atomics. With delta = sum dout * out - dlse of a query, p = exp(score - lse):

    dv = sum_i p dout,   ds = p (dout.v - delta),   dq = scale sum_j ds k,   dk = scale sum_i ds q

With a sink of share r = sigmoid(lse - sink) and dropout's factor z (0 or 1 / (1 - p)): dv takes p r z for p,
ds = p (r z dout.v - delta), delta = r sum dout * out - dlse. Three kernels (delta here, then _attention_dkv and
_attention_dq) with seven products instead of five, but repeats are bit-equal.

As in the forward, a program whose result is not finite runs again (`FIX`), with 0 for inf and NaN in the operands,
which might otherwise reach rows that do not see them, and adds them where they are seen.
"""

import triton
import triton.language as tl
from trainwright.kernels._attention_scores import (
    RARE,
    exp_of,
    score_terms,
    scores,
    sink_share,
    to_unit,
)
from trainwright.kernels._attention_tiles import (
    BIAS,
    SINKS,
    band_of,
    key_ranges,
    load,
    locate,
    product,
)


@triton.jit
def _flash_attention_delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, sinks_ptr, dsinks_ptr, do_batch, do_row, do_head, H, Tq, Dv,
    HAS_DLSE: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """delta, and per program the part of the sink's gradient. Packed sequences are as one: rows know no other."""
    block, b, h = locate(tl.cdiv(Tq, BM), H)
    rows = block * BM + tl.arange(0, BM)
    e = tl.arange(0, BDV)
    at = out_ptr + (b * Tq * H + h) * Dv + rows.to(tl.int64)[:, None] * (H * Dv) + e[None, :]
    out = tl.load(at, mask=(rows[:, None] < Tq) & (e[None, :] < Dv), other=0.0)
    dout = load(dout_ptr + b * do_batch + h * do_head, rows, do_row, e, Tq, Dv, True, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (b * H + h) * Tq + rows
    if SINKS & O:
        lse = tl.load(lse_ptr + at, mask=rows < Tq, other=float("-inf"))
        share = sink_share(lse, tl.load(sinks_ptr + h))
        lost = tl.where(lse == float("-inf"), 0.0, (1.0 - share) * delta)
        tl.store(dsinks_ptr + tl.program_id(0), -tl.sum(lost))
        delta *= share
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=rows < Tq, other=0.0)
    tl.store(delta_ptr + at, delta, mask=rows < Tq)


@triton.jit
def _flash_attention_norm_kernel(
    q_ptr, k_ptr, lse_ptr, norm_ptr, alibi_ptr, bias_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, alibi_batch,
    alibi_head, bias_batch, bias_head, bias_i, bias_j, H, group, Tq, Tk, D, scale, left, right, softcap,
    O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """1 / sum_j exp(score - lse) of rows whose lse is too large to hold the logarithm of the number of keys, else 1."""
    block, b, h = locate(tl.cdiv(Tq, BM), H)
    i0 = block * BM
    rows = i0 + tl.arange(0, BM)
    d = tl.arange(0, BD)
    at = (b * H + h) * Tq + rows
    lse = tl.load(lse_ptr + at, mask=rows < Tq, other=0.0)
    rare = (tl.abs(lse) > RARE) & (tl.abs(lse) != float("inf"))
    norm = tl.full((BM,), 1.0, dtype=tl.float32)
    if tl.max(tl.where(rare, 1, 0)) == 1:
        q = load(q_ptr + b * q_batch + h * q_head, rows, q_row, d, Tq, D, True, True)
        k_ptr += b * k_batch + (h // group) * k_head
        band = band_of(Tq, Tk, left, right, O)
        terms = score_terms(
            scale, softcap, alibi_ptr, alibi_batch, alibi_head, bias_ptr, bias_batch, bias_head, bias_i, bias_j, b, h,
            Tq, Tk, O,
        )  # fmt: skip
        first, _inner, _outer, last = key_ranges(i0, Tk, band, True, O, BM, BN)
        l = tl.zeros((BM,), dtype=tl.float32)
        for start in tl.range(first, last, BN):
            keys = start + tl.arange(0, BN)
            k = load(k_ptr, keys, k_row, d, Tk, D, True, True)
            qk = product(q, tl.trans(k), PRECISION)
            s, _t, seen = scores(qk, rows[:, None], keys[None, :], terms, band, True, O)
            l += tl.sum(tl.where(seen, exp_of(s - lse[:, None], O), 0.0), 1)
        norm = 1.0 / tl.where(rare, l, 1.0)
    tl.store(norm_ptr + at, norm, mask=rows < Tq)


@triton.jit
def row_statistics(lse_ptr, delta_ptr, norm_ptr, rows, Tq, sink, O: tl.constexpr):
    """lse in the kernel's unit, +inf (so that p = 0) for rows past the end or with nothing to attend to; delta; the
    factor that makes p's sum 1; the sink's share."""
    lse = tl.load(lse_ptr + rows, mask=rows < Tq, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(delta_ptr + rows, mask=rows < Tq, other=0.0)
    norm, share = delta, delta
    if BIAS & O:
        norm = tl.load(norm_ptr + rows, mask=rows < Tq, other=1.0)
    if SINKS & O:
        share = sink_share(lse, sink)
    return to_unit(lse, O), delta, norm, share


@triton.jit
def probabilities(s, lse, norm, O: tl.constexpr):
    p = exp_of(s - lse, O)
    if BIAS & O:
        p *= norm
    return p
