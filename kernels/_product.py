"""What the matrix products in Triton share: the order of the tiles, the loop over K, the epilogue, and the kernel of
linear and matmul.

Tiles are taken in groups of GROUP rows of tiles, so that what is read of A and B at the same time shares the L2 cache.
Where the architecture has tensor descriptors (sm_90 on) and the operands begin at 16-byte boundaries, the copy engine
fetches whole boxes of A and B (TMA), which takes neither registers nor addresses, and programs are persistent: each
computes tile after tile, the next on its way while one is finished. Else pointers, and a program for each tile. Either
way operands are read as they are stored: a transposed one costs nothing.

K in parts. `splits` given by the caller: the sums of part s of product b are a matrix of their own in a workspace.
Stream-K: where the last wave of tiles would leave programs idle, the blocks of K of its tiles are dealt out evenly;
what a program has of a tile, the end of one and the beginning of the next at most, goes to its two slots of a
workspace. A second kernel adds the parts of an element in the order of k and applies the epilogue. No atomics: repeats
are bit-equal. A program has as much of K as any other, so no program waits for another and none can deadlock.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ._activation import activate
from ._product_configs import (
    GROUP_M,
    INTERPRETED,
    architecture,
    constants,
    kind_for,
    look_up,
    multiprocessors,
    schedule_for,
)

TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
K_UNIT = 64  # parts of K begin at multiples of the largest BLOCK_K, so that copies stay aligned
SUM_BLOCK, SUM_ROWS = 1024, 16


@triton.jit
def tile_of(
    program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Row and column of the tile of that number, in groups of GROUP rows of tiles."""
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


@triton.jit
def _box(desc, batch, i, j, BATCHED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    if BATCHED:
        box = tl.reshape(desc.load([batch, i, j]), (ROWS, COLS))
    else:
        box = desc.load([i, j])
    return box


@triton.jit
def product_of_boxes(
    a, b, a_batch, b_batch, row, col, k_begin, k_end,
    BATCHED_A: tl.constexpr, BATCHED_B: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for the tile at (row, col) of product numbers a_batch, b_batch, through descriptors. A_K, B_K: k is
    contiguous, the descriptor is of (M, K), of (N, K); else of (K, M), (K, N). k_end is K or a multiple of BLOCK_K."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        if A_K:
            x = _box(a, a_batch, row, k, BATCHED_A, BLOCK_M, BLOCK_K)
        else:
            x = tl.trans(_box(a, a_batch, k, row, BATCHED_A, BLOCK_K, BLOCK_M))
        if B_K:
            w = tl.trans(_box(b, b_batch, col, k, BATCHED_B, BLOCK_N, BLOCK_K))
        else:
            w = _box(b, b_batch, k, col, BATCHED_B, BLOCK_K, BLOCK_N)
        acc = tl.dot(x.to(OPERAND), w.to(OPERAND), acc, input_precision="ieee")
    return acc


@triton.jit
def finish(
    acc, row, col, M, N, bias_ptr, r_ptr, c_ptr, pre_ptr, r_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_PRE: tl.constexpr,
):  # fmt: skip
    """c = activation(acc + bias) + residual, pre = acc + bias, at rows and columns (int64) that exist."""
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


@triton.jit
def _product_kernel(
    a, b, bias_ptr, r_ptr, c_ptr, pre_ptr, parts_ptr, M, N, K, splits, part, whole, depth, tiles_all,
    a_batch, a_row, a_k, b_batch, b_k, b_col, r_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_PRE: tl.constexpr,
    BOXES: tl.constexpr, BATCHED: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, STREAM: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    mine = (whole - program + programs - 1) // programs
    blocks = tl.cdiv(K, BLOCK_K)
    at = program * depth
    end = tl.minimum(at + depth, (tiles_all - whole) * blocks)
    if STREAM:
        mine_and_pieces = mine + 2
    elif BOXES:
        mine_and_pieces = mine
    else:
        mine_and_pieces = 1  # there are as many programs as tiles
    for i in tl.range(0, mine_and_pieces, flatten=BOXES and not STREAM):
        # A whole tile of one part of K of one product; or what this program has of a tile that is streamed.
        number = program + i * programs
        copy = number // tiles
        k_begin = copy % splits * part
        k_end = tl.minimum(k_begin + part, K)
        if STREAM:
            streamed = i >= mine
            piece = tl.minimum(blocks - at % blocks, end - at)
            number = tl.where(streamed, tl.minimum(whole + at // blocks, tiles_all - 1), number)
            copy = number // tiles
            k_begin = tl.where(streamed, at % blocks * BLOCK_K, k_begin)
            k_end = tl.where(streamed, tl.minimum(k_begin + piece * BLOCK_K, K), k_end)
        batch = (copy // splits).to(tl.int64)
        tile_m, tile_n = tile_of(number % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
        row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        if BOXES:
            acc = product_of_boxes(
                a, b, copy // splits, copy // splits, tile_m * BLOCK_M, tile_n * BLOCK_N, k_begin, k_end,
                BATCHED, BATCHED, A_K, B_K, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = product(
                a + batch * a_batch, b + batch * b_batch, row, col, M, N, k_begin, k_end, a_row, a_k, b_k, b_col,
                OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        to = c_ptr + copy.to(tl.int64) * M * N
        if STREAM:
            if streamed:
                if piece > 0:
                    slot = (program * 2 + i - mine).to(tl.int64) * (BLOCK_M * BLOCK_N)
                    inner = (
                        tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                    )
                    tl.store(parts_ptr + slot + inner, acc)
                at += piece
            else:
                finish(
                    acc, row, col, M, N, bias_ptr, r_ptr, to, pre_ptr, r_row, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
                    SAVE_PRE,
                )  # fmt: skip
        else:
            finish(
                acc, row, col, M, N, bias_ptr, r_ptr, to, pre_ptr, r_row, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SAVE_PRE
            )  # fmt: skip


@triton.jit
def _sum_stream_kernel(
    parts_ptr, bias_ptr, r_ptr, c_ptr, pre_ptr, M, N, K, whole, depth, r_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_PRE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a streamed tile: its parts, which programs one after the other have, added in order."""
    streamed, blocks = tl.program_id(1), tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    number = whole + streamed
    tile_m, tile_n = tile_of(number % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
    first = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inner = first[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for program in range(streamed * blocks // depth, ((streamed + 1) * blocks - 1) // depth + 1):
        # The slot is 0 if this is the first tile that the program streams.
        slot = program * 2 + tl.where(program * depth // blocks == streamed, 0, 1)
        acc += tl.load(parts_ptr + slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + inner)
    row = tile_m.to(tl.int64) * BLOCK_M + first
    col = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    to = c_ptr + (number // tiles).to(tl.int64) * M * N
    finish(
        acc, row, col, M, N, bias_ptr, r_ptr, to, pre_ptr, r_row, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SAVE_PRE
    )  # fmt: skip


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


# ---- launch


def operand_of(a, b):
    """The dtype that tensor cores multiply in: the common one, else fp32; fp32 for K = 1 too, as Triton unrolls a loop
    of one step and then clears the registers of wgmma behind its fence."""
    same = a.dtype == b.dtype and a.shape[-1] != 1 and not INTERPRETED
    return a.dtype if same else torch.float32


def is_aligned(a, b, M, N, K):
    """Whether every row of a (.., M, K), b (.., K, N) and the result starts at a multiple of 16 elements: N, the size
    along each dense direction, and every other stride."""
    sizes = [N, K if a.stride(-1) == 1 or b.stride(-2) == 1 else 0, M if a.stride(-2) == 1 else 0]
    sizes += [s for t in (a, b) for s in t.stride() if s != 1]
    return all(s % 16 == 0 for s in sizes)


def _has_boxes(x):
    """Whether a descriptor can describe a matrix or a batch: one stride is 1, all others are multiples of 16 bytes."""
    units = [d for d in (-1, -2) if x.stride(d) == 1]
    others = [s for d, s in enumerate(x.stride()) if d != x.dim() + (units or [0])[0]]
    return (
        bool(units) and x.dtype.itemsize == 2 and x.numel() > 0 and x.data_ptr() % 16 == 0
        and all(s > 0 and s % 8 == 0 for s in others)
    )  # fmt: skip


def use_boxes(a, b):
    return (
        architecture() >= 90
        and a.dtype == b.dtype
        and a.shape[-1] != 1
        and _has_boxes(a)
        and _has_boxes(b)
    )


def box_of(x, k, rows, depth, batched):
    """Descriptor of x, its dimension k (-1 or -2) that of K, in boxes of `rows` by `depth`; whether K is contiguous."""
    along_k = x.stride(k) == 1
    if not batched and x.dim() == 3:
        x = x[0]
    x = x if x.stride(-1) == 1 else x.mT
    box = [rows, depth] if along_k else [depth, rows]
    return TensorDescriptor.from_tensor(x, [1, *box] if batched else box), along_k


def multiply(a, b, out, splits, *, bias=None, residual=None, activation=0, pre=None, stream=True):
    """out (B, M, N) = activation(a (B, M, K) b (B, K, N) + bias) + residual, K in `splits` parts (0: as is best)."""
    (B, M, K), N = a.shape, b.shape[2]
    part = triton.cdiv(triton.cdiv(max(K, 1), max(splits, 1)), K_UNIT) * K_UNIT
    stream, splits = stream and splits == 0, max(triton.cdiv(K, part), 1)
    to = out if splits == 1 else a.new_empty((B, splits, M, N), dtype=torch.float32)
    operand, sms = operand_of(a, b), multiprocessors()
    fused = activation != 0 or pre is not None or residual is not None
    aligned = is_aligned(a, b, M, N, K)
    kind = kind_for(M, N, torch.float32 if operand == torch.float32 and not INTERPRETED else a.dtype, aligned, fused,
                    B * splits, sms)  # fmt: skip
    tile = look_up(kind, architecture())
    sizes = constants(tile)
    BLOCK_M, BLOCK_N, BLOCK_K = tile[:3]
    tiles = B * splits * triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    blocks = triton.cdiv(K, BLOCK_K)
    boxes = aligned and use_boxes(a, b)
    plan = schedule_for(tiles, blocks, sms * tile[5], boxes, stream)
    x, w, a_k, b_k = a, b, False, False
    if boxes:
        x, a_k = box_of(a, -1, BLOCK_M, BLOCK_K, B > 1)
        w, b_k = box_of(b, -2, BLOCK_N, BLOCK_K, B > 1)
    streamed = tiles - plan.whole
    slots = 2 * plan.programs * BLOCK_M * BLOCK_N if streamed else 0
    parts = a.new_empty((slots,), dtype=torch.float32)
    r_row = 0 if residual is None else residual.stride(0)
    epilogue = {
        "ACTIVATION": activation, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None,
        "SAVE_PRE": pre is not None, "GROUP": GROUP_M,
    }  # fmt: skip
    _product_kernel[(plan.programs,)](
        x, w, bias, residual, to, pre, parts, M, N, K, splits, part, plan.whole, plan.depth, tiles,
        *a.stride(), *b.stride(), r_row, BOXES=boxes, BATCHED=B > 1, A_K=a_k, B_K=b_k,
        STREAM=streamed > 0, OPERAND=TL[operand], **epilogue, **sizes,
    )  # fmt: skip
    if streamed:
        _sum_stream_kernel[(BLOCK_M // SUM_ROWS, streamed)](
            parts, bias, residual, to, pre, M, N, K, plan.whole, plan.depth, r_row,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, ROWS=SUM_ROWS, **epilogue,
        )  # fmt: skip
    if splits > 1:
        _sum_splits_kernel[(triton.cdiv(M * N, SUM_BLOCK), B)](
            to, out, M * N, splits, BLOCK=SUM_BLOCK
        )
    return out


# ---- what the tests compile ahead of time (AOT of the op files)


def configuration(
    dtype, layout, kind, *, bias=False, activation=0, boxes=False, batched=False, stream=False
):
    """Of the product kernel. `layout`: N or T for each operand, T if it is stored transposed."""
    tile = look_up(kind, 90)
    sizes = constants(tile)
    BLOCK_M, BLOCK_N, BLOCK_K = tile[:3]
    a_k, b_k = layout[0] == "N", layout[1] == "T"
    fused, aligned = activation != 0, kind not in ("anywhere", "fp32")
    pointers = ("a", "b", "bias_ptr", "r_ptr", "c_ptr", "pre_ptr")
    types = dict.fromkeys(pointers, f"*{dtype}") | {"parts_ptr": "*fp32"}
    if boxes:
        shapes = {
            "a": [BLOCK_M, BLOCK_K] if a_k else [BLOCK_K, BLOCK_M],
            "b": [BLOCK_N, BLOCK_K] if b_k else [BLOCK_K, BLOCK_N],
        }
        types |= {n: f"tensordesc<{dtype}{[1, *s] if batched else s}>" for n, s in shapes.items()}
    dense = {"a_k" if a_k else "a_row", "b_k" if b_k else "b_col"}
    strides = ("M", "N", "K", "a_batch", "a_row", "a_k", "b_batch", "b_k", "b_col", "r_row", "part")
    for name in strides:
        if name not in dense:
            types[name] = "i32:16" if aligned and (name != "M" or not a_k) else "i32"
    types |= dict.fromkeys(("splits", "whole", "depth", "tiles_all"), "i32")
    values = {
        **dict.fromkeys(dense, 1), "ACTIVATION": activation, "HAS_BIAS": bias, "HAS_RESIDUAL": fused, "SAVE_PRE": fused,
        "BOXES": boxes, "BATCHED": batched, "A_K": a_k if boxes else False, "B_K": b_k if boxes else False,
        "STREAM": stream, "OPERAND": tl.float32 if dtype == "fp32" else tl.bfloat16, "GROUP": GROUP_M,
        **{k: v for k, v in sizes.items() if k.startswith("BLOCK")},
    }  # fmt: skip
    patterns = (
        ["80:mma\\.sync", "90:wgmma", "100:tcgen05\\.mma", "80:cp\\.async"] if aligned else []
    )
    if boxes:
        patterns = [*patterns, "cp\\.async\\.bulk\\.tensor"]
    options = {"num_stages": sizes["num_stages"], **({"archs": (90, 100)} if boxes else {})}
    return _product_kernel, types, values, sizes["num_warps"], patterns, options


def sum_configurations():
    """Of the kernels that add parts."""
    tile = look_up("small", 90)
    pointers = ("bias_ptr", "r_ptr", "c_ptr", "pre_ptr")
    stream = {
        **dict.fromkeys(pointers, "*bf16"), "parts_ptr": "*fp32", **dict.fromkeys(("N", "K", "r_row"), "i32:16"),
        **dict.fromkeys(("M", "whole", "depth"), "i32"),
    }  # fmt: skip
    flags = dict.fromkeys(("HAS_BIAS", "HAS_RESIDUAL", "SAVE_PRE"), True)
    sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile))
    return [
        (
            _sum_stream_kernel, stream,
            {"ACTIVATION": 2, **flags, **sizes, "GROUP": GROUP_M, "ROWS": SUM_ROWS}, 4, [],
        ),
        (
            _sum_splits_kernel,
            {"partial_ptr": "*fp32", "c_ptr": "*bf16", "size": "i32:16", "splits": "i32"},
            {"BLOCK": SUM_BLOCK}, 4, [],
        ),
    ]  # fmt: skip
