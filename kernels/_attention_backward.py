"""Attention, backward, without atomics. With delta = sum dout * out - dlse of a query, p = exp(score - lse):

    dv = sum_i p dout,   ds = p (dout.v - delta),   dq = scale sum_j ds k,   dk = scale sum_i ds q

delta    one program per block of rows.
dkv      one program per (block of keys, b, g), which walks the query heads of the group and their blocks of queries.
dq       one program per (block of queries, b, h); also the gradient of its ALiBi slope, as one partial sum.
Seven products instead of five, but repeats are bit-equal. With a sink of share r = sigmoid(lse - sink) and dropout's
factor z (0 or 1 / (1 - p)): dv takes p r z for p, ds = p (r z dout.v - delta), delta = r sum dout * out - dlse.

As in the forward, a program whose result is not finite runs again (`FIX`), with 0 for inf and NaN in the operands,
which might otherwise reach rows that do not see them, and adds them where they are seen.
"""

import triton
import triton.language as tl
from trainwright.kernels._attention_scores import (
    RARE,
    distance,
    dropout_terms,
    exp_of,
    gradients,
    kept,
    kept_pairs,
    score_terms,
    scores,
    sink_share,
    to_unit,
)
from trainwright.kernels._attention_tiles import (
    BIAS,
    DROPOUT,
    SINKS,
    VARLEN,
    band_of,
    clean,
    dot,
    key_ranges,
    load,
    locate,
    not_finite,
    odd_row,
    product,
    query_ranges,
    sequence,
    steps_in,
    store,
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
    out = load(out_ptr + (b * Tq * H + h) * Dv, rows, H * Dv, e, Tq, Dv, True, True)
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


@triton.jit
def _dkv_range(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, norm_ptr, keys, n0, first, split, second, last, q_row, do_row, D,
    Dv, Tq, sink, terms, band, dropout, MASKED: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    _seed, _threshold, rescale, _b, _h = dropout
    n, steps = steps_in(first, split, second, last, BM)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = step * BM + tl.where(step < n, first, second - n * BM)
        rows = start + tl.arange(0, BM)
        q = load(q_ptr, rows, q_row, d, Tq, D, MASKED, not EVEN_D)
        lse, delta, norm, share = row_statistics(lse_ptr, delta_ptr, norm_ptr, rows, Tq, sink, O)
        qk = product(k, tl.trans(q), PRECISION)
        s, t, seen = scores(qk, rows[None, :], keys[:, None], terms, band, MASKED, O)
        if MASKED:
            seen = seen & (rows[None, :] < Tq)
        p = probabilities(s, lse[None, :], norm[None, :], O)
        dout = load(dout_ptr, rows, do_row, e, Tq, Dv, MASKED, not EVEN_DV)
        keep = seen
        if DROPOUT & O:
            keep = tl.trans(kept(rows, n0, dropout, BN))
        dp = p
        if NEED_DK:
            dp = product(v, tl.trans(dout), PRECISION)
        weight, _ds, dqk = gradients(
            p, dp, t, seen, keep, delta[None, :], share[None, :], rescale, MASKED, O
        )
        if FIX:  # where they are summed over queries
            q, dout = clean(q), clean(dout)
        if NEED_DV:
            dv = dot(dv, weight.to(dout.dtype), dout, PRECISION)
        if NEED_DK:
            dk = dot(dk, dqk.to(q.dtype), q, PRECISION)
    return dk, dv


@triton.jit
def _odd_queries(
    dk, dv, k, q_ptr, dout_ptr, lse_ptr, keys, first, last, q_row, do_row, D, Dv, sink, terms, band, dropout,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, O: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """dv and, of each inf or NaN in dout, p * dout for the keys that its query sees; dk, NaN where one in q is seen."""
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    _seed, _threshold, rescale, _b, _h = dropout
    for row in tl.range(first, last):
        q, odd_q, count_q = odd_row(q_ptr, row, q_row, d, D)
        dout, odd, count = odd_row(dout_ptr, row, do_row, e, Dv)
        if count + count_q > 0:
            qk = tl.sum(k.to(tl.float32) * q[None, :], 1)[:, None]
            i, j = row + tl.zeros_like(keys)[:, None], keys[:, None]
            s, _t, seen = scores(qk, i, j, terms, band, True, O)
            lse = tl.load(lse_ptr + row)
            p = exp_of(s - to_unit(lse, O), O)
            if SINKS & O:
                p *= sink_share(lse, sink)
            if DROPOUT & O:
                p *= tl.where(kept_pairs(i, j, dropout), rescale, 0.0)
            if NEED_DV:
                dv += tl.where(seen & odd[None, :], p * dout[None, :], 0.0)
            if NEED_DK:
                dk = tl.where(seen & odd_q[None, :], float("nan"), dk)
    return dk, dv


@triton.jit
def _flash_attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, norm_ptr, dk_ptr, dv_ptr, bad_ptr, cu_q_ptr, cu_k_ptr, alibi_ptr,
    bias_ptr, sinks_ptr, seed_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch,
    do_row, do_head, alibi_batch, alibi_head, bias_batch, bias_head, bias_i, bias_j, H, G, Tq, Tk, total_q, total_k, D,
    Dv, scale, left, right, softcap, threshold, rescale, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if FIX:  # noqa: SIM102
        if tl.load(bad_ptr + tl.program_id(0)) == 0:
            return
    block, b, g = locate(tl.cdiv(Tk, BN), G)
    n0 = block * BN
    batch, first_q, Tq = sequence(cu_q_ptr, b, Tq, O)
    batch_k, first_k, Tk = sequence(cu_k_ptr, b, Tk, O)
    if VARLEN & O:  # noqa: SIM102
        if n0 >= Tk:
            tl.store(bad_ptr + tl.program_id(0), 0)
            return
    keys = n0 + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    q_ptr += batch * q_batch + first_q * q_row
    k_ptr += batch_k * k_batch + first_k * k_row + g * k_head
    v_ptr += batch_k * v_batch + first_k * v_row + g * v_head
    dout_ptr += batch * do_batch + first_q * do_row
    k = load(k_ptr, keys, k_row, d, Tk, D, True, not EVEN_D)
    v = k
    if NEED_DK:
        v = load(v_ptr, keys, v_row, e, Tk, Dv, True, not EVEN_DV)
    band = band_of(Tq, Tk, left, right, O)
    first, inner, outer, last = query_ranges(n0, Tq, Tk, band, FIX, O, BM, BN)
    # A gradient that is not wanted takes one element's place, not a tile's.
    dk = tl.zeros((BN, BD) if NEED_DK else (1, 1), dtype=tl.float32)
    dv = tl.zeros((BN, BDV) if NEED_DV else (1, 1), dtype=tl.float32)
    group = H // G
    for h in tl.range(g * group, (g + 1) * group):
        q_h = q_ptr + h * q_head
        do_h = dout_ptr + h * do_head
        at = (batch * H + h) * total_q + first_q
        norm_h = norm_ptr
        sink = 0.0
        if BIAS & O:
            norm_h = norm_ptr + at
        if SINKS & O:
            sink = tl.load(sinks_ptr + h)
        terms = score_terms(
            scale, softcap, alibi_ptr, alibi_batch, alibi_head, bias_ptr, bias_batch, bias_head, bias_i, bias_j, b, h,
            Tq, Tk, O,
        )  # fmt: skip
        dropout = dropout_terms(seed_ptr, threshold, rescale, b, h, O)
        dk, dv = _dkv_range(
            dk, dv, k, v, q_h, do_h, lse_ptr + at, delta_ptr + at, norm_h, keys, n0, first, tl.minimum(inner, last),
            outer, last, q_row, do_row, D, Dv, Tq, sink, terms, band, dropout, True, NEED_DK, NEED_DV, FIX, O, BM, BN,
            BD, BDV, EVEN_D, EVEN_DV, PRECISION, STAGES,
        )  # fmt: skip
        if FIX:
            dk, dv = _odd_queries(
                dk, dv, k, q_h, do_h, lse_ptr + at, keys, first, last, q_row, do_row, D, Dv, sink, terms, band, dropout,
                NEED_DK, NEED_DV, O, BD, BDV,
            )  # fmt: skip
        if not (FIX or BIAS & O):
            dk, dv = _dkv_range(
                dk, dv, k, v, q_h, do_h, lse_ptr + at, delta_ptr + at, norm_h, keys, n0, inner,
                tl.minimum(outer, last), 0, 0, q_row, do_row, D, Dv, Tq, sink, terms, band, dropout, False, NEED_DK,
                NEED_DV, FIX, O, BM, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, STAGES,
            )  # fmt: skip
    at_k = (batch_k * total_k + first_k) * G + g
    bad = 0
    if NEED_DK:
        dk *= scale
        bad = not_finite(dk)
        store(dk_ptr + at_k * D, keys, G * D, d, Tk, D, dk)
    if NEED_DV:
        bad = tl.maximum(bad, not_finite(dv))
        store(dv_ptr + at_k * Dv, keys, G * Dv, e, Tk, Dv, dv)
    if not FIX:
        tl.store(bad_ptr + tl.program_id(0), bad)


@triton.jit
def _dq_range(
    dq, da, total, q, dout, stats, k_ptr, v_ptr, rows, first, split, second, last, k_row, v_row, D, Dv, Tq, Tk, terms,
    band, dropout, MASKED: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DALIBI: tl.constexpr, FIX: tl.constexpr,
    O: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    lse, delta, norm, share = stats
    _seed, _threshold, rescale, _b, _h = dropout
    n, steps = steps_in(first, split, second, last, BN)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = step * BN + tl.where(step < n, first, second - n * BN)
        keys = start + tl.arange(0, BN)
        k = load(k_ptr, keys, k_row, d, Tk, D, MASKED, not EVEN_D)
        v = load(v_ptr, keys, v_row, e, Tk, Dv, MASKED, not EVEN_DV)
        qk = product(q, tl.trans(k), PRECISION)
        s, t, seen = scores(qk, rows[:, None], keys[None, :], terms, band, MASKED, O)
        p = probabilities(s, lse[:, None], norm[:, None], O)
        keep = seen
        if DROPOUT & O:
            keep = kept(rows, start, dropout, BN)
        dp = product(dout, tl.trans(v), PRECISION)
        _weight, ds, dqk = gradients(
            p, dp, t, seen, keep, delta[:, None], share[:, None], rescale, MASKED, O
        )
        if NEED_DALIBI:
            da += tl.sum(ds * distance(rows[:, None], keys[None, :], Tq, Tk), 1)
            total += tl.sum(tl.where(seen, p, 0.0) if MASKED else p, 1)
        if FIX:  # where it is summed over keys
            k = clean(k)
        if NEED_DQ:
            dq = dot(dq, dqk.to(k.dtype), k, PRECISION)
    return dq, da, total


@triton.jit
def _odd_keys(
    dq, k_ptr, rows, first, last, k_row, D, terms, band, O: tl.constexpr, BD: tl.constexpr
):
    """dq, NaN where an inf or NaN in k is seen."""
    d = tl.arange(0, BD)
    for key in tl.range(first, last):
        _k, odd, count = odd_row(k_ptr, key, k_row, d, D)
        if count > 0:
            i, j = rows[:, None], key + tl.zeros_like(rows)[:, None]
            _s, _t, seen = scores(tl.zeros_like(j).to(tl.float32), i, j, terms, band, True, O)
            dq = tl.where(seen & odd[None, :], float("nan"), dq)
    return dq


@triton.jit
def _flash_attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, norm_ptr, dq_ptr, dalibi_ptr, bad_ptr, cu_q_ptr, cu_k_ptr,
    alibi_ptr, bias_ptr, sinks_ptr, seed_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    do_batch, do_row, do_head, alibi_batch, alibi_head, bias_batch, bias_head, bias_i, bias_j, H, group, Tq, Tk,
    total_q, D, Dv, scale, left, right, softcap, threshold, rescale, NEED_DQ: tl.constexpr, NEED_DALIBI: tl.constexpr,
    FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if FIX:  # noqa: SIM102
        if tl.load(bad_ptr + tl.program_id(0)) == 0:
            return
    blocks = tl.cdiv(Tq, BM)
    block, b, h = locate(blocks, H)
    i0 = (blocks - 1 - block) * BM
    batch, first_q, Tq = sequence(cu_q_ptr, b, Tq, O)
    batch_k, first_k, Tk = sequence(cu_k_ptr, b, Tk, O)
    if VARLEN & O:  # noqa: SIM102
        if i0 >= Tq:
            tl.store(bad_ptr + tl.program_id(0), 0)
            if NEED_DALIBI:
                tl.store(dalibi_ptr + tl.program_id(0), 0.0)
            return
    g = h // group
    rows = i0 + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    q_ptr += batch * q_batch + first_q * q_row + h * q_head
    dout_ptr += batch * do_batch + first_q * do_row + h * do_head
    k_ptr += batch_k * k_batch + first_k * k_row + g * k_head
    v_ptr += batch_k * v_batch + first_k * v_row + g * v_head
    q = load(q_ptr, rows, q_row, d, Tq, D, True, not EVEN_D)
    dout = load(dout_ptr, rows, do_row, e, Tq, Dv, True, not EVEN_DV)
    at = (batch * H + h) * total_q + first_q
    sink = 0.0
    if BIAS & O:
        norm_ptr += at
    if SINKS & O:
        sink = tl.load(sinks_ptr + h)
    stats = row_statistics(lse_ptr + at, delta_ptr + at, norm_ptr, rows, Tq, sink, O)
    band = band_of(Tq, Tk, left, right, O)
    terms = score_terms(
        scale, softcap, alibi_ptr, alibi_batch, alibi_head, bias_ptr, bias_batch, bias_head, bias_i, bias_j, b, h, Tq,
        Tk, O,
    )  # fmt: skip
    dropout = dropout_terms(seed_ptr, threshold, rescale, b, h, O)
    first, inner, outer, last = key_ranges(i0, Tk, band, FIX, O, BM, BN)
    dq = tl.zeros((BM, BD) if NEED_DQ else (1, 1), dtype=tl.float32)
    da = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    dq, da, total = _dq_range(
        dq, da, total, q, dout, stats, k_ptr, v_ptr, rows, first, tl.minimum(inner, last), outer, last, k_row, v_row, D,
        Dv, Tq, Tk, terms, band, dropout, True, NEED_DQ, NEED_DALIBI, FIX, O, BN, BD, BDV, EVEN_D, EVEN_DV,
        PRECISION, STAGES,
    )  # fmt: skip
    if not (FIX or BIAS & O):
        dq, da, total = _dq_range(
            dq, da, total, q, dout, stats, k_ptr, v_ptr, rows, inner, tl.minimum(outer, last), 0, 0, k_row, v_row, D,
            Dv, Tq, Tk, terms, band, dropout, False, NEED_DQ, NEED_DALIBI, FIX, O, BN, BD, BDV, EVEN_D, EVEN_DV,
            PRECISION, STAGES,
        )  # fmt: skip
    bad = 0
    if NEED_DALIBI:
        # The distances make a large lse large, and its rounding a factor of the whole row.
        da = da / tl.where(total == 0.0, 1.0, total)
        tl.store(dalibi_ptr + tl.program_id(0), -tl.sum(da))
    if NEED_DQ:
        dq *= scale
        bad = not_finite(dq)
        if FIX:
            dq = _odd_keys(dq, k_ptr, rows, first, last, k_row, D, terms, band, O, BD)
        dq_ptr += ((batch * total_q + first_q) * H + h) * D
        store(dq_ptr, rows, H * D, d, Tq, D, dq)
    if not FIX:
        tl.store(bad_ptr + tl.program_id(0), bad)
