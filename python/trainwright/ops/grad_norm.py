"""The norm of a list of gradients in one read, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor, type_error
from trainwright.ops import _library

__all__ = ["clip_grad_norm_", "grad_norm"]

STATS = "(Tensor[] tensors, float p) -> Tensor"
SCALE = "(Tensor(a!)[] tensors, Tensor factor) -> ()"


def _stats_reference(tensors: list[Tensor], p: float) -> Tensor:
    wide = [t.detach().double() for t in tensors if t.numel()]
    if not wide:
        return torch.zeros(2, dtype=torch.float64, device=tensors[0].device)
    each = torch.stack([torch.linalg.vector_norm(t, p) for t in wide])
    if p == math.inf:
        total = each.amax()
    elif p == -math.inf:
        total = each.amin()
    else:
        total = each.sum() if p == 0.0 else each.pow(p).sum()
    odd = torch.stack([~t.isfinite().all() for t in wide]).any()
    return torch.stack([total, odd.double()])


def _scale_reference(tensors: list[Tensor], factor: Tensor) -> None:
    for t in tensors:
        wide = _library.acc_dtype(t.dtype)
        t.copy_(t.to(wide) * factor.to(wide))


def _stats_fake(tensors: list[Tensor], p: float) -> Tensor:
    return tensors[0].new_empty(2, dtype=torch.float64)


def _scale_fake(tensors: list[Tensor], factor: Tensor) -> None:
    return None


GRAD_STATS = _library.define_backends(
    "grad_norm", "grad_stats" + STATS, _stats_reference, _stats_fake
)
GRAD_SCALE = _library.define_backends(
    "grad_norm", "grad_scale_" + SCALE, _scale_reference, _scale_fake
)


def check_norm_type(op: str, norm_type: Any) -> float:
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float | str):
        raise type_error(op, "norm_type", "a number or 'inf'", type(norm_type).__name__)
    return float(norm_type)


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.device, []).append(t)
    return groups


def _norm(tensors: list[Tensor], p: float, backend: str | None) -> Tensor:
    """0-d fp64 on the first tensor's device."""
    totals = []
    for device, members in _by_device(tensors).items():
        chosen = dispatch.resolve("grad_norm", backend, device, members[0].dtype)
        totals.append(GRAD_STATS[chosen](members, p)[0].to(tensors[0].device))
    return norm_of(totals, p)


def norm_of(totals: list[Tensor], p: float) -> Tensor:
    """The norm from the totals of parts: sums of powers, or extremes."""
    if math.isinf(p):
        all_totals = torch.stack(totals)
        return all_totals.amax() if p > 0 else all_totals.amin()
    total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    return total.sqrt() if p == 2.0 else total if p in (0.0, 1.0) else total.pow(1.0 / p)


@dispatch.register(
    "grad_norm",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def grad_norm(
    tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *, backend: str | None = None
) -> Tensor:
    """Norm of all elements of all tensors together, in one read.

    ``(Σ |x|^p)^(1/p)``; the largest |x| for p = inf, the smallest for −inf, the count of non-zeros for 0.

    Args:
        tensors: a tensor or an iterable of tensors; fp32, bf16, fp16 or fp64 in any mix, any shape and strides.
        norm_type: p, a number or "inf".
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        0-d fp32 on the device of the first tensor; 0 for no tensors.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or dtype.
        trainwright.BackendError: no backend can run the call.

    Numerics: summed in fp64 whatever the dtype, block by block in a fixed order: no overflow of large fp16 or fp32
    gradients, and the same bits for any thread count. NaN and inf reach the result.

    >>> import torch, trainwright as tw
    >>> tw.grad_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)])
    tensor(5.)
    """
    op = "grad_norm"
    p = check_norm_type(op, norm_type)
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, t in enumerate(items):
        check_tensor(op, f"tensors[{i}]", t)
    if not items:
        return torch.zeros(())
    with torch.no_grad():
        return _norm(items, p, backend).float()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Scale the gradients of `parameters` in place so that their common norm is at most `max_norm`.

    ``grad *= min(1, max_norm / (norm + 1e-6))``, as `torch.nn.utils.clip_grad_norm_`. Nothing is written if there is
    nothing to clip. Clipping inside the optimizer (``max_grad_norm=``) costs no pass at all.

    Args:
        parameters: a tensor or an iterable of tensors; those without a gradient are left out.
        max_norm: largest norm that is left as it is.
        norm_type: see `grad_norm`.
        error_if_nonfinite: raise if the norm is NaN or infinite (this waits for the device).
        foreach: accepted for compatibility; one kernel serves all tensors in any case.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        The norm before clipping, 0-d fp32.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; gradients are unchanged then.
        TypeError, ValueError: an argument is of the wrong kind or dtype.

    Numerics: as `grad_norm`; each gradient is scaled in fp32 (fp64 for fp64) and rounded once.

    >>> import torch, trainwright as tw
    >>> p = torch.zeros(2, requires_grad=True)
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> tw.clip_grad_norm_([p], max_norm=1.0), p.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    op = "clip_grad_norm_"
    p = check_norm_type(op, norm_type)
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
        raise type_error(op, "max_norm", "a number", type(max_norm).__name__)
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [t.grad for t in owners if t.grad is not None]
    if not grads:
        return torch.zeros(())
    for i, g in enumerate(grads):
        check_tensor(op, f"gradient {i}", g)
    with torch.no_grad():
        norm = _norm(grads, p, backend)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot be clipped. "
                "To disable this error and scale the gradients by the non-finite norm anyway, "
                "set `error_if_nonfinite=False`"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device, members in _by_device(grads).items():
            chosen = dispatch.resolve("grad_norm", backend, device, members[0].dtype)
            GRAD_SCALE[chosen](members, factor.to(device))
            torch.autograd.graph.increment_version(members)
        return norm.float()


@dispatch.self_check("grad_norm")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p = torch.zeros(7, 300, device=device, requires_grad=True)
    p.grad = torch.randn(7, 300).to(device)
    return [clip_grad_norm_([p], 1.0, backend=backend), p.grad]
