"""SGD with momentum over a list of tensors, in place: every parameter, gradient, master and state dtype.

`tw.optim.SGD` is the optimizer over this op.
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

__all__ = ["sgd_"]


def _update(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    acc = p.dtype
    g = g + h["weight_decay"].to(acc) * p
    direction = g
    if "momentum_buffer" in states:
        momentum = h["momentum"].to(acc)
        later = momentum * states["momentum_buffer"] + (1.0 - h["dampening"]).to(acc) * g
        b = states["momentum_buffer"] = torch.where(h["t"] == 1, g, later)
        direction = torch.where(h["nesterov"] != 0, g + momentum * b, b)
    return p - h["lr"].to(acc) * direction


OP = OptimizerOp(
    "sgd",
    ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    (State("momentum_buffer", True, flag=1),),
    _update,
)
STEP = define(OP)


@dispatch.register(
    "sgd",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
@documented
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    momentum_buffers: Sequence[Tensor] | None = None,
    masters: Sequence[Tensor | None] | None = None,
    scales: Mapping[str, Sequence[Tensor]] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    offsets: Sequence[int] | None = None,
    control: Tensor | None = None,
    lost: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One SGD step of many parameters, in place, in one kernel.

    With ``g = control[0] · grad + wd · p`` (negative to maximise): without momentum ``p −= lr g``. With it
    ``b = momentum · b + (1 − dampening) g`` (``b = g`` in a parameter's first step), and ``p −= lr b``, or
    ``p −= lr (g + momentum · b)`` with Nesterov's.

    Args:
        {tensors}
        momentum_buffers: state; {state}.
        {steps}
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        {options}

    {errors and numerics}

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013;
    torch.optim.SGD.

    >>> import torch, trainwright as tw
    >>> p, g = torch.ones(2), torch.tensor([1.0, -1.0])
    >>> tw.sgd_([p], [g], [torch.zeros((), dtype=torch.float64)], lr=0.5)
    >>> p
    tensor([0.5000, 1.5000])
    """
    op = "sgd_"
    check_number(op, "lr", lr)
    check_number(op, "momentum", momentum, minimum=0.0)
    check_number(op, "dampening", dampening)
    check_number(op, "weight_decay", weight_decay)
    check_bool(op, "nesterov", nesterov)
    check_bool(op, "maximize", maximize)
    if (momentum != 0.0) != (momentum_buffers is not None):
        raise value_error(
            op, "momentum_buffers", "a list if momentum is not 0, else None", momentum
        )
    states = {"momentum_buffer": momentum_buffers}
    hyper = (lr, momentum, dampening, weight_decay, nesterov, maximize)
    call(
        OP, STEP, params, grads, states, steps, hyper,
        masters=masters, scales=scales, stochastic_rounding=stochastic_rounding, seed=seed, offsets=offsets,
        control=control, lost=lost, backend=backend,
    )  # fmt: skip


@dispatch.self_check("sgd")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, b, g = (torch.randn(5, 33).to(device) for _ in range(3))
    step = torch.ones((), dtype=torch.float64, device=device)
    options = {"momentum": 0.9, "momentum_buffers": [b], "nesterov": True}
    sgd_([p], [g.t().contiguous().t()], [step], lr=0.1, **options, backend=backend)  # type: ignore[arg-type]
    return [p, b, step]
