"""What every optimizer checks of its numbers and switches, in the constructor and for each parameter group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from trainwright.errors import check_bool, type_error, value_error

NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")
# torch's optimizers say these words of the same faults, and callers may look for them.
TORCH_SAYS = {
    "lr": "Invalid learning rate: {}",
    "eps": "Invalid epsilon value: {}",
    "weight_decay": "Invalid weight_decay value: {}",
    "momentum": "Invalid momentum value: {}",
    "alpha": "Invalid alpha value: {}",
    "betas[0]": "Invalid beta parameter at index 0: {}",
    "betas[1]": "Invalid beta parameter at index 1: {}",
}
SWITCHES = ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov")


def _refused(optimizer: str, name: str, expected: str, value: Any) -> ValueError:
    value = value.item() if isinstance(value, Tensor) else value
    words = f" ({TORCH_SAYS[name].format(value)})" if name in TORCH_SAYS else ""
    return value_error(optimizer, name, expected, f"{value}{words}")


def _number(optimizer: str, name: str, value: Any) -> float | None:
    """The value of a number or of a tensor of one; None if reading it would wait for a device."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            got = f"shape {tuple(value.shape)} (Tensor {name} must be 1-element)"
            raise value_error(optimizer, name, "a number or a tensor of one element", got)
        if value.device.type != "cpu":
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise type_error(optimizer, name, "a number", type(value).__name__)
    if not math.isfinite(value):
        raise _refused(optimizer, name, "a finite number", value)
    return float(value)


def check_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise unless the numbers and switches among the options of a parameter group can be worked with."""
    for name, value in options.items():
        if name in SWITCHES:
            check_bool(optimizer, name, value)
        elif name in NOT_NEGATIVE:
            number = _number(optimizer, name, value)
            if number is not None and number < 0.0:
                raise _refused(optimizer, name, "at least 0", value)
        elif name == "alpha":
            number = _number(optimizer, name, value)
            if number is not None and not 0.0 <= number <= 1.0:
                raise _refused(optimizer, name, "a number in [0, 1]", value)
        elif name == "dampening":
            _number(optimizer, name, value)
        elif name == "betas":
            if not isinstance(value, tuple | list):
                raise type_error(optimizer, name, "a tuple of two numbers", type(value).__name__)
            if len(value) != 2:
                raise value_error(optimizer, name, "two numbers", len(value))
            for i, beta in enumerate(value):
                number = _number(optimizer, f"betas[{i}]", beta)
                if number is not None and not 0.0 <= number < 1.0:
                    raise _refused(optimizer, f"betas[{i}]", "a number in [0, 1)", beta)
    if options.get("nesterov") and "dampening" in options:
        momentum, dampening = options["momentum"], options["dampening"]
        if momentum <= 0.0 or dampening != 0.0:
            got = f"True with momentum {momentum}, dampening {dampening}"
            raise value_error(
                optimizer, "nesterov", "True only with a momentum and without dampening", got
            )
