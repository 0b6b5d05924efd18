"""`FlatLayout`: where each gradient lives in the flat buckets. Plain data, no tensors.

Parameters are taken in reverse order of registration, about the order in which a backward finishes their gradients,
and laid end to end in one flat space per dtype. The space is cut into buckets; a cut never depends on values, so
equal models give equal layouts on every rank, which `fingerprint` and `first_difference` check.

A small first bucket starts the network early, and small last buckets leave little to wait for at the end: with bucket
transfer time proportional to its size, the communication that the backward cannot hide is about the last bucket
alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["Bucket", "FlatLayout", "Piece", "Slot"]

MIB = 1 << 20
ALIGN_BYTES = 64  # each rank's part of a bucket starts on a cache line
HEAD, TAIL = (
    2,
    3,
)  # "auto": the first buckets grow from 1/4 of a full one, the last ones shrink to 1/8
MIN_PIECE_BYTES = 1 * MIB  # a parameter is not cut into smaller pieces than this
AUTO_SHARE = 8  # "auto": about this many full buckets ...
AUTO_LIMITS = {"cpu": (1 * MIB, 8 * MIB), "cuda": (4 * MIB, 64 * MIB)}  # ... within these sizes


@dataclass(frozen=True)
class Slot:
    """One parameter. `offset` counts elements in its dtype's flat space, `bucket` is its first bucket."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int
    numel: int
    bucket: int


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of slot `slot`, at `offset` of a bucket. Only a parameter larger than a bucket is cut."""

    slot: int
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous part of one dtype's flat space: `numel` elements of gradients, then `padding` elements of zeros."""

    index: int
    dtype: str
    start: int
    numel: int
    padding: int
    pieces: tuple[Piece, ...]


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _target(total: int, index: int, rest: int, bucket_bytes: int | None, device_type: str) -> int:
    """Wanted size in bytes of bucket `index`, when `rest` of `total` bytes are not in a bucket yet."""
    if bucket_bytes is not None:
        return bucket_bytes
    low, high = AUTO_LIMITS.get(device_type, AUTO_LIMITS["cuda"])
    size = min(max(total // AUTO_SHARE, low), high)
    first = size >> max(0, HEAD - index)
    return min(first, max(size >> TAIL, rest // 2))


def _cuts(
    sizes: Sequence[int],
    contiguous: Sequence[bool],
    target: Callable[[int, int], int],
    min_piece: int,
) -> list[int]:
    """Element positions where buckets end, ascending, the last one the total. `target(index, rest)` is the wanted size.

    Buckets end where parameters end. One that is larger than a bucket is cut, so that its transfer is a pipeline of
    pieces, and ends a bucket, so that no piece of it waits for the next parameter.
    """
    total = sum(sizes)
    ends: list[int] = []
    begin = start = 0  # of the open bucket, of the parameter

    def close(end: int) -> None:
        nonlocal begin
        if end > begin:
            ends.append(end)
            begin = end

    for size, whole in zip(sizes, contiguous):
        want, filled = target(len(ends), total - begin), start - begin
        too_much = filled + size - want
        if filled >= want / 4 and too_much > want - filled:
            close(start)
            want = target(len(ends), total - begin)
        end = start + size
        if whole and size > want >= min_piece:
            while end - begin > 1.5 * want:
                close(max(start, (begin + want) // 16 * 16))
                want = max(min_piece, target(len(ends), total - begin))
            close(end)
        elif end - begin >= want:
            close(end)
        start = end
    if not ends or begin < total:
        ends.append(total)
    return ends


@dataclass(frozen=True)
class FlatLayout:
    """The layout of parameters on `world` ranks: `slots` in reverse order of registration, `buckets` as launched."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    world: int
    group: str = ""

    @classmethod
    def build(
        cls,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        world: int,
        bucket_mb: float | str = "auto",
        group: str = "",
    ) -> FlatLayout:
        """Lay out `parameters` (name, tensor), given in order of registration. Only their metadata is read.

        Args:
            parameters: as `nn.Module.named_parameters` gives them; complex ones count as two real elements each.
            world: number of ranks; a bucket is padded so that each gets an equal part.
            bucket_mb: size of a bucket in MiB, or "auto": about an eighth of the gradients, from 1 to 8 MiB on CPU
                and 4 to 64 MiB on GPU, with smaller ones at the start and at the end.
            group: name of the process group, part of the fingerprint.
        """
        if bucket_mb == "auto":
            bucket_bytes = None
        else:
            bucket_bytes = max(1, int(float(bucket_mb) * MIB))
        backward = list(parameters)[::-1]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position, (_, p) in enumerate(backward):
            by_dtype.setdefault(_real_dtype(p.dtype), []).append(position)
        offsets = [0] * len(backward)
        sizes = [p.numel() * (2 if p.dtype.is_complex else 1) for _, p in backward]
        drafts: list[tuple[int, Bucket]] = []  # (when it is ready, bucket)
        device_type = backward[0][1].device.type if backward else "cpu"
        for dtype, members in by_dtype.items():
            itemsize = dtype.itemsize
            total = sum(sizes[i] for i in members) * itemsize

            def target(index: int, rest: int, total: int = total, itemsize: int = itemsize) -> int:
                wanted = _target(total, index, rest * itemsize, bucket_bytes, device_type)
                return max(1, wanted // itemsize)

            ends = _cuts(
                [sizes[i] for i in members],
                [backward[i][1].is_contiguous() for i in members],
                target,
                MIN_PIECE_BYTES // itemsize,
            )
            starts = [0, *ends[:-1]]
            parts: list[list[Piece]] = [[] for _ in ends]
            offset, b = 0, 0
            for i in members:
                offsets[i] = offset
                while b < len(ends) - 1 and offset >= ends[b]:
                    b += 1
                done = 0
                while True:
                    end = min(sizes[i], ends[b] - offset)
                    parts[b].append(Piece(i, done, end, offset + done - starts[b]))
                    done = end
                    if done == sizes[i]:
                        break
                    b += 1
                offset += sizes[i]
            unit = world * max(1, ALIGN_BYTES // dtype.itemsize)
            for start, end, pieces in zip(starts, ends, parts):
                padding = -(end - start) % unit
                bucket = Bucket(0, _name(dtype), start, end - start, padding, tuple(pieces))
                drafts.append((pieces[-1].slot, bucket))
        # Launch order: by the last of its gradients. The sort is stable: pieces of one parameter stay in order.
        drafts.sort(key=lambda draft: draft[0])
        buckets = tuple(dataclasses.replace(b, index=i) for i, (_, b) in enumerate(drafts))
        first_bucket: dict[int, int] = {}
        for bucket in buckets:
            for piece in bucket.pieces:
                first_bucket.setdefault(piece.slot, bucket.index)
        slots = tuple(
            Slot(
                name, tuple(p.shape), tuple(p.stride()), _name(p.dtype),
                offsets[i], sizes[i], first_bucket[i],
            )
            for i, (name, p) in enumerate(backward)
        )  # fmt: skip
        return cls(slots, buckets, world, group)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything in the layout."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FlatLayout:
        data: dict[str, Any] = json.loads(text)
        slots = tuple(
            Slot(**{**s, "shape": tuple(s["shape"]), "stride": tuple(s["stride"])})
            for s in data["slots"]
        )
        buckets = tuple(
            Bucket(**{**b, "pieces": tuple(Piece(**p) for p in b["pieces"])})
            for b in data["buckets"]
        )
        return cls(slots, buckets, data["world"], data["group"])

    def first_difference(self, other: FlatLayout) -> str | None:
        """The first parameter, in order of registration, in which two layouts differ, in words, or None."""
        mine, theirs = self.slots[::-1], other.slots[::-1]
        mine_by, theirs_by = ({s.name: s for s in slots} for slots in (mine, theirs))
        for i in range(max(len(mine), len(theirs))):
            a = mine[i] if i < len(mine) else None
            b = theirs[i] if i < len(theirs) else None
            if a is not None and a.name not in theirs_by:
                return f"{a.name}: {_describe(a)} against no such parameter"
            if b is not None and b.name not in mine_by:
                return f"{b.name}: no such parameter against {_describe(b)}"
            assert a is not None and b is not None
            if a.name != b.name:
                return f"{a.name}: parameter {i} against {b.name} in its place"
            if (a.shape, a.stride, a.dtype) != (b.shape, b.stride, b.dtype):
                return f"{a.name}: {_describe(a)} against {_describe(b)}"
        for a, b in zip(mine, theirs):
            if a != b:
                return f"{a.name}: bucket {a.bucket} against bucket {b.bucket} (bucket_mb differs)"
        if self.buckets != other.buckets or (self.world, self.group) != (other.world, other.group):
            return "the buckets: bucket_mb, world size or group differ"
        return None

    def summary(self) -> str:
        """One line per bucket: what `repr` is too long for."""
        lines = [f"{len(self.slots)} parameters in {len(self.buckets)} buckets, {self.world} ranks"]
        for b in self.buckets:
            names = [self.slots[p.slot].name for p in b.pieces]
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(f"  {b.index}: {b.numel} {b.dtype} + {b.padding}, {span}")
        return "\n".join(lines)


def _describe(slot: Slot) -> str:
    return f"{slot.dtype} {slot.shape} with strides {slot.stride}"
