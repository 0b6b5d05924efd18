"""Matrix product in Triton:  C (M, N) = activation(A (M, K) B (K, N) + bias) + residual, any strides of A and B.

One program per BLOCK_M x BLOCK_N tile of C, over the whole of K: no split, so repeats are bit-equal. Sums, bias,
activation and residual in fp32; rounded once. Programs run in groups of GROUP_M rows of tiles, so that the tiles
of A and B that run at the same time share the L2 cache. fp32 operands are multiplied in fp32 (no TF32).
2 M N K FLOPs; bound: tensor cores from a few hundred FLOPs per byte on, else memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl

from ._activation import activate
from ._product import GROUP_M, TL, is_aligned, operand_of, product, tile_of, tiles_for


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, bias_ptr, r_ptr, c_ptr, pre_ptr, M, N, K, a_row, a_k, b_k, b_col, r_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_PRE: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product(
        a_ptr, b_ptr, row, col, M, N, 0, K, a_row, a_k, b_k, b_col, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip

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


def gemm(a, b, bias, residual, activation, dtype, save_pre):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty((M, N), dtype=dtype)
    pre = a.new_empty((M, N) if save_pre else (0,), dtype=dtype)
    operand = operand_of(a, b)
    if M and N:
        fused = activation != 0 or save_pre or residual is not None
        tiles = tiles_for(M, N, operand, is_aligned(a, b, M, N, K), fused)
        _gemm_kernel[(triton.cdiv(M, tiles["BLOCK_M"]) * triton.cdiv(N, tiles["BLOCK_N"]),)](
            a, b, bias, residual, c, pre, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            0 if residual is None else residual.stride(0), ACTIVATION=activation, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, SAVE_PRE=save_pre, OPERAND=TL[operand], GROUP=GROUP_M, **tiles,
        )  # fmt: skip
    return c, pre


def _configuration(dtype, dense, activation, M, N, aligned=True):
    """AOT entry for an (M, N) product. `dense`: the strides that are 1; the others are multiples of 16 if `aligned`."""
    fused = activation != 0
    tiles = tiles_for(M, N, torch.float32 if dtype == "fp32" else torch.bfloat16, aligned, fused)
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
