"""Batches of matrix products in Triton, with K split on request:  out (B, M, N) = a (B, M, K) b (B, K, N), any strides.

One program per BLOCK_M x BLOCK_N tile of one part of K of one product. With one part it rounds its sums to the output;
with more it leaves them in fp32 in a workspace (B, splits, M, N), and a second kernel adds the parts in order and
rounds once. No atomics: repeats are bit-equal. Parts are multiples of K_UNIT, so that copies stay aligned.
2 B M N K FLOPs; the split adds 4 (splits + 1) B M N bytes. Bound: tensor cores, else memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl

from ._product import GROUP_M, TL, is_aligned, operand_of, product, tile_of, tiles_for

K_UNIT = 64  # the largest BLOCK_K
SUM_BLOCK = 1024


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, part, a_batch, a_row, a_k, b_batch, b_k, b_col,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_begin = split * part
    acc = product(
        a_ptr + batch * a_batch, b_ptr + batch * b_batch, row, col, M, N, k_begin, tl.minimum(k_begin + part, K), a_row,
        a_k, b_k, b_col, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    c_ptr += (batch * tl.num_programs(1) + split) * M * N
    mask = (row < M)[:, None] & (col < N)[None, :]
    at = row[:, None] * N + col[None, :]
    tl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_splits_kernel(partial_ptr, c_ptr, size, splits, BLOCK: tl.constexpr):
    """c (B, size) = partial (B, splits, size) summed over the splits in order."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(partial_ptr + (batch * splits + split) * size + at, mask=inside, other=0.0)
    tl.store(c_ptr + batch * size + at, total.to(c_ptr.dtype.element_ty), mask=inside)


def matmul(a, b, dtype, splits):
    (B, M, K), N = a.shape, b.shape[2]
    out = a.new_empty((B, M, N), dtype=dtype)
    if not out.numel():
        return out
    part = triton.cdiv(triton.cdiv(max(K, 1), splits), K_UNIT) * K_UNIT
    splits = max(triton.cdiv(K, part), 1)
    to = out if splits == 1 else a.new_empty((B, splits, M, N), dtype=torch.float32)
    operand = operand_of(a, b)
    tiles = tiles_for(M, N, operand, is_aligned(a, b, M, N, K), False, B * splits)
    grid = (triton.cdiv(M, tiles["BLOCK_M"]) * triton.cdiv(N, tiles["BLOCK_N"]), splits, B)
    _matmul_kernel[grid](
        a, b, to, M, N, K, part, a.stride(0), a.stride(1), a.stride(2), b.stride(0), b.stride(1), b.stride(2),
        OPERAND=TL[operand], GROUP=GROUP_M, **tiles,
    )  # fmt: skip
    if splits > 1:
        _sum_splits_kernel[(triton.cdiv(M * N, SUM_BLOCK), B)](
            to, out, M * N, splits, BLOCK=SUM_BLOCK
        )
    return out


def _configuration(dense, M, N, copies):
    tiles = tiles_for(M, N, torch.bfloat16, True, False, copies)
    types = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32" if copies > 1 else "*bf16"}
    for name in ("M", "N", "K", "part", "a_batch", "a_row", "a_k", "b_batch", "b_k", "b_col"):
        if name not in dense:
            types[name] = "i32" if name == "M" and "a_row" not in dense else "i32:16"
    constants = {
        **dict.fromkeys(dense, 1), "OPERAND": tl.bfloat16, "GROUP": GROUP_M,
        **{k: v for k, v in tiles.items() if k.startswith("BLOCK")},
    }  # fmt: skip
    patterns = ["80:mma\\.sync", "90:wgmma", "100:tcgen05\\.mma", "80:cp\\.async"]
    return _matmul_kernel, types, constants, tiles["num_warps"], patterns


AOT = [
    _configuration(("a_k", "b_col"), 8192, 8192, 1),
    _configuration(("a_k", "b_k"), 64, 64, 16),
    (
        _sum_splits_kernel,
        {"partial_ptr": "*fp32", "c_ptr": "*bf16", "size": "i32:16", "splits": "i32"},
        {"BLOCK": SUM_BLOCK},
        4,
        [],
    ),
]
