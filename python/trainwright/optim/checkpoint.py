"""Adam's state in the layouts of other packages.

=============  =====================================  ==========================================================
package        state of a parameter                   beside it, in the group
=============  =====================================  ==========================================================
torch          step, exp_avg, exp_avg_sq              decoupled_weight_decay
Apex           exp_avg, exp_avg_sq                    step (a number, or a tensor if capturable), bias_correction
DeepSpeed      step (a number), exp_avg, exp_avg_sq   bias_correction; FusedAdam also ``step: 0``
bitsandbytes   step, state1, state2: fp32; or uint8   (decay is decoupled in Adam and AdamW alike)
               codes with qmap1 and absmax1, ...
=============  =====================================  ==========================================================

Both moments mean the same in all of them: exponential averages from zero, corrected for the bias when they are used,
eps outside the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.errors import type_error, value_error
from trainwright.ops import _optimizer_formats as formats

__all__ = ["export_adam_state", "import_adam_state"]

Options = dict[str, Any]  # of a parameter group
States = dict[Any, dict[str, Any]]  # of its parameters
MOMENTS = ("exp_avg", "exp_avg_sq")
BNB_BLOCKS = (256, 2048)  # elements with one absmax: since and before bitsandbytes 0.45


def layout_of(state_dict: Mapping[str, Any]) -> str:
    """ "torch", "apex", "deepspeed" or "bitsandbytes"."""
    states = [s for s in state_dict["state"].values() if isinstance(s, Mapping)]
    if any("state1" in s or "__bnb_optimizer_quant_state__" in s for s in states):
        return "bitsandbytes"
    if any("bias_correction" in group for group in state_dict["param_groups"]):
        return "deepspeed" if any("step" in s for s in states) else "apex"
    return "torch"


# ---- reading


def import_adam_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An Adam checkpoint of torch, Apex, DeepSpeed or bitsandbytes in torch's layout, which `load_state_dict` takes.

    `tw.optim.AdamW` and `Adam` do this by themselves when they load. bitsandbytes' 8-bit codes become fp32. What the
    checkpoint does not say comes from the optimizer: Apex and DeepSpeed don't save whether weight decay is decoupled,
    so load them into the class that matches.

    Args:
        state_dict: what the other optimizer's `state_dict()` returned. Not modified.

    Returns:
        A new dict; tensors that did not have to change are the same.

    Raises:
        ValueError: the checkpoint means something else: no bias correction, tensor-wise 8-bit states, another optimizer
            than Adam, the shard of a ZeRO optimizer, or parameters of one Apex group with different step counts.

    >>> import torch, trainwright as tw
    >>> apex = {"state": {0: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}},
    ...         "param_groups": [{"lr": 0.1, "bias_correction": True, "step": 7, "params": [0]}]}
    >>> tw.optim.import_adam_state(apex)["state"][0]["step"].item()
    7.0
    """
    op = "import_adam_state"
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = type(state_dict).__name__
        if isinstance(state_dict, Mapping):
            got = f"keys {sorted(map(str, state_dict))}"
        expected = (
            "a dict with 'state' and 'param_groups' (of a ZeRO optimizer: consolidate it first)"
        )
        raise value_error(op, "state_dict", expected, got)
    layout = layout_of(state_dict)
    if layout == "torch":
        return dict(state_dict)
    states: dict[Any, Any] = dict(state_dict["state"])
    groups = [dict(group) for group in state_dict["param_groups"]]
    for g, group in enumerate(groups):
        if not group.pop("bias_correction", True):
            raise value_error(
                op, f"param_groups[{g}]['bias_correction']", "True (ours always corrects)", False
            )
        for key in ("grad_averaging", "max_grad_norm", "alpha", "t_alpha", "t_beta3"):
            if group.get(key) is not None:
                raise value_error(op, f"param_groups[{g}]", "the options of Adam", repr(key))
        count = group.pop("step", None)
        mine = {k: dict(states[k]) for k in group["params"] if k in states}
        if layout == "bitsandbytes":
            group["decoupled_weight_decay"] = True
            mine = {k: _from_bitsandbytes(f"{op}: state[{k}]", s) for k, s in mine.items()}
        elif layout == "apex" and mine and count is None:
            raise value_error(op, f"param_groups[{g}]['step']", "Apex's step count", None)
        steps = [float(s["step"]) for s in mine.values() if "step" in s]
        if layout == "deepspeed" and count is not None:
            # FusedAdam counts in the last parameter's state alone, and used that count for all of them.
            steps = [max(steps, default=0.0)] * len(mine)
        if layout == "apex":
            steps = [float(count)] * len(mine) if count is not None else []
        for (k, s), step in zip(mine.items(), steps):
            s["step"] = torch.tensor(step, dtype=torch.float64)
            states[k] = s
    return {**state_dict, "state": states, "param_groups": groups}


def _from_bitsandbytes(where: str, s: dict[str, Any]) -> dict[str, Any]:
    s |= s.pop("__bnb_optimizer_quant_state__", {})  # where FSDP finds no tensors of other shapes
    result: dict[str, Any] = {"step": s.get("step", 0)}
    for i, name in enumerate(MOMENTS, 1):
        value = s.get(f"state{i}")
        if not isinstance(value, Tensor):
            raise ValueError(f"{where}: state{i}: expected one of Adam's two moments, got {value}")
        if value.dtype == torch.uint8:
            value = _dequantized(where, i, value, s)
        result[name] = value
    return result


def _dequantized(where: str, i: int, codes: Tensor, s: dict[str, Any]) -> Tensor:
    qmap, absmax = s.get(f"qmap{i}"), s.get(f"absmax{i}")
    if not isinstance(qmap, Tensor) or qmap.numel() != 256:
        raise ValueError(f"{where}: qmap{i}: expected 256 values, got {qmap}")
    if not isinstance(absmax, Tensor):
        raise ValueError(
            f"{where}: absmax{i}: expected block-wise 8-bit state, got none (block_wise=False is not supported)"
        )
    n = codes.numel()
    block = next((b for b in BNB_BLOCKS if -(-n // b) == absmax.numel()), None)
    if block is None:
        sizes = " or ".join(str(-(-n // b)) for b in BNB_BLOCKS)
        raise ValueError(
            f"{where}: absmax{i}: expected {sizes} blocks for {n} codes, got {absmax.numel()}"
        )
    per_element = absmax.float().repeat_interleave(block)[:n].view(codes.shape)
    return qmap.float().to(codes.device)[codes.long()] * per_element


# ---- writing


def export_adam_state(optimizer: torch.optim.Optimizer, layout: str) -> dict[str, Any]:
    """The state of an Adam optimizer as the other package's `state_dict()` would return it, to load it there.

    The moments are exact in fp32 (fp64 for fp64 parameters); from there each package rounds to the dtype that it keeps.
    Masters are not part of any of these layouts: pass them on as the parameters' values, ``opt.state[p]["master"]``.

    Args:
        optimizer: `tw.optim.AdamW`, `Adam` or `Offload` of one, or torch's.
        layout: "torch"; "apex" (FusedAdam); "deepspeed" (CPUAdam, and FusedAdam); "bitsandbytes" (any Adam or AdamW;
            fp32 moments, which its 8-bit optimizers take too).

    Raises:
        TypeError, ValueError: another optimizer or layout, or one that the layout has no words for: AMSGrad, maximize,
            different step counts in a group ("apex"), weight decay that is not decoupled ("bitsandbytes").

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, requires_grad=True)
    >>> opt = tw.optim.AdamW([p], lr=0.1)
    >>> p.grad = torch.ones(2)
    >>> opt.step()
    >>> tw.optim.export_adam_state(opt, "apex")["param_groups"][0]["step"]
    1
    """
    op = "export_adam_state"
    writers = {"apex": _to_apex, "deepspeed": _to_deepspeed, "bitsandbytes": _to_bitsandbytes}
    if layout != "torch" and layout not in writers:
        raise value_error(
            op, "layout", "'torch', 'apex', 'deepspeed' or 'bitsandbytes'", repr(layout)
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise type_error(op, "optimizer", "an optimizer", type(optimizer).__name__)
    saved = optimizer.state_dict()
    groups, states = saved["param_groups"], saved["state"]
    if any(not {"betas", "eps", "decoupled_weight_decay"} <= group.keys() for group in groups):
        raise type_error(op, "optimizer", "Adam or AdamW", type(optimizer).__name__)
    plain = {k: _plain_moments(s) for k, s in states.items()}
    if layout == "torch":
        return {"state": plain, "param_groups": groups}
    new_groups = []
    for g, group in enumerate(groups):
        where = f"{op}: param_groups[{g}]"
        if group["amsgrad"] or group["maximize"]:
            key = "amsgrad" if group["amsgrad"] else "maximize"
            raise ValueError(f"{where}: {key}: expected False for layout {layout!r}, got True")
        mine = {k: plain[k] for k in group["params"] if k in plain}
        options = {
            "lr": float(group["lr"]),
            "betas": tuple(map(float, group["betas"])),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "params": list(group["params"]),
        }
        if layout == "bitsandbytes" and options["weight_decay"] and not group["decoupled_weight_decay"]:  # fmt: skip
            raise ValueError(
                f"{where}: weight_decay: expected decoupled decay, or 0, for layout 'bitsandbytes', got "
                f"{options['weight_decay']} added to the gradient"
            )
        new_groups.append(writers[layout](where, options, mine))
    return {"state": plain, "param_groups": new_groups}


def _plain_moments(s: Mapping[str, Any]) -> dict[str, Any]:
    """step and full-precision moments, which are copies."""
    result: dict[str, Any] = {"step": torch.tensor(float(s["step"]), dtype=torch.float32)}
    for name in (*MOMENTS, "max_exp_avg_sq"):
        if name in s:
            value: Tensor = s[name]
            if value.dtype in (torch.int8, torch.uint8):
                value = formats.int8_decode(value, s[name + "_scale"])
            wide = torch.float64 if value.dtype == torch.float64 else torch.float32
            result[name] = value.detach().to(wide, copy=True)
    return result


def _to_apex(where: str, options: Options, states: States) -> Options:
    steps = {int(s.pop("step")) for s in states.values()}
    if len(steps) > 1:
        raise ValueError(f"{where}: step: expected one count for the group, got {sorted(steps)}")
    count = {"step": steps.pop()} if steps else {}
    return {**options, "bias_correction": True, **count}


def _to_deepspeed(where: str, options: Options, states: States) -> Options:
    for s in states.values():
        s["step"] = int(s["step"])
    return {**options, "bias_correction": True, "amsgrad": False}


def _to_bitsandbytes(where: str, options: Options, states: States) -> Options:
    for s in states.values():
        s["step"] = int(s["step"])
        for i, name in enumerate(MOMENTS, 1):
            s[f"state{i}"] = s.pop(name)
    return options
