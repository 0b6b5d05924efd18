"""Rotary position embedding in Triton: for the pair (a, b) number p at token t,
a' = a * cos[t, p] - b * sin[t, p],  b' = b * cos[t, p] + a * sin[t, p].

One program per token for q and k together: it reads its row of the tables once and turns all heads, BLOCK_H at a time.
Heads may lie any stride apart, so q and k may be slices of one fused projection. The elements past R pass through.
Bytes per element: 2s (s = element size). Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import triton
import triton.language as tl
from trainwright.kernels._tl import acc_type

TILE = 2048  # elements of a tile of heads: 16 for each of 128 threads


@triton.jit
def _turn_heads(
    in_ptr, out_ptr, cos, sin, heads, head_stride, D, HALF,
    INTERLEAVED: tl.constexpr, HAS_REST: tl.constexpr, ACC: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All heads of one token. cos, sin: (BLOCK_P,) in ACC."""
    p = tl.arange(0, BLOCK_P)
    first = 2 * p if INTERLEAVED else p
    second = 2 * p + 1 if INTERLEAVED else p + HALF
    for start in range(0, heads, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        here = (h < heads)[:, None]
        source = in_ptr + h.to(tl.int64)[:, None] * head_stride
        target = out_ptr + h.to(tl.int64)[:, None] * D
        mask = here & (p < HALF)[None, :]
        a = tl.load(source + first[None, :], mask=mask, other=0.0).to(ACC)
        b = tl.load(source + second[None, :], mask=mask, other=0.0).to(ACC)
        tl.store(
            target + first[None, :], (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask
        )
        tl.store(
            target + second[None, :], (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask
        )
        if HAS_REST:
            d = tl.arange(0, BLOCK_D)
            rest = here & (d >= 2 * HALF)[None, :] & (d < D)[None, :]
            tl.store(target + d[None, :], tl.load(source + d[None, :], mask=rest), mask=rest)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, T, H, G, D, HALF,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, table_batch_stride,
    HAS_K: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HAS_REST: tl.constexpr, ACC: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b = n // T
    t = n % T
    p = tl.arange(0, BLOCK_P)
    table = b * table_batch_stride + t * HALF + p
    cos = tl.load(cos_ptr + table, mask=p < HALF, other=0.0).to(ACC)[None, :]
    sin = tl.load(sin_ptr + table, mask=p < HALF, other=0.0).to(ACC)[None, :]
    if INVERSE:
        sin = -sin
    _turn_heads(
        q_ptr + b * q_batch_stride + t * q_token_stride, q_out_ptr + n * H * D, cos, sin, H, q_head_stride, D, HALF,
        INTERLEAVED, HAS_REST, ACC, BLOCK_H, BLOCK_P, BLOCK_D,
    )  # fmt: skip
    if HAS_K:
        _turn_heads(
            k_ptr + b * k_batch_stride + t * k_token_stride, k_out_ptr + n * G * D, cos, sin, G, k_head_stride, D, HALF,
            INTERLEAVED, HAS_REST, ACC, BLOCK_H, BLOCK_P, BLOCK_D,
        )  # fmt: skip


def rope(q, k, cos, sin, interleaved, inverse):
    B, T, H, D = q.shape
    half = cos.shape[-1]
    q_out, k_out = q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)
    q, k = (x if x is None or D <= 1 or x.stride(3) == 1 else x.contiguous() for x in (q, k))
    heads = max(H, 0 if k is None else k.shape[2])
    if B * T * heads * D:
        pairs, block_d = triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(D)
        _rope_kernel[(B * T,)](
            q, k, cos, sin, q_out, k_out, T, H, 0 if k is None else k.shape[2], D, half, *q.stride()[:3],
            *((0, 0, 0) if k is None else k.stride()[:3]), T * half if cos.dim() == 3 else 0,
            HAS_K=k is not None, INTERLEAVED=interleaved, INVERSE=inverse, HAS_REST=2 * half < D,
            ACC=acc_type(q.dtype),
            BLOCK_H=min(triton.next_power_of_2(heads), max(1, TILE // block_d)), BLOCK_P=pairs, BLOCK_D=block_d,
        )  # fmt: skip
    return q_out, k_out


# Configurations that the tests compile ahead of time for every architecture: (kernel, argument types, constants, warps,
# instructions that the PTX must contain).
AOT = [
    (
        _rope_kernel,
        {"q_ptr": "*bf16", "k_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "q_out_ptr": "*bf16",
         "k_out_ptr": "*bf16", "T": "i32", "H": "i32", "G": "i32", "D": "i32", "HALF": "i32",
         "q_batch_stride": "i64", "q_token_stride": "i32", "q_head_stride": "i32", "k_batch_stride": "i64",
         "k_token_stride": "i32", "k_head_stride": "i32", "table_batch_stride": "i32"},
        {"HAS_K": True, "INTERLEAVED": interleaved, "INVERSE": interleaved, "HAS_REST": interleaved, "ACC": tl.float32,
         "BLOCK_H": 16, "BLOCK_P": 64, "BLOCK_D": 128},
        4,
        [],
    )
    for interleaved in (False, True)
]  # fmt: skip
