"""Newton-Schulz iteration of a batch of matrices in Triton (formula in csrc/include/trainwright/newton_schulz.h).

Four kernels. `_square_sums` and `_normalize` read each matrix twice and write it once: 3 s bytes per element.
`_symmetric` makes alpha S S^T + beta S, for the Gram matrix of X and for the polynomial of that Gram matrix: one
program per tile on or below the diagonal, which also writes the tile's mirror image. `_apply` makes a X + Q X.
Products run on the tensor cores in x's dtype (fp32: in fp32 on the FMA units), with sums in fp32, rounded once per
product. A tall matrix is its transpose with the strides exchanged; nothing is transposed in memory. Per step
m^2 n + m^3 + 2 m^2 n FLOPs (m <= n): bound by the tensor cores from m of a few hundred on. Every sum runs in a fixed
order: repeats are bit-equal, and a matrix does not see its batch.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import os

import torch
import triton
import triton.language as tl
from trainwright.kernels._cast import cast

BLOCK = 4096  # elements of a matrix that one program of the norm reads: 16 per thread of 8 warps
MAX_BATCH = 65535  # programs along the second dimension of a grid
# The interpreter multiplies the bits of bf16 as integers; in fp32 the products are the same.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _square_sums(
    x_ptr, partial_ptr, rows, cols, batch_stride, row_stride, col_stride, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(1).to(tl.int64) * batch_stride
    at += i // cols * row_stride + i % cols * col_stride
    size = tl.full((), 1, tl.int64) * rows * cols
    x = tl.load(at, mask=i < size, other=0.0).to(tl.float64)
    out = partial_ptr + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out, tl.sum(x * x, axis=0))


@triton.jit
def _normalize(
    x_ptr, norm_ptr, out_ptr, rows, cols, batch_stride, row_stride, col_stride, T: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out (batch, rows, cols), dense."""
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.full((), 1, tl.int64) * rows * cols
    at = x_ptr + batch * batch_stride + i // cols * row_stride + i % cols * col_stride
    x = tl.load(at, mask=i < size, other=0.0).to(tl.float64) / tl.load(norm_ptr + batch)
    tl.store(out_ptr + batch * size + i, cast(x, T), mask=i < size)


@triton.jit
def _symmetric(
    s_ptr, c_ptr, n, K, s_batch, s_row, s_k, alpha, beta,
    ADD: tl.constexpr, OPERAND: tl.constexpr, T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C (n, n) = alpha S S^T [+ beta S, where S is symmetric and dense]; S (n, K)."""
    program = tl.program_id(0)
    # Tile (i, j), j <= i, is number i (i + 1) / 2 + j.
    i = ((tl.sqrt(8.0 * program.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > program, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= program, i + 1, i)
    j = program - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    row = i.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = j.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_K).to(tl.int64)
    s_ptr += batch * s_batch
    a = s_ptr + row[:, None] * s_row + step[None, :] * s_k
    b = s_ptr + step[:, None] * s_k + col[None, :] * s_row
    advance = tl.full((), BLOCK_K, tl.int64) * s_k
    acc = tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = step < K - k
        x = tl.load(a, mask=(row < n)[:, None] & inside[None, :], other=0.0).to(OPERAND)
        y = tl.load(b, mask=inside[:, None] & (col < n)[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a += advance
        b += advance

    mask = (row < n)[:, None] & (col < n)[None, :]
    acc = acc * alpha
    if ADD:
        base = s_ptr + row[:, None] * n + col[None, :]
        acc += beta * tl.load(base, mask=mask, other=0.0).to(tl.float32)
    value = cast(acc, T)
    out = c_ptr + batch * n * n
    tl.store(out + row[:, None] * n + col[None, :], value, mask=mask)
    if i != j:
        mirrored = (col < n)[:, None] & (row < n)[None, :]
        tl.store(out + col[:, None] * n + row[None, :], tl.trans(value), mask=mirrored)


@triton.jit
def _apply(
    q_ptr, x_ptr, out_ptr, M, N, x_row, x_col, alpha,
    OPERAND: tl.constexpr, T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out (M, N) = alpha X + Q X, with Q (M, M) dense, X and out of the same strides, M N apart in the batch."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + program % (GROUP * tiles_n) % height
    tile_n = program % (GROUP * tiles_n) // height
    batch = tl.program_id(1).to(tl.int64)
    q_ptr += batch * M * M
    x_ptr += batch * M * N
    out_ptr += batch * M * N

    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K).to(tl.int64)
    q = q_ptr + row[:, None] * M + step[None, :]
    x = x_ptr + step[:, None] * x_row + col[None, :] * x_col
    advance = tl.full((), BLOCK_K, tl.int64) * x_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, M, BLOCK_K):
        inside = step < M - k
        u = tl.load(q, mask=(row < M)[:, None] & inside[None, :], other=0.0).to(OPERAND)
        v = tl.load(x, mask=inside[:, None] & (col < N)[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(u, v, acc, input_precision="ieee")
        q += BLOCK_K
        x += advance

    mask = (row < M)[:, None] & (col < N)[None, :]
    at = row[:, None] * x_row + col[None, :] * x_col
    acc += alpha * tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, cast(acc, T), mask=mask)


_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _tiles(m, dtype, aligned):
    """Sides of a tile and of a K block, warps and pipeline stages. 128 x 128 sums fill half the registers of 8 warps;
    rows that do not start at 16-byte boundaries cannot be copied to shared memory asynchronously, and fp32 has no
    tensor cores: small tiles then."""
    if dtype == torch.float32 or not aligned:
        return {"BLOCK_M": 64, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
    if m <= 64:
        return {"BLOCK_M": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def newton_schulz_fwd(x, coefficients, eps):
    B, M, N = x.shape
    if B > MAX_BATCH:
        return torch.cat(
            [newton_schulz_fwd(part, coefficients, eps) for part in x.split(MAX_BATCH)]
        )
    out = x.new_empty((B, M, N))
    if out.numel() == 0:
        return out
    dtype, T = x.dtype, _TL[x.dtype]
    blocks = triton.cdiv(M * N, BLOCK)
    partial = torch.empty((B, blocks), dtype=torch.float64, device=x.device)
    _square_sums[(blocks, B)](x, partial, M, N, *x.stride(), BLOCK=BLOCK, num_warps=8)
    norm = partial.sum(1).sqrt_().clamp_(min=eps)
    steps = len(coefficients) // 3
    spare = torch.empty_like(out) if steps else out
    here, there = (out, spare) if steps % 2 == 0 else (spare, out)
    _normalize[(blocks, B)](x, norm, here, M, N, *x.stride(), T=T, BLOCK=BLOCK, num_warps=8)

    m, n = min(M, N), max(M, N)
    short, long = (N, 1) if M <= N else (1, N)  # strides along m and along n
    gram, polynomial = (x.new_empty((B, m, m)) for _ in range(2))
    options = _tiles(m, dtype, m % 16 == 0 and n % 16 == 0)
    options |= {"OPERAND": tl.float32 if INTERPRETED else T, "T": T}
    side = triton.cdiv(m, options["BLOCK_M"])
    triangle = (side * (side + 1) // 2, B)
    rectangle = (side * triton.cdiv(n, options["BLOCK_M"]), B)
    for a, b, c in zip(coefficients[::3], coefficients[1::3], coefficients[2::3]):
        _symmetric[triangle](here, gram, m, n, M * N, short, long, 1.0, 0.0, ADD=False, **options)
        _symmetric[triangle](gram, polynomial, m, m, m * m, m, 1, c, b, ADD=True, **options)
        _apply[rectangle](
            polynomial, here, there, m, n, short, long, a, BLOCK_N=options["BLOCK_M"], GROUP=8, **options
        )  # fmt: skip
        here, there = there, here
    return out


def _configurations(dtype, m, aligned):
    """AOT entries for wide matrices of m rows: the two symmetric products and the last one; and one tall product."""
    tiles = _tiles(m, torch.float32 if dtype == "fp32" else torch.bfloat16, aligned)
    T = tl.float32 if dtype == "fp32" else tl.bfloat16
    shared = {"OPERAND": T, "T": T, "BLOCK_M": tiles["BLOCK_M"], "BLOCK_K": tiles["BLOCK_K"]}
    size = "i32:16" if aligned else "i32"
    pointers = dict.fromkeys(("s_ptr", "c_ptr", "q_ptr", "x_ptr", "out_ptr"), f"*{dtype}")
    sizes = dict.fromkeys(("n", "K", "s_batch", "s_row", "M", "N", "x_row", "s_k", "x_col"), size)
    types = {**pointers, **sizes, "alpha": "fp32", "beta": "fp32"}

    def without(*names):
        return {k: v for k, v in types.items() if k not in names}

    product = {**shared, "BLOCK_N": tiles["BLOCK_M"], "GROUP": 8}
    cores = ["80:mma\\.sync", "90:wgmma", "100:tcgen05\\.mma", "80:cp\\.async"]
    cores = cores if aligned and dtype == "bf16" else []
    warps = tiles["num_warps"]
    return [
        (_symmetric, without("s_k"), {**shared, "s_k": 1, "ADD": False}, warps, cores),
        (_symmetric, without("s_k"), {**shared, "s_k": 1, "ADD": True}, warps, cores),
        (_symmetric, without("s_row"), {**shared, "s_row": 1, "ADD": False}, warps, cores),
        (_apply, without("x_col"), {**product, "x_col": 1}, warps, cores),
        (_apply, without("x_row"), {**product, "x_row": 1}, warps, cores),
    ]


_LAYOUT = {"rows": "i32", "cols": "i32", "batch_stride": "i64", "row_stride": "i32"}
AOT = [
    *_configurations("bf16", 768, True),
    *_configurations("bf16", 64, True),
    *_configurations("bf16", 768, False),
    *_configurations("fp32", 768, True),
    (_square_sums, {"x_ptr": "*fp32", "partial_ptr": "*fp64", **_LAYOUT}, {"col_stride": 1, "BLOCK": BLOCK}, 8, []),
    (_normalize, {"x_ptr": "*bf16", "norm_ptr": "*fp64", "out_ptr": "*bf16", **_LAYOUT},
     {"col_stride": 1, "T": tl.bfloat16, "BLOCK": BLOCK}, 8, []),
]  # fmt: skip
