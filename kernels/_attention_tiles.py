"""What every attention kernel shares: where a program works, which blocks it walks, tiles of matrices, products.

A kernel gets its options as one constexpr, `O`, a sum of the names below: a branch on it costs nothing when it runs, so
the kernel without options is the same as if they did not exist. (`BIAS & O`, not `O & BIAS`: in the interpreter O is
an int, which does not know what to do with a constexpr.)
"""

import triton
import triton.language as tl

LEFT = tl.constexpr(1)  # the window is limited to the left,
RIGHT = tl.constexpr(2)  # or to the right
TOP_LEFT = tl.constexpr(4)  # query i stands at i, not at i + Tk - Tq
VARLEN = tl.constexpr(8)  # sequences packed one after the other
SOFTCAP = tl.constexpr(16)
ALIBI = tl.constexpr(32)
BIAS = tl.constexpr(64)
SINKS = tl.constexpr(128)
DROPOUT = tl.constexpr(256)
EDGES = tl.constexpr(
    512
)  # every block compares positions, in one loop: with a bias, which may hide any pair, and in
# fp32, where that is little beside products on FMA units, whose operands a loop without masks keeps in registers


@triton.jit
def locate(blocks, heads, pieces=1):
    """Block, batch (or sequence) and head of this program, one of `pieces` neighbours that have them in common; blocks
    of one head are neighbours, so they share its keys.

    One axis, since the others of a grid end at 65535.
    """
    place = tl.program_id(0) // pieces
    rest = place // blocks
    return place % blocks, (rest // heads).to(tl.int64), (rest % heads).to(tl.int64)


@triton.jit
def sequence(cu_ptr, b, T, O: tl.constexpr):
    """(batch, first row there, rows) of sequence b."""
    first = b * 0
    batch = b
    if VARLEN & O:
        first = tl.load(cu_ptr + b).to(tl.int64)
        T = tl.load(cu_ptr + b + 1) - tl.load(cu_ptr + b)
        batch = b * 0
    return batch, first, T


@triton.jit
def load(
    ptr, rows, stride, columns, size, width, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr
):
    """rows x columns of a matrix, 0 past `size` rows or `width` columns. Its rows begin at multiples of 16 bytes, and
    what follows them up to the next is 0 (`whole_packs` in flash_attention.py)."""
    PACK: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    at = tl.multiple_of(ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], [1, 16])
    inside = columns < tl.cdiv(width, PACK) * PACK
    if MASK_ROWS and MASK_COLUMNS:
        mask = tl.max_constancy((rows[:, None] < size) & inside[None, :], [1, PACK])
        return tl.load(at, mask=mask, other=0.0)
    if MASK_ROWS:
        return tl.load(at, mask=rows[:, None] < size, other=0.0)
    if MASK_COLUMNS:
        return tl.load(at, mask=tl.max_constancy(inside, PACK)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store(ptr, rows, stride, columns, size, width, x):
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < size) & (columns[None, :] < width)
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def dot(acc, a, b, PRECISION: tl.constexpr):
    if PRECISION == "upcast":  # the interpreter multiplies bf16 as the integers that store it
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def product_by_columns(
    a_ptr, a_rows, a_row, a_size, b_ptr, b_rows, b_row, b_size, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a b^T of rows of two matrices, from memory in slices of their columns: on FMA units a product holds whole rows of
    its operands in registers, and those of a large head dim do not fit."""
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in tl.range(0, BD, 32):
        d = first + tl.arange(0, 32)
        a = load(a_ptr, a_rows, a_row, d, a_size, width, True, True)
        b = load(b_ptr, b_rows, b_row, d, b_size, width, True, True)
        acc = dot(acc, a, tl.trans(b), PRECISION)
    return acc


@triton.jit
def band_of(Tq, Tk, left, right, O: tl.constexpr):
    """(offset, left, right): query i stands at p = i + offset and sees keys p - left .. p + right."""
    offset = Tk - Tq
    if TOP_LEFT & O:
        offset = 0
    return offset, left, right


@triton.jit
def sees(i, j, Tk, band, O: tl.constexpr):
    """Whether queries i see keys j, which broadcast against each other."""
    offset, left, right = band
    seen = j < Tk
    if LEFT & O:
        seen = seen & (j >= i + offset - left)
    if RIGHT & O:
        seen = seen & (j <= i + offset + right)
    return seen


@triton.jit
def key_ranges(
    i0, Tk, band, FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The keys of queries i0 .. i0 + BM - 1: masks needed in [first, inner) and [outer, last), none between."""
    offset, left, right = band
    first, inner, outer, last = 0, 0, Tk // BN * BN, Tk
    if LEFT & O:
        first = tl.maximum(i0 + offset - left, 0) // BN * BN
        inner = tl.maximum(tl.cdiv(i0 + BM - 1 + offset - left, BN) * BN, first)
    if RIGHT & O:
        last = tl.minimum(i0 + BM + offset + right, Tk)
        outer = tl.minimum(tl.maximum(i0 + offset + right + 1, 0) // BN * BN, outer)
    if FIX or EDGES & O:
        inner, outer = first, first
    return first, inner, tl.maximum(outer, inner), last


@triton.jit
def query_ranges(
    n0, Tq, Tk, band, FIX: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The queries that see keys n0 .. n0 + BN - 1, as `key_ranges`."""
    offset, left, right = band
    first, inner, outer, last = 0, 0, Tq // BM * BM, Tq
    if RIGHT & O:
        first = tl.maximum(n0 - offset - right, 0) // BM * BM
        inner = tl.maximum(tl.cdiv(tl.maximum(n0 + BN - 1 - offset - right, 0), BM) * BM, first)
    if LEFT & O:
        last = tl.minimum(n0 + BN - offset + left, Tq)
        outer = tl.minimum(tl.maximum(n0 + left - offset + 1, 0) // BM * BM, outer)
    if FIX or EDGES & O:
        inner, outer = first, first
    else:
        if n0 + BN > Tk:
            inner, outer = first, first
    return first, inner, tl.maximum(outer, inner), last


@triton.jit
def span_of(ranges, MASKED: tl.constexpr):
    """Of `key_ranges` or `query_ranges` the blocks that need masks, or those that do not, as `blocks_in` takes them."""
    first, inner, outer, last = ranges
    if MASKED:
        return first, tl.minimum(inner, last), outer, last
    return inner, tl.minimum(outer, last), inner * 0, inner * 0


@triton.jit
def blocks_in(span, BLOCK: tl.constexpr):
    """Blocks in [first, split), and in that and [second, last) together."""
    first, split, second, last = span
    n = tl.cdiv(tl.maximum(split - first, 0), BLOCK)
    return n, n + tl.cdiv(tl.maximum(last - second, 0), BLOCK)


@triton.jit
def block_start(step, n, span, BLOCK: tl.constexpr):
    """Where block number `step` of the span begins."""
    first, _split, second, _last = span
    return step * BLOCK + tl.where(step < n, first, second - n * BLOCK)


@triton.jit
def place_of(batch, head, first):
    """Of a matrix among all that a descriptor knows."""
    return tl.cast(batch, tl.int32), tl.cast(head, tl.int32), tl.cast(first, tl.int32)


@triton.jit
def load_block(
    ptr, desc, place, start, stride, columns, size, width, MASKED: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS - 1 of a matrix, 0 past its end; through a descriptor of all matrices, in which this
    one is at `place_of(...)`, where no row is past the end."""
    if TMA and not MASKED:
        batch, head, first = place
        x = desc.load([batch, head, first + start, 0])
        return x.reshape([ROWS, COLUMNS])
    return load(ptr, start + tl.arange(0, ROWS), stride, columns, size, width, MASKED, not EVEN)


@triton.jit
def clean(x):
    """x with 0 for inf and NaN."""
    if x.dtype == tl.float32:
        odd = (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    elif x.dtype == tl.bfloat16:
        odd = (x.to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80
    else:
        odd = (x.to(tl.int16, bitcast=True) & 0x7C00) == 0x7C00
    return tl.where(odd, 0.0, x).to(x.dtype)


@triton.jit
def not_finite(x):
    """1 if an element of fp32 x is inf or NaN, else 0."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1))


@triton.jit
def odd_row(ptr, row, stride, columns, width):
    """One row in fp32, which of its elements are inf or NaN, and their number."""
    x = tl.load(
        ptr + tl.cast(row, tl.int64) * stride + columns, mask=columns < width, other=0.0
    ).to(tl.float32)
    odd = x - x != 0.0
    return x, odd, tl.sum(tl.where(odd, 1, 0))


@triton.jit
def _flash_attention_outside_kernel(
    x_ptr, cu_ptr, S, rows, row_stride, columns, column_stride, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Fills what lies before the first and behind the last sequence."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, last = tl.load(cu_ptr), tl.load(cu_ptr + S)
    outside = (row < rows) & ((row < first) | (row >= last))
    if tl.max(tl.where(outside, 1, 0)) == 0:
        return
    for start in tl.range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
        x = tl.full((ROWS, COLUMNS), value, dtype=tl.float32)
        mask = outside[:, None] & (column < columns)[None, :]
        tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=mask)
