"""What the driver works on: a bucket's tensors, a step's agreement between ranks, and reused flat buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.ops.bucket_pack import PACK_OPS, SUM_OPS, UNPACK_OPS
from trainwright.parallel.layout import Bucket


@dataclass
class Job:
    """One bucket of one step: `grads[i]` (None: missing) is its piece i; the averages go to `outs`."""

    bucket: Bucket
    grads: list[Tensor | None]
    outs: list[Tensor]
    out_offsets: list[int] | None = None  # of `outs` in the bucket; None: one per piece
    missing: bool = False  # some of `grads` are None
    sums: Tensor | None = None  # weighted sum of earlier microbatches, in flat form
    # Of a sharded bucket: rank r's part is [cuts[r], cuts[r + 1]), and the average of this rank's goes to `average`.
    cuts: tuple[int, ...] | None = None
    average: Tensor | None = None
    errors: tuple[Tensor, Tensor | None] | None = None  # of the int8 wire, see `_feedback`
    complete: bool = False
    ready: Any = None  # CUDA event after the gradients
    finished: Any = None  # CUDA event after the averages

    def in_place(self, dtype: torch.dtype) -> Tensor | None:
        """The memory of the average, if it can be the bucket's flat buffer: one contiguous piece of `dtype`."""
        bucket = self.bucket
        if len(bucket.pieces) > 1 or bucket.padding or self.out_offsets is not None:
            return None
        (out,) = self.outs
        return out.view(-1) if out.dtype == dtype and out.is_contiguous() else None

    def pack(self, flat: Tensor, scale: float, *, nothing: bool = False, add: bool = False) -> None:
        """flat = (or +=) scale x gradients, missing ones and padding zero; `nothing`: all are missing."""
        grads = self.grads
        first = grads[0]
        if scale == 1.0 and not nothing and first is not None and _same_place(first, flat):
            return
        if nothing or self.missing:
            empty = flat[:0]
            grads = [empty if nothing or g is None else g for g in grads]
        ends = [*self.bucket.offsets, flat.numel()]
        run_op("bucket_pack", flat, grads, ends, scale, None, add)

    def unpack(self, flat: Tensor, scale: float) -> None:
        if self.outs:
            offsets = self.bucket.offsets if self.out_offsets is None else self.out_offsets
            if scale != 1.0 or not _same_place(self.outs[0], flat):
                run_op("bucket_unpack", flat, self.outs, offsets, scale, None)
            torch.autograd.graph.increment_version(self.outs)


def _same_place(a: Tensor, flat: Tensor) -> bool:
    return a.data_ptr() == flat.data_ptr() and a.numel() == flat.numel()


class Row(NamedTuple):
    """What one rank says in the header; see `Round`."""

    step: int
    weight: float
    accumulated: bool
    layout: int
    joined: bool


_ROW = struct.Struct("<qd?q?")


@dataclass
class Round:
    """One step's exchange. The header is what each rank says first; it arrives before the first bucket moves."""

    step: int
    weight: float  # of this rank, summed over its microbatches
    accumulated: bool  # the gradients come as weighted sums
    layout: int  # fingerprint
    joined: bool = False  # this rank has run out of batches
    header: list[Row] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    scale: float = 1.0  # on this rank's gradients
    inverse: float = 1.0  # on the sum
    raw: bool = True  # gradients travel unscaled, so 16-bit ones lose nothing
    footer: list[bytes] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    busy_ms: float = 0.0
    sent_bytes: int = 0

    def words(self) -> bytes:
        """This rank's row of the header."""
        accumulated, joined = self.accumulated, self.joined
        return _ROW.pack(self.step, self.weight, accumulated, self.layout, joined)

    @property
    def over(self) -> bool:
        """Whether all ranks have run out of batches: this was no step."""
        return all(row.joined for row in self.header)

    def agree(self, rows: Iterable[bytes]) -> None:
        """Take all ranks' `words`: gradients become sum_r weight_r g_r / sum_r weight_r."""
        self.header = [Row(*_ROW.unpack(row)) for row in rows]
        self.weights = [row.weight for row in self.header]
        total = sum(self.weights)
        self.inverse = 1.0 / total if total > 0 else 0.0
        self.scale = self.weight
        self.raw = not any(row.accumulated for row in self.header)
        if self.raw and len(set(self.weights)) == 1 and total > 0:
            self.scale, self.inverse = 1.0, 1.0 / len(self.weights)
        elif self.raw:
            self.raw = False


class Pool:
    """Flat buffers that are reused, so that a step allocates nothing once warm."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.UntypedStorage] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        size = numel * dtype.itemsize
        fits = [i for i, s in enumerate(self._free) if size <= s.nbytes() <= 2 * size + 4096]
        if not fits:
            return torch.empty(numel, dtype=dtype, device=self._device)
        storage = self._free.pop(min(fits, key=lambda i: self._free[i].nbytes()))
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, 0, (numel,), (1,))

    def give(self, *buffers: Tensor) -> None:
        self._free += [b.untyped_storage() for b in buffers]


_OPS = {"bucket_pack": PACK_OPS, "bucket_unpack": UNPACK_OPS, "ordered_sum": SUM_OPS}


def run_op(op: str, flat: Tensor, *args: Any) -> None:
    """An op of trainwright.ops.bucket_pack without its argument checks: those of 200 tensors cost a millisecond."""
    _OPS[op][dispatch.resolve(op, None, flat.device, flat.dtype)](flat, *args)
