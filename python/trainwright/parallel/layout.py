"""`FlatLayout`: where each gradient lives in the flat buckets. Plain data, no tensors.

Parameters are taken in reverse order of registration, about the order in which a backward finishes their gradients,
and laid end to end in one flat space per dtype. The space is cut into buckets; a cut never depends on values, so
equal models give equal layouts on every rank, which `fingerprint` and `first_difference` check.

With buckets of automatic size on the CPU, parameters of 1 MiB and more come first in that space and have buckets of
their own, which are exchanged in the gradient's memory, without a copy; the small ones share buckets.

A small first bucket starts the network early, and small last buckets leave little to wait for at the end: with bucket
transfer time proportional to its size, the communication that the backward cannot hide is about the last bucket
alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trainwright.errors import check_int, check_number

__all__ = ["Bucket", "FlatLayout", "Piece", "Slot"]

MIB = 1 << 20
ALIGN_BYTES = 64  # each rank's part of a bucket starts on a cache line
TAPER = (1 / 4, 1 / 2), (1 / 2, 1 / 4, 1 / 8)  # of the first and of the last buckets
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

    @cached_property
    def offsets(self) -> list[int]:
        """Of the pieces."""
        return [piece.offset for piece in self.pieces]


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _auto(total: int, device_type: str) -> int:
    low, high = AUTO_LIMITS.get(device_type, AUTO_LIMITS["cuda"])
    return min(max(total // AUTO_SHARE, low), high)


def bucket_bytes(bucket_mb: float | str, total: int, device_type: str) -> int:
    """The size that `bucket_mb` stands for, where there are `total` bytes in all."""
    return _auto(total, device_type) if bucket_mb == "auto" else max(1, int(float(bucket_mb) * MIB))


def _targets(total: int, bucket_bytes: int | None, device_type: str) -> list[int]:
    """Wanted bucket sizes in bytes, in launch order; they add up to `total`."""
    if total == 0:
        return [0]
    if bucket_bytes is not None:
        full, rest = divmod(total, bucket_bytes)
        return [bucket_bytes] * full + ([rest] if rest else [])
    size = _auto(total, device_type)
    head, tail = ([int(size * f) for f in fractions] for fractions in TAPER)
    middle = total - sum(head) - sum(tail)
    if middle < 0:  # a small model: the tail alone, as far as it goes
        cuts: list[int] = []
        for want in reversed(tail):
            if sum(cuts) + want >= total:
                break
            cuts.append(want)
        return [total - sum(cuts), *reversed(cuts)]
    count = max(1, round(middle / size))
    middles = [middle // count] * count
    middles[0] += middle - sum(middles)
    return head + middles + tail


def _cuts(
    sizes: Sequence[int], contiguous: Sequence[bool], targets: Sequence[int], min_piece: int
) -> list[int]:
    """Element positions where buckets end, ascending, the last one the total.

    A wanted end moves to the nearest end of a parameter, unless the parameter is larger than the bucket: then it is
    cut, so that its transfer is a pipeline of pieces.
    """
    ends: list[int] = []
    total, want, slot, start = sum(sizes), 0, 0, 0  # [start, start + sizes[slot]) holds `want`
    for target in targets[:-1]:
        want += target
        while slot < len(sizes) and start + sizes[slot] <= want:
            start += sizes[slot]
            slot += 1
        if slot == len(sizes):
            break
        end = start + sizes[slot]
        cut = start if want - start <= end - want else end
        if contiguous[slot] and sizes[slot] > target >= min_piece:
            near = min(want - start, end - want) < target // 4
            cut = cut if near else max(start, want - want % 16)
        if cut > (ends[-1] if ends else 0) and cut < total:
            ends.append(cut)
    return [*ends, total]


def _arrange(
    members: Sequence[int],
    sizes: Sequence[int],
    contiguous: Sequence[bool],
    itemsize: int,
    unit: int,
    bucket_bytes: int | None,
    device_type: str,
) -> tuple[list[int], list[int]]:
    """The parameters of one dtype in the order of its flat space, and the element positions where buckets end.

    Large parameters on the CPU come first, one to a bucket, or cut evenly; the others follow.
    """
    large: list[int] = []
    if bucket_bytes is None and device_type == "cpu":
        least = MIN_PIECE_BYTES // itemsize
        large = [i for i in members if contiguous[i] and sizes[i] >= least and sizes[i] % unit == 0]
    limit = _auto(sum(sizes[i] for i in members) * itemsize, device_type) // itemsize
    ends: list[int] = []
    start = 0
    for i in large:
        parts = max(1, round(sizes[i] / limit))
        ends += [start + sizes[i] // unit * part // parts * unit for part in range(1, parts + 1)]
        start += sizes[i]
    alone = set(large)
    small = [i for i in members if i not in alone]
    if small:
        targets = _targets(sum(sizes[i] for i in small) * itemsize, bucket_bytes, device_type)
        cuts = _cuts(
            [sizes[i] for i in small],
            [contiguous[i] for i in small],
            [max(1, t // itemsize) for t in targets],
            MIN_PIECE_BYTES // itemsize,
        )
        ends += [start + cut for cut in cuts]
    return large + small, ends


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
        device_type: str | None = None,
    ) -> FlatLayout:
        """Lay out `parameters` (name, tensor), given in order of registration. Only their metadata is read.

        Args:
            parameters: as `nn.Module.named_parameters` gives them; complex ones count as two real elements each.
            world: number of ranks; a bucket is padded so that each gets an equal part.
            bucket_mb: size of a bucket in MiB, or "auto": about an eighth of the gradients, from 1 to 8 MiB on CPU
                and 4 to 64 MiB on GPU, with two smaller ones at the start and three at the end; on the CPU
                parameters of 1 MiB and more are then in buckets of their own.
            group: name of the process group, part of the fingerprint.
            device_type: that "auto" sizes are for; None: where the parameters are.
        """
        check_int("FlatLayout.build", "world", world, minimum=1)
        if bucket_mb != "auto":
            check_number("FlatLayout.build", "bucket_mb", bucket_mb, minimum=0)
        size = None if bucket_mb == "auto" else max(1, int(float(bucket_mb) * MIB))
        backward = list(parameters)[::-1]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position, (_, p) in enumerate(backward):
            by_dtype.setdefault(_real_dtype(p.dtype), []).append(position)
        offsets = [0] * len(backward)
        sizes = [p.numel() * (2 if p.dtype.is_complex else 1) for _, p in backward]
        drafts: list[tuple[int, Bucket]] = []  # (when it is ready, bucket)
        contiguous = [p.is_contiguous() for _, p in backward]
        if device_type is None:
            device_type = backward[0][1].device.type if backward else "cpu"
        for dtype, members in by_dtype.items():
            unit = world * max(1, ALIGN_BYTES // dtype.itemsize)
            members, ends = _arrange(
                members, sizes, contiguous, dtype.itemsize, unit, size, device_type
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
