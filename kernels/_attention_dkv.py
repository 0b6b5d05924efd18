"""Attention, backward: dk and dv, one program per (block of keys, b, g), which walks the query heads of the group and
their blocks of queries (formulas in _attention_backward)."""

import triton
import triton.language as tl
from trainwright.kernels._attention_backward import (
    probabilities,
    row_statistics,
)
from trainwright.kernels._attention_scores import (
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
    EDGES,
    SINKS,
    VARLEN,
    band_of,
    block_start,
    blocks_in,
    clean,
    dot,
    load,
    load_block,
    locate,
    not_finite,
    odd_row,
    place_of,
    product,
    product_by_columns,
    query_ranges,
    sequence,
    span_of,
    store,
)


@triton.jit
def _dkv_range(
    dk, dv, k, v, k_ptr, v_ptr, k_row, v_row, Tk, q_ptr, dout_ptr, q_desc, do_desc, place, lse_ptr, delta_ptr,
    norm_ptr, keys, n0, span, q_row, do_row, D, Dv, Tq, sink, terms, band, dropout, MASKED: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    SLICED: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 and (BD > 64 or BDV > 64)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    _seed, _threshold, rescale, _b, _h = dropout
    n, steps = blocks_in(span, BM)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = block_start(step, n, span, BM)
        rows = start + tl.arange(0, BM)
        q = load_block(q_ptr, q_desc, place, start, q_row, d, Tq, D, MASKED, EVEN_D, TMA, BM, BD)
        lse, delta, norm, share = row_statistics(lse_ptr, delta_ptr, norm_ptr, rows, Tq, sink, O)
        if SLICED:
            qk = product_by_columns(
                k_ptr, keys, k_row, Tk, q_ptr, rows, q_row, Tq, D, BN, BM, BD, PRECISION
            )
        else:
            qk = product(k, tl.trans(q), PRECISION)
        s, t, seen = scores(qk, rows[None, :], keys[:, None], terms, band, MASKED, O)
        if MASKED:
            seen = seen & (rows[None, :] < Tq)
        p = probabilities(s, lse[None, :], norm[None, :], O)
        dout = load_block(
            dout_ptr, do_desc, place, start, do_row, e, Tq, Dv, MASKED, EVEN_DV, TMA, BM, BDV
        )
        keep = seen
        if DROPOUT & O:
            keep = tl.trans(kept(rows, n0, dropout, BN))
        dp = p
        if NEED_DK:
            if SLICED:
                dp = product_by_columns(
                    v_ptr, keys, v_row, Tk, dout_ptr, rows, do_row, Tq, Dv, BN, BM, BDV, PRECISION
                )
            else:
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
    q_ptr, k_ptr, v_ptr, dout_ptr, desc0, desc1, lse_ptr, delta_ptr, norm_ptr, dk_ptr, dv_ptr, bad_ptr, cu_q_ptr,
    cu_k_ptr, alibi_ptr, bias_ptr, sinks_ptr, seed_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
    v_head, do_batch, do_row, do_head, alibi_batch, alibi_head, bias_batch, bias_head, bias_i, bias_j, H, G, Tq, Tk,
    total_q, total_k, D, Dv, scale, left, right, softcap, threshold, rescale, NEED_DK: tl.constexpr, NEED_DV:
    tl.constexpr, FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV:
    tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES:
    tl.constexpr,
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
    ranges = query_ranges(n0, Tq, Tk, band, FIX, O, BM, BN)
    PARTS: tl.constexpr = 1 if FIX or EDGES & O else 2
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
        place = place_of(batch, h, first_q)
        for part in tl.static_range(PARTS):
            dk, dv = _dkv_range(
                dk, dv, k, v, k_ptr, v_ptr, k_row, v_row, Tk, q_h, do_h, desc0, desc1, place, lse_ptr + at,
                delta_ptr + at, norm_h, keys, n0, span_of(ranges, part == 0), q_row, do_row, D, Dv, Tq, sink, terms,
                band, dropout, part == 0, NEED_DK, NEED_DV, FIX, O, BM, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, TMA,
                STAGES,
            )  # fmt: skip
        if FIX:
            first, _inner, _outer, last = ranges
            dk, dv = _odd_queries(
                dk, dv, k, q_h, do_h, lse_ptr + at, keys, first, last, q_row, do_row, D, Dv, sink, terms, band, dropout,
                NEED_DK, NEED_DV, O, BD, BDV,
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
