"""The argument checks that the attention functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.errors import (
    check_bool,
    check_number,
    check_tensor,
    type_error,
    value_error,
)


def checked_qkv(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, packed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, which fit each other; under autocast in its dtype (fp64 stays)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, x)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    same = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    if same and len(of_q) == len(of_k) == len(of_v) == (3 if packed else 4):
        (*_, H, D), G = of_q, of_k[-2]
        grouped = H % G == 0 if G else H == 0
        fit = of_k[:-1] == of_v[:-1] and of_k[-1] == D and (packed or of_k[0] == of_q[0])
        if fit and grouped and D and of_v[-1]:
            return q, k, v
    raise _misfit(op, q, k, v, packed)


def _misfit(op: str, q: Tensor, k: Tensor, v: Tensor, packed: bool) -> Exception:
    """What is wrong with q, k and v, the first thing first."""
    layout = "(tokens, heads, head dim)" if packed else "(B, T, heads, head dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if packed else 4):
            return value_error(op, name, f"shape {layout}", tuple(x.shape))
    try:
        for name, x in (("k", k), ("v", v)):
            check_tensor(op, name, x, dtypes=(q.dtype,), device=q.device)
        batch = () if packed else (q.shape[0],)
        check_tensor(op, "k", k, shape=(*batch, None, None, q.shape[-1]))
        check_tensor(op, "v", v, shape=(*batch, k.shape[-3], k.shape[-2], None))
    except (TypeError, ValueError) as error:
        return error
    H, G, D = q.shape[-2], k.shape[-2], q.shape[-1]
    if D == 0 or v.shape[-1] == 0:
        return value_error(op, "q" if D == 0 else "v", "a head dim of at least 1", 0)
    return value_error(op, "k", f"a number of heads that divides q's {H}", G)


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


def check_options(
    op: str, q: Tensor, batch: int, *, causal: Any, causal_align: Any, scale: Any, window: Any, softcap: Any,
    alibi_slopes: Any, sinks: Any, dropout_p: Any, seed: Any, return_lse: Any, deterministic: Any,
) -> tuple[float, tuple[int, int]]:  # fmt: skip
    """Raise unless the options that both functions have are right. The scale, and the keys seen to the left and to the
    right of the position."""
    check_bool(op, "return_lse", return_lse)
    check_bool(op, "causal", causal)
    if causal_align not in ("bottom-right", "top-left"):
        raise value_error(op, "causal_align", "'bottom-right' or 'top-left'", repr(causal_align))
    H, D = q.shape[-2:]
    if scale is None:
        scale = D**-0.5
    check_number(op, "scale", scale)
    left, right = check_window(op, window)
    if softcap is not None:
        check_number(op, "softcap", softcap)
        if softcap <= 0:
            raise value_error(op, "softcap", "a number above 0", softcap)
    check_number(op, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise value_error(op, "dropout_p", "a probability in [0, 1]", dropout_p)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise type_error(op, "seed", "None or an int", type(seed).__name__)
    if alibi_slopes is not None:
        check_tensor(op, "alibi_slopes", alibi_slopes, device=q.device)
        if alibi_slopes.shape not in ((H,), (batch, H)):
            expected = f"shape ({H},) or ({batch}, {H})"
            raise value_error(op, "alibi_slopes", expected, tuple(alibi_slopes.shape))
    if sinks is not None:
        check_tensor(op, "sinks", sinks, shape=(H,), device=q.device)
    if deterministic is not None:
        check_bool(op, "deterministic", deterministic)
    return float(scale), (left, 0 if causal else right)


def check_bias(op: str, q: Tensor, k: Tensor, bias: Any) -> None:
    if bias is None:
        return
    check_tensor(op, "bias", bias, device=q.device)
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    tail = full[4 - min(bias.dim(), 4) :]
    if bias.dim() > 4 or any(b not in (1, f) for b, f in zip(bias.shape, tail)):
        raise value_error(op, "bias", f"a shape that broadcasts to {full}", tuple(bias.shape))
