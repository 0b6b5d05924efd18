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
        params: fp32, bf16, fp16 or fp64 in any mix; any strides without overlap. Updated in place; nothing outside
            a view is touched.
        grads: same shapes; any of those dtypes, any strides. Not modified.
        square_avgs, momentum_buffers, grad_avgs: state, fp32 (fp64 for fp64
            parameters) or bf16 of the parameters' shapes, any strides; or int8 codes (uint8 where never negative),
            contiguous, with `scales`. `grad_avgs` makes it centered.
        steps: 0-d fp64 tensors on the parameters' device, raised by one.
        lr, alpha, eps, weight_decay, momentum, maximize: as in `torch.optim.RMSprop`.
        masters: for each parameter None, an fp32 tensor that holds its exact value, or (bf16 only) the int16 remainder
            of that value; the parameter receives its rounding. bf16 and fp16 parameters only.
        scales: for int8 state, per state name the fp32 scales of each parameter, one per 256 elements.
        stochastic_rounding, seed: round states, and parameters without a master, up or down at random so that the mean
            is right; the bits depend on (seed, element, step) alone.
        offsets: index of each tensor's first element in the whole parameter, if it is a shard of one.
        control: (2,) fp64 on the device: the gradient multiplier (clip coefficient / loss scale), and a flag: non-zero
            skips the step and leaves every tensor, step counts included, as it is.
        lost: (2,) fp64 on the device, raised by the number of elements whose update was not zero, and of those whose
            stored value did not move.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: elements in fp32 (fp64 for fp64 parameters), each operation rounded by itself; the scalars they share in
    fp64; what is stored in fewer bits is rounded once. The same bits for any thread count, layout and backend.

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
