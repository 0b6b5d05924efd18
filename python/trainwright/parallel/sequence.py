"""What stands between tensor-parallel layers: rows of a replicated tensor divided among the ranks, and parameters that
every rank holds whole while it sees its own rows alone (norms, routers)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import check_tensor, type_error
from trainwright.ops._library import acc_dtype
from trainwright.parallel._exchange import (
    How,
    check_group,
    gather_sizes,
    gathered_rows,
    ordered_all_reduce,
)
from trainwright.parallel._schedule_runtime import Group
from trainwright.parallel._sizes import shard_slice, split_evenly

__all__ = ["gather_rows", "scatter_rows", "sum_gradients"]


def _all_rows(x: Tensor, sizes: list[int], how: How) -> Tensor:
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    whole = flat.new_empty(sum(sizes), flat.shape[1])
    for rows, part in gathered_rows(flat, sizes, how, 0.0):
        whole[rows] = part
    return whole.view(-1, *x.shape[1:])


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How) -> Tensor:
        ctx.how, ctx.sizes = how, split_evenly(x.shape[0], how.world)
        return x[shard_slice(ctx.sizes, how.rank)].clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _all_rows(dy, ctx.sizes, ctx.how), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How) -> Tensor:
        ctx.how, ctx.sizes = how, gather_sizes(x.shape[0], how.group, x.device)
        return _all_rows(x, ctx.sizes, how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy[shard_slice(ctx.sizes, ctx.how.rank)].clone(), None


def scatter_rows(x: Tensor, *, group: Group = None) -> Tensor:
    """This rank's rows of x (T, ...), which is the same on every rank: where a sequence-parallel region begins.

    T is split as evenly as possible, larger shards first. The gradient of x is gathered from all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: x is no tensor, or has no rows.
    """
    check_group("scatter_rows", group)
    check_tensor("scatter_rows", "x", x, min_dim=1)
    return _Scatter.apply(x, How("scatter_rows", group))


def gather_rows(x: Tensor, *, group: Group = None) -> Tensor:
    """The rows of all ranks, (Σ T_r, ...), from x (T_r, ...): where a sequence-parallel region ends.

    The gradient of the result is taken as the same on every rank, and each keeps its rows of it.

    Raises:
        As `scatter_rows`.
    """
    check_group("gather_rows", group)
    check_tensor("gather_rows", "x", x, min_dim=1)
    return _Gather.apply(x, How("gather_rows", group))


def sum_gradients(module: nn.Module, *, group: Group = None) -> Callable[[], None]:
    """From now on every parameter of `module` gets the sum of the ranks' gradients, in fp32 in the order of the ranks.

    For a module that every rank holds whole and runs on its own rows, as the norms, or a router, of a sequence-parallel
    region: each rank's gradient covers its rows, the sum all of them, with the same bits on every rank. The sum is
    taken inside each backward, once per parameter, so every rank has to run the same backward.

    Args:
        module: its parameters must not be split.
        group: process group; None is the default group.

    Returns:
        A function that undoes it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: module is not an nn.Module.
    """
    check_group("sum_gradients", group)
    if not isinstance(module, nn.Module):
        raise type_error("sum_gradients", "module", "an nn.Module", type(module).__name__)

    def add(gradient: Tensor) -> Tensor:
        total = ordered_all_reduce(gradient.to(acc_dtype(gradient.dtype)).contiguous(), group)
        return total.to(gradient.dtype)

    handles = [p.register_hook(add) for p in module.parameters() if p.requires_grad]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
