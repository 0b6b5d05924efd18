"""flash-attn's way to write options, as `tw.flash_attention` takes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainwright.errors import check_number, check_tensor, type_error, value_error

Window = tuple[int, int]
Result = Any  # out, or (out, lse, None) with return_attn_probs


def check_packed(function: str, name: str, x: Tensor, dims: int, parts: int) -> tuple[Tensor, ...]:
    """The `parts` tensors along the third-last dimension of `x`."""
    check_tensor(function, name, x)
    if x.dim() != dims or x.shape[-3] != parts:
        lead = "(B, T, " if dims == 5 else "(tokens, "
        raise value_error(function, name, f"shape {lead}{parts}, heads, head dim)", tuple(x.shape))
    return x.unbind(-3)


def options(
    function: str, causal: bool, window_size: Window, softcap: float, alibi_slopes: Tensor | None,
    softmax_scale: float | None,
) -> dict[str, Any]:  # fmt: skip
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise type_error(function, "window_size", "(left, right)", repr(window_size))
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, int):
            raise type_error(function, "window_size", "two ints", repr(window_size))
    check_number(function, "softcap", softcap, minimum=0.0)
    return {
        "causal": causal,
        "window": tuple(max(side, -1) for side in window_size),
        "softcap": softcap if softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
        "scale": softmax_scale,
    }
