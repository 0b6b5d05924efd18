"""Gradients in and out of a flat buffer, and the rank-ordered sum, in Triton.

One launch per gradient dtype, one program per block of BLOCK elements of any tensor; addresses come from a table
(kernels/_multi_tensor.py). Each program writes its own sum of squares and finite check; torch adds them in a fixed
order.
Bytes per element: pack s_grad + s_flat (+ s_flat when adding), sum W s_chunk + s_out. Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl
from trainwright.kernels._cast import cast
from trainwright.kernels._multi_tensor import TL_DTYPES, block_table, by_dtype, number_table
from trainwright.kernels._tl import acc_type

BLOCK = 4096  # 32 elements per thread of 4 warps: enough loads in flight to hide DRAM latency


@triton.jit
def _store_stats(partial_ptr, program, y, mask):
    """Sum of squares in fp64, and 1 if anything is not finite, of what was stored."""
    z = tl.where(mask, y.to(tl.float64), 0.0)
    tl.store(partial_ptr + 2 * program, tl.sum(z * z, axis=0))
    tl.store(
        partial_ptr + 2 * program + 1,
        tl.max(tl.where(z - z == 0.0, 0.0, 1.0).to(tl.float64), axis=0),
    )


@triton.jit
def _pointer(at, T: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a table, of elements T."""
    p = tl.load(at).to(tl.pointer_type(T))
    if ALIGNED:
        p = tl.multiple_of(p, 4 * T.primitive_bitwidth // 8)
    return p


@triton.jit
def _number(at, ALIGNED: tl.constexpr):
    """A count of elements in a table."""
    n = tl.load(at)
    if ALIGNED:
        n = tl.multiple_of(n, 4)
    return n


@triton.jit
def _bucket_pack_kernel(
    table_ptr, blocks_ptr, flat_ptr, partial_ptr, scale_ptr,
    T: tl.constexpr, ACC: tl.constexpr, ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + 4 * tl.load(blocks_ptr + 2 * program)
    grad_ptr = _pointer(row, T, ALIGNED)
    n, slot = _number(row + 1, ALIGNED), _number(row + 2, ALIGNED)
    length = _number(row + 3, ALIGNED)
    i = tl.multiple_of(tl.load(blocks_ptr + 2 * program + 1), BLOCK) + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(grad_ptr + i, mask=mask, other=0.0).to(ACC) * tl.load(scale_ptr).to(ACC)
    out = flat_ptr + slot + i
    if ACCUMULATE:
        x += tl.load(out, mask=mask, other=0.0).to(ACC)
    y = cast(tl.where(mask, x, 0.0), flat_ptr.dtype.element_ty)  # zeros in the padding of the slot
    tl.store(out, y, mask=i < length)
    _store_stats(partial_ptr, program, y, mask)


@triton.jit
def _bucket_unpack_kernel(
    table_ptr, blocks_ptr, flat_ptr, scale_ptr,
    T: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + 3 * tl.load(blocks_ptr + 2 * program)
    out_ptr = _pointer(row, T, ALIGNED)
    n, slot = _number(row + 1, ALIGNED), _number(row + 2, ALIGNED)
    i = tl.multiple_of(tl.load(blocks_ptr + 2 * program + 1), BLOCK) + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(flat_ptr + slot + i, mask=mask, other=0.0).to(ACC) * tl.load(scale_ptr).to(ACC)
    tl.store(out_ptr + i, cast(x, T), mask=mask)


@triton.jit
def _ordered_sum_kernel(
    table_ptr, out_ptr, partial_ptr, scale_ptr, W, n,
    T: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(_pointer(table_ptr, T, ALIGNED) + i, mask=mask, other=0.0).to(ACC)
    for w in range(1, W):
        total += tl.load(_pointer(table_ptr + w, T, ALIGNED) + i, mask=mask, other=0.0).to(ACC)
    y = cast(total * tl.load(scale_ptr).to(ACC), out_ptr.dtype.element_ty)
    tl.store(out_ptr + i, y, mask=mask)
    _store_stats(partial_ptr, program, y, mask)


def _aligned(rows):
    """Whether addresses (the first column) are multiples of 16 bytes, and counts of 4 elements: then each thread reads
    and writes four at a time, and a warp whole sectors in any mix of dtypes; else one element at a time.
    """
    return all(row[0] % 16 == 0 and not any(n % 4 for n in row[1:]) for row in rows)


def _scale(scale, scale_tensor, like):
    if scale_tensor is None:
        return torch.full((), scale, dtype=torch.float64, device=like.device)
    return scale_tensor.to(torch.float64) * scale


def _stats(partials, like):
    if not partials:
        return torch.zeros(2, dtype=torch.float64, device=like.device)
    partial = torch.cat(partials)
    return torch.stack([partial[:, 0].sum(), partial[:, 1].amax()])


def bucket_pack_(flat, grads, offsets, scale, scale_tensor, accumulate):
    factor = _scale(scale, scale_tensor, flat)
    partials = []
    for dtype, members in by_dtype(grads).items():
        dense = [grads[i].contiguous() for i in members]
        # Adding touches the gradients' elements only; copying writes the whole slots.
        lengths = tuple(
            g.numel() if accumulate else offsets[i + 1] - offsets[i] for i, g in zip(members, dense)
        )
        rows = tuple(
            (g.data_ptr(), g.numel(), offsets[i], n) for i, g, n in zip(members, dense, lengths)
        )
        blocks = block_table(lengths, BLOCK, flat.device)
        if not len(blocks):
            continue
        partial = flat.new_empty((len(blocks), 2), dtype=torch.float64)
        _bucket_pack_kernel[(len(blocks),)](
            number_table(rows, flat.device), blocks, flat, partial, factor,
            T=TL_DTYPES[dtype], ACC=acc_type(dtype, flat.dtype), ACCUMULATE=accumulate,
            ALIGNED=_aligned(rows), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        partials.append(partial)
    return _stats(partials, flat)


def bucket_unpack_(flat, outs, offsets, scale, scale_tensor):
    factor = _scale(scale, scale_tensor, flat)
    for dtype, members in by_dtype(outs).items():
        dense = [
            o if o.is_contiguous() else torch.empty_like(o, memory_format=torch.contiguous_format)
            for o in (outs[i] for i in members)
        ]
        rows = tuple((o.data_ptr(), o.numel(), offsets[i]) for i, o in zip(members, dense))
        blocks = block_table(tuple(o.numel() for o in dense), BLOCK, flat.device)
        if not len(blocks):
            continue
        _bucket_unpack_kernel[(len(blocks),)](
            number_table(rows, flat.device), blocks, flat, factor,
            T=TL_DTYPES[dtype], ACC=acc_type(dtype, flat.dtype), ALIGNED=_aligned(rows), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        for i, o in zip(members, dense):
            if o is not outs[i]:
                outs[i].copy_(o)


def ordered_sum_(out, chunks, scale, scale_tensor):
    n = out.numel()
    programs = triton.cdiv(n, BLOCK)
    partial = out.new_empty((programs, 2), dtype=torch.float64)
    if n:
        rows = (tuple(c.data_ptr() for c in chunks),)
        aligned = all(address % 16 == 0 for address in rows[0])
        _ordered_sum_kernel[(programs,)](
            number_table(rows, out.device), out, partial, _scale(scale, scale_tensor, out), len(chunks), n,
            T=TL_DTYPES[chunks[0].dtype], ACC=acc_type(chunks[0].dtype), ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return _stats([partial] if n else [], out)


AOT = [
    (
        _bucket_pack_kernel,
        {"table_ptr": "*i64", "blocks_ptr": "*i64", "flat_ptr": "*fp32", "partial_ptr": "*fp64", "scale_ptr": "*fp64"},
        {"T": tl.bfloat16, "ACC": tl.float32, "ACCUMULATE": True, "ALIGNED": True, "BLOCK": BLOCK},
        8,
        [],
    ),
    (
        _bucket_unpack_kernel,
        {"table_ptr": "*i64", "blocks_ptr": "*i64", "flat_ptr": "*fp32", "scale_ptr": "*fp64"},
        {"T": tl.bfloat16, "ACC": tl.float32, "ALIGNED": True, "BLOCK": BLOCK},
        8,
        [],
    ),
    (
        _ordered_sum_kernel,
        {"table_ptr": "*i64", "out_ptr": "*fp32", "partial_ptr": "*fp64", "scale_ptr": "*fp64", "W": "i32", "n": "i64"},
        {"T": tl.bfloat16, "ACC": tl.float32, "ALIGNED": True, "BLOCK": BLOCK},
        8,
        [],
    ),
]  # fmt: skip
