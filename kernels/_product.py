"""What the matrix products in Triton share: the order of the tiles, the loop over K, and the choice of tile sizes."""

import os

import torch
import triton
import triton.language as tl

GROUP_M = 8
# The interpreter multiplies the bits of bf16 as integers; in fp32 the products are the same.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def tile_of(
    program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Row and column of the program's tile: programs run in groups of GROUP rows of tiles, so that the tiles of A and B
    that run at the same time share the L2 cache."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + program % (GROUP * tiles_n) % height, program % (GROUP * tiles_n) // height


@triton.jit
def product(
    a_ptr, b_ptr, row, col, row_end, col_end, k_begin, k_end, a_row, a_k, b_k, b_col,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sum over k in [k_begin, k_end) of A[row, k] B[k, col] in fp32; 0 from row_end, col_end on. row, col are int64."""
    step = k_begin + tl.arange(0, BLOCK_K).to(tl.int64)
    a = a_ptr + row[:, None] * a_row + step[None, :] * a_k
    b = b_ptr + step[:, None] * b_k + col[None, :] * b_col
    a_next, b_next = tl.full((), BLOCK_K, tl.int64) * a_k, tl.full((), BLOCK_K, tl.int64) * b_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, k_end - k_begin, BLOCK_K):
        inside = step < k_end - k
        x = tl.load(a, mask=(row < row_end)[:, None] & inside[None, :], other=0.0).to(OPERAND)
        w = tl.load(b, mask=inside[:, None] & (col < col_end)[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        a += a_next
        b += b_next
    return acc


def tiles_for(M, N, operand, aligned, fused, copies=1):
    """Block sizes, warps and pipeline stages for `copies` products. 128 x 256 fills the registers of 8 warps with fp32
    sums and leaves none for an epilogue; products too small to give every SM such a tile take smaller ones. Rows
    that do not start at 16-byte boundaries cannot be copied to shared memory asynchronously: small tiles,
    whose loads fit in registers. fp32 runs on the FMA units."""
    if operand == torch.float32 or not aligned:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
    if not fused and copies * triton.cdiv(M, 128) * triton.cdiv(N, 256) >= 132:  # SMs of an H100
        return {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    if copies * triton.cdiv(M, 128) * triton.cdiv(N, 128) >= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}


def operand_of(a, b):
    """The dtype that tensor cores multiply in: the common one, else fp32."""
    return a.dtype if a.dtype == b.dtype and not INTERPRETED else torch.float32


def is_aligned(a, b, M, N, K):
    """Whether every row of a (.., M, K), b (.., K, N) and the result starts at a multiple of 16 elements: N, the size
    along each dense direction, and every other stride."""
    sizes = [N, K if a.stride(-1) == 1 or b.stride(-2) == 1 else 0, M if a.stride(-2) == 1 else 0]
    sizes += [s for t in (a, b) for s in t.stride() if s != 1]
    return all(s % 16 == 0 for s in sizes)
