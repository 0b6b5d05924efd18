"""Attention, backward: dq, one program per (block of queries, b, h), and the gradient of its ALiBi slope, one sum per
program (formulas in _attention_backward)."""

import triton
import triton.language as tl
from trainwright.kernels._attention_backward import (
    probabilities,
    row_statistics,
)
from trainwright.kernels._attention_scores import (
    distance,
    dropout_terms,
    gradients,
    kept,
    score_terms,
    scores,
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
    key_ranges,
    load,
    load_block,
    locate,
    not_finite,
    odd_row,
    place_of,
    product,
    sequence,
    span_of,
    store,
)


@triton.jit
def _dq_range(
    dq, da, total, q, dout, stats, k_ptr, v_ptr, k_desc, v_desc, place, rows, span, k_row, v_row, D, Dv, Tq, Tk, terms,
    band, dropout, MASKED: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DALIBI: tl.constexpr, FIX: tl.constexpr,
    O: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    lse, delta, norm, share = stats
    _seed, _threshold, rescale, _b, _h = dropout
    n, steps = blocks_in(span, BN)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = block_start(step, n, span, BN)
        keys = start + tl.arange(0, BN)
        k = load_block(k_ptr, k_desc, place, start, k_row, d, Tk, D, MASKED, EVEN_D, TMA, BN, BD)
        v = load_block(v_ptr, v_desc, place, start, v_row, e, Tk, Dv, MASKED, EVEN_DV, TMA, BN, BDV)
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
    q_ptr, k_ptr, v_ptr, desc0, desc1, dout_ptr, lse_ptr, delta_ptr, norm_ptr, dq_ptr, dalibi_ptr, bad_ptr, cu_q_ptr,
    cu_k_ptr, alibi_ptr, bias_ptr, sinks_ptr, seed_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
    v_head, do_batch, do_row, do_head, alibi_batch, alibi_head, bias_batch, bias_head, bias_i, bias_j, H, group, Tq, Tk,
    total_q, D, Dv, scale, left, right, softcap, threshold, rescale, NEED_DQ: tl.constexpr, NEED_DALIBI: tl.constexpr,
    FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, EVEN_D:
    tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
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
    ranges = key_ranges(i0, Tk, band, FIX, O, BM, BN)
    place = place_of(batch_k, g, first_k)
    dq = tl.zeros((BM, BD) if NEED_DQ else (1, 1), dtype=tl.float32)
    da = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    PARTS: tl.constexpr = 1 if FIX or EDGES & O else 2
    for part in tl.static_range(PARTS):
        dq, da, total = _dq_range(
            dq, da, total, q, dout, stats, k_ptr, v_ptr, desc0, desc1, place, rows, span_of(ranges, part == 0), k_row,
            v_row, D, Dv, Tq, Tk, terms, band, dropout, part == 0, NEED_DQ, NEED_DALIBI, FIX, O, BN, BD, BDV, EVEN_D,
            EVEN_DV, PRECISION, TMA, STAGES,
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
            first, _inner, _outer, last = ranges
            dq = _odd_keys(dq, k_ptr, rows, first, last, k_row, D, terms, band, O, BD)
        dq_ptr += ((batch * total_q + first_q) * H + h) * D
        store(dq_ptr, rows, H * D, d, Tq, D, dq)
    if not FIX:
        tl.store(bad_ptr + tl.program_id(0), bad)
