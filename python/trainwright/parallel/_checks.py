"""What data parallel verifies: equal layouts on all ranks, and that no parameter was replaced after wrapping."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.parallel._wire import Wire
from trainwright.parallel.errors import CollectiveError, LayoutError
from trainwright.parallel.layout import FlatLayout

Place = tuple[
    str, nn.Parameter, dict[str, Any], str
]  # name, parameter, its owner's dict, its key there


def places(module: nn.Module) -> list[Place]:
    """Every floating parameter once, in order of registration, with the place where its module keeps it."""
    found: list[Place] = []
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, p in owner._parameters.items():
            if p is None or id(p) in seen:
                continue
            seen.add(id(p))
            if p.is_floating_point() or p.is_complex():
                name = f"{prefix}.{key}" if prefix else key
                found.append((name, p, owner._parameters, key))
    return found


def check_places(found: list[Place]) -> None:
    for name, p, owner, key in found:
        if owner.get(key) is not p:
            raise RuntimeError(
                f"DataParallel: {name} was replaced or removed after wrapping, so its gradient would not be averaged;"
                " change parameters in place, or wrap the module again"
            )


def one_device(found: list[Place]) -> torch.device:
    device = found[0][1].device if found else torch.device("cpu")
    for name, p, _, _ in found:
        if p.device != device:
            raise ValueError(
                f"DataParallel: module: expected all parameters on one device, got {found[0][0]} on {device}"
                f" and {name} on {p.device}"
            )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"DataParallel: module: expected parameters on cpu or cuda, got {device}")
    return device


def writable(grad: Tensor) -> bool:
    """Whether each element has its own memory (an expanded gradient has not)."""
    return all(n <= 1 or s for n, s in zip(grad.shape, grad.stride()))


def compare_layouts(wire: Wire, layout: FlatLayout, timeout: float, *, moment: str) -> None:
    """Raise, on all ranks alike, the first difference between rank 0's layout and another's."""
    store = wire.store
    keys = [f"layout/{moment}/{r}" for r in range(wire.world)]
    store.set(keys[wire.rank], layout.to_json())
    deadline = time.monotonic() + timeout
    first: FlatLayout | None = None
    for r, key in enumerate(keys):
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"{wire.name}: rank {wire.ranks[r]} does not say what its parameters are",
                    ranks=(wire.ranks[r],),
                    operation=moment,
                )
            time.sleep(0.002)
        theirs = FlatLayout.from_json(store.get(key).decode())
        first = theirs if first is None else first
        difference = first.first_difference(theirs)
        if difference:
            raise LayoutError(
                f"{wire.name}: at {moment}, parameters differ between rank {wire.ranks[0]} and rank {wire.ranks[r]}:"
                f" {difference}",
                ranks=(wire.ranks[r],),
                operation=moment,
            )
