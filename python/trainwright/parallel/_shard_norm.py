"""Norms of gradients that are split over ranks: every element of the unsharded model counts once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.ops.grad_norm import GRAD_STATS
from trainwright.parallel._exchange import ordered_all_reduce

if TYPE_CHECKING:
    from trainwright.parallel._shard_set import Shard, ShardSet
    from trainwright.parallel.parallelize import Parallelized


def squares_of_whole(
    parallelized: Parallelized, grads: list[Tensor], backend: str | None = None
) -> Tensor:
    """(2,) fp64 on the gradients' device: the sum of squares over the whole model, and whether an element is not
    finite.

    `grads` are gradients of the model's parameters, any of them. Those of parameters that every rank holds whole are
    the same everywhere and counted here; of the others every rank counts what it is the first to hold.
    """
    names = {id(p.grad): name for name, p in parallelized.model.named_parameters()}
    device = grads[0].device if grads else torch.device("cpu")
    sums = torch.zeros(2, 2, dtype=torch.float64, device=device)  # whole, split
    for i, split in enumerate((False, True)):
        members = [g for g in grads if (names[id(g)] in parallelized.shards) is split]
        if split:
            members = [parallelized.once(names[id(g)], g) for g in members]
        members = [g for g in members if g.numel()]
        for dtype in dict.fromkeys(g.dtype for g in members):
            chosen = dispatch.resolve("grad_norm", backend, device, dtype)
            sums[i] += GRAD_STATS[chosen]([g for g in members if g.dtype == dtype], 2.0)
    sums[1] = ordered_all_reduce(sums[1].clone(), parallelized.group)
    return torch.stack([sums[:, 0].sum(), (sums[:, 1].sum() != 0).double()])


def squares_of_ranges(
    parallelized: Parallelized, home: ShardSet, grads: list[Tensor], backend: str | None = None
) -> Tensor:
    """The same of a model that `Zero` divides in stages 2 and 3, but for this rank's ranges of the gradients: summed
    over the ranks of Zero's group, it is that of the whole model.

    What every rank of the tensor-parallel group holds whole is cut into other ranges on each, so each of them counts
    for its share: then all ranks have the same bits.
    """
    shards = [(name, s) for name, of_p in zip(home.names, home.shards) for s in of_p]
    places = {id(s.grad): (name, s) for name, s in shards if s.grad is not None}
    device = home.witness.device
    sums = torch.zeros(2, 2, dtype=torch.float64, device=device)  # whole, split
    for g in grads:
        split = False
        if id(g) in places:  # not the witness of an overflow
            name, shard = places[id(g)]
            split = name in parallelized.shards
            g = _once(parallelized, name, home.owner_of(shard), shard, g) if split else g
        if g.numel():
            chosen = dispatch.resolve("grad_norm", backend, device, g.dtype)
            sums[int(split)] += GRAD_STATS[chosen]([g], 2.0)
    sums[0, 0] /= parallelized.world
    sums = ordered_all_reduce(sums.view(-1), parallelized.group).view(2, 2)
    return torch.stack([sums[:, 0].sum(), (sums[:, 1].sum() != 0).double()])


def _once(parallelized: Parallelized, name: str, p: Tensor, shard: Shard, g: Tensor) -> Tensor:
    """What of a range's gradient no rank of the tensor-parallel group before this one holds."""
    part = parallelized.shards[name]
    held = p.shape[part.dim] - parallelized.once(name, p).shape[part.dim]
    if not held:
        return g
    inner = math.prod(p.shape[part.dim + 1 :])
    at = torch.arange(shard.shard_offset, shard.shard_offset + g.numel(), device=g.device)
    return g[at // inner % p.shape[part.dim] >= held]


def clip_by_whole_norm(kind: Any, parallelized: Parallelized) -> Any:
    """A subclass of an optimizer of `trainwright.optim` that takes the norm by `squares_of_whole`."""

    class TensorParallel(kind):  # type: ignore[misc]
        of_split_model = True

        def _grad_stats(self, grads: dict[torch.device, list[Tensor]], home: torch.device) -> Tensor:  # fmt: skip
            every = [g for members in grads.values() for g in members]
            if getattr(self, "_stage", 1) > 1:
                found = squares_of_ranges(parallelized, self._set, every, self._options.backend)
                return found.to(home)
            return squares_of_whole(parallelized, every, self._options.backend).to(home)

    TensorParallel.__name__ = TensorParallel.__qualname__ = kind.__name__
    return TensorParallel
