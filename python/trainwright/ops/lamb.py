"""LAMB over a list of tensors, in place: every parameter, gradient, master and state dtype.

`tw.optim.Lamb` is the optimizer over this op.
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

__all__ = ["lamb_"]


def _update(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    acc = p.dtype
    m, v, t = states["exp_avg"], states["exp_avg_sq"], h["t"]
    states["exp_avg"] = m + (1.0 - h["beta1"]).to(acc) * (g - m)
    states["exp_avg_sq"] = h["beta2"].to(acc) * v + (1.0 - h["beta2"]).to(acc) * (g * g)
    m, v = (store(name, states[name]) for name in ("exp_avg", "exp_avg_sq"))
    root = sqrt(v) * (1.0 / (1.0 - h["beta2"] ** t).sqrt()).to(acc) + h["eps"].to(acc)
    u = m * (1.0 / (1.0 - h["beta1"] ** t)).to(acc) / root + h["weight_decay"].to(acc) * p
    p_norm, u_norm = p.double().square().sum().sqrt(), u.double().square().sum().sqrt()
    ratio = torch.where((p_norm == 0) | (u_norm == 0), 1.0, p_norm / u_norm)
    return p - (h["lr"] * ratio).to(acc) * u


OP = OptimizerOp(
    "lamb",
    ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
    (State("exp_avg", True), State("exp_avg_sq", False)),
    _update,
)
STEP = define(OP)


@dispatch.register(
    "lamb",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
@documented
def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
    masters: Sequence[Tensor | None] | None = None,
    scales: Mapping[str, Sequence[Tensor]] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] | None = None,
    control: Tensor | None = None,
    lost: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One LAMB step of many parameters, in place.

    With ``g = control[0] · grad`` (negative to maximise) and t the parameter's own step count, raised by one:
    ``m += (1 − β₁)(g − m)``; ``v = β₂ v + (1 − β₂) g²``; ``u = m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + eps) + wd · p``;
    ``p −= lr · |p|/|u| · u``, the ratio 1 if either norm is 0. u takes m and v as they are stored, after rounding. The
    norms are those of the tensors given: a shard has a ratio of its own.

    Args:
        {tensors}
        exp_avgs, exp_avg_sqs: state; {state}.
        {steps}
        lr, betas, eps, weight_decay, maximize: as in the paper.
        {options}

    {errors and numerics}

    Source: You et al., "Large batch optimization for deep learning", ICLR 2020.

    >>> import torch, trainwright as tw
    >>> p, g = torch.ones(2), torch.tensor([1.0, -1.0])
    >>> tw.lamb_([p], [g], [torch.zeros(2)], [torch.zeros(2)], [torch.zeros((), dtype=torch.float64)], lr=0.5)
    >>> p
    tensor([0.5000, 1.5000])
    """
    op = "lamb_"
    check_number(op, "lr", lr)
    check_number(op, "eps", eps, minimum=0.0)
    check_number(op, "weight_decay", weight_decay)
    check_bool(op, "maximize", maximize)
    for i, beta in enumerate(betas):
        check_below_one(op, f"betas[{i}]", beta)
    states = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    hyper = (lr, *betas, eps, weight_decay, maximize)
    call(
        OP, STEP, params, grads, states, steps, hyper,
        masters=masters, scales=scales, stochastic_rounding=stochastic_rounding, seed=seed, offsets=offsets,
        control=control, lost=lost, backend=backend,
    )  # fmt: skip


@dispatch.self_check("lamb")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, m, g = (torch.randn(5, 33).to(device) for _ in range(3))
    v, step = torch.rand(5, 33).to(device), torch.ones((), dtype=torch.float64, device=device)
    lamb_([p], [g.t().contiguous().t()], [m], [v], [step], lr=0.1, backend=backend)
    return [p, m, v, step]
