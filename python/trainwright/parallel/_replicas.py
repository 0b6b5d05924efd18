"""Parameters and buffers start equal, and buffers stay equal: both from the group's rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainwright.parallel._wire import Wire

CHUNK_BYTES = 32 << 20


def _as_bytes(tensors: list[Tensor]) -> Tensor:
    flat = [t.detach().resolve_conj().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(flat)


def _from_bytes(data: Tensor, tensors: list[Tensor]) -> None:
    """Write without a trace: through `.data`, so that graphs which saved a buffer stay valid."""
    offset = 0
    for t in tensors:
        size = t.numel() * t.element_size()
        if size:
            t.data.copy_(data[offset : offset + size].clone().view(t.dtype).view(t.shape))
        offset += size


def broadcast(
    wire: Wire, tensors: list[Tensor], wait: Callable[[object], None], source: int = 0
) -> None:
    """Make tensors equal to those of the group's rank `source`, about 32 MiB at a time."""
    group: list[Tensor] = []
    size = 0
    assert wire.scatter is not None
    for i, t in enumerate(tensors):
        group.append(t)
        size += t.numel() * t.element_size()
        if size and (size >= CHUNK_BYTES or i == len(tensors) - 1):
            data = _as_bytes(group)
            wait(wire.scatter.broadcast(data, source))
            if wire.rank != source:
                _from_bytes(data, group)
            group, size = [], 0


class BufferSync:
    """Buffers of a module, equal on all ranks after each step: as the first rank has them that has not run out of
    batches. Nothing is sent while no rank has changed one."""

    def __init__(self, module: nn.Module, wire: Wire) -> None:
        self._owners = [m._buffers for m in module.modules()]
        self._wire = wire
        self._module = module
        self._buffers = self._now()
        self._last = _as_bytes(self._buffers) if self._buffers else None

    def _now(self) -> list[Tensor]:
        """Each once. `module.buffers()` takes a microsecond a module, in every step."""
        found = {id(b): b for owner in self._owners if owner for b in owner.values()}
        return [b for b in found.values() if b is not None and b.numel()]

    def changed(self) -> bool:
        """Whether this rank's buffers differ from the last synchronised ones. On GPU always, to spare a host wait."""
        self._buffers = buffers = self._now()
        if not buffers or not self._module.training:
            return False
        if buffers[0].is_cuda or self._last is None:
            return True
        now = _as_bytes(buffers)
        return now.numel() != self._last.numel() or not torch.equal(now, self._last)

    def broadcast(self, wait: Callable[[object], None], source: int) -> None:
        if self._buffers:
            broadcast(self._wire, self._buffers, wait, source)
            self._last = None if self._buffers[0].is_cuda else _as_bytes(self._buffers)
