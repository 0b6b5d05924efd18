"""The arguments of one call of an optimizer op, and the table of addresses that replaces them while nothing moves.

On CUDA the kernels read the table from device memory, which is filled anew only when an address in it has changed: a
step is then one launch, whatever the number of tensors.
"""

from __future__ import annotations

import array
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.ops._optimizer import MEMORY_COLUMNS

if TYPE_CHECKING:
    from trainwright.optim._base import FusedOptimizer

# torch's ScalarType numbers, csrc/include/trainwright/types.h
DTYPE_CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


@dataclass
class Batch:
    """The tensors of one device, in the order of the op's arguments (trainwright/ops/_optimizer.py)."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    spec: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    names: list[list[str]] = field(
        default_factory=list
    )  # keys of each parameter's entries of `states`


def _same_objects(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


class Plan:
    """The table of addresses of a step in which every parameter, contiguous and all on one device, had a contiguous
    gradient.

    `refresh` finds out whether that is still so and nothing moved: every parameter, state dict and state tensor is the
    same object, at the same address, of the same size and dtype. That costs less than handing the lists to the op.
    """

    params: list[Tensor]
    state_dicts: list[dict[str, Any]]  # all of optimizer.state, in order
    tensors: dict[
        str, tuple[list[dict[str, Any]], list[Tensor]]
    ]  # key -> states that have it, the tensors
    facts: list[Any]
    grad_dtypes: list[torch.dtype]
    flags: list[int]
    offsets: list[int]
    device: torch.device
    backend: str
    op: Callable[..., None]
    table: Tensor
    addresses: array.array[int]  # of the gradients, as the table has them
    memory: Tensor | None  # the table on a CUDA device
    moved: bool  # it is not there yet, or no longer as it was

    def _facts(self, params: list[Tensor]) -> list[Any]:
        facts: list[Any] = list(map(Tensor.data_ptr, params))
        for name, (_, members) in self.tensors.items():
            if name != "step":
                facts += map(Tensor.data_ptr, members)
        facts += [p.dtype for p in params]
        facts += map(Tensor.numel, params)
        facts += map(Tensor.is_contiguous, params)
        return facts

    @classmethod
    def make(cls, optimizer: FusedOptimizer, batches: dict[torch.device, Batch]) -> Plan | None:
        everything = sum(len(group["params"]) for group in optimizer.param_groups)
        if len(batches) != 1:
            return None
        ((device, b),) = batches.items()
        backend = optimizer._backend(device, b)
        op = optimizer.module.STEP.get(f"{backend} table")
        if op is None or len(b.params) != everything:
            return None
        lists = [b.params, b.grads, b.masters, b.states]
        if not all(t.is_contiguous() for tensors in lists for t in tensors):
            return None
        plan = cls()
        plan.device, plan.backend, plan.op = device, backend, op
        plan.params = b.params
        plan.state_dicts = list(optimizer.state.values())
        plan.tensors = {"step": ([], [])}
        columns: dict[str, list[int]] = {}
        order = [s.name for s in optimizer.op.states]
        count = len(b.params)
        for i, (p, names) in enumerate(zip(b.params, b.names)):
            state = optimizer.state[p]
            for key in ("step", *names, *(["master"] if "master" in state else [])):
                dicts, tensors = plan.tensors.setdefault(key, ([], []))
                dicts.append(state)
                tensors.append(state[key])
                if key not in columns:
                    columns[key] = [0] * count
                columns[key][i] = state[key].data_ptr()
        nothing = [0] * count
        value_columns = [columns.get(name, nothing) for name in order]
        scale_columns = [columns.get(name + "_scale", nothing) for name in order]
        missing = [nothing] * (3 - len(order))
        plan.facts = plan._facts(plan.params)
        plan.grad_dtypes = [g.dtype for g in b.grads]
        plan.flags = optimizer._all_flags()
        plan.offsets = b.offsets
        plan.table = torch.tensor(
            [
                [p.data_ptr() for p in b.params],
                [g.data_ptr() for g in b.grads],
                columns.get("master", nothing),
                *value_columns, *missing,
                *scale_columns, *missing,
                columns["step"],
                [p.numel() for p in b.params],
                b.offsets,
                [DTYPE_CODES[p.dtype] for p in b.params],
                [DTYPE_CODES[g.dtype] for g in b.grads],
                b.spec,
            ],
            dtype=torch.int64,
        )  # fmt: skip
        plan.table = plan.table.t().contiguous()
        plan.addresses = array.array("q", map(Tensor.data_ptr, b.grads))
        plan.memory = None
        if backend != "cpu":
            shape = (count + 1, MEMORY_COLUMNS)
            plan.memory = torch.empty(shape, dtype=torch.int64, device=device)
        plan.moved = True
        return plan

    def refresh(self, optimizer: FusedOptimizer) -> list[Tensor] | None:
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
        except (KeyError, TypeError, RuntimeError):
            return None  # a state is gone; a gradient is None, or sparse
        if (
            self._facts(params) != self.facts
            or [g.dtype for g in grads] != self.grad_dtypes
            or optimizer._all_flags() != self.flags
            or optimizer._offsets(params) != self.offsets
            or optimizer._backend(self.device, None) != self.backend
        ):
            return None
        addresses = array.array("q", map(Tensor.data_ptr, grads))
        if addresses != self.addresses:
            self.addresses, self.moved = addresses, True
            self.table[:, 1] = torch.frombuffer(addresses, dtype=torch.int64)
        return grads

    def step(self, hyper: Tensor, control: Tensor | None, seed: int, lost: Tensor | None) -> None:
        self.op(self.table, self.memory, self.moved, hyper, control, seed, lost)
        self.moved = False
        torch.autograd.graph.increment_version(self.params)
