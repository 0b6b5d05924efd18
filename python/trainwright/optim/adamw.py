"""`tw.optim.AdamW`."""

from __future__ import annotations

import array
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.ops.adamw import STEP, step_by_table
from trainwright.optim._base import FusedOptimizer, new_step, run_closure, state_dtype

__all__ = ["AdamW"]

CPU = torch.device("cpu")
# torch's ScalarType numbers, csrc/include/trainwright/types.h
DTYPE_CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


@dataclass
class _Batch:
    """The tensors of one device, in the order of the op's arguments."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    spec: list[int] = field(default_factory=list)


class _Plan:
    """The table of addresses of a step in which every parameter, contiguous and on the CPU, had a contiguous gradient.

    `refresh` finds out whether that is still so and nothing moved: every parameter, state dict and state tensor is the
    same object, at the same address, of the same size and dtype. That costs less than handing the lists to the op.
    """

    params: list[Tensor]
    state_dicts: list[dict[str, Any]]  # all of optimizer.state, in order
    tensors: dict[
        str, tuple[list[dict[str, Any]], list[Tensor]]
    ]  # name -> states that have it, the tensors
    facts: list[Any]
    grad_dtypes: list[torch.dtype]
    amsgrad: list[bool]
    table: Tensor

    @staticmethod
    def _facts(
        params: list[Tensor], tensors: dict[str, tuple[list[dict[str, Any]], list[Tensor]]]
    ) -> list[Any]:
        facts: list[Any] = list(map(Tensor.data_ptr, params))
        for name, (_, members) in tensors.items():
            if name != "step":
                facts += map(Tensor.data_ptr, members)
        facts += [p.dtype for p in params]
        facts += map(Tensor.numel, params)
        facts += map(Tensor.is_contiguous, params)
        return facts

    @classmethod
    def make(cls, optimizer: AdamW, batches: dict[torch.device, _Batch]) -> _Plan | None:
        b = batches.get(CPU)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        if b is None or len(batches) != 1 or len(b.params) != len(everything):
            return None
        if dispatch.resolve("adamw", optimizer._options.backend, CPU, b.params[0].dtype) != "cpu":
            return None
        lists = [b.params, b.grads, b.exp_avgs, b.exp_avg_sqs, b.max_exp_avg_sqs, b.masters]
        if not all(t.is_contiguous() for tensors in lists for t in tensors):
            return None
        plan = cls()
        plan.params = b.params
        plan.state_dicts = list(optimizer.state.values())
        states = [optimizer.state[p] for p in b.params]
        plan.tensors = {
            "exp_avg": (states, b.exp_avgs),
            "exp_avg_sq": (states, b.exp_avg_sqs),
            "step": (states, b.steps),
            "max_exp_avg_sq": (
                [s for s, bits in zip(states, b.spec) if bits & 32],
                b.max_exp_avg_sqs,
            ),
            "master": ([s for s, bits in zip(states, b.spec) if bits & 1], b.masters),
        }
        plan.facts = cls._facts(plan.params, plan.tensors)
        plan.grad_dtypes = [g.dtype for g in b.grads]
        plan.amsgrad = [bool(group["amsgrad"]) for group in optimizer.param_groups]
        maxima = (t.data_ptr() for t in b.max_exp_avg_sqs)
        masters = (t.data_ptr() for t in b.masters)
        plan.table = torch.tensor(
            [
                [p.data_ptr() for p in b.params],
                [g.data_ptr() for g in b.grads],
                [t.data_ptr() for t in b.exp_avgs],
                [t.data_ptr() for t in b.exp_avg_sqs],
                [next(maxima) if bits & 32 else 0 for bits in b.spec],
                [next(masters) if bits & 1 else 0 for bits in b.spec],
                [t.data_ptr() for t in b.steps],
                [p.numel() for p in b.params],
                [DTYPE_CODES[p.dtype] for p in b.params],
                [DTYPE_CODES[g.dtype] for g in b.grads],
                [bits >> 8 for bits in b.spec],
            ],
            dtype=torch.int64,
        )
        plan.table = plan.table.t().contiguous()
        return plan

    def refresh(self, optimizer: AdamW) -> list[Tensor] | None:
        """The gradients, with their addresses entered in the table; None if the plan no longer holds."""
        params: list[Tensor] = []
        for group in optimizer.param_groups:
            params += group["params"]
        if not _same_objects(params, self.params):
            return None
        if not _same_objects(list(optimizer.state.values()), self.state_dicts):
            return None
        grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        try:
            for name, (states, tensors) in self.tensors.items():
                if not _same_objects(list(map(operator.itemgetter(name), states)), tensors):
                    return None
            if not all(map(Tensor.is_contiguous, grads)):
                return None
        except (
            KeyError,
            TypeError,
            RuntimeError,
        ):  # a state is gone; a gradient is None, or sparse
            return None
        backend = optimizer._options.backend
        if (
            dispatch.resolve("adamw", backend, CPU, params[0].dtype) != "cpu"
            or self._facts(params, self.tensors) != self.facts
            or [g.dtype for g in grads] != self.grad_dtypes
            or [bool(group["amsgrad"]) for group in optimizer.param_groups] != self.amsgrad
        ):
            return None
        addresses = array.array("q", map(Tensor.data_ptr, grads))
        self.table[:, 1] = torch.frombuffer(addresses, dtype=torch.int64)
        return grads


def _same_objects(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` in one multi-tensor kernel per device, with masters, clipping and loss scaling folded in.

    The formula is that of `tw.adamw_`. Constructor and `state_dict` are compatible with torch's in both directions; the
    state of a parameter is ``step`` (0-d fp64, so that it stays exact), ``exp_avg``, ``exp_avg_sq`` and, where used,
    ``max_exp_avg_sq`` and ``master``.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch, per group too; `lr` and `betas` may be
            tensors.
        foreach, capturable, fused: accepted and kept in the groups; the same kernel runs in any case.
        differentiable: must be False.
        master_weights: "fp32" or "auto" keeps an fp32 master of each bf16 or fp16 parameter; "none" updates the
            parameter itself. After editing parameters by hand call `refresh_masters()`.
        state_dtype, stochastic_rounding, seed: only fp32 state and rounding to nearest so far.
        max_grad_norm: clip the global 2-norm of all gradients inside the step; ``p.grad`` is not rewritten.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Gradients may have another dtype and other strides than their parameter. With a `GradScaler` or `tw.LossScaler` the
    gradients are unscaled inside the step, and a step that overflowed leaves parameters, state, masters and step counts
    as they were. `last_step` holds what a step found, on the device: `step()` never waits for it.

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, requires_grad=True)
    >>> opt = tw.optim.AdamW([p], lr=0.5, weight_decay=0.0, max_grad_norm=1.0)
    >>> p.grad = torch.tensor([3.0, -4.0])
    >>> opt.step()
    >>> p.tolist(), opt.last_step.grad_norm.item()
    ([0.5, 1.5], 5.0)
    """

    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        backend: str | None = None,
    ) -> None:
        self._set_options(
            differentiable=differentiable,
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            max_grad_norm=max_grad_norm,
            backend=backend,
        )
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, fused=fused,
        )  # fmt: skip

    def _start(self, p: Tensor, state: dict[str, Any]) -> None:
        state["step"] = new_step(p)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(
                p, dtype=state_dtype(p), memory_format=torch.preserve_format
            )

    def _collect(self) -> dict[torch.device, _Batch]:
        batches: dict[torch.device, _Batch] = {}
        device, batch = None, _Batch()
        for index, group in enumerate(self.param_groups):
            amsgrad = group["amsgrad"]
            for p in group["params"]:
                grad = p.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"AdamW does not support sparse gradients (got layout {grad.layout})"
                    )
                if p.device != device:
                    device = p.device
                    batch = batches.setdefault(device, _Batch())
                state = self.state[p]
                if "exp_avg" not in state:
                    self._start(p, state)
                bits = index << 8
                if amsgrad:
                    bits |= 1 << 5
                    if "max_exp_avg_sq" not in state:
                        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
                    batch.max_exp_avg_sqs.append(state["max_exp_avg_sq"])
                if self._wants_master(p):
                    bits |= 1
                    if "master" not in state:
                        state["master"] = p.detach().to(torch.float32, copy=True)
                    batch.masters.append(state["master"])
                batch.params.append(p)
                batch.grads.append(grad)
                batch.exp_avgs.append(state["exp_avg"])
                batch.exp_avg_sqs.append(state["exp_avg_sq"])
                batch.steps.append(state["step"])
                batch.states += [state["exp_avg"], state["exp_avg_sq"]]
                if amsgrad:
                    batch.states.append(state["max_exp_avg_sq"])
                batch.spec.append(bits)
        return batches

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure`, if given, returned."""
        loss = run_closure(closure)
        hyper = ("lr", "betas", "eps", "weight_decay", "maximize")
        plan = self.__dict__.get("_plan")
        grads = plan.refresh(self) if plan is not None else None
        if plan is not None and grads is not None:
            control = self._overflow_and_clip({CPU: grads})
            step_by_table(plan.table, self._hyper(hyper, CPU), control)
            torch.autograd.graph.increment_version(plan.params)
            return loss
        batches = self._collect()
        control = self._overflow_and_clip({d: b.grads for d, b in batches.items()})
        for device, b in batches.items():
            chosen = dispatch.resolve("adamw", self._options.backend, device, b.params[0].dtype)
            STEP[chosen](
                b.params, b.grads, b.masters, b.states, b.steps, b.spec, [0] * len(b.params),
                self._hyper(hyper, device), None if control is None else control.to(device), 0, None,
            )  # fmt: skip
            torch.autograd.graph.increment_version(b.params)
        self._plan = _Plan.make(self, batches)
        return loss
