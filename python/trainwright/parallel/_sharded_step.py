"""The optimizer of `Zero`: an optimizer class of `tw.optim` that updates only this rank's ranges of its parameters.

In stage 1 its groups hold the module's parameters, so whatever reads their gradients (a scaler, clipping) works as
usual and finds the same on all ranks; ranges stand in their place during a step. In stages 2 and 3 the parameters have
no gradients: the groups hold the ranges, and a witness of all ranks' overflows.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainwright.ops._optimizer_formats import STATE_BLOCK
from trainwright.optim._base import FusedOptimizer, run_closure
from trainwright.parallel._shard_set import Shard, ShardSet


def refuse_others(home: ShardSet) -> Any:
    """Make the step of an optimizer that holds parameters of `home`, whose gradients are not with them, an error: it
    would silently do nothing. Returns a handle that ends this.
    """
    me = weakref.ref(home)

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = me()
        if mine is None:
            return
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in mine.index:
                got = (
                    f"one of another {type(optimizer).__name__} on {mine.names[mine.index[id(p)]]}"
                )
                raise RuntimeError(
                    "Zero: optimizer: expected a step of zero.optimizer in stages 2 and 3, where gradients are not with"
                    f" the parameters, got {got}"
                )

    return register_optimizer_step_pre_hook(look)


class ShardedStep(FusedOptimizer):
    """Mixin in front of an optimizer class; see `build`. Its state belongs to the ranges."""

    _set: ShardSet
    _stage: int
    given: list[list[Tensor]]  # per group the module's parameters
    offloaded = False  # Offload keeps the state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient, on all ranks. Collective."""
        loss = run_closure(closure)
        with self._updated_parameters(step=True):
            FusedOptimizer.step(self)
        return loss

    @contextlib.contextmanager
    def _updated_parameters(self, *, step: bool) -> Iterator[None]:
        """Inside, the groups hold this rank's ranges; after a step, all ranks get those of the others."""
        home = self._set
        home.driver.raise_error()
        home.refresh()
        params = {home.index[id(p)]: p for group in self.given for p in group}
        if self._stage == 1:
            updated = {i for i, p in params.items() if p.grad is not None}
        else:
            updated = home.graded & params.keys()
        with self._on_ranges(gradients=step and self._stage == 1):
            yield
        if step:
            home.gather(updated)
            home.end_step()

    def _host_class(self) -> type[FusedOptimizer]:
        plain: type[FusedOptimizer] = type(self).__mro__[2]
        return plain

    def _state_moved(self, state: Any) -> None:
        self.state, self.offloaded = state, True  # Zero reads it here, and loads it

    def _edit_mark(self, p: Tensor) -> tuple[int, int]:
        assert isinstance(p, Shard)
        return self._set.owner_of(p)._version, p.data_ptr()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for the gradients of the parameters and of the ranges."""
        super().zero_grad(set_to_none)
        if self._stage > 1:
            self._set.witness.grad = None
            for p in (p for group in self.given for p in group):
                if set_to_none:
                    p.grad = None
                    self._set.graded.discard(self._set.index[id(p)])
                elif p.grad is not None:
                    p.grad.zero_()

    @contextlib.contextmanager
    def _on_ranges(self, gradients: bool = False) -> Iterator[None]:
        """Inside, the groups hold this rank's ranges and nothing else, with the parameters' gradients if asked for."""
        before = [group["params"] for group in self.param_groups]
        touched: list[Shard] = []
        try:
            for group, params in zip(self.param_groups, self.given):
                group["params"] = [s for p in params for s in self._set.of(p)]
                for p in params if gradients else ():
                    shards = self._set.of(p)
                    if shards and p.grad is not None:
                        _take_gradient(p, shards)
                        touched += shards
            yield
        finally:
            for shard in touched:
                shard.grad = None
            for group, held in zip(self.param_groups, before):
                group["params"] = held

    def _overflow_and_clip(self, grads: dict[torch.device, list[Tensor]]) -> Tensor | None:
        if self._stage == 1:
            # Of the whole gradients, which every rank has: the norm has the bits that one process would find.
            whole = [p.grad for group in self.given for p in group if p.grad is not None]
            grads = {whole[0].device: whole} if whole else {}
        elif not grads:
            grads = {self._set.witness.device: []}
        return super()._overflow_and_clip(grads)

    def _grad_stats(self, grads: dict[torch.device, list[Tensor]], home: torch.device) -> Tensor:
        if self._stage == 1:
            return super()._grad_stats(grads, home)
        mine = super()._grad_stats({d: g for d, g in grads.items() if g}, home)
        return self._set.sum_over_ranks(mine.cpu()).to(home)

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
        group = self.param_groups[-1]
        given = list(group["params"])
        known = {id(p) for other in self.__dict__.setdefault("given", []) for p in other}
        problem = next((p for p in given if id(p) not in self._set.index), None)
        if problem is not None or known & set(map(id, given)):
            self.param_groups.pop()
            expected = (
                "parameters of module" if problem is not None else "each parameter in one group"
            )
            raise ValueError(
                f"Zero: params: expected {expected}, got another tensor of shape {tuple(given[0].shape)}"
            )
        self.given.append(given)
        if self._stage == 1:
            self.given[-1] = group["params"]
        else:
            first = [self._set.witness] if len(self.param_groups) == 1 else []
            group["params"] = first + [s for p in given for s in self._set.of(p)]

    def _problem(self, p: Tensor) -> str | None:
        divided = self._stage == 3 and id(p) in self._set.index  # of which nothing is here now
        return None if divided else super()._problem(p)

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


def _take_gradient(p: Tensor, shards: list[Shard]) -> None:
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
    optimizer: type[FusedOptimizer],
    stage: int,
    shard_set: ShardSet,
    params: Any,
    options: dict[str, Any],
) -> Any:
    """`optimizer` with a sharded step, for `params`: parameters or groups of them."""
    cls: Any = type(optimizer.__name__, (ShardedStep, optimizer), {})
    made = cls.__new__(cls)
    made._set, made._stage = shard_set, stage
    made.__init__(params, **options)
    return made
