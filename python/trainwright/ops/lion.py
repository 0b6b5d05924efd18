"""Lion over a list of tensors, in place: every parameter, gradient, master and state dtype.

`tw.optim.Lion` is the optimizer over this op.
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

__all__ = ["lion_"]


def _update(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    acc, m = p.dtype, states["exp_avg"]
    c = h["beta1"].to(acc) * m + (1.0 - h["beta1"]).to(acc) * g
    sign = torch.where(c > 0, 1.0, torch.where(c < 0, -1.0, c))
    states["exp_avg"] = h["beta2"].to(acc) * m + (1.0 - h["beta2"]).to(acc) * g
    return (1.0 - h["lr"] * h["weight_decay"]).to(acc) * p - h["lr"].to(acc) * sign


OP = OptimizerOp(
    "lion",
    ("lr", "beta1", "beta2", "weight_decay", "maximize"),
    (State("exp_avg", True),),
    _update,
)
STEP = define(OP)


@dispatch.register(
    "lion",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
@documented
def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
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
    """One Lion step of many parameters, in place, in one kernel.

    With ``g = control[0] · grad`` (negative to maximise): ``p = (1 − lr·wd) p − lr · sign(β₁ m + (1 − β₁) g)``, then
    ``m = β₂ m + (1 − β₂) g``. The sign of 0 is 0, that of NaN is NaN.

    Args:
        {tensors}
        exp_avgs: state; {state}.
        {steps}
        lr, betas, weight_decay, maximize: as in the paper; the decay is decoupled.
        {options}

    {errors and numerics}

    Source: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023.

    >>> import torch, trainwright as tw
    >>> p, g = torch.ones(2), torch.tensor([3.0, -0.1])
    >>> tw.lion_([p], [g], [torch.zeros(2)], [torch.zeros((), dtype=torch.float64)], lr=0.5)
    >>> p
    tensor([0.5000, 1.5000])
    """
    op = "lion_"
    check_number(op, "lr", lr)
    check_number(op, "weight_decay", weight_decay)
    check_bool(op, "maximize", maximize)
    for i, beta in enumerate(betas):
        check_below_one(op, f"betas[{i}]", beta)
    states = {"exp_avg": exp_avgs}
    hyper = (lr, *betas, weight_decay, maximize)
    call(
        OP, STEP, params, grads, states, steps, hyper,
        masters=masters, scales=scales, stochastic_rounding=stochastic_rounding, seed=seed, offsets=offsets,
        control=control, lost=lost, backend=backend,
    )  # fmt: skip


@dispatch.self_check("lion")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, m, g = (torch.randn(5, 33).to(device) for _ in range(3))
    step = torch.ones((), dtype=torch.float64, device=device)
    lion_([p], [g.t().contiguous().t()], [m], [step], lr=0.1, backend=backend)
    return [p, m, step]
