"""What the optimizer ops share: one schema, the torch reference around an op's formula, the checks of its function.

An op is an `OptimizerOp`; `define` registers it. The schema of ``<name>_``, for all tensors of a device in one call:

params, grads, steps (0-d fp64, raised by one), spec and offsets have one entry for each parameter. `masters` and
`states` hold, parameter by parameter, only the tensors that exist. A master is fp32, or int16 (split16's remainder).
A state is fp32 (fp64 for fp64 parameters) or bf16 of the parameter's shape, or two tensors: int8 (uint8 if it is never
negative) codes of that shape, row-major, and fp32 scales, one per 256 elements. spec[i] =
``group << 8 | flags << 5 | stochastic << 4 | state format << 2 | master format`` (`pack_spec`); flags says which
optional states exist. offsets[i] is the index of the tensor's first element in the whole parameter, 0 unless it is a
shard; with int8 state a multiple of 256. hyper (groups, len(op.hyper)) fp64. control (2,) fp64: multiplier of the
gradients, and non-zero to skip the step. lost (2,) fp64: raised by the number of elements whose update was not zero,
and by how many of those rounding took away.

Every operation on elements is rounded by itself, in the order in which the reference has it: all backends give the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.errors import (
    check_bool,
    check_int,
    check_number,
    check_tensor,
    value_error,
)
from trainwright.ops import _library
from trainwright.ops import _optimizer_formats as formats

SCHEMA = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] masters, Tensor(c!)[] states, Tensor(d!)[] steps, int[] spec, "
    "int[] offsets, Tensor hyper, Tensor? control, int seed, Tensor(e!)? lost) -> ()"
)
ALL_FLAGS = 7
STATE_FORMATS = {
    torch.float32: formats.FULL_STATE,
    torch.float64: formats.FULL_STATE,
    torch.bfloat16: formats.BF16_STATE,
    torch.int8: formats.INT8_STATE,
    torch.uint8: formats.INT8_STATE,
}


@dataclass(frozen=True)
class State:
    """One state tensor of a parameter. `flag` is its bit of spec's flags, 0 if it always exists."""

    name: str
    signed: bool
    flag: int = 0


class Update(Protocol):
    """The new parameter from the old one and the gradient (multiplied, negative to maximise), all in the accumulation
    dtype; puts the new states into `states`, which holds those that exist. `h` holds the op's hyper-parameters and
    ``t``, the step, as 0-d fp64; `store(name, x)` gives what a state will be read as after x is stored in it."""

    def __call__(
        self,
        p: Tensor,
        g: Tensor,
        states: dict[str, Tensor],
        h: dict[str, Tensor],
        store: Callable[[str, Tensor], Tensor],
    ) -> Tensor: ...


@dataclass(frozen=True)
class OptimizerOp:
    """`hyper` names the columns of the op's argument, "maximize" among them."""

    name: str
    hyper: tuple[str, ...]
    states: tuple[State, ...]
    update: Update

    def present(self, flags: int) -> tuple[State, ...]:
        return tuple(s for s in self.states if s.flag == 0 or s.flag & flags)


@dataclass(frozen=True)
class Spec:
    group: int = 0
    flags: int = 0
    stochastic: bool = False
    state: int = formats.FULL_STATE
    master: int = formats.NO_MASTER


def pack_spec(s: Spec) -> int:
    return s.group << 8 | s.flags << 5 | s.stochastic << 4 | s.state << 2 | s.master


def unpack_spec(bits: int) -> Spec:
    return Spec(bits >> 8, bits >> 5 & 7, bool(bits >> 4 & 1), bits >> 2 & 3, bits & 3)


# ---- the torch reference


def _encode(state: State, form: int, x: Tensor, words: Tensor | None, like: Tensor) -> list[Tensor]:
    """The tensors that store x: as many as the format has."""
    if form == formats.FULL_STATE:
        return [x]
    noise = None if words is None else formats.state_noise(words, state.signed)
    if form == formats.BF16_STATE:
        if noise is None:
            return [x.to(torch.bfloat16)]
        return [formats.bf16_stochastic(x, noise.view(x.shape))]
    return list(formats.int8_encode(x, state.signed, noise))


def _decode(form: int, stored: Sequence[Tensor], acc: torch.dtype) -> Tensor:
    if form == formats.INT8_STATE:
        return formats.int8_decode(stored[0], stored[1])
    return stored[0].to(acc)


def _reference_one(
    op: OptimizerOp, p: Tensor, grad: Tensor, master: Tensor | None, stored: list[list[Tensor]], t: Tensor,
    spec: Spec, offset: int, h: dict[str, Tensor], multiplier: Tensor, seed: int,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:  # fmt: skip
    """(tensor, its new value) for all that changes; which updates are not zero, and which of them were lost."""
    acc = _library.acc_dtype(p.dtype)
    present = op.present(spec.flags)
    narrow = spec.state != formats.FULL_STATE or (
        spec.master == formats.NO_MASTER and p.dtype in (torch.bfloat16, torch.float16)
    )
    words = None
    if spec.stochastic and narrow:
        words = formats.stochastic_words(seed, offset, p.numel(), t)
    by_name = {s.name: s for s in present}

    def store(name: str, x: Tensor) -> Tensor:
        return _decode(spec.state, _encode(by_name[name], spec.state, x, words, p), acc)

    if spec.master == formats.SPLIT16_MASTER:
        assert master is not None
        old = formats.split16_join(p, master)
    else:
        old = p.to(acc) if master is None else master
    states = {s.name: _decode(spec.state, tensors, acc) for s, tensors in zip(present, stored)}
    g = grad.to(acc) * (multiplier * (1.0 - 2.0 * h["maximize"])).to(acc)
    new = op.update(old, g, states, h, store)

    results: list[tuple[Tensor, Tensor]] = []
    for s, tensors in zip(present, stored):
        results += zip(tensors, _encode(s, spec.state, states[s.name], words, p))
    if spec.master == formats.SPLIT16_MASTER:
        assert master is not None
        parameter, remainder = formats.split16(new)
        results += [(p, parameter), (master, remainder)]
        kept = formats.split16_join(parameter, remainder)
    elif master is not None:
        results += [(p, new.to(p.dtype)), (master, new)]
        kept = new
    elif words is not None and p.dtype in (torch.bfloat16, torch.float16):
        noise = formats.parameter_noise(words).view(p.shape)
        half = formats.bf16_stochastic if p.dtype == torch.bfloat16 else formats.fp16_stochastic
        parameter = half(new, noise)
        results += [(p, parameter)]
        kept = parameter.to(acc)
    else:
        results += [(p, new.to(p.dtype))]
        kept = new.to(p.dtype).to(acc)
    moved = new != old
    return results, moved, moved & (kept == old)


def reference(op: OptimizerOp) -> Callable[..., None]:
    """The op in plain torch: its specification."""

    def run(
        params: list[Tensor], grads: list[Tensor], masters: list[Tensor], states: list[Tensor], steps: list[Tensor],
        spec: list[int], offsets: list[int], hyper: Tensor, control: Tensor | None, seed: int, lost: Tensor | None,
    ) -> None:  # fmt: skip
        next_master, next_state = iter(masters), iter(states)
        one = torch.ones((), dtype=torch.float64, device=hyper.device)
        keep = None if control is None else control[1] != 0
        for p, grad, step, bits, offset in zip(params, grads, steps, spec, offsets):
            s = unpack_spec(bits)
            master = next(next_master) if s.master else None
            per_state = 2 if s.state == formats.INT8_STATE else 1
            stored = [[next(next_state) for _ in range(per_state)] for _ in op.present(s.flags)]
            t = step + 1
            h = {**dict(zip(op.hyper, hyper[s.group])), "t": t}
            multiplier = one if control is None else control[0]
            results, moved, gone = _reference_one(
                op, p, grad, master, stored, t, s, offset, h, multiplier, seed
            )
            for target, value in [(step, t), *results]:
                if keep is not None:
                    value = torch.where(keep, target, value.to(target.dtype))
                target.copy_(value)
            if lost is not None:
                found = torch.stack([moved.sum(), gone.sum()]).to(torch.float64)
                lost += found if keep is None else torch.where(keep, 0.0, found)

    return run


def _fake(*_: Any) -> None:
    return None


# The optimizers' short cut: contiguous tensors by address. table (params, 15) int64, on the CPU: param, grad, master or
# 0, three states, three lists of scales, step, elements, offset, dtype, dtype of the gradient, spec. memory, for CUDA:
# (params + 1, MEMORY_COLUMNS) int64 on the device, where the kernels read the table; `moved` says that it is not there
# yet, or no longer as it was.
TABLE_SCHEMA = (
    "(Tensor table, Tensor(a!)? memory, bool moved, Tensor hyper, Tensor? control, int seed, "
    "Tensor(b!)? lost) -> ()"
)
MEMORY_COLUMNS = 16  # OptimizerRow in csrc/cuda/optimizer_table.cuh


def define(op: OptimizerOp, kernel_file: str | None = None) -> dict[str, Callable[..., None]]:
    """Register ``trainwright::<name>_`` with its torch reference. What runs it on each backend ("cpu"), and by a table
    of addresses ("cpu table"). kernel_file: module of `trainwright.kernels`, if that is not the op's name."""
    _library.LIBRARY.define(f"{op.name}_table" + TABLE_SCHEMA)
    table = getattr(torch.ops.trainwright, f"{op.name}_table").default
    kernels = kernel_file or op.name
    backends = _library.define_backends(kernels, f"{op.name}_" + SCHEMA, reference(op), _fake)
    return {**backends, "cpu table": table, "cuda table": table}


# ---- the function of an op


def check_scales(op: str, name: str, codes: Tensor, scales: Tensor | None, numel: int) -> Tensor:
    if scales is None:
        raise value_error(op, "scales", f"scales for the {codes.dtype} state {name}", None)
    shape = (formats.scale_count(numel),)
    check_tensor(
        op, f"scales[{name!r}]", scales, dtypes=(torch.float32,), shape=shape, device=codes.device
    )
    for what, t in ((name, codes), (f"scales[{name!r}]", scales)):
        if not t.is_contiguous():
            raise value_error(op, what, "a contiguous tensor", f"strides {t.stride()}")
    return scales


def needs(specs: Sequence[Spec], lost: bool) -> dict[str, int]:
    """What a backend may lack (`Candidate.lacks`), for `dispatch.resolve`: only what the call uses."""
    used = {
        "split16": any(s.master == formats.SPLIT16_MASTER for s in specs),
        "bf16_state": any(s.state == formats.BF16_STATE for s in specs),
        "int8_state": any(s.state == formats.INT8_STATE for s in specs),
        "stochastic_rounding": any(s.stochastic for s in specs),
        "lost_updates": lost,
    }
    return {name: 1 for name, value in used.items() if value}


def call(
    op: OptimizerOp, table: dict[str, Callable[..., None]], params: Sequence[Tensor], grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor] | None], steps: Sequence[Tensor], hyper: Sequence[float], *,
    masters: Sequence[Tensor | None] | None, scales: Mapping[str, Sequence[Tensor]] | None, stochastic_rounding: bool,
    seed: int, offsets: Sequence[int] | None, control: Tensor | None, lost: Tensor | None, backend: str | None,
) -> None:  # fmt: skip
    """Check the arguments of ``tw.<name>_`` and run it: all parameters in one group, all with the same states."""
    name, count = f"{op.name}_", len(params)
    given = {k: v for k, v in states.items() if v is not None}
    lists: dict[str, Sequence[Any]] = {"grads": grads, "steps": steps}
    lists |= {k + "s": v for k, v in given.items()}
    for key, extra in (("masters", masters), ("offsets", offsets)):
        if extra is not None:
            lists[key] = extra
    for key, members in lists.items():
        if len(members) != count:
            raise value_error(name, key, f"{count} tensors", len(members))
    check_bool(name, "stochastic_rounding", stochastic_rounding)
    check_int(name, "seed", seed)
    flags = 0
    for s in op.states:
        flags |= s.flag if s.name in given else 0
    specs: list[Spec] = []
    flat_masters: list[Tensor] = []
    flat_states: list[Tensor] = []
    for i, p in enumerate(params):
        check_tensor(name, f"params[{i}]", p, device=params[0].device)
        check_tensor(name, f"grads[{i}]", grads[i], shape=p.shape, device=p.device)
        check_tensor(
            name, f"steps[{i}]", steps[i], dtypes=(torch.float64,), shape=(), device=p.device
        )
        master = None if masters is None else masters[i]
        specs.append(
            Spec(
                0, flags, stochastic_rounding,
                check_states(op, name, i, p, given, scales, flat_states),
                check_master(name, i, p, master),
            )
        )  # fmt: skip
        if master is not None:
            flat_masters.append(master)
        if offsets is not None:
            check_int(name, f"offsets[{i}]", offsets[i])
            in_blocks = specs[-1].state == formats.INT8_STATE
            if offsets[i] < 0 or (in_blocks and offsets[i] % formats.STATE_BLOCK):
                expected = "at least 0" + ", a multiple of 256 for int8 state" * in_blocks
                raise value_error(name, f"offsets[{i}]", expected, offsets[i])
    if not params:
        return
    device = params[0].device
    for key, numbers in (("control", control), ("lost", lost)):
        if numbers is not None:
            check_tensor(name, key, numbers, dtypes=(torch.float64,), shape=(2,), device=device)
    chosen = dispatch.resolve(
        op.name, backend, device, params[0].dtype, **needs(specs, lost is not None)
    )
    with torch.no_grad():
        row = torch.tensor([list(hyper)], dtype=torch.float64, device=device)
        table[chosen](
            list(params), list(grads), flat_masters, flat_states, list(steps), [pack_spec(s) for s in specs],
            list(offsets or [0] * count), row, control, seed, lost,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            changed = [
                *params,
                *flat_masters,
                *flat_states,
                *steps,
                *([] if lost is None else [lost]),
            ]
            torch.autograd.graph.increment_version(changed)


def check_states(
    op: OptimizerOp, name: str, i: int, p: Tensor, given: Mapping[str, Sequence[Tensor]],
    scales: Mapping[str, Sequence[Tensor]] | None, flat: list[Tensor],
) -> int:  # fmt: skip
    """The format of the states of parameter i, which are appended to `flat`."""
    form: int | None = None
    for s in op.states:
        if s.name not in given:
            continue
        x = given[s.name][i]
        code_dtype = torch.int8 if s.signed else torch.uint8
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, code_dtype)
        if p.dtype == torch.float64:
            dtypes = (torch.float64,)
        check_tensor(name, f"{s.name}s[{i}]", x, dtypes=dtypes, shape=p.shape, device=p.device)
        if form is not None and STATE_FORMATS[x.dtype] != form:
            raise value_error(name, f"{s.name}s[{i}]", "the format of the other states", x.dtype)
        form = STATE_FORMATS[x.dtype]
        flat.append(x)
        if form == formats.INT8_STATE:
            mine = None if scales is None or s.name not in scales else scales[s.name][i]
            flat.append(check_scales(name, f"{s.name}", x, mine, p.numel()))
    return form or formats.FULL_STATE


def check_master(name: str, i: int, p: Tensor, master: Tensor | None) -> int:
    if master is None:
        return formats.NO_MASTER
    where = f"masters[{i}]"
    dtypes = (torch.float32, torch.int16)
    check_tensor(name, where, master, dtypes=dtypes, shape=p.shape, device=p.device)
    if p.dtype not in (torch.bfloat16, torch.float16):
        raise value_error(name, where, f"None for a {p.dtype} parameter", "a tensor")
    if master.dtype == torch.int16 and p.dtype != torch.bfloat16:
        raise value_error(name, where, f"fp32 for a {p.dtype} parameter", "int16")
    return formats.FP32_MASTER if master.dtype == torch.float32 else formats.SPLIT16_MASTER


def check_below_one(op: str, name: str, value: float) -> None:
    check_number(op, name, value, minimum=0.0)
    if value >= 1.0:
        raise value_error(op, name, "a number below 1", value)
