"""What a parameter's state is made of, for every optimizer and storage format: new, loaded and converted tensors.

The state of a parameter holds ``step`` (0-d fp64), each of the op's states under its name, for int8 codes also
``<name>_scale``, and ``master``: fp32, or int16, the remainder of split16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.errors import value_error
from trainwright.ops import _optimizer_formats as formats
from trainwright.ops._optimizer import State

LOW_PRECISION = (torch.bfloat16, torch.float16)


def new_step(p: Tensor, value: float = 0.0) -> Tensor:
    """A parameter's step count: 0-d fp64 on its device, exact to 2^53 (torch's fp32 count stops at 2^24)."""
    return torch.full((), value, dtype=torch.float64, device=p.device)


def state_format(p: Tensor, asked: torch.dtype | str) -> int:
    """The format of p's states; those of an fp64 parameter are fp64."""
    if p.dtype == torch.float64 or asked == torch.float32:
        return formats.FULL_STATE
    return formats.BF16_STATE if asked == torch.bfloat16 else formats.INT8_STATE


def master_format(p: Tensor, asked: str) -> int:
    if p.dtype not in LOW_PRECISION or asked == "none":
        return formats.NO_MASTER
    return formats.SPLIT16_MASTER if asked == "split16" else formats.FP32_MASTER


def _full_dtype(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def new_state(p: Tensor, s: State, form: int) -> dict[str, Tensor]:
    """Zeros for state s of p."""
    if form == formats.INT8_STATE:
        codes = torch.zeros(p.shape, dtype=torch.int8 if s.signed else torch.uint8, device=p.device)
        scales = torch.zeros(formats.scale_count(p.numel()), device=p.device)
        return {s.name: codes, s.name + "_scale": scales}
    dtype = torch.bfloat16 if form == formats.BF16_STATE else _full_dtype(p)
    return {s.name: torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)}


def new_master(p: Tensor, form: int) -> Tensor:
    if form == formats.SPLIT16_MASTER:
        return torch.zeros_like(p, dtype=torch.int16, memory_format=torch.preserve_format)
    return p.detach().to(torch.float32, copy=True)


def _like_parameter(p: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the parameter's memory order."""
    empty = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
    return empty.copy_(value)


def _load_state(p: Tensor, s: State, form: int, loaded: dict[str, Any]) -> dict[str, Tensor]:
    value: Tensor = loaded[s.name]
    scale: Any = loaded.get(s.name + "_scale")
    coded = value.dtype in (torch.int8, torch.uint8)
    if coded and scale is None:
        raise value_error("load_state_dict", s.name + "_scale", "the scales of int8 codes", scale)
    if form == formats.INT8_STATE:
        if coded:
            return {s.name: value.contiguous().clone(), s.name + "_scale": scale.float().clone()}
        codes, scales = formats.int8_encode(value.float(), s.signed, None)
        return {s.name: codes, s.name + "_scale": scales}
    if coded:
        value = formats.int8_decode(value, scale.float())
    dtype = torch.bfloat16 if form == formats.BF16_STATE else _full_dtype(p)
    return {s.name: _like_parameter(p, value, dtype)}


def _split_master(p: Tensor, master: Tensor) -> Tensor:
    """The remainder of an fp32 master. A p that the cast rounded from it is half-way down on some ties, where split16
    goes away from zero: there, and only there, p moves to the other neighbour, so that both make the master."""
    parameter, remainder = formats.split16(master)
    with torch.no_grad():
        tie = (remainder == -0x8000) & (p == master.to(p.dtype)) & (p != parameter)
        if tie.any():
            p.copy_(torch.where(tie, parameter, p))
    return remainder


def _load_master(p: Tensor, form: int, value: Tensor) -> Tensor:
    remainder = value.dtype == torch.int16
    if form == formats.SPLIT16_MASTER:
        return _like_parameter(p, value if remainder else _split_master(p, value.float()), torch.int16)  # fmt: skip
    if remainder:
        value = formats.split16_join(p.detach().to(torch.bfloat16), value)
    return _like_parameter(p, value, torch.float32)


def load(
    name: str,
    states: tuple[State, ...],
    p: Tensor,
    values: dict[str, Any],
    form: int,
    master: int,
    counts: bool = True,
) -> dict[str, Any]:
    """The state of a checkpoint as this optimizer keeps it: copies on p's device, in the formats asked for.

    From and to int16 masters needs the parameter's value, so the model is loaded first. What the optimizer does not
    know is kept as it is.
    """
    values = {
        k: v.detach().to(p.device) if isinstance(v, Tensor) else v
        for k, v in values.items()
        if v is not None
    }
    known = [s.name for s in states]
    result: dict[str, Any] = {}
    for key in (*known, "master"):
        value = values.get(key)
        if isinstance(value, Tensor) and value.shape != p.shape:
            where = f"load_state_dict: {key}"
            raise value_error(name, where, f"shape {tuple(p.shape)}", tuple(value.shape))
    if counts and "step" in values:
        result["step"] = new_step(p, float(values["step"]))
    elif counts and values.keys() & set(
        known
    ):  # torch's SGD does not count: anything but the first step will do
        result["step"] = new_step(p, 1.0)
    for s in states:
        if s.name in values:
            result |= _load_state(p, s, form, values)
    if "master" in values and master != formats.NO_MASTER:
        result["master"] = _load_master(p, master, values["master"])
    taken = {"step", "master", *known, *(n + "_scale" for n in known)}
    others = {k: v for k, v in values.items() if k not in taken}
    return result | {k: v.clone() if isinstance(v, Tensor) else v for k, v in others.items()}
