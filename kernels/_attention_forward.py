"""Attention, forward: one program per (block of queries, b, h); online softmax over the blocks of keys it sees.

Per key and query 2 (D + Dv) FLOPs; a program reads q and writes out once, and reads the keys and values it sees.

A product of 0 and an inf or NaN of v would reach a query that does not see it. No program looks for them: they show in
its result, and only a program whose result is not finite runs again (`FIX`), with 0 in their place, and adds them where
they are seen.
"""

import triton
import triton.language as tl
from trainwright.kernels._attention_scores import (
    LN2,
    NATURAL,
    dropout_terms,
    exp_of,
    kept,
    kept_pairs,
    score_terms,
    scores,
    sink_share,
    to_unit,
)
from trainwright.kernels._attention_split import PIECES, piece_of, pieces_of, slot_of
from trainwright.kernels._attention_tiles import (
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
def _fwd_range(
    acc, m, l, q, k_ptr, v_ptr, k_desc, v_desc, place, rows, span, k_row, v_row, D, Dv, Tk, terms, band, dropout,
    MASKED: tl.constexpr, FIX: tl.constexpr, O: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    n, steps = blocks_in(span, BN)
    for step in tl.range(0, steps, num_stages=STAGES):
        start = block_start(step, n, span, BN)
        keys = start + tl.arange(0, BN)
        k = load_block(k_ptr, k_desc, place, start, k_row, d, Tk, D, MASKED, EVEN_D, TMA, BN, BD)
        qk = product(q, tl.trans(k), PRECISION)
        s, _t, seen = scores(qk, rows[:, None], keys[None, :], terms, band, MASKED, O)
        if MASKED:
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = exp_of(s - base[:, None], O)
        alpha = exp_of(m - base, O)
        l = l * alpha + tl.sum(p, 1)
        m = top
        if DROPOUT & O:
            p = tl.where(kept(rows, start, dropout, BN), p, 0.0)
        v = load_block(v_ptr, v_desc, place, start, v_row, e, Tk, Dv, MASKED, EVEN_DV, TMA, BN, BDV)
        if FIX:
            v = clean(v)
        acc = dot(acc * alpha[:, None], p.to(v.dtype), v, PRECISION)
    return acc, m, l


@triton.jit
def _odd_values(
    out, q, lse, share, k_ptr, v_ptr, rows, first, last, k_row, v_row, D, Dv, terms, band, dropout, O: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """out and, of each inf or NaN in v, p * v for the queries that see it."""
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    _seed, _threshold, rescale, _b, _h = dropout
    for key in tl.range(first, last):
        v, odd, count = odd_row(v_ptr, key, v_row, e, Dv)
        if count > 0:
            k, _odd, _count = odd_row(k_ptr, key, k_row, d, D)
            qk = tl.sum(q.to(tl.float32) * k[None, :], 1)[:, None]
            i, j = rows[:, None], key + tl.zeros_like(rows)[:, None]
            s, _t, seen = scores(qk, i, j, terms, band, True, O)
            p = exp_of(s - to_unit(lse, O)[:, None], O) * share
            if DROPOUT & O:
                p *= tl.where(kept_pairs(i, j, dropout), rescale, 0.0)
            out += tl.where(seen & odd[None, :], p * v[None, :], 0.0)
    return out


@triton.jit
def _flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, desc0, desc1, out_ptr, lse_ptr, bad_ptr, cu_q_ptr, cu_k_ptr, alibi_ptr, bias_ptr, sinks_ptr,
    seed_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, alibi_batch, alibi_head,
    bias_batch, bias_head, bias_i, bias_j, H, group, Tq, Tk, total_q, part_rows, pieces, D, Dv, scale, left, right,
    softcap, threshold, rescale, SPLIT: tl.constexpr, FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if FIX:  # noqa: SIM102
        if tl.load(bad_ptr + tl.program_id(0)) == 0:
            return
    blocks = tl.cdiv(part_rows if SPLIT == PIECES else Tq, BM)
    block, b, h = locate(blocks, H, pieces if SPLIT == PIECES else 1)
    i0 = (blocks - 1 - block) * BM  # the last first: under a causal mask it has the most work
    batch, first_q, Tq = sequence(cu_q_ptr, b, Tq, O)
    batch_k, first_k, Tk = sequence(cu_k_ptr, b, Tk, O)
    if VARLEN & O:  # noqa: SIM102
        if i0 >= Tq:
            tl.store(bad_ptr + tl.program_id(0), 0)
            return
    band = band_of(Tq, Tk, left, right, O)
    piece = tl.program_id(0) % pieces
    first_piece, count = pieces_of(Tq, Tk, group, band, O)
    if SPLIT:  # noqa: SIM102
        if ((count > 1) != (SPLIT == PIECES)) | ((piece >= count) & (SPLIT == PIECES)):
            tl.store(bad_ptr + tl.program_id(0), 0)
            return
    g = h // group
    rows = i0 + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    q_ptr += batch * q_batch + first_q * q_row + h * q_head
    k_ptr += batch_k * k_batch + first_k * k_row + g * k_head
    v_ptr += batch_k * v_batch + first_k * v_row + g * v_head
    q = load(q_ptr, rows, q_row, d, Tq, D, True, not EVEN_D)
    terms = score_terms(
        scale, softcap, alibi_ptr, alibi_batch, alibi_head, bias_ptr, bias_batch, bias_head, bias_i, bias_j, b, h, Tq,
        Tk, O,
    )  # fmt: skip
    dropout = dropout_terms(seed_ptr, threshold, rescale, b, h, O)
    ranges = key_ranges(i0, Tk, band, FIX, O, BM, BN)
    if SPLIT == PIECES:
        ranges = piece_of(ranges, first_piece + piece)
    place = place_of(batch_k, g, first_k)
    acc = tl.zeros((BM, BDV), dtype=tl.float32)
    m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BM,), dtype=tl.float32)
    PARTS: tl.constexpr = 1 if FIX or EDGES & O else 2
    for part in tl.static_range(PARTS):
        acc, m, l = _fwd_range(
            acc, m, l, q, k_ptr, v_ptr, desc0, desc1, place, rows, span_of(ranges, part == 0), k_row, v_row, D, Dv, Tk,
            terms, band, dropout, part == 0, FIX, O, BN, BD, BDV, EVEN_D, EVEN_DV, PRECISION, TMA, STAGES,
        )  # fmt: skip
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    if NATURAL & O:
        lse = m + tl.math.log2(l) * LN2
    else:
        lse = (m + tl.math.log2(l)) * LN2
    lse = tl.where(empty, float("-inf"), lse)
    share = 1.0
    if SINKS & O:
        share = sink_share(lse, tl.load(sinks_ptr + h))
        l /= share
        share = share[:, None]
    if DROPOUT & O:
        l /= rescale
    out = tl.where(empty[:, None], 0.0, acc / l[:, None])
    if FIX:
        first, _inner, _outer, last = ranges
        out = _odd_values(
            out, q, lse, share, k_ptr, v_ptr, rows, first, last, k_row, v_row, D, Dv, terms, band, dropout, O, BD, BDV
        )  # fmt: skip
    else:
        tl.store(bad_ptr + tl.program_id(0), not_finite(out))
    if SPLIT == PIECES:
        at = ((slot_of(b, first_k, pieces, O) + piece) * H + h) * part_rows
        step = Dv
        out_ptr += at * Dv
    else:
        at = (batch * H + h) * total_q + first_q
        step = H * Dv
        out_ptr += ((batch * total_q + first_q) * H + h) * Dv
    if not FIX:
        tl.store(lse_ptr + at + rows, lse, mask=rows < Tq)
    store(out_ptr, rows, step, e, Tq, Dv, out)
