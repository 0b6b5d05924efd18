"""How a length is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.errors import check_int


def split_evenly(total: int, parts: int) -> list[int]:
    """Sizes of `parts` shards of `total`, larger ones first: 7 over 3 is [3, 2, 2]."""
    base, extra = divmod(total, parts)
    return [base + (rank < extra) for rank in range(parts)]


def check_split(op: str, sizes: Sequence[int], chunks: int) -> None:
    """Raise unless these are sizes of every rank's shard, and a number of parts."""
    for size in sizes:
        check_int(op, "sizes", size, minimum=0)
    check_int(op, "chunks", chunks, minimum=1)


def shard_slice(sizes: Sequence[int], rank: int) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])
