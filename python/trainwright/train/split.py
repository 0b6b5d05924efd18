"""The recipe's model split over `--tp` ranks: which ranks share a model, and what of it each holds.

Query heads are split as evenly as possible; a rank holds the key/value heads that its query heads need, so with fewer
of them than ranks some are on several. Everything else is as `trainwright.parallel.parallelize` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from trainwright.parallel._sizes import split_evenly
from trainwright.parallel.parallelize import Parallelized, Style, parallelize
from trainwright.train.model import GPT, Block, GPTConfig


@dataclass
class Split:
    """This rank among those that share its model (`tp`), and among those that hold the same part of it (`dp`)."""

    parts: Parallelized
    dp_group: dist.ProcessGroup
    tp_rank: int


def heads_of(config: GPTConfig, world: int) -> list[tuple[range, range]]:
    """By rank, its query heads and the key/value heads that these need.

    >>> heads_of(GPTConfig(256, 1, 24, 3, 1, 64, 8), 2)
    [(range(0, 2), range(0, 1)), (range(2, 3), range(0, 1))]
    """
    each, first, found = config.heads // config.kv_heads, 0, []
    for count in split_evenly(config.heads, world):
        last = first + count
        found.append((range(first, last), range(first // each, -(-last // each))))
        first = last
    return found


def split_model(model: GPT, tp: int, rank: int, world: int) -> Split:
    """Split `model` over groups of `tp` neighbouring ranks; called by every rank. `tp` divides `world`."""
    blocks = [list(range(first, first + tp)) for first in range(0, world, tp)]
    rows = [list(range(i, world, tp)) for i in range(tp)]
    tp_group, dp_group = (
        next(g for ranks, g in [(r, dist.new_group(r)) for r in every] if rank in ranks)
        for every in (blocks, rows)
    )
    config = model.config
    heads = heads_of(config, tp)
    D = config.head_dim
    q, kv = ([(h.start * D, h.stop * D) for h in column] for column in zip(*heads))
    plan: dict[str, str | Style] = {
        "embedding": "vocab", "blocks.*.attention.q": Style("column", {"ranges": q}),
        "blocks.*.attention.[kv]": Style("column", {"ranges": kv}),
        "blocks.*.attention.out": Style("row", {"ranges": q}), "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row",
    }  # fmt: skip
    if model.head is not None:
        plan["head"] = "column"
    parts = parallelize(model, plan, group=tp_group)
    tp_rank = rank % tp
    mine, keys = heads[tp_rank]
    kv_of = [h // (config.heads // config.kv_heads) - keys.start for h in mine]
    set_kv_heads(model, kv_of if kv_of != _grouped(len(mine), len(keys)) else None)
    return Split(parts, dp_group, tp_rank)


def _grouped(heads: int, kv_heads: int) -> list[int]:
    """The key/value head of every query head as attention has it."""
    each = heads // max(1, kv_heads)
    return [h // each for h in range(heads)] if kv_heads and heads % kv_heads == 0 else []


def set_kv_heads(model: GPT, kv_of: list[int] | None) -> None:
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.kv_of = kv_of
