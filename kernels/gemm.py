"""Matrix product in Triton:  C (M, N) = activation(A (M, K) B (K, N) + bias) + residual, any strides of A and B.

One program per BLOCK_M x BLOCK_N tile of C, over the whole of K: no split, so repeats are bit-equal. Sums, bias,
activation and residual in fp32; rounded once. Programs run in groups of GROUP_M rows of tiles, so that the tiles
of A and B that run at the same time share the L2 cache. fp32 operands are multiplied in fp32 (no TF32).
2 M N K FLOPs; bound: tensor cores from a few hundred FLOPs per byte on, else memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import os

import torch
import triton
import triton.language as tl

from ._activation import activate

GROUP_M = 8
# The interpreter multiplies the bits of bf16 as integers; in fp32 the products are the same.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, bias_ptr, r_ptr, c_ptr, pre_ptr, M, N, K, a_row, a_k, b_k, b_col, r_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_PRE: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + program % (GROUP * tiles_n) % height
    tile_n = program % (GROUP * tiles_n) // height

    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K).to(tl.int64)
    a = a_ptr + row[:, None] * a_row + step[None, :] * a_k
    b = b_ptr + step[:, None] * b_k + col[None, :] * b_col
    a_next, b_next = tl.full((), BLOCK_K, tl.int64) * a_k, tl.full((), BLOCK_K, tl.int64) * b_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = step < K - k
        x = tl.load(a, mask=(row < M)[:, None] & inside[None, :], other=0.0).to(OPERAND)
        w = tl.load(b, mask=inside[:, None] & (col < N)[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        a += a_next
        b += b_next

    mask = (row < M)[:, None] & (col < N)[None, :]
    at = row[:, None] * N + col[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if SAVE_PRE:
        tl.store(pre_ptr + at, acc.to(pre_ptr.dtype.element_ty), mask=mask)
    acc = activate(acc, ACTIVATION)
    if HAS_RESIDUAL:
        acc += tl.load(r_ptr + row[:, None] * r_row + col[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=mask)


_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _tiles(M, N, operand, aligned, fused):
    """Block sizes, warps and pipeline stages. 128 x 256 fills the registers of 8 warps with fp32 sums and
    leaves none for an epilogue; a product too small to give every SM such a tile takes smaller ones. Rows
    that do not start at 16-byte boundaries cannot be copied to shared memory asynchronously: small tiles,
    whose loads fit in registers. fp32 runs on the FMA units."""
    if operand == torch.float32 or not aligned:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
    if not fused and triton.cdiv(M, 128) * triton.cdiv(N, 256) >= 132:  # SMs of an H100
        return {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    if triton.cdiv(M, 128) * triton.cdiv(N, 128) >= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}


def gemm(a, b, bias, residual, activation, dtype, save_pre):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty((M, N), dtype=dtype)
    pre = a.new_empty((M, N) if save_pre else (0,), dtype=dtype)
    operand = a.dtype if a.dtype == b.dtype and not INTERPRETED else torch.float32
    if M and N:
        # What must be a multiple of 16: N, the size along each dense direction, and every other stride.
        sizes = [N, K if a.stride(1) == 1 or b.stride(0) == 1 else 0, M if a.stride(0) == 1 else 0]
        sizes += [s for t in (a, b) for s in t.stride() if s != 1]
        fused = activation != 0 or save_pre or residual is not None
        tiles = _tiles(M, N, operand, all(s % 16 == 0 for s in sizes), fused)
        _gemm_kernel[(triton.cdiv(M, tiles["BLOCK_M"]) * triton.cdiv(N, tiles["BLOCK_N"]),)](
            a, b, bias, residual, c, pre, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            0 if residual is None else residual.stride(0), ACTIVATION=activation, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, SAVE_PRE=save_pre, OPERAND=_TL[operand], GROUP=GROUP_M, **tiles,
        )  # fmt: skip
    return c, pre


def _configuration(dtype, dense, activation, M, N, aligned=True):
    """AOT entry for an (M, N) product. `dense`: the strides that are 1; the others are multiples of 16 if `aligned`."""
    fused = activation != 0
    tiles = _tiles(M, N, torch.float32 if dtype == "fp32" else torch.bfloat16, aligned, fused)
    types = dict.fromkeys(("a_ptr", "b_ptr", "bias_ptr", "r_ptr", "c_ptr", "pre_ptr"), f"*{dtype}")
    for name in ("M", "N", "K", "a_row", "a_k", "b_k", "b_col", "r_row"):
        if name not in dense:
            types[name] = "i32:16" if aligned and (name != "M" or "a_row" in dense) else "i32"
    constants = {
        **dict.fromkeys(dense, 1), "ACTIVATION": activation, "HAS_BIAS": True, "HAS_RESIDUAL": fused, "SAVE_PRE": fused,
        "OPERAND": tl.float32 if dtype == "fp32" else tl.bfloat16, "GROUP": GROUP_M,
        **{k: v for k, v in tiles.items() if k.startswith("BLOCK")},
    }  # fmt: skip
    tensor_cores = ["80:mma\\.sync", "90:wgmma", "100:tcgen05\\.mma", "80:cp\\.async"]
    return (
        _gemm_kernel,
        types,
        constants,
        tiles["num_warps"],
        tensor_cores if aligned and dtype == "bf16" else [],
    )


_NT, _NN, _TN = ("a_k", "b_k"), ("a_k", "b_col"), ("a_row", "b_col")  # forward, dgrad, wgrad
AOT = [
    _configuration("bf16", _NT, 0, 8192, 8192),
    _configuration("bf16", _NN, 0, 8192, 8192),
    _configuration("bf16", _TN, 0, 8192, 8192),
    _configuration("bf16", _NT, 2, 8192, 8192),
    _configuration("bf16", _NT, 3, 64, 64),
    _configuration("bf16", _NT, 2, 64, 64, aligned=False),
    _configuration("fp32", _NT, 2, 64, 64, aligned=False),
]
