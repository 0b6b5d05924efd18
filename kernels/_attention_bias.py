"""The gradient of attention's bias: the sum of ds = p (dout.v - delta) over the axes that the bias broadcasts.

One program per tile of the result that has both sequence axes, which walks the batches and heads that the bias shares.
Without one of these axes the result is small and its tiles few, so there a program has one batch and head, walks the
blocks along that axis, and the host sums over what else is shared. Both in a fixed order, so repeats are bit-equal.
"""

import triton
import triton.language as tl
from trainwright.kernels._attention_backward import probabilities, row_statistics
from trainwright.kernels._attention_scores import (
    dropout_terms,
    gradients,
    kept,
    score_terms,
    scores,
)
from trainwright.kernels._attention_tiles import (
    DROPOUT,
    SINKS,
    band_of,
    key_ranges,
    load,
    product,
    query_ranges,
)


@triton.jit
def _flash_attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, norm_ptr, dbias_ptr, alibi_ptr, bias_ptr, sinks_ptr, seed_ptr,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head, alibi_batch,
    alibi_head, bias_batch, bias_head, bias_i, bias_j, B, H, group, batches, heads, Tq, Tk, D, Dv, scale, left, right,
    softcap, threshold, rescale, SUM_I: tl.constexpr, SUM_J: tl.constexpr, O: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dbias is (batches, heads, Tq, Tk), without an axis that is summed over."""
    tiles_q = 1 if SUM_I else tl.cdiv(Tq, BM)
    tiles_k = 1 if SUM_J else tl.cdiv(Tk, BN)
    tile = tl.program_id(0) % (tiles_q * tiles_k)
    out = tl.program_id(0) // (tiles_q * tiles_k)
    i0, n0 = tile // tiles_k * BM, tile % tiles_k * BN
    band = band_of(Tq, Tk, left, right, O)
    walk_q, walk_k = 1, 1  # the blocks along either axis that this program sums
    first, _inner, _outer, last = key_ranges(i0, Tk, band, True, O, BM, BN)
    if SUM_I:
        first, _inner, _outer, last = query_ranges(n0, Tq, Tk, band, True, O, BM, BN)
        walk_q = tl.cdiv(tl.maximum(last - first, 0), BM)
        i0 = first
    elif SUM_J:
        walk_k = tl.cdiv(tl.maximum(last - first, 0), BN)
        n0 = first
    else:
        walk_k = tl.where((n0 + BN > first) & (n0 < last), 1, 0)
    shared_heads = H // heads
    d, e = tl.arange(0, BD), tl.arange(0, BDV)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, (B // batches) * shared_heads * walk_q * walk_k, num_stages=STAGES):
        head = step // (walk_q * walk_k)
        b = (out // heads + head // shared_heads).to(tl.int64)
        h = (out % heads + head % shared_heads).to(tl.int64)
        g = h // group
        rows = i0 + step % walk_q * BM + tl.arange(0, BM)
        start = n0 + step // walk_q % walk_k * BN
        keys = start + tl.arange(0, BN)
        q = load(q_ptr + b * q_batch + h * q_head, rows, q_row, d, Tq, D, True, not EVEN_D)
        k = load(k_ptr + b * k_batch + g * k_head, keys, k_row, d, Tk, D, True, not EVEN_D)
        terms = score_terms(
            scale, softcap, alibi_ptr, alibi_batch, alibi_head, bias_ptr, bias_batch, bias_head, bias_i, bias_j, b, h,
            Tq, Tk, O,
        )  # fmt: skip
        dropout = dropout_terms(seed_ptr, threshold, rescale, b, h, O)
        sink = 0.0
        if SINKS & O:
            sink = tl.load(sinks_ptr + h)
        at = (b * H + h) * Tq
        lse, delta, norm, share = row_statistics(
            lse_ptr + at, delta_ptr + at, norm_ptr + at, rows, Tq, sink, O
        )
        qk = product(q, tl.trans(k), PRECISION)
        s, t, seen = scores(qk, rows[:, None], keys[None, :], terms, band, True, O)
        p = probabilities(s, lse[:, None], norm[:, None], O)
        dout = load(
            dout_ptr + b * do_batch + h * do_head, rows, do_row, e, Tq, Dv, True, not EVEN_DV
        )
        v = load(v_ptr + b * v_batch + g * v_head, keys, v_row, e, Tk, Dv, True, not EVEN_DV)
        dp = product(dout, tl.trans(v), PRECISION)
        keep = seen
        if DROPOUT & O:
            keep = kept(rows, start, dropout, BN)
        _weight, ds, _dqk = gradients(
            p, dp, t, seen, keep, delta[:, None], share[:, None], rescale, True, O
        )
        acc += ds
    i0, n0 = tile // tiles_k * BM, tile % tiles_k * BN
    out = out.to(tl.int64)
    if SUM_I:
        keys = n0 + tl.arange(0, BN)
        tl.store(dbias_ptr + out * Tk + keys, tl.sum(acc, 0), mask=keys < Tk)
    elif SUM_J:
        rows = i0 + tl.arange(0, BM)
        tl.store(dbias_ptr + out * Tq + rows, tl.sum(acc, 1), mask=rows < Tq)
    else:
        rows, keys = i0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        at = dbias_ptr + (out * Tq + rows)[:, None] * Tk + keys[None, :]
        tl.store(at, acc, mask=(rows[:, None] < Tq) & (keys[None, :] < Tk))
