"""What the driver works on: a bucket's tensors, a step's agreement between ranks, and reused flat buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
        if nothing or any(g is None for g in grads):  # not "in", which would compare tensors
            empty = flat[:0]
            grads = [empty if nothing or g is None else g for g in grads]
        offsets = [piece.offset for piece in self.bucket.pieces]
        run_op("bucket_pack", flat, grads, [*offsets, flat.numel()], scale, None, add)

    def unpack(self, flat: Tensor, scale: float) -> None:
        offsets = self.out_offsets
        if offsets is None:
            offsets = [piece.offset for piece in self.bucket.pieces]
        if self.outs:
            if scale != 1.0 or not _same_place(self.outs[0], flat):
                run_op("bucket_unpack", flat, self.outs, offsets, scale, None)
            torch.autograd.graph.increment_version(self.outs)


def _same_place(a: Tensor, flat: Tensor) -> bool:
    return a.data_ptr() == flat.data_ptr() and a.numel() == flat.numel()


@dataclass
class Round:
    """One step's exchange. The header is what each rank says first; it arrives before the first bucket moves."""

    step: int
    weight: float  # of this rank, summed over its microbatches
    accumulated: bool  # the gradients come as weighted sums
    layout: int  # fingerprint
    joined: bool = False  # this rank has run out of batches
    header: list[list[int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    scale: float = 1.0  # on this rank's gradients
    inverse: float = 1.0  # on the sum
    raw: bool = True  # gradients travel unscaled, so 16-bit ones lose nothing
    footer: list[bytes] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    busy_ms: float = 0.0
    sent_bytes: int = 0

    def words(self) -> list[int]:
        weight = torch.tensor([self.weight], dtype=torch.float64).view(torch.int64)
        return [
            self.step, int(weight.item()), int(self.accumulated), self.layout, int(self.joined),
        ]  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether all ranks have run out of batches: this was no step."""
        return all(row[4] for row in self.header)

    def agree(self, header: list[list[int]]) -> None:
        """Take all ranks' headers: gradients become sum_r weight_r g_r / sum_r weight_r."""
        self.header = header
        bits = torch.tensor([row[1] for row in header], dtype=torch.int64)
        self.weights = bits.view(torch.float64).tolist()
        total = sum(self.weights)
        self.inverse = 1.0 / total if total > 0 else 0.0
        self.scale = self.weight
        self.raw = not any(row[2] for row in header)
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
