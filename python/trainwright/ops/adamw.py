"""AdamW over a list of tensors, in place: every parameter, gradient, master and state dtype.

`tw.optim.AdamW` is the optimizer over this op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_bool, check_number
from trainwright.ops._optimizer import OptimizerOp, State, call, check_below_one, define
from trainwright.ops._optimizer_docs import documented
from trainwright.ops._optimizer_formats import sqrt

__all__ = ["adamw_"]


def _update(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    return adamw_apply(p, g, states, h)


def adamw_apply(p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor]) -> Tensor:
    """The update with a finished gradient."""
    acc, t = p.dtype, h["t"]
    m, v = states["exp_avg"], states["exp_avg_sq"]
    m = m + (1.0 - h["beta1"]).to(acc) * (g - m)
    v = h["beta2"].to(acc) * v + (1.0 - h["beta2"]).to(acc) * (g * g)
    states["exp_avg"], states["exp_avg_sq"] = m, v
    if "max_exp_avg_sq" in states:
        v = states["max_exp_avg_sq"] = torch.maximum(states["max_exp_avg_sq"], v)
    root = sqrt(v) * (1.0 / (1.0 - h["beta2"] ** t).sqrt()).to(acc) + h["eps"].to(acc)
    kept = (1.0 - h["lr"] * h["weight_decay"]).to(acc) * p
    return kept - (h["lr"] / (1.0 - h["beta1"] ** t)).to(acc) * (m / root)


OP = OptimizerOp(
    "adamw",
    ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
    (State("exp_avg", True), State("exp_avg_sq", False), State("max_exp_avg_sq", False, flag=1)),
    _update,
)
STEP = define(OP)


@dispatch.register(
    "adamw",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
@documented
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    masters: Sequence[Tensor | None] | None = None,
    scales: Mapping[str, Sequence[Tensor]] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] | None = None,
    control: Tensor | None = None,
    lost: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One AdamW step of many parameters, in place, in one kernel.

    With ``g = control[0] · grad`` (negative to maximise) and t the parameter's own step count, raised by one:
    ``m += (1 − β₁)(g − m)``; ``v = β₂ v + (1 − β₂) g²``;
    ``p = (1 − lr·wd) p − lr/(1 − β₁ᵗ) · m / (√(v/(1 − β₂ᵗ)) + eps)``; with AMSGrad the largest v so far in place of v.

    Args:
        {tensors}
        exp_avgs, exp_avg_sqs, max_exp_avg_sqs: state; {state}. `max_exp_avg_sqs` turns AMSGrad on.
        {steps}
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
        {options}

    {errors and numerics}

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

    >>> import torch, trainwright as tw
    >>> p, g = torch.ones(2), torch.tensor([1.0, -1.0])
    >>> tw.adamw_([p], [g], [torch.zeros(2)], [torch.zeros(2)], [torch.zeros((), dtype=torch.float64)], lr=0.5,
    ...           weight_decay=0.0)
    >>> p
    tensor([0.5000, 1.5000])
    """
    op = "adamw_"
    check_number(op, "lr", lr)
    check_number(op, "eps", eps, minimum=0.0)
    check_number(op, "weight_decay", weight_decay)
    check_bool(op, "maximize", maximize)
    for i, beta in enumerate(betas):
        check_below_one(op, f"betas[{i}]", beta)
    states = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs, "max_exp_avg_sq": max_exp_avg_sqs}
    hyper = (lr, *betas, eps, weight_decay, maximize)
    call(
        OP, STEP, params, grads, states, steps, hyper,
        masters=masters, scales=scales, stochastic_rounding=stochastic_rounding, seed=seed, offsets=offsets,
        control=control, lost=lost, backend=backend,
    )  # fmt: skip


@dispatch.self_check("adamw")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, m, g = (torch.randn(5, 33).to(device) for _ in range(3))
    v, step = torch.rand(5, 33).to(device), torch.ones((), dtype=torch.float64, device=device)
    adamw_([p], [g.t().contiguous().t()], [m], [v], [step], lr=0.1, backend=backend)
    return [p, m, v, step]
