"""The optimizer classes and their torch counterparts, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import trainwright as tw
from numerics import same_bits
from torch.testing._internal import common_optimizers as torch_inputs


@dataclass(frozen=True)
class Optimizer:
    """`options` bring every state into play; `plain` is torch's class, where there is one."""

    name: str
    options: dict[str, Any]
    states: tuple[str, ...]
    plain: type[torch.optim.Optimizer] | None = None
    inputs: Callable[..., list[Any]] | None = None
    errors: Callable[..., list[Any]] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # other options, for a second group

    @property
    def ours(self) -> type[torch.optim.Optimizer]:
        return getattr(tw.optim, self.name)

    def __str__(self) -> str:
        return self.name


def _with_torch(name, options, states, **changes):
    stem = name.lower()
    return Optimizer(
        name, options, states, getattr(torch.optim, name), getattr(torch_inputs, f"optim_inputs_func_{stem}"),
        getattr(torch_inputs, f"optim_error_inputs_func_{stem}"), changes,
    )  # fmt: skip


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}
TORCH = [
    _with_torch("AdamW", ADAM, (*MOMENTS, "max_exp_avg_sq"), betas=(0.7, 0.9)),
    _with_torch("Adam", ADAM, (*MOMENTS, "max_exp_avg_sq"), betas=(0.7, 0.9)),
    _with_torch("SGD", {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, ("momentum_buffer",), momentum=0.5),
    _with_torch("RMSprop", {"lr": 0.02, "momentum": 0.5, "centered": True, "weight_decay": 0.1},
                ("square_avg", "grad_avg", "momentum_buffer"), alpha=0.8),
]  # fmt: skip
OURS = [
    Optimizer("Lion", {"lr": 0.01, "weight_decay": 0.1}, ("exp_avg",), changes={"betas": (0.7, 0.9)}),
    Optimizer("Lamb", {"lr": 0.02, "weight_decay": 0.1}, MOMENTS, changes={"betas": (0.7, 0.9)}),
]  # fmt: skip
ALL = [*TORCH, *OURS]
BY_NAME = {o.name: o for o in ALL}


def leaf(x):
    x = x.detach().requires_grad_()
    x.grad_dtype = None  # gradients of any dtype
    return x


def parameters(dtype=torch.float32, seed=0):
    """Contiguous, transposed, channels last, 0-d and empty."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(300,), (7, 33), (), (0, 4)]
    tensors = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    tensors.append(torch.randn(16, 9, generator=g).to(dtype).t())
    channels = torch.randn(2, 3, 4, 5, generator=g).to(dtype)
    tensors.append(channels.to(memory_format=torch.channels_last))
    return [leaf(t) for t in tensors]


def copies(params):
    return [leaf(p.detach().clone()) for p in params]


def give_gradients(params, step, dtype=None, scale=1.0):
    """Gradients that depend on the step alone, those of matrices transposed in memory."""
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = (torch.randn(p.shape, generator=g) * scale).to(dtype or p.dtype)
        p.grad = grad.t().contiguous().t() if p.dim() == 2 else grad


def train(optimizer, params, steps, dtype=None):
    for step in steps:
        give_gradients(params, step, dtype)
        optimizer.step()


def assert_same_run(a, first, b, second):
    """The same bits of parameters and state."""
    for p, q in zip(a, b, strict=True):
        assert same_bits(p.detach(), q.detach())
        assert first.state[p].keys() == second.state[q].keys()
        for key, value in first.state[p].items():
            other = second.state[q][key]
            assert same_bits(value, other) if isinstance(value, torch.Tensor) else value == other


def assert_close_run(a, ours, b, theirs, states):
    """Parameters and states within torch's tolerances; b and `theirs` are torch's."""
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)
        assert p in ours.state or q not in theirs.state  # SGD without momentum: ours counts
        for key in states:
            mine, yours = ours.state[p].get(key), theirs.state[q].get(key)
            assert (mine is None) == (yours is None), key
            if mine is not None:
                torch.testing.assert_close(mine, yours)
