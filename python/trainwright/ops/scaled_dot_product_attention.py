"""torch's attention function, on `flash_attention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainwright.errors import check_bool, check_tensor, type_error, value_error
from trainwright.ops.flash_attention import flash_attention

__all__ = ["scaled_dot_product_attention"]

OP = "scaled_dot_product_attention"


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
        attn_mask: broadcastable to (..., H, Tq, Tk): bool (True: attend), or a term added to the score, fp32 or of the
            dtype of query, with its gradient. A query that may attend to nothing gives 0.
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
    q, k, v = _check(query, key, value, attn_mask, is_causal, enable_gqa)
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if enable_gqa and k.shape[-3] != v.shape[-3]:  # then each is read at its own rate
        k, v = (x.repeat_interleave(q.shape[-3] // max(x.shape[-3], 1), -3) for x in (k, v))
    heads = q.shape[-3]
    if not enable_gqa:
        heads = torch.broadcast_shapes(q.shape[-3:-2], k.shape[-3:-2], v.shape[-3:-2])[0]

    def by_token(x: Tensor) -> Tensor:  # (B, T, heads, channels)
        x = x.expand(*lead, x.shape[-3] if enable_gqa else heads, *x.shape[-2:])
        return x.reshape(math.prod(lead), *x.shape[-3:]).transpose(1, 2)

    out = flash_attention(
        by_token(q), by_token(k), by_token(v), causal=is_causal, causal_align="top-left", scale=scale,
        bias=_bias(attn_mask, query, (*lead, heads, q.shape[-2], k.shape[-2])), dropout_p=dropout_p, backend=backend,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    if query.dim() == 2:
        return out[0, :, 0]
    return out.transpose(1, 2).reshape(*lead, heads, q.shape[-2], v.shape[-1])


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> list[Tensor]:
    """Raise unless the arguments fit; query, key and value with a dimension of heads."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        check_tensor(OP, name, x, min_dim=2)
        if x.dim() != query.dim():
            raise value_error(OP, name, f"{query.dim()} dimensions, as query", tuple(x.shape))
        check_tensor(OP, name, x, dtypes=(query.dtype,), device=query.device)
    check_bool(OP, "is_causal", is_causal)
    check_bool(OP, "enable_gqa", enable_gqa)
    if key.shape[-1] != query.shape[-1]:
        raise value_error(OP, "key", f"a last dimension of {query.shape[-1]}", tuple(key.shape))
    if value.shape[-2] != key.shape[-2]:
        expected = f"{key.shape[-2]} tokens, as key"
        raise value_error(OP, "value", expected, tuple(value.shape))
    if mask is not None:
        if is_causal:
            raise value_error(OP, "attn_mask", "None together with is_causal=True", "a mask")
        if not isinstance(mask, Tensor) or mask.dtype not in (
            torch.bool,
            torch.float32,
            query.dtype,
        ):
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise type_error(OP, "attn_mask", f"None, bool, float32 or {query.dtype}", got)
    with_heads = [x if x.dim() > 2 else x[None] for x in tensors.values()]
    shapes = [x.shape[: -3 if enable_gqa else -2] for x in with_heads]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        expected = "dimensions before the last two (three with enable_gqa) that broadcast"
        raise value_error(OP, "query, key, value", expected, [tuple(s) for s in shapes]) from None
    if enable_gqa:
        heads = query.shape[-3] if query.dim() > 2 else 1
        for name, x in zip(("key", "value"), with_heads[1:]):
            if heads % max(x.shape[-3], 1) or (heads and not x.shape[-3]):
                expected = f"a number of heads that divides query's {heads}"
                raise value_error(OP, name, expected, x.shape[-3])
    if mask is not None:
        lead = torch.broadcast_shapes(*shapes)
        lead = (*lead, with_heads[0].shape[-3]) if enable_gqa else lead
        full = (*lead, query.shape[-2], key.shape[-2])
        tail = full[max(len(full) - mask.dim(), 0) :]
        if mask.dim() > len(full) or any(m not in (1, f) for m, f in zip(mask.shape, tail)):
            expected = f"a shape that broadcasts to {tuple(full)}"
            raise value_error(OP, "attn_mask", expected, tuple(mask.shape))
    return with_heads


def mask_as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, bools (True: attend) or a term already, as a term of the score."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)


def _bias(mask: Tensor | None, query: Tensor, full: tuple[int, ...]) -> Tensor | None:
    """The mask as a term of the score, broadcastable to (B, heads, Tq, Tk) with B the product of the leading dims."""
    if mask is None:
        return None
    mask = mask_as_bias(mask, query.dtype)
    if mask.dim() <= 3 or len(full) == 4:
        return mask
    several = any(n != 1 for n in mask.shape[:-3])  # leading dims: they become one
    if several:
        mask = mask.expand(*full[:-3], *mask.shape[-3:])
    return mask.reshape(math.prod(full[:-3]) if several else 1, *mask.shape[-3:])
