"""Gradients as int8 for the network, in Triton (formulas in csrc/include/trainwright/int8_wire.h).

A program has 64 blocks of 64 elements, four lanes of a warp and 16 elements a lane for each; the largest of a block is
found on the bits of the values, which are ordered as they are, with NaN on top. Multiplications and additions are not
fused: the bits are those of the other backends.
Bytes per element: encode 4 (x) + 8 (error) + 17/16, sum 17/16 W + 4. Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import triton
import triton.language as tl
from trainwright.kernels._multi_tensor import number_table
from trainwright.ops.int8_wire import BLOCK, SMALLEST, _parts

BLOCKS = 64  # of a program
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
LIMIT = tl.constexpr(SMALLEST)


@triton.jit
def _places(n, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of this program and their elements."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    i = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    i = tl.multiple_of(first * BLOCK, BLOCK) + i
    return first + tl.arange(0, BLOCKS), i, i < n


# Of codes at a multiple of 16 a thread would store 16, and read its values half a sector at a time.
@triton.jit(do_not_specialize_on_alignment=["codes_ptr"])
def _int8_encode_kernel(
    x_ptr, error_ptr, codes_ptr, steps_ptr, n, scale, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    block, i, mask = _places(n, BLOCKS, BLOCK)
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    v = x * scale + tl.load(error_ptr + i, mask=mask, other=0.0)
    v = tl.where(mask, v, 0.0)
    bits = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    peak = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    usable = finite & (peak >= LIMIT)
    safe = tl.where(usable, peak, 1.0)
    step = tl.where(usable, safe * (1.0 / 127.0), tl.where(finite, 0.0, float("nan")))
    inverse = tl.div_rn(1.0, safe) * 127.0
    some = usable[:, None]
    # 1.5 * 2^23: adding it rounds to a whole number, ties to even.
    code = tl.where(some, (v * inverse[:, None] + 12582912.0) - 12582912.0, 0.0)
    left = tl.where(some, v - code * step[:, None], tl.where(finite[:, None], v, 0.0))
    tl.store(error_ptr + i, left, mask=mask)
    codes = tl.multiple_of(codes_ptr + i, [1, 4])  # as all rows are
    tl.store(codes, code.to(tl.int8), mask=mask)
    tl.store(steps_ptr + block, step, mask=block * BLOCK < n)


@triton.jit
def _int8_sum_kernel(
    table_ptr, out_ptr, W, n, begin, scale, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """begin: of the steps, in bytes of a row."""
    block, i, mask = _places(n, BLOCKS, BLOCK)
    total = tl.zeros((BLOCKS, BLOCK), dtype=tl.float32)
    for w in range(0, W):
        row = tl.load(table_ptr + w)
        codes_ptr = tl.multiple_of(row.to(tl.pointer_type(tl.int8)), 4)
        codes = tl.load(codes_ptr + i, mask=mask, other=0)
        steps = (row + begin).to(tl.pointer_type(tl.float32)) + block
        step = tl.load(steps, mask=block * BLOCK < n, other=0.0)
        value = codes.to(tl.float32) * step[:, None]
        total = tl.where(w == 0, value, total + value)
    tl.store(out_ptr + i, total * scale, mask=mask)


def int8_encode_(row, error, x, scale):
    n = x.numel()
    if n == 0:
        return
    codes, steps = _parts(row, n)
    grid = (triton.cdiv(n, BLOCKS * BLOCK),)
    _int8_encode_kernel[grid](
        x, error, codes, steps, n, scale, BLOCKS=BLOCKS, BLOCK=BLOCK, **OPTIONS
    )


def int8_sum_(out, rows, scale):
    n = out.numel()
    if n == 0:
        return
    addresses = number_table((tuple(r.data_ptr() for r in rows),), out.device)
    grid = (triton.cdiv(n, BLOCKS * BLOCK),)
    _int8_sum_kernel[grid](
        addresses, out, len(rows), n, triton.cdiv(n, 4) * 4, scale, BLOCKS=BLOCKS, BLOCK=BLOCK, **OPTIONS
    )  # fmt: skip


_SHAPE = {"BLOCKS": BLOCKS, "BLOCK": BLOCK}
AOT = [
    (
        _int8_encode_kernel,
        {"x_ptr": "*fp32", "error_ptr": "*fp32", "codes_ptr": "*i8", "steps_ptr": "*fp32", "n": "i64", "scale": "fp32"},
        _SHAPE,
        8,
        [],
        {"enable_fp_fusion": False},
    ),
    (
        _int8_sum_kernel,
        {"table_ptr": "*i64", "out_ptr": "*fp32", "W": "i32", "n": "i64", "begin": "i64", "scale": "fp32"},
        _SHAPE,
        8,
        [],
        {"enable_fp_fusion": False},
    ),
]  # fmt: skip
