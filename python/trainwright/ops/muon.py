"""Muon over a list of matrices, in place: fused momentum, Newton-Schulz batched over equal shapes, fused update.

`tw.optim.Muon` is the optimizer over this op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import (
    FLOAT_DTYPES,
    check_bool,
    check_int,
    check_number,
    check_tensor,
    type_error,
    value_error,
)
from trainwright.ops import _library
from trainwright.ops.newton_schulz import (
    COEFFICIENTS,
    EPS,
    MAX_STEPS,
    NEWTON_SCHULZ,
    check_coefficients,
)

__all__ = ["muon_"]

# hyper (groups, 4) fp64: lr, weight decay, momentum, nesterov; groups[i] is the row of tensor i. control (2,) fp64:
# multiplier of the gradients, and non-zero to skip the step: buffers stay as they are and updates become 0.
MOMENTUM = (
    "(Tensor[] grads, Tensor(a!)[] buffers, Tensor(b!)[] updates, int[] groups, Tensor hyper, "
    "Tensor? control) -> ()"
)
# spec[i] = group << 1 | has master; `masters` holds only those that exist.
UPDATE = (
    "(Tensor(a!)[] params, Tensor(b!)[] masters, Tensor[] updates, int[] spec, float[] ratios, Tensor hyper, "
    "Tensor? control) -> ()"
)
# Matrices of one shape beyond so many elements are orthogonalised one part after the other: bounds the memory, and is
# enough to fill any device.
BATCH_ELEMENTS = 1 << 26


def _momentum_reference(
    grads: list[Tensor], buffers: list[Tensor], updates: list[Tensor], groups: list[int], hyper: Tensor,
    control: Tensor | None,
) -> None:  # fmt: skip
    for grad, buffer, update, group in zip(grads, buffers, updates, groups):
        acc = _library.acc_dtype(buffer.dtype)
        momentum, nesterov = hyper[group, 2], hyper[group, 3] != 0
        blend = 1.0 - momentum

        def towards(b: Tensor, g: Tensor, blend: Tensor = blend, mu: Tensor = momentum) -> Tensor:
            d, dtype = g - b, b.dtype
            near = b + blend.to(dtype) * d
            return torch.where(blend.to(dtype) < 0.5, near, g - mu.to(dtype) * d)

        g = grad.to(acc)
        if control is not None:
            g = g * control[0].to(acc)
        b = towards(buffer.to(acc), g)
        u = torch.where(nesterov, towards(b, g), b)
        if control is not None:
            skip = control[1] != 0
            b, u = torch.where(skip, buffer.to(acc), b), torch.where(skip, 0.0, u)
        buffer.copy_(b)
        update.copy_(u)


def _update_reference(
    params: list[Tensor], masters: list[Tensor], updates: list[Tensor], spec: list[int], ratios: list[float],
    hyper: Tensor, control: Tensor | None,
) -> None:  # fmt: skip
    next_master = iter(masters)
    for p, update, bits, ratio in zip(params, updates, spec, ratios):
        master = next(next_master) if bits & 1 else None
        exact = p if master is None else master
        acc = _library.acc_dtype(p.dtype)
        lr, weight_decay = hyper[bits >> 1, 0], hyper[bits >> 1, 1]
        keep, rate = (1.0 - lr * weight_decay).to(acc), (lr * ratio).to(acc)
        new = keep * exact.to(acc) - rate * update.to(acc)
        for target in (p, master):
            if target is not None:
                value = new.to(target.dtype)
                if control is not None:
                    value = torch.where(control[1] != 0, target, value)
                target.copy_(value)


def _fake(*_: object) -> None:
    return None


MOMENTUM_PASS = _library.define_backends(
    "muon", "muon_momentum_" + MOMENTUM, _momentum_reference, _fake
)
UPDATE_PASS = _library.define_backends("muon", "muon_update_" + UPDATE, _update_reference, _fake)


# ---- the step


@dataclass(frozen=True)
class Orthogonalization:
    """How the updates of a parameter group are made orthogonal and scaled."""

    coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = EPS
    steps: int = 5
    adjust_lr_fn: str | None = None


def matrices_of(shape: torch.Size) -> tuple[int, int, int]:
    """(number, rows, columns) of the matrices that a parameter is."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def lr_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """What the learning rate of a (rows, columns) matrix is multiplied by."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def working_dtype(p: Tensor, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None:
        return asked
    if p.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if p.device.type == "cuda" else torch.float32


@dataclass
class Member:
    """One parameter of a step."""

    param: Tensor
    grad: Tensor
    buffer: Tensor
    master: Tensor | None
    group: int


def _parts(members: list[Member]) -> list[list[Member]]:
    """The members, of one matrix shape, in parts of at most BATCH_ELEMENTS elements or one parameter."""
    parts: list[list[Member]] = [[]]
    size = 0
    for m in members:
        if parts[-1] and size + m.param.numel() > BATCH_ELEMENTS:
            parts.append([])
            size = 0
        parts[-1].append(m)
        size += m.param.numel()
    return parts


def step_matrices(
    members: Sequence[Member], kinds: Sequence[Orthogonalization], hyper: Tensor, control: Tensor | None, *,
    dtype: torch.dtype | None, backend: str | None,
) -> None:  # fmt: skip
    """One step of parameters on one device. `kinds` and `hyper` have one entry for each parameter group."""
    batches: dict[tuple[object, ...], list[Member]] = {}
    for m in members:
        kind, (_, rows, columns) = kinds[m.group], matrices_of(m.param.shape)
        if m.param.numel():
            key = (rows, columns, working_dtype(m.param, dtype), m.param.dtype == torch.float64,
                   kind.coefficients, kind.eps, kind.steps)  # fmt: skip
            batches.setdefault(key, []).append(m)
    for whole in batches.values():
        for batch in _parts(whole):
            _step_batch(batch, kinds, hyper, control, dtype, backend)


def _step_batch(
    batch: list[Member], kinds: Sequence[Orthogonalization], hyper: Tensor, control: Tensor | None,
    asked: torch.dtype | None, backend: str | None,
) -> None:  # fmt: skip
    params, kind = [m.param for m in batch], kinds[batch[0].group]
    first, dtype = params[0], working_dtype(params[0], asked)
    counts, (_, rows, columns) = [matrices_of(p.shape)[0] for p in params], matrices_of(first.shape)
    chosen = dispatch.resolve("muon", backend, first.device, first.dtype)
    orthogonalise = dispatch.resolve("newton_schulz", backend, first.device, dtype)
    update = torch.empty((sum(counts), rows, columns), dtype=dtype, device=first.device)

    def views() -> list[Tensor]:
        return [part.view(p.shape) for part, p in zip(update.split(counts), params)]

    groups = [m.group for m in batch]
    MOMENTUM_PASS[chosen](
        [m.grad for m in batch], [m.buffer for m in batch], views(), groups, hyper, control
    )
    update = NEWTON_SCHULZ[orthogonalise](update, list(kind.coefficients) * kind.steps, kind.eps)
    masters = [m.master for m in batch if m.master is not None]
    spec = [m.group << 1 | (m.master is not None) for m in batch]
    ratios = [lr_ratio(kinds[group].adjust_lr_fn, rows, columns) for group in groups]
    UPDATE_PASS[chosen](params, masters, views(), spec, ratios, hyper, control)
    if not torch.compiler.is_compiling():
        changed = [*params, *(m.buffer for m in batch), *masters]
        torch.autograd.graph.increment_version(changed)


# ---- the function


def check_adjust_lr_fn(value: object) -> None:
    if value not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Adjust learning rate function {value} is not supported")


@dispatch.register(
    "muon",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES[:3]),
    Candidate("torch", FLOAT_DTYPES),
)
def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    masters: Sequence[Tensor | None] | None = None,
    ns_dtype: torch.dtype | None = None,
    control: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One Muon step of many parameters, in place.

    With ``g = control[0] · grad``: ``b += (1 − μ)(g − b)``; ``u = b + (1 − μ)(g − b)`` with the new b if `nesterov`,
    else b; ``O = newton_schulz(u)``; ``p = (1 − lr·wd) p − lr·r·O``, where for an (A, B) matrix r = √max(1, A/B)
    ("original", the default) or 0.2·√max(A, B) ("match_rms_adamw").

    A 2-D parameter is a matrix. A 3-D one is a batch of matrices, each orthogonalised by itself (experts, heads). One
    of 4 and more dimensions is a convolution's weight, flattened to (out, everything else). r is that of these.

    Args:
        params: 2 and more dimensions; fp32, bf16, fp16 or fp64 in any mix; any strides without overlap. Updated in
            place; nothing outside a view is touched.
        grads: same shapes; any of those dtypes, any strides. Not modified.
        momentum_buffers: the parameters' shapes; fp32 or bf16 (fp64 for fp64 parameters), any strides. Updated.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in `torch.optim.Muon`.
        masters: for each parameter an fp32 tensor that holds its exact value (the parameter receives its rounding), or
            None; bf16 and fp16 parameters only.
        ns_dtype: dtype of the matrices that are orthogonalised; None: bf16 on GPUs and fp32 on the CPU, fp64 for fp64.
        control: (2,) fp64 on the device: the gradient multiplier (clip coefficient / loss scale), and a flag: non-zero
            skips the step and leaves every tensor as it is.
        backend: None, "cpu", "triton" or "torch".

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: elements in fp32 (fp64 for fp64 parameters), each rounded once, by itself: the same bits on all backends
    for the same orthogonalised update; that is as exact as `newton_schulz` in `ns_dtype`. Parameters of equal matrix
    shape are orthogonalised together, with the bits of one by one. A zero gradient gives a zero update, for any rank.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; "match_rms_adamw": Liu et
    al., "Muon is scalable for LLM training", 2025.

    >>> import torch, trainwright as tw
    >>> p, g = torch.zeros(2, 2), torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    >>> tw.muon_([p], [g], [torch.zeros(2, 2)], lr=1.0)
    >>> p.round(decimals=1)
    tensor([[ 0.0000, -0.7000],
            [-1.1000,  0.0000]])
    """
    op = "muon_"
    lists = {"grads": grads, "momentum_buffers": momentum_buffers}
    if masters is not None:
        lists["masters"] = masters  # type: ignore[assignment]
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise value_error(op, name, f"{len(params)} tensors", len(tensors))
    for name, number in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)):  # fmt: skip
        check_number(op, name, number, minimum=0.0)
    check_bool(op, "nesterov", nesterov)
    check_coefficients(op, "ns_coefficients", ns_coefficients)
    check_int(op, "ns_steps", ns_steps, minimum=0)
    if ns_steps > MAX_STEPS:
        raise value_error(op, "ns_steps", f"at most {MAX_STEPS}", ns_steps)
    check_adjust_lr_fn(adjust_lr_fn)
    check_ns_dtype(op, ns_dtype)
    members = []
    for i, p in enumerate(params):
        check_tensor(op, f"params[{i}]", p, min_dim=2, device=params[0].device)
        check_tensor(op, f"grads[{i}]", grads[i], shape=p.shape, device=p.device)
        wide = p.dtype == torch.float64
        dtypes = (torch.float64,) if wide else (torch.float32, torch.bfloat16)
        check_tensor(
            op, f"momentum_buffers[{i}]", momentum_buffers[i], dtypes=dtypes, shape=p.shape, device=p.device
        )  # fmt: skip
        master = None if masters is None else masters[i]
        if master is not None:
            check_tensor(
                op, f"masters[{i}]", master, dtypes=(torch.float32,), shape=p.shape, device=p.device
            )
            if p.dtype not in (torch.bfloat16, torch.float16):
                raise value_error(
                    op, f"masters[{i}]", f"None for a {p.dtype} parameter", "a tensor"
                )
        members.append(Member(p, grads[i], momentum_buffers[i], master, 0))
    if not params:
        return
    device = params[0].device
    if control is not None:
        check_tensor(op, "control", control, dtypes=(torch.float64,), shape=(2,), device=device)
    kind = Orthogonalization(
        tuple(map(float, ns_coefficients)), float(eps), ns_steps, adjust_lr_fn  # type: ignore[arg-type]
    )  # fmt: skip
    row = [[lr, weight_decay, momentum, float(nesterov)]]
    with torch.no_grad():
        hyper = torch.tensor(row, dtype=torch.float64, device=device)
        step_matrices(members, [kind], hyper, control, dtype=ns_dtype, backend=backend)


def check_ns_dtype(op: str, value: object) -> None:
    if value is not None and value not in FLOAT_DTYPES:
        raise type_error(
            op, "ns_dtype", "None, torch.float32, bfloat16, float16 or float64", repr(value)
        )


@dispatch.self_check("muon")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    p, q = (torch.randn(s).to(device) for s in ((20, 33), (3, 4, 5)))
    grads, buffers = ([torch.randn(x.shape).to(device) for x in (p, q)] for _ in range(2))
    muon_([p, q], grads, buffers, lr=0.1, ns_dtype=torch.float32, backend=backend)
    return [p, q, *buffers]
