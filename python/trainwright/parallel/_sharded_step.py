"""The optimizer of `Zero`: an optimizer class of `tw.optim` that updates only this rank's ranges of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainwright.ops._optimizer_formats import STATE_BLOCK
from trainwright.optim._base import FusedOptimizer, run_closure
from trainwright.parallel._shard_set import ShardSet


class ShardedStep(FusedOptimizer):
    """Mixin in front of an optimizer class; see `build`.

    Its groups hold the module's parameters, so whatever reads their gradients (a scaler, clipping) works as usual and
    finds the same on all ranks. Its state belongs to the ranges.
    """

    _set: ShardSet
    _whole: list[list[Tensor]]  # the groups' parameters, while ranges stand in their place

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient, on all ranks. Collective."""
        loss = run_closure(closure)
        self._set.driver.raise_error()
        self._set.refresh()
        params = [p for group in self.param_groups for p in group["params"]]
        updated = {self._set.index[id(p)] for p in params if p.grad is not None}
        with self._on_ranges(gradients=True):
            FusedOptimizer.step(self)
        self._set.gather(updated)
        return loss

    @contextlib.contextmanager
    def _on_ranges(self, gradients: bool = False) -> Iterator[None]:
        """Inside, the groups hold this rank's ranges, with their part of the gradients if asked for."""
        self._whole = [group["params"] for group in self.param_groups]
        touched = []
        try:
            for group, params in zip(self.param_groups, self._whole):
                group["params"] = []
                for p in params:
                    shards = self._set.of(p)
                    group["params"] += shards
                    if gradients and shards and p.grad is not None:
                        _take_gradient(p, shards)
                        touched += shards
            yield
        finally:
            for shard in touched:
                shard.grad = None
            for group, params in zip(self.param_groups, self._whole):
                group["params"] = params

    def _overflow_and_clip(self, grads: dict[torch.device, list[Tensor]]) -> Tensor | None:
        # Of the whole gradients, which every rank has: the norm has the bits that one process would find.
        whole = [p.grad for params in self._whole for p in params if p.grad is not None]
        return super()._overflow_and_clip({whole[0].device: whole} if whole else {})

    def _report_lost(self, counts: list[Tensor]) -> None:
        total = torch.zeros(2, dtype=torch.float64)
        for x in counts:
            total += x.cpu()
        super()._report_lost([self._set.sum_over_ranks(total)])

    def refresh_masters(self) -> None:
        """Set the masters to the parameters: call it after parameters were edited by hand."""
        self._set.refresh()
        with self._on_ranges():
            super().refresh_masters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for parameters of the module."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if id(p) not in self._set.index:
                self.param_groups.pop()
                raise ValueError("Zero: params: expected parameters of module, got another tensor")

    def _set_options(self, **options: Any) -> None:
        super()._set_options(**options)
        if self._options.state_dtype == "int8" and self._set.block % STATE_BLOCK:
            raise ValueError(
                "Zero: state_dtype: int8 state must be asked for at construction, so that no rank's range begins inside"
                " one of its blocks"
            )

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            "Zero: optimizer.state_dict: the state is divided among the ranks; use full_state_dict() or"
            " sharded_state_dict() of Zero"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError(
            "Zero: optimizer.load_state_dict: use load_full_state_dict() or load_sharded_state_dict() of Zero"
        )


def _take_gradient(p: Tensor, shards: list[Any]) -> None:
    grad = p.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"Zero: expected dense gradients, got {grad.layout} of a parameter of shape {tuple(p.shape)}"
        )
    flat = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
    for shard in shards:
        if flat.dtype != shard.dtype:
            shard.grad_dtype = flat.dtype
        shard.grad = flat[shard.shard_offset : shard.shard_offset + shard.numel()]


def build(
    optimizer: type[FusedOptimizer], shard_set: ShardSet, params: Any, options: dict[str, Any]
) -> Any:
    """`optimizer` with a sharded step, for `params`: parameters or groups of them."""
    cls: Any = type(optimizer.__name__, (ShardedStep, optimizer), {})
    made = cls.__new__(cls)
    made._set = shard_set
    made.__init__(params, **options)
    return made
