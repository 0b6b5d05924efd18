"""Muon over a list of matrices, in place: fused momentum, Newton-Schulz batched over equal shapes, fused update.

`tw.optim.Muon` is the optimizer over this op.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from trainwright.ops._optimizer import (
    OptimizerOp,
    Spec,
    State,
    check_master,
    check_states,
    define,
    needs,
    pack_spec,
)
from trainwright.ops._optimizer_formats import FULL_STATE, NO_MASTER
from trainwright.ops.newton_schulz import (
    COEFFICIENTS,
    EPS,
    MAX_STEPS,
    NEWTON_SCHULZ,
    check_coefficients,
)

__all__ = ["muon_"]

# Matrices of one shape beyond so many elements are orthogonalised one part after the other: bounds the memory, and is
# enough to fill any device.
BATCH_ELEMENTS = 1 << 26


def _momentum(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    b, mu = states["momentum_buffer"], h["momentum"].to(g.dtype)
    blend = (1.0 - h["momentum"]).to(g.dtype)

    def towards(b: Tensor) -> Tensor:
        d = g - b
        return torch.where(blend < 0.5, b + blend * d, g - mu * d)

    states["momentum_buffer"] = b = towards(b)
    return torch.where(h["nesterov"] != 0, towards(b), b)


def _update(
    p: Tensor, g: Tensor, states: dict[str, Tensor], h: dict[str, Tensor], store: Callable[[str, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    keep, rate = 1.0 - h["lr"] * h["weight_decay"], h["lr"] * h["ratio"]
    return keep.to(p.dtype) * p - rate.to(p.dtype) * g


# The first pass writes the updates, its "parameters"; the second takes the orthogonalised ones as "gradients".
MOMENTUM = OptimizerOp(
    "muon_momentum",
    ("momentum", "nesterov", "maximize"),
    (State("momentum_buffer", True),),
    _momentum,
)
UPDATE = OptimizerOp("muon_update", ("lr", "weight_decay", "ratio", "maximize"), (), _update)
MOMENTUM_PASS, UPDATE_PASS = define(MOMENTUM, "muon"), define(UPDATE, "muon")


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
    """One parameter of a step. states: the momentum in its format, one tensor or two. spec: as of any optimizer op.
    step: raised by one, if rounding is stochastic; else None."""

    param: Tensor
    grad: Tensor
    states: list[Tensor]
    master: Tensor | None
    spec: Spec
    step: Tensor | None = None


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


@dataclass(frozen=True)
class Call:
    """What the parameters of a step share. `kinds` and `hyper` (lr, weight decay, momentum, nesterov) have one entry
    for each parameter group."""

    kinds: Sequence[Orthogonalization]
    hyper: Tensor
    control: Tensor | None
    dtype: torch.dtype | None
    seed: int
    backend: str | None


def step_matrices(members: Sequence[Member], call: Call) -> None:
    """One step of parameters on one device."""
    batches: dict[tuple[object, ...], list[Member]] = {}
    for m in members:
        kind, (_, rows, columns) = call.kinds[m.spec.group], matrices_of(m.param.shape)
        if m.param.numel():
            key = (rows, columns, working_dtype(m.param, call.dtype), m.param.dtype == torch.float64,
                   kind.coefficients, kind.eps, kind.steps)  # fmt: skip
            batches.setdefault(key, []).append(m)
    for whole in batches.values():
        for batch in _parts(whole):
            _step_batch(batch, call)


@functools.lru_cache(maxsize=256)
def _numbers(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _step_batch(batch: list[Member], call: Call) -> None:
    params, device = [m.param for m in batch], batch[0].param.device
    first, dtype = params[0], working_dtype(params[0], call.dtype)
    counts, (_, rows, columns) = [matrices_of(p.shape)[0] for p in params], matrices_of(first.shape)
    specs = [m.spec for m in batch]
    chosen = dispatch.resolve("muon", call.backend, device, first.dtype, **needs(specs, False))
    orthogonalise = dispatch.resolve("newton_schulz", call.backend, device, dtype)
    # fp64 updates are of fp64 parameters and the reverse, whatever they are orthogonalised in. A skipped step leaves
    # them as they are.
    wide = first.dtype == torch.float64
    elements = dtype if (dtype == torch.float64) == wide else _library.acc_dtype(first.dtype)
    make = torch.empty if call.control is None else torch.zeros
    update = make((sum(counts), rows, columns), dtype=elements, device=device)

    def views() -> list[Tensor]:
        return [part.view(p.shape) for part, p in zip(update.split(counts), params)]

    groups, seed, offsets = [s.group for s in specs], call.seed, [0] * len(batch)
    unused = torch.zeros((), dtype=torch.float64, device=device)
    steps = [unused if m.step is None else m.step for m in batch]
    zeros = torch.zeros_like(call.hyper[:, :1])
    MOMENTUM_PASS[chosen](
        views(), [m.grad for m in batch], [], [t for m in batch for t in m.states], steps,
        [pack_spec(replace(s, master=NO_MASTER)) for s in specs], offsets,
        torch.cat([call.hyper[:, 2:], zeros], 1), call.control, seed, None,
    )  # fmt: skip
    kind = call.kinds[groups[0]]
    coefficients = list(kind.coefficients) * kind.steps
    update = NEWTON_SCHULZ[orthogonalise](update.to(dtype), coefficients, kind.eps)
    masters = [m.master for m in batch if m.master is not None]
    ratios = tuple(lr_ratio(call.kinds[group].adjust_lr_fn, rows, columns) for group in groups)
    own = call.hyper.index_select(0, _numbers(tuple(groups), torch.int64, device))
    ratio = _numbers(ratios, torch.float64, device).unsqueeze(1)
    control = call.control
    if control is not None:  # the gradients' multiplier is not the updates'
        control = torch.stack([torch.ones_like(control[0]), control[1]])
    UPDATE_PASS[chosen](
        params, views(), masters, [], [s - 1.0 for s in steps],
        [pack_spec(replace(s, group=i, state=FULL_STATE)) for i, s in enumerate(specs)], offsets,
        torch.cat([own[:, :2], ratio, torch.zeros_like(ratio)], 1), control, seed, None,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        changed = [*params, *(t for m in batch for t in m.states), *masters]
        torch.autograd.graph.increment_version(changed)


# ---- the function


def check_adjust_lr_fn(op: str, value: object) -> None:
    if value not in (None, "original", "match_rms_adamw"):
        got = f"{value!r} (Adjust learning rate function {value} is not supported)"  # in torch's words too
        raise value_error(op, "adjust_lr_fn", "None, 'original' or 'match_rms_adamw'", got)


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
    scales: Mapping[str, Sequence[Tensor]] | None = None,
    steps: Sequence[Tensor] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
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
        momentum_buffers: the parameters' shapes; fp32 or bf16 (fp64 for fp64 parameters), any strides; or int8 codes,
            contiguous, with `scales`. Updated.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in `torch.optim.Muon`.
        masters: for each parameter None, an fp32 tensor that holds its exact value, or (bf16 only) the int16 remainder
            of that value; the parameter receives its rounding. bf16 and fp16 parameters only.
        scales: for int8 codes, ``{"momentum_buffer": the fp32 scales of each parameter, one per 256 elements}``.
        stochastic_rounding, seed, steps: round the momentum, parameters without a master, and bf16 updates up or down
            at random so that the mean is right; the bits depend on (seed, element, step) alone. `steps` (0-d fp64 on
            the parameters' device, raised by one) is needed for it.
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
    for key, extra in (("masters", masters), ("steps", steps)):
        if extra is not None:
            lists[key] = extra  # type: ignore[assignment]
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
    check_adjust_lr_fn("muon_", adjust_lr_fn)
    check_ns_dtype(op, ns_dtype)
    check_bool(op, "stochastic_rounding", stochastic_rounding)
    check_int(op, "seed", seed)
    if stochastic_rounding and steps is None:
        raise value_error(op, "steps", "step counts for stochastic rounding", None)
    members = []
    given = {"momentum_buffer": momentum_buffers}
    for i, p in enumerate(params):
        check_tensor(op, f"params[{i}]", p, min_dim=2, device=params[0].device)
        check_tensor(op, f"grads[{i}]", grads[i], shape=p.shape, device=p.device)
        flat: list[Tensor] = []
        state = check_states(MOMENTUM, op, i, p, given, scales, flat)
        master = None if masters is None else masters[i]
        spec = Spec(0, 0, stochastic_rounding, state, check_master(op, i, p, master))
        step = None if steps is None else steps[i]
        if step is not None:
            check_tensor(
                op, f"steps[{i}]", step, dtypes=(torch.float64,), shape=(), device=p.device
            )
        members.append(Member(p, grads[i], flat, master, spec, step))
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
        step_matrices(members, Call([kind], hyper, control, ns_dtype, seed, backend))


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
