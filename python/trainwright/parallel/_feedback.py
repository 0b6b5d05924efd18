"""Error feedback of the int8 wire: what rounding has taken from the gradients, to be added to the next ones.

Two kinds, both in units of the average: `sent`, of this rank's own gradients, and `averaged`, of the averages of the
part of a bucket that this rank sums up and sends on. They lie as the buckets do, and move by parameter and position
when the buckets change; the sum over all ranks of all errors is what training has not seen yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainwright.parallel._step import Plan
from trainwright.parallel.layout import Bucket

Errors = dict[str, dict[str, Tensor]]  # kind -> parameter -> flat fp32
KINDS = ("sent", "averaged")


class Feedback:
    """Of one rank. `names` per parameter in order of registration."""

    def __init__(self, names: Sequence[str], world: int, rank: int, device: torch.device) -> None:
        self._names, self._world, self._rank = names, world, rank
        self._device = device
        self._plan: Plan | None = None
        self._flat: dict[str, dict[int, Tensor]] = {kind: {} for kind in KINDS}
        self._waiting: Errors = {kind: {} for kind in KINDS}  # until a plan wants them

    def of(self, plan: Plan, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """The errors of a bucket: of what this rank sends, and of its part of the averages (None if it keeps them)."""
        if plan is not self._plan:
            self.load(self.by_name())
            self._plan = plan
        sent, averaged = (self._flat[kind] for kind in KINDS)
        if bucket.index not in sent:
            sent[bucket.index] = self._take("sent", plan, bucket)
            if not plan.cuts:
                begin, end = self._own(bucket)
                averaged[bucket.index] = self._take("averaged", plan, bucket)[begin:end].clone()
        return sent[bucket.index], averaged.get(bucket.index)

    def _own(self, bucket: Bucket) -> tuple[int, int]:
        part = (bucket.numel + bucket.padding) // self._world
        return self._rank * part, (self._rank + 1) * part

    def _take(self, kind: str, plan: Plan, bucket: Bucket) -> Tensor:
        flat = torch.zeros(bucket.numel + bucket.padding, device=self._device)
        for piece in bucket.pieces:
            values = self._waiting[kind].get(self._names[plan.params[piece.slot]])
            if values is not None:
                size = piece.end - piece.begin
                flat[piece.offset : piece.offset + size] = values[piece.begin : piece.end]
        return flat

    def by_name(self) -> Errors:
        """All errors by parameter; one that has none is left out."""
        found: Errors = {kind: dict(self._waiting[kind]) for kind in KINDS}
        plan = self._plan
        if plan is None:
            return found
        for kind in KINDS:
            for index, flat in self._flat[kind].items():
                bucket = plan.layout.buckets[index]
                whole = flat
                if kind == "averaged":
                    whole = torch.zeros(bucket.numel + bucket.padding, device=self._device)
                    begin, end = self._own(bucket)
                    whole[begin:end] = flat
                for piece in bucket.pieces:
                    slot = plan.layout.slots[piece.slot]
                    name = self._names[plan.params[piece.slot]]
                    values = found[kind].get(name)
                    if values is None or values is self._waiting[kind].get(name):
                        values = found[kind][name] = torch.zeros(slot.numel, device=self._device)
                    size = piece.end - piece.begin
                    values[piece.begin : piece.end] = whole[piece.offset : piece.offset + size]
        return found

    def load(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take errors over. Names that are no parameters are ignored."""
        self._plan = None
        self._flat = {kind: {} for kind in KINDS}
        self._waiting = {
            kind: {
                name: values.to(self._device, torch.float32).reshape(-1)
                for name, values in errors.get(kind, {}).items()
            }
            for kind in KINDS
        }


def total(errors: Errors) -> dict[str, Tensor]:
    """Both kinds together, by parameter, on the CPU."""
    names = dict.fromkeys(name for kind in KINDS for name in errors[kind])
    found = {}
    for name in names:
        parts = [errors[kind][name].cpu() for kind in KINDS if name in errors[kind]]
        found[name] = parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]
    return found


def mean(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of several ranks' `total`: given to each of any number of ranks, their average is what it was."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, values in part.items():
            found[name] = found[name] + values if name in found else values.clone()
    return {name: values / len(parts) for name, values in found.items()}
