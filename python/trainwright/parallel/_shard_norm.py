"""Norms of gradients that are split over ranks: every element of the unsharded model counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.ops.grad_norm import GRAD_STATS
from trainwright.parallel._exchange import ordered_all_reduce

if TYPE_CHECKING:
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


def clip_by_whole_norm(kind: Any, parallelized: Parallelized) -> Any:
    """A subclass of an optimizer of `trainwright.optim` that takes the norm by `squares_of_whole`."""

    class TensorParallel(kind):  # type: ignore[misc]
        def _grad_stats(self, grads: dict[torch.device, list[Tensor]], home: torch.device) -> Tensor:  # fmt: skip
            every = [g for members in grads.values() for g in members]
            return squares_of_whole(parallelized, every, self._options.backend).to(home)

    TensorParallel.__name__ = TensorParallel.__qualname__ = kind.__name__
    return TensorParallel
