"""RMSprop over a list of tensors, in place: every parameter, gradient, master and state dtype.

`tw.optim.RMSprop` is the optimizer over this op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_bool, check_number, value_error
from trainwright.ops._optimizer import OptimizerOp, State, call, define
from trainwright.ops._optimizer_docs import documented
from trainwright.ops._optimizer_formats import sqrt

__all__ = ["rmsprop_"]


def _update(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    acc = p.dtype
    alpha, blend = h["alpha"].to(acc), (1.0 - h["alpha"]).to(acc)
    g = g + h["weight_decay"].to(acc) * p
    variance = states["square_avg"] = alpha * states["square_avg"] + blend * (g * g)
    if "grad_avg" in states:
        a = states["grad_avg"] = states["grad_avg"] + blend * (g - states["grad_avg"])
        variance = variance - a * a
        variance = torch.where(variance < 0, variance * 0, variance)
    r = g / (sqrt(variance) + h["eps"].to(acc))
    if "momentum_buffer" in states:
        r = states["momentum_buffer"] = h["momentum"].to(acc) * states["momentum_buffer"] + r
    return p - h["lr"].to(acc) * r


OP = OptimizerOp(
    "rmsprop",
    ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize"),
    (
        State("square_avg", False),
        State("momentum_buffer", True, flag=1),
        State("grad_avg", True, flag=2),
    ),
    _update,
)
STEP = define(OP)


@dispatch.register(
    "rmsprop",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
@documented
def rmsprop_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    maximize: bool = False,
    momentum_buffers: Sequence[Tensor] | None = None,
    grad_avgs: Sequence[Tensor] | None = None,
    masters: Sequence[Tensor | None] | None = None,
    scales: Mapping[str, Sequence[Tensor]] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] | None = None,
    control: Tensor | None = None,
    lost: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One RMSprop step of many parameters, in place, in one kernel.

    With ``g = control[0] · grad + wd · p`` (negative to maximise): ``v = α v + (1 − α) g²``; centered also
    ``a += (1 − α)(g − a)``, else a = 0; ``r = g / (√(v − a²) + eps)``; ``p −= lr r``, or with momentum
    ``b = momentum · b + r`` and ``p −= lr b``. v − a² is taken as 0 where rounding made it negative.

    Args:
        {tensors}
        square_avgs, momentum_buffers, grad_avgs: state; {state}. `grad_avgs` makes it centered.
        {steps}
        lr, alpha, eps, weight_decay, momentum, maximize: as in `torch.optim.RMSprop`.
        {options}

    {errors and numerics}

    Source: Tieleman and Hinton, lecture 6.5 of "Neural networks for machine learning", 2012; Graves, arXiv 1308.0850.

    >>> import torch, trainwright as tw
    >>> p, g = torch.ones(2), torch.tensor([1.0, -1.0])
    >>> tw.rmsprop_([p], [g], [torch.zeros(2)], [torch.zeros((), dtype=torch.float64)], lr=0.5, alpha=0.0)
    >>> p
    tensor([0.5000, 1.5000])
    """
    op = "rmsprop_"
    check_number(op, "lr", lr)
    check_number(op, "eps", eps, minimum=0.0)
    check_number(op, "weight_decay", weight_decay)
    check_number(op, "momentum", momentum, minimum=0.0)
    check_number(op, "alpha", alpha, minimum=0.0)
    check_bool(op, "maximize", maximize)
    if (momentum != 0.0) != (momentum_buffers is not None):
        raise value_error(
            op, "momentum_buffers", "a list if momentum is not 0, else None", momentum
        )
    states = {"square_avg": square_avgs, "momentum_buffer": momentum_buffers, "grad_avg": grad_avgs}
    hyper = (lr, alpha, eps, weight_decay, momentum, maximize)
    call(
        OP, STEP, params, grads, states, steps, hyper,
        masters=masters, scales=scales, stochastic_rounding=stochastic_rounding, seed=seed, offsets=offsets,
        control=control, lost=lost, backend=backend,
    )  # fmt: skip


@dispatch.self_check("rmsprop")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, b, g = (torch.randn(5, 33).to(device) for _ in range(3))
    v, a = torch.rand(5, 33).to(device), torch.zeros(5, 33, device=device)
    step = torch.ones((), dtype=torch.float64, device=device)
    options = {"momentum": 0.9, "momentum_buffers": [b], "grad_avgs": [a]}
    rmsprop_([p], [g.t().contiguous().t()], [v], [step], lr=0.1, **options, backend=backend)  # type: ignore[arg-type]
    return [p, v, b, a, step]
