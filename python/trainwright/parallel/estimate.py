"""`estimate`: how much memory a model's state will take on each rank, before anything is started."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import check_int, type_error, value_error
from trainwright.ops._optimizer_formats import STATE_BLOCK
from trainwright.optim._base import FusedOptimizer
from trainwright.optim.adamw import AdamW
from trainwright.parallel._blocks import find_blocks, ranges_of
from trainwright.parallel._checks import places
from trainwright.parallel._shards import divide
from trainwright.parallel.layout import FlatLayout, bucket_bytes

__all__ = ["Estimate", "estimate"]

SAMPLE = 16 * STATE_BLOCK  # elements of which the optimizer's state is measured


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank, of the rank that has most. Buffers, activations and communication buffers are not in it.

    Attributes:
        parameters, gradients: of the module; stages 2 and 3 of ZeRO keep a part of them.
        state: of the optimizer, masters included.
        gathered: what stage 3 has whole for a moment beside that: a block of parameters, and the next one.
    """

    parameters: int
    gradients: int
    state: int
    gathered: int = 0

    @property
    def total(self) -> int:
        """Between steps: what `Zero.model_state_bytes` measures."""
        return self.parameters + self.gradients + self.state


def estimate(
    module: nn.Module,
    optimizer: type[FusedOptimizer] = AdamW,
    *,
    stage: int,
    world: int,
    bucket_mb: float | str = "auto",
    overlap: str = "auto",
    **optimizer_kwargs: Any,
) -> Estimate:
    """Memory of `Zero(module, optimizer, stage=stage, ...)` on `world` ranks, or of `DataParallel` with stage 0.

    The optimizer's bytes per element are measured on one small parameter of each dtype; elements are counted as the
    ranks will divide them. The module may be on the meta device, so no memory is needed to ask.

    Args:
        module: its parameters, frozen ones too.
        optimizer, overlap, bucket_mb, **optimizer_kwargs: as for `Zero`.
        stage: 0 (nothing is divided), 1, 2 or 3.
        world: number of ranks.

    Raises:
        TypeError, ValueError: an argument.

    >>> import torch, trainwright as tw
    >>> module = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> [tw.parallel.estimate(module, stage=s, world=4).total / 10**6 for s in range(4)]
    [16.0, 10.0, 7.0, 4.0]
    """
    if not isinstance(module, nn.Module):
        raise type_error("estimate", "module", "an nn.Module", type(module).__name__)
    check_int("estimate", "stage", stage)
    check_int("estimate", "world", world)
    if stage not in (0, 1, 2, 3):
        raise value_error("estimate", "stage", "0, 1, 2, 3", stage)
    if world < 1:
        raise value_error("estimate", "world", "at least 1", world)
    params = [p for _, p, _, _ in places(module)]
    per_element = {
        dtype: _state_bytes(optimizer, dtype, optimizer_kwargs)
        for dtype in {p.dtype for p in params if p.requires_grad}
    }
    stage = stage if world > 1 else 0
    unit = STATE_BLOCK if optimizer_kwargs.get("state_dtype") == "int8" else 1
    total = sum(p.numel() * p.itemsize for p in params)
    limit = bucket_bytes(bucket_mb, total, "cpu")
    blocks = find_blocks(module, params, limit_bytes=limit, world=world, unit=unit)
    if stage == 3:
        ranges = ranges_of(blocks, [p.numel() for p in params])
    else:
        named = [(name, p) for name, p, _, _ in places(module)]
        layout = FlatLayout.build(named, world=world, bucket_mb=bucket_mb, device_type="cpu")
        ranges = divide(layout, unit)[::-1]
    estimates = []
    for rank in range(world):
        owned = [sum(r.end - r.begin for r in of_p if r.owner == rank) for of_p in ranges]
        sums = [0.0, 0.0, 0.0]
        for p, mine in zip(params, owned):
            sums[0] += p.itemsize * (mine if stage == 3 else p.numel())
            if p.requires_grad:
                sums[1] += p.itemsize * (mine if stage >= 2 else p.numel())
                sums[2] += per_element[p.dtype] * (mine if stage >= 1 else p.numel())
        estimates.append(Estimate(*map(round, sums)))
    most = max(estimates, key=lambda e: e.total)
    if stage != 3:
        return most
    sizes = [b.numel * getattr(torch, b.dtype).itemsize for b in blocks]
    pairs = [a + b for a, b in itertools.pairwise(sizes)] if overlap != "off" else []
    return Estimate(most.parameters, most.gradients, most.state, max(sizes + pairs, default=0))


def _state_bytes(
    optimizer: type[FusedOptimizer], dtype: torch.dtype, options: dict[str, Any]
) -> float:
    """Of the state of one element, found by a step of the optimizer itself."""
    p = nn.Parameter(torch.zeros(SAMPLE, dtype=dtype))
    made: Any = optimizer([p], **options)
    p.grad = torch.zeros_like(p)
    made.step()
    state = made.state[p]
    sizes = [v.nbytes for k, v in state.items() if isinstance(v, Tensor) and k != "step"]
    return sum(sizes) / SAMPLE
