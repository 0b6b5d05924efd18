"""Who owns which elements of the parameters, and buckets cut so that each rank's elements lie together. Plain data.

The flat space of each dtype is divided bucket by bucket into W equal parts, so that every bucket gives each rank the
same work. What a rank owns of a parameter is a few ranges of its elements, in row-major order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.parallel.layout import Bucket, FlatLayout, Piece

ALIGNED = 16  # elements: ranges of large buckets begin on a cache line


@dataclass(frozen=True)
class Range:
    """Elements [begin, end) of a parameter, row-major, and the rank that owns them."""

    begin: int
    end: int
    owner: int


def divide(layout: FlatLayout, block: int = 1) -> list[list[Range]]:
    """Per slot its ranges in ascending order, together the whole parameter. No range begins inside a block of `block`
    elements of its parameter. An empty parameter is an empty range of rank 0.
    """
    world = layout.world
    cuts: list[list[Range]] = [[] for _ in layout.slots]
    for bucket in layout.buckets:
        unit = ALIGNED if bucket.numel >= 256 * ALIGNED * world else 1
        ends = [bucket.numel * (r + 1) // world // unit * unit for r in range(world - 1)]
        ends.append(bucket.numel)
        for piece in bucket.pieces:
            start, stop, begin = piece.offset, piece.offset + piece.end - piece.begin, 0
            for owner, end in enumerate(ends):
                first, last = max(start, begin), min(stop, end)
                if first < last:
                    shift = piece.begin - piece.offset
                    cuts[piece.slot].append(Range(first + shift, last + shift, owner))
                begin = end
    return [
        _on_blocks(sorted(ranges, key=lambda r: r.begin), slot.numel, block)
        for slot, ranges in zip(layout.slots, cuts)
    ]


def _on_blocks(ranges: Sequence[Range], numel: int, block: int) -> list[Range]:
    if not ranges:
        return [Range(0, 0, 0)]
    begins = [(r.begin + block // 2) // block * block for r in ranges]
    found: list[Range] = []
    for r, begin, end in zip(ranges, begins, [*begins[1:], numel]):
        begin, end = min(begin, numel), min(end, numel)
        if begin == end:
            continue
        if found and found[-1].owner == r.owner:
            found[-1] = dataclasses.replace(found[-1], end=end)
        else:
            found.append(Range(begin, end, r.owner))
    return found


@dataclass(frozen=True)
class OwnedBucket:
    """A bucket whose pieces are cut at the ranges and sorted by owner: rank r's part is [cuts[r], cuts[r + 1])."""

    bucket: Bucket
    owners: tuple[int, ...]  # of the pieces
    cuts: tuple[int, ...]

    def pieces_of(self, rank: int) -> list[Piece]:
        return [p for p, owner in zip(self.bucket.pieces, self.owners) if owner == rank]


def by_owner(bucket: Bucket, ranges: Sequence[Sequence[Range]], world: int) -> OwnedBucket:
    """`bucket` in the order of owners; `ranges` per slot of its layout."""
    parts: list[tuple[int, int, int, int]] = []  # owner, slot, begin, end
    for piece in bucket.pieces:
        for r in ranges[piece.slot]:
            begin, end = max(piece.begin, r.begin), min(piece.end, r.end)
            if begin < end or (piece.begin == piece.end and r.begin == r.end):
                parts.append((r.owner, piece.slot, begin, end))
    parts.sort(key=lambda part: part[0])
    pieces, cuts, offset, owner = [], [0], 0, 0
    for part_owner, slot, begin, end in parts:
        cuts += [offset] * (part_owner - owner)
        owner = part_owner
        pieces.append(Piece(slot, begin, end, offset))
        offset += end - begin
    cuts += [offset] * (world - owner)
    owned = dataclasses.replace(bucket, pieces=tuple(pieces), padding=0)
    return OwnedBucket(owned, tuple(part[0] for part in parts), tuple(cuts))
