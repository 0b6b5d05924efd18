"""One matrix product per group of rows in Triton; the groups are known on the device only.

forward  out[rows of e] = x[rows of e] w[e]. The grid has a row of tiles for every BLOCK_M rows and one more per group:
         enough whatever the groups are. A program walks the end rows to find the group and the tile that are its own;
         the rows past the last group are one more group, which gets 0. Programs too many return.
wgrad    dw[e] = x[rows of e]' dy[rows of e]: one program per tile of dw and group, over the rows of the group.
Ends outside [0, N] or out of order never lead outside the tensors: they are clamped as they are read.
128 x 256 tiles would spill beside the search for the group, so the tiles are those of a product with an epilogue.
Where the architecture has tensor descriptors, the forward fetches boxes (TMA); rows of the next group that come along
are not stored. wgrad sums over rows, so those of other groups must not come along: pointers.
Sums in fp32, rounded once; no atomics: repeats are bit-equal. 2 N K C FLOPs; bound: tensor cores, or reading w where
the groups have few rows.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import triton
import triton.language as tl

from ._product import TL, box_of, is_aligned, operand_of, product, product_of_boxes, use_boxes
from ._product_configs import architecture, constants, kind_for, look_up


@triton.jit
def _group_end(offsets_ptr, e, begin, N):
    return tl.minimum(tl.maximum(tl.load(offsets_ptr + e), begin), N)


@triton.jit
def _grouped_matmul_kernel(
    x, w, offsets_ptr, out_ptr, N, K, C, E, x_row, x_k, w_group, w_k, w_col,
    BOXES: tl.constexpr, X_K: tl.constexpr, W_K: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # The tile of rows: number `left` of the group, counted over the groups in order.
    left, group, begin, end = tl.program_id(1), E, 0, 0
    found = False
    previous = 0
    for e in range(E):
        stop = _group_end(offsets_ptr, e, previous, N)
        tiles = tl.cdiv(stop - previous, BLOCK_M)
        mine = (left < tiles) & (left >= 0) & (not found)
        group = tl.where(mine, e, group)
        begin = tl.where(mine, previous + left * BLOCK_M, begin)
        end = tl.where(mine, stop, end)
        left = tl.where(found | mine, left, left - tiles)
        found = found | mine
        previous = stop
    if not found:
        begin, end = previous + left * BLOCK_M, N
    if begin >= end:
        return
    row = begin + tl.arange(0, BLOCK_M).to(tl.int64)
    col = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row[:, None] * C + col[None, :]
    mask = (row < end)[:, None] & (col < C)[None, :]
    if not found:  # past the last group
        tl.store(out_ptr + at, tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty), mask=mask)
        return
    if BOXES:  # rows of the next group come along, and are not stored
        acc = product_of_boxes(
            x, w, 0, group, begin, tl.program_id(0) * BLOCK_N, 0, K, False, True, X_K, W_K, OPERAND, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
    else:
        acc = product(
            x, w + group.to(tl.int64) * w_group, row, col, end, C, 0, K, x_row, x_k, w_k, w_col, OPERAND, BLOCK_M,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_wgrad_kernel(
    x_ptr, dy_ptr, offsets_ptr, dw_ptr, N, K, C, x_row, x_k, dy_row, dy_col,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    begin = 0
    for before in range(e):
        begin = _group_end(offsets_ptr, before, begin, N)
    end = _group_end(offsets_ptr, e, begin, N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product(
        x_ptr, dy_ptr, row, col, K, C, begin, end, x_k, x_row, dy_row, dy_col, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    mask = (row < K)[:, None] & (col < C)[None, :]
    at = e * K * C + row[:, None] * C + col[None, :]
    tl.store(dw_ptr + at, acc.to(dw_ptr.dtype.element_ty), mask=mask)


def _tiles_for(M, N, operand, aligned, copies=1):
    return constants(look_up(kind_for(M, N, operand, aligned, True, copies), architecture()))


def grouped_matmul(x, weights, offsets, dtype):
    (N, K), (E, _, C) = x.shape, weights.shape
    out = x.new_empty((N, C), dtype=dtype)
    if not out.numel():
        return out
    if not E:
        return out.zero_()
    operand, aligned = operand_of(x, weights), is_aligned(x, weights, N, C, K)
    tiles = _tiles_for(N, C, operand, aligned)
    grid = (triton.cdiv(C, tiles["BLOCK_N"]), triton.cdiv(N, tiles["BLOCK_M"]) + E + 1)
    boxes = aligned and use_boxes(x, weights)
    a, b, x_k, w_k = x, weights, False, False
    if boxes:
        a, x_k = box_of(x, -1, tiles["BLOCK_M"], tiles["BLOCK_K"], False)
        b, w_k = box_of(weights, -2, tiles["BLOCK_N"], tiles["BLOCK_K"], True)
    _grouped_matmul_kernel[grid](
        a, b, offsets, out, N, K, C, E, x.stride(0), x.stride(1), *weights.stride(), BOXES=boxes, X_K=x_k, W_K=w_k,
        OPERAND=TL[operand], **tiles,
    )  # fmt: skip
    return out


def grouped_matmul_wgrad(x, dy, offsets, dtype):
    (N, K), C, E = x.shape, dy.shape[1], offsets.shape[0]
    dw = x.new_empty((E, K, C), dtype=dtype)
    if dw.numel():
        operand = operand_of(x, dy)
        # Groups begin at any row: along it nothing is aligned, across it everything may be.
        tiles = _tiles_for(K, C, operand, is_aligned(x.t(), dy, K, C, 16), E)
        grid = (triton.cdiv(C, tiles["BLOCK_N"]), triton.cdiv(K, tiles["BLOCK_M"]), E)
        _grouped_wgrad_kernel[grid](
            x, dy, offsets, dw, N, K, C, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1),
            OPERAND=TL[operand], **tiles,
        )  # fmt: skip
    return dw


def _configuration(kernel, sizes, dense, kind, boxes=False):
    tiles = constants(look_up(kind, 90))
    BLOCK_M, BLOCK_N, BLOCK_K = (tiles[n] for n in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    names = [n for n in kernel.arg_names if n.endswith("_ptr") or n in ("x", "w")]
    types = {n: "*i32" if n == "offsets_ptr" else "*bf16" for n in names}
    types |= {n: "i32" if n in ("N", "E") else "i32:16" for n in sizes if n not in dense}
    if boxes:
        types["x"] = f"tensordesc<bf16{[BLOCK_M, BLOCK_K]}>"
        types["w"] = f"tensordesc<bf16{[1, BLOCK_K, BLOCK_N]}>"
    flags = {"BOXES": boxes, "X_K": boxes, "W_K": False} if "BOXES" in kernel.arg_names else {}
    values = {
        **dict.fromkeys(dense, 1), **flags, "OPERAND": tl.bfloat16,
        **{k: v for k, v in tiles.items() if k.startswith("BLOCK")},
    }  # fmt: skip
    options = {"num_stages": tiles["num_stages"], **({"archs": (90, 100)} if boxes else {})}
    patterns = ["80:mma\\.sync", "90:wgmma", *(["cp\\.async\\.bulk\\.tensor"] if boxes else [])]
    return kernel, types, values, tiles["num_warps"], patterns, options


_FORWARD = (
    _grouped_matmul_kernel, ("N", "K", "C", "E", "x_row", "x_k", "w_group", "w_k", "w_col"),
    ("x_k", "w_col"), "fused",
)  # fmt: skip
AOT = [
    _configuration(*_FORWARD),
    _configuration(*_FORWARD, boxes=True),
    _configuration(
        _grouped_wgrad_kernel, ("N", "K", "C", "x_row", "x_k", "dy_row", "dy_col"),
        ("x_k", "dy_col"), "fused",
    ),
]  # fmt: skip
