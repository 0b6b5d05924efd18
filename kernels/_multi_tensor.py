"""Tables for kernels that work on a list of tensors in one launch.

A kernel gets a table with one row of 64-bit numbers per tensor (addresses, sizes, offsets) and a list of blocks
(row, first element), one per program. Both are pure functions of plain Python numbers, so they are cached on those
numbers: a table can never be stale, and a step whose tensors did not move uploads nothing.
"""

import functools

import torch
import triton.language as tl

TL_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}


@functools.lru_cache(maxsize=256)
def number_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """(len(rows), width) int64 on `device`."""
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def chunk_table(
    lengths: tuple[int, ...], chunks: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """(programs, 3) int64 on `device`: the row, the first element and the end of each chunk. chunks: elements of a
    chunk, by row; the last of a row may have fewer."""
    length, chunk = torch.tensor(lengths, dtype=torch.int64), torch.tensor(chunks)
    counts = (length + chunk - 1) // chunk
    row = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    first = torch.cumsum(counts, 0) - counts
    begin = (torch.arange(len(row)) - first[row]) * chunk[row]
    end = torch.minimum(begin + chunk[row], length[row])
    return torch.stack([row, begin, end], 1).contiguous().to(device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def block_table(lengths: tuple[int, ...], block: int, device: torch.device) -> torch.Tensor:
    """(blocks, 2) int64 on `device`: the row and the first element of each block of `block` elements."""
    table = chunk_table(lengths, (block,) * len(lengths), torch.device("cpu"))
    return table[:, :2].contiguous().to(device, non_blocking=True)


def same_order(tensors, row_major):
    """The tensors, of one shape, each as dense memory in one common order of elements: row-major, or that of the first
    if it is dense. Those that do not have it are replaced by copies. None passes through."""
    first = tensors[0]
    if all(t is None or t.is_contiguous() for t in tensors):
        return tensors
    by_stride = sorted(range(first.dim()), key=lambda d: -first.stride(d))
    if row_major or not first.permute(by_stride).is_contiguous():
        strides = torch.empty(first.shape, device="meta").stride()
    else:
        strides = first.stride()

    def align(t):
        if t is None or t.stride() == strides:
            return t
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

    return [align(t) for t in tensors]


def by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Indices of the tensors that have elements, grouped by dtype, in order."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault(t.dtype, []).append(i)
    return groups
