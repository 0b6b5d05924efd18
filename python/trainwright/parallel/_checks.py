"""What data parallel verifies: equal layouts on all ranks; no parameter replaced, or left without a gradient."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

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


def check_places(found: list[Place], parameters: list[nn.Parameter]) -> None:
    """Raise unless each module still holds the parameter that it held: those of `found`, in that order."""
    if all(map(operator.is_, (owner.get(key) for _, _, owner, key in found), parameters)):
        return
    for name, p, owner, key in found:
        if owner.get(key) is not p:
            raise RuntimeError(
                f"DataParallel: {name} was replaced or removed after wrapping, so its gradient would not be averaged;"
                " change parameters in place, or wrap the module again"
            )


def averaged_once(op: str, found: list[Place], reducers: Iterable[Any]) -> None:
    """Raise if the hooks of another object are on a parameter: its gradient would be sent twice, and found once."""
    taken = {id(p) for r in reducers if not r.driver.closed for p in r.parameters}
    for name, p, _, _ in found:
        if id(p) in taken:
            raise ValueError(
                f"{op}: module: expected parameters that no other DataParallel or Zero averages, got {name}; close()"
                " the other one first"
            )


def one_device(op: str, found: list[Place]) -> torch.device:
    device = found[0][1].device
    for name, p, _, _ in found:
        if p.device != device:
            raise ValueError(
                f"{op}: module: expected all parameters on one device, got {found[0][0]} on {device}"
                f" and {name} on {p.device}"
            )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: module: expected parameters on cpu or cuda, got {device}")
    return device


def unused_error(
    names: Sequence[str], ranks: Sequence[int], used: Sequence[bytes], weights: Sequence[float]
) -> RuntimeError | None:
    """The error for parameters without a gradient. Ranks of weight 0 have nothing to say.

    Args:
        names: per slot.
        ranks: global rank of each rank of the group.
        used: per rank, a byte per slot, 0 if it got no gradient.
        weights: per rank.
    """
    missing = []
    for slot in reversed(range(len(names))):  # in order of registration
        without = [ranks[r] for r, u in enumerate(used) if weights[r] and not u[slot]]
        if without:
            missing.append((names[slot], without))
    if not missing:
        return None
    shown = ", ".join(f"{name} (rank {', '.join(map(str, r))})" for name, r in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return RuntimeError(
        f"DataParallel: no gradient for {shown}{more} in this backward. Use every parameter in the loss,"
        ' freeze those that are not with requires_grad_(False), or choose unused="zero" or unused="skip"'
    )


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
