"""AdamW over a list of tensors, in place: every parameter × gradient dtype, fp32 masters, clip and unscale folded in.

`tw.optim.AdamW` is the optimizer over this op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_bool, check_number, check_tensor, value_error
from trainwright.ops import _library

__all__ = ["adamw_"]

# One call serves all parameter groups of a device. spec[i] = group << 2 | has max_exp_avg_sq << 1 | has master, and the
# lists of those two hold only the tensors that exist. hyper (groups, 6) fp64: lr, beta1, beta2, eps, weight_decay,
# maximize. control (2) fp64: multiplier of the gradients, and non-zero to skip the step.
SCHEMA = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
    "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, int[] spec, Tensor hyper, Tensor? control) -> ()"
)


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    spec: list[int],
    hyper: Tensor,
    control: Tensor | None,
) -> None:
    next_max, next_master = iter(max_exp_avg_sqs), iter(masters)
    for p, grad, m, v, step, bits in zip(params, grads, exp_avgs, exp_avg_sqs, steps, spec):
        lr, beta1, beta2, eps, weight_decay, maximize = hyper[bits >> 2]
        largest = next(next_max) if bits & 2 else None
        master = next(next_master) if bits & 1 else None
        t = step + 1
        multiplier = (1.0 if control is None else control[0]) * (1.0 - 2.0 * maximize)
        g = grad.to(m.dtype) * multiplier.to(m.dtype)
        new_m = torch.lerp(m, g, (1.0 - beta1).to(m.dtype))
        new_v = beta2.to(v.dtype) * v + (1.0 - beta2).to(v.dtype) * g.square()
        h = new_v if largest is None else torch.maximum(largest, new_v)
        root = h.sqrt() / (1.0 - beta2**t).sqrt().to(h.dtype) + eps.to(h.dtype)
        old = p.to(m.dtype) if master is None else master
        new = (1.0 - lr * weight_decay).to(m.dtype) * old
        new = new - (lr / (1.0 - beta1**t)).to(m.dtype) * (new_m / root)
        results = [(p, new), (m, new_m), (v, new_v), (step, t), (largest, h), (master, new)]
        for target, value in results:
            if target is not None and control is None:
                target.copy_(value)
            elif target is not None and control is not None:
                target.copy_(torch.where(control[1] != 0, target, value.to(target.dtype)))


def _fake(*_: Any) -> None:
    return None


STEP = _library.define_backends("adamw", "adamw_" + SCHEMA, _reference, _fake)
# The optimizer's short cut on the CPU: contiguous tensors by address, see csrc/cpu/adamw.cpp.
_library.LIBRARY.define("adamw_table(Tensor table, Tensor hyper, Tensor? control) -> ()")
step_by_table = torch.ops.trainwright.adamw_table.default


@dispatch.register(
    "adamw",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
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
    control: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One AdamW step of many parameters, in place, in one kernel.

    With ``g = control[0] · grad`` (negative to maximise) and t the parameter's own step count, raised by one:
    ``m += (1 − β₁)(g − m)``; ``v = β₂ v + (1 − β₂) g²``;
    ``p = (1 − lr·wd) p − lr/(1 − β₁ᵗ) · m / (√(v/(1 − β₂ᵗ)) + eps)``; with AMSGrad the largest v so far in place of v.

    Args:
        params: fp32, bf16, fp16 or fp64 in any mix; any strides without overlap. Updated in place; nothing outside
            a view is touched.
        grads: same shapes; any of those dtypes, any strides. Not modified.
        exp_avgs, exp_avg_sqs, max_exp_avg_sqs: state of the parameters' shapes, fp32 (fp64 for fp64 parameters), any
            strides. `max_exp_avg_sqs` turns AMSGrad on.
        steps: 0-d fp64 tensors on the parameters' device, raised by one.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
        masters: for each parameter an fp32 tensor that holds its exact value (the parameter receives its rounding), or
            None; bf16 and fp16 parameters only.
        control: (2,) fp64 on the device: the gradient multiplier (clip coefficient / loss scale), and a flag: non-zero
            skips the step and leaves every tensor, step counts included, as it is.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: elements in fp32 (fp64 for fp64 parameters), bias corrections in fp64; a low-precision parameter is
    rounded once. Every element is computed alone: the same bits for any thread count and layout.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

    >>> import torch, trainwright as tw
    >>> p, g = torch.ones(2), torch.tensor([1.0, -1.0])
    >>> tw.adamw_([p], [g], [torch.zeros(2)], [torch.zeros(2)], [torch.zeros((), dtype=torch.float64)], lr=0.5,
    ...           weight_decay=0.0)
    >>> p
    tensor([0.5000, 1.5000])
    """
    op = "adamw_"
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    if max_exp_avg_sqs is not None:
        lists["max_exp_avg_sqs"] = max_exp_avg_sqs
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise value_error(op, name, f"{len(params)} tensors", len(tensors))
    if masters is not None and len(masters) != len(params):
        raise value_error(op, "masters", f"{len(params)} tensors", len(masters))
    check_number(op, "lr", lr)
    check_number(op, "eps", eps, minimum=0.0)
    check_number(op, "weight_decay", weight_decay)
    check_bool(op, "maximize", maximize)
    for i, beta in enumerate(betas):
        check_number(op, f"betas[{i}]", beta, minimum=0.0)
        if beta >= 1.0:
            raise value_error(op, f"betas[{i}]", "a number below 1", beta)
    for i, p in enumerate(params):
        check_tensor(op, f"params[{i}]", p, device=params[0].device)
        check_tensor(op, f"grads[{i}]", grads[i], shape=p.shape, device=p.device)
        state_dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
            if name in lists:
                check_tensor(
                    op, f"{name}[{i}]", lists[name][i], dtypes=(state_dtype,), shape=p.shape, device=p.device
                )  # fmt: skip
        check_tensor(
            op, f"steps[{i}]", steps[i], dtypes=(torch.float64,), shape=(), device=p.device
        )
        master = None if masters is None else masters[i]
        if master is not None:
            check_tensor(
                op, f"masters[{i}]", master, dtypes=(torch.float32,), shape=p.shape, device=p.device
            )
            if p.dtype not in (torch.bfloat16, torch.float16):
                raise value_error(
                    op, f"masters[{i}]", f"None for a {p.dtype} parameter", "a tensor"
                )
    if not params:
        return
    device = params[0].device
    if control is not None:
        check_tensor(op, "control", control, dtypes=(torch.float64,), shape=(2,), device=device)
    present = [m for m in masters or () if m is not None]
    spec = [
        (max_exp_avg_sqs is not None) << 1 | (masters is not None and masters[i] is not None)
        for i in range(len(params))
    ]
    chosen = dispatch.resolve("adamw", backend, device, params[0].dtype)
    with torch.no_grad():
        hyper = torch.tensor(
            [[lr, *betas, eps, weight_decay, maximize]], dtype=torch.float64, device=device
        )
        maxima = list(max_exp_avg_sqs or ())
        STEP[chosen](
            list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(steps), maxima, present, spec, hyper,
            control,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(
                [*params, *exp_avgs, *exp_avg_sqs, *steps, *maxima, *present]
            )


@dispatch.self_check("adamw")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, m, g = (torch.randn(5, 33).to(device) for _ in range(3))
    v, step = torch.rand(5, 33).to(device), torch.ones((), dtype=torch.float64, device=device)
    adamw_([p], [g.t().contiguous().t()], [m], [v], [step], lr=0.1, backend=backend)
    return [p, m, v, step]
