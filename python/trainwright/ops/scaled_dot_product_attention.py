"""torch's attention function, on `flash_attention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainwright.errors import check_tensor, type_error, value_error
from trainwright.ops.flash_attention import flash_attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on `flash_attention`: same arguments, same meaning.

    Args:
        query: (..., H, Tq, D); key (..., G, Tk, D); value (..., G, Tk, Dv); G = H unless `enable_gqa`.
        attn_mask: broadcastable to (..., H, Tq, Tk): bool (True: attend) or a float term added to the score.
        dropout_p: probability of dropping a weight; drawn from torch's default generator.
        is_causal: top-left causal mask; not together with attn_mask.
        scale: default 1/√D.
        enable_gqa: H may be a multiple of G.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        (..., H, Tq, Dv), dtype of query.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, shape or range.
        trainwright.BackendError: no backend can run the call.

    Numerics: those of `flash_attention`.

    Source: torch.nn.functional.scaled_dot_product_attention, whose documentation is the specification.

    >>> import torch, trainwright as tw
    >>> x = torch.ones(1, 1, 3, 4)
    >>> tw.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 1, 3, 4])
    """
    op = "scaled_dot_product_attention"
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(op, name, x, min_dim=2)
        if x.dim() != query.dim():
            raise value_error(op, name, f"{query.dim()} dimensions, as query", tuple(x.shape))
    if attn_mask is not None and is_causal:
        raise value_error(op, "attn_mask", "None together with is_causal=True", "a mask")
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3] if query.dim() > 2 else 1
    if not enable_gqa and query.dim() > 2:
        heads = torch.broadcast_shapes(query.shape[-3:-2], key.shape[-3:-2], value.shape[-3:-2])[0]

    def by_token(x: Tensor) -> Tensor:  # (B, T, heads, channels)
        if x.dim() == 2:
            return x[None, :, None]
        x = x.expand(*lead, x.shape[-3] if enable_gqa else heads, *x.shape[-2:])
        return x.reshape(-1 if x.numel() else math.prod(lead), *x.shape[-3:]).transpose(1, 2)

    bias = attn_mask
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dtype not in (torch.bool, query.dtype):
            got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise type_error(op, "attn_mask", f"None or a tensor of bool or {query.dtype}", got)
        if bias.dtype == torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=bias.device)
            bias = torch.where(bias, zero, -math.inf)
        if bias.dim() > 4 or (query.dim() != 4 and bias.dim() > 2):
            bias = bias.expand(*lead, heads, query.shape[-2], key.shape[-2])
            bias = bias.reshape(-1, *bias.shape[-3:])
    out = flash_attention(
        by_token(query), by_token(key), by_token(value), causal=is_causal, causal_align="top-left", scale=scale,
        bias=bias, dropout_p=dropout_p, backend=backend,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    if query.dim() == 2:
        return out[0, :, 0]
    return out.transpose(1, 2).reshape(*lead, heads, query.shape[-2], value.shape[-1])
