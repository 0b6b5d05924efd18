"""Exceptions of the package, and the one-line argument checks that every op uses.

Argument errors are `TypeError`/`ValueError`, raised before any work, in one shape:
``rms_norm: weight: expected shape (768,), got (767,)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class BackendError(RuntimeError):
    """No backend can run this call. The message lists each backend with its reason."""


def type_error(op: str, argument: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"{op}: {argument}: expected {expected}, got {got}")


def value_error(op: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{op}: {argument}: expected {expected}, got {got}")


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensor(
    op: str,
    argument: str,
    value: Any,
    *,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    shape: Sequence[int | None] | None = None,
    min_dim: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless `value` is a dense tensor of an accepted dtype, shape (None: any size) and device."""
    if not isinstance(value, torch.Tensor):
        raise type_error(op, argument, "a torch.Tensor", type(value).__name__)
    if value.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise type_error(op, argument, f"dtype {names}", str(value.dtype).removeprefix("torch."))
    if value.layout is not torch.strided:
        raise type_error(op, argument, "a dense tensor", value.layout)
    if min_dim is not None and value.dim() < min_dim:
        raise value_error(op, argument, f"at least {min_dim} dimension(s)", tuple(value.shape))
    if shape is not None and (
        value.dim() != len(shape)
        or any(want is not None and want != have for want, have in zip(shape, value.shape))
    ):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise value_error(op, argument, f"shape ({wanted})", tuple(value.shape))
    if device is not None and value.device != device:
        raise value_error(op, argument, f"device {device}", value.device)


def check_bool(op: str, argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise type_error(op, argument, "a bool", type(value).__name__)


def check_number(op: str, argument: str, value: Any, *, minimum: float | None = None) -> None:
    """Raise unless `value` is a finite int or float (not bool), at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise type_error(op, argument, "a number", type(value).__name__)
    if value != value or value in (float("inf"), float("-inf")):
        raise value_error(op, argument, "a finite number", value)
    if minimum is not None and value < minimum:
        raise value_error(op, argument, f"at least {minimum}", value)


def check_int(op: str, argument: str, value: Any, *, minimum: int | None = None) -> None:
    """Raise unless `value` is an int (not bool), at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(op, argument, "an int", type(value).__name__)
    if minimum is not None and value < minimum:
        raise value_error(op, argument, f"at least {minimum}", value)
