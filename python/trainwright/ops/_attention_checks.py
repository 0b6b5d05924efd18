"""The argument checks that the attention functions share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.errors import (
    FLOAT_DTYPES,
    check_bool,
    check_int,
    check_number,
    check_tensor,
    type_error,
    value_error,
)

Shape = Sequence[int]


def _is_plain(x: Any) -> bool:
    """Whether `check_tensor` has nothing to say, in a fourth of its time."""
    return isinstance(x, Tensor) and x.dtype in FLOAT_DTYPES and x.layout is torch.strided


def checked_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: dense tensors of one dtype and device; under autocast in its dtype (fp64 stays)."""
    if not (_is_plain(q) and _is_plain(k) and _is_plain(v)):
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(op, name, x)
    device = q.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if not (q.dtype == k.dtype == v.dtype and k.device == device == v.device):
        for name, x in (("k", k), ("v", v)):
            check_tensor(op, name, x, dtypes=(q.dtype,), device=device)
    return q, k, v


def _check_shapes(op: str, q: Shape, k: Shape, v: Shape, packed: bool) -> None:
    def check(name: str, shape: Shape, wanted: Sequence[int | None]) -> None:
        if any(want is not None and want != have for want, have in zip(wanted, shape)):
            text = ", ".join("any" if s is None else str(s) for s in wanted)
            raise value_error(op, name, f"shape ({text})", tuple(shape))

    layout = "(tokens, heads, head dim)" if packed else "(B, T, heads, head dim)"
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != (3 if packed else 4):
            raise value_error(op, name, f"shape {layout}", tuple(shape))
    batch = () if packed else (q[0],)
    check("k", k, (*batch, None, None, q[-1]))
    check("v", v, (*batch, k[-3], k[-2], None))
    H, G, D = q[-2], k[-2], q[-1]
    if D == 0 or v[-1] == 0:
        raise value_error(op, "q" if D == 0 else "v", "a head dim of at least 1", 0)
    if (G == 0 and H != 0) or (G != 0 and H % G != 0):
        raise value_error(op, "k", f"a number of heads that divides q's {H}", G)


def check_window(op: str, window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise type_error(op, "window", "None or (left, right)", repr(window))
    for side in window:
        if isinstance(side, bool) or not isinstance(side, int):
            raise type_error(op, "window", "two ints", repr(window))
        if side < -1:
            raise value_error(op, "window", "-1 (no limit) or more", side)
    return int(window[0]), int(window[1])


def _check_plain(
    op: str, q: Shape, k: Shape, v: Shape, causal: Any, causal_align: Any, scale: Any, window: Any, softcap: Any,
    dropout_p: Any, return_lse: Any, deterministic: Any,
) -> tuple[float, tuple[int, int]]:  # fmt: skip
    _check_shapes(op, q, k, v, packed=op == "flash_attention_varlen")
    check_bool(op, "return_lse", return_lse)
    check_bool(op, "causal", causal)
    if causal_align not in ("bottom-right", "top-left"):
        raise value_error(op, "causal_align", "'bottom-right' or 'top-left'", repr(causal_align))
    if scale is None:
        scale = q[-1] ** -0.5
    check_number(op, "scale", scale)
    left, right = check_window(op, window)
    if softcap is not None:
        check_number(op, "softcap", softcap)
        if softcap <= 0:
            raise value_error(op, "softcap", "a number above 0", softcap)
    check_number(op, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise value_error(op, "dropout_p", "a probability in [0, 1]", dropout_p)
    if deterministic is not None:
        check_bool(op, "deterministic", deterministic)
    return float(scale), (left, 0 if causal else right)


_remembered = functools.lru_cache(maxsize=4096, typed=True)(_check_plain)


def check_plain(*arguments: Any) -> tuple[float, tuple[int, int]]:
    """Raise unless the shapes of q, k and v fit and the options that are no tensors are right. The scale, and the keys
    seen to the left and to the right of the position. A short call is not much longer than these checks, so what has
    passed is remembered (but windows: (1, 0) and (1.0, 0) are one key)."""
    *_, window, _, _, _, _ = arguments
    if torch.compiler.is_compiling() or window is not None:
        return _check_plain(*arguments)
    try:
        return _remembered(*arguments)
    except TypeError:  # that of a check, or something that has no hash
        return _check_plain(*arguments)


def check_terms(
    op: str,
    q: Tensor,
    k: Tensor,
    batch: int,
    alibi_slopes: Any,
    bias: Any,
    sinks: Any,
    seed: Any,
    first_head: Any,
) -> None:
    """Raise unless the options that are tensors, and those of the random numbers, are right."""
    H = q.shape[-2]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise type_error(op, "seed", "None or an int", type(seed).__name__)
    check_int(op, "first_head", first_head, minimum=0)
    if first_head + H > 2**31:
        raise value_error(op, "first_head", f"at most {2**31 - H}", first_head)
    if alibi_slopes is not None:
        check_tensor(op, "alibi_slopes", alibi_slopes, device=q.device)
        if alibi_slopes.shape not in ((H,), (batch, H)):
            expected = f"shape ({H},) or ({batch}, {H})"
            raise value_error(op, "alibi_slopes", expected, tuple(alibi_slopes.shape))
    if sinks is not None:
        check_tensor(op, "sinks", sinks, shape=(H,), device=q.device)
    if bias is not None:
        _check_bias(op, q, k, bias)


def _check_bias(op: str, q: Tensor, k: Tensor, bias: Any) -> None:
    check_tensor(op, "bias", bias, device=q.device)
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    tail = full[4 - min(bias.dim(), 4) :]
    if bias.dim() > 4 or any(b not in (1, f) for b, f in zip(bias.shape, tail)):
        raise value_error(op, "bias", f"a shape that broadcasts to {full}", tuple(bias.shape))
