"""Few queries and many keys: the keys are cut into pieces, each a program's, and the parts put together in order.

Which sequences are split, and where, depends on their shapes and bands alone (csrc/include/trainwright/
flash_attention.h): neither the batch nor the device changes a bit of a result. Parts are fp32, lse natural and without
the sink. A query and head have pieces (4 Dv + 4) bytes of them, written once; the merge reads them, lse twice.
"""

import triton
import triton.language as tl
from trainwright.kernels._attention_scores import sink_share
from trainwright.kernels._attention_tiles import (
    LEFT,
    RIGHT,
    SINKS,
    VARLEN,
    band_of,
    locate,
    sequence,
)

SPLIT_ROWS = tl.constexpr(64)  # queries of the heads that share keys, at most
SPLIT_KEYS = tl.constexpr(512)  # of a piece
WHOLE = tl.constexpr(1)  # a launch for the sequences of a call that are not split,
PIECES = tl.constexpr(2)  # and one for the others


@triton.jit
def pieces_of(Tq, Tk, group, band, O: tl.constexpr):
    """(the first piece of keys that a query sees, pieces from there to the last); one piece if they are not split."""
    offset, left, right = band
    begin, end = Tk * 0, Tk
    if LEFT & O:
        begin = tl.minimum(tl.maximum(offset - left, 0), Tk)
    if RIGHT & O:
        end = tl.minimum(tl.maximum(Tq + offset + right, 0), Tk)
    first = begin // SPLIT_KEYS
    few = (Tq > 0) & (Tq * group <= SPLIT_ROWS)
    return first, tl.where(few, tl.maximum(tl.cdiv(end, SPLIT_KEYS) - first, 1), 1)


@triton.jit
def slot_of(b, first_k, pieces, O: tl.constexpr):
    """Of a sequence's first part; in a packed batch it begins by where its keys do."""
    if VARLEN & O:
        return first_k // SPLIT_KEYS + b
    return b * pieces


@triton.jit
def piece_of(ranges, piece):
    """What `key_ranges` found, in one piece of the keys."""
    first, inner, outer, last = ranges
    start = piece * SPLIT_KEYS
    end = start + SPLIT_KEYS
    first, last = tl.maximum(first, start), tl.minimum(last, end)
    inner = tl.minimum(tl.maximum(inner, start), end)
    outer = tl.minimum(tl.maximum(outer, start), end)
    return first, inner, outer, last


@triton.jit
def _flash_attention_merge_kernel(
    parts_ptr, parts_lse_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, H, group, Tq, Tk, total_q, part_rows,
    pieces, Dv, left, right, O: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """One program per query and head."""
    i, b, h = locate(part_rows, H)
    batch, first_q, Tq = sequence(cu_q_ptr, b, Tq, O)
    _batch, first_k, Tk = sequence(cu_k_ptr, b, Tk, O)
    _first, count = pieces_of(Tq, Tk, group, band_of(Tq, Tk, left, right, O), O)
    if (i >= Tq) | (count == 1):
        return
    at = (slot_of(b, first_k, pieces, O) * H + h) * part_rows + i
    step = (H * part_rows).to(tl.int64)
    top, total = float("-inf"), 0.0
    for piece in tl.range(0, count):
        x = tl.load(parts_lse_ptr + at + piece * step)
        higher = tl.where(x > top, x, top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log(total))
    e = tl.arange(0, BDV)
    out = tl.zeros((BDV,), dtype=tl.float32)
    for piece in tl.range(0, count):
        row = at + piece * step
        x = tl.load(parts_lse_ptr + row)
        y = tl.load(parts_ptr + row * Dv + e, mask=e < Dv, other=0.0)
        out += tl.where(x == float("-inf"), 0.0, tl.exp(x - lse) * y)
    if SINKS & O:
        out *= sink_share(lse, tl.load(sinks_ptr + h))
    to = out_ptr + ((batch * total_q + first_q + i) * H + h) * Dv
    tl.store(to + e, out.to(out_ptr.dtype.element_ty), mask=e < Dv)
    tl.store(lse_ptr + (batch * H + h) * total_q + first_q + i, lse)


def most_pieces(call, options):
    """Of a sequence of this call, 1 if none is split. Of a packed batch the host knows bounds of lengths only."""
    Tq, Tk, O, keys = call["Tq"], call["Tk"], call["O"], SPLIT_KEYS.value
    limit = SPLIT_ROWS.value // max(call["group"], 1)
    left, right = bool(O & options.LEFT.value), bool(O & options.RIGHT.value)
    if not O & options.VARLEN.value:
        offset = 0 if O & options.TOP_LEFT.value else Tk - Tq
        begin = min(max(offset - call["left"], 0), Tk) if left else 0
        end = min(max(Tq + offset + call["right"], 0), Tk) if right else Tk
        count = triton.cdiv(end, keys) - begin // keys
        return max(count, 1) if 0 < Tq <= limit else 1
    if limit == 0 or call["cu_q_ptr"] is call["cu_k_ptr"]:  # as many keys as queries
        return 1
    count = triton.cdiv(Tk, keys)
    if left and right:
        count = min(count, (min(Tq, limit) + call["left"] + call["right"]) // keys + 2)
    return max(count, 1)
