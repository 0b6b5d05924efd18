"""`tw.nn.MultiheadAttention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import (
    check_bool,
    check_int,
    check_number,
    check_tensor,
    type_error,
    value_error,
)
from trainwright.ops.flash_attention import flash_attention
from trainwright.ops.linear import linear

__all__ = ["MultiheadAttention"]

_OP = "MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on `tw.linear` and `tw.flash_attention`; same initialisation and state dict.

    Constructor and `forward` take torch's arguments with torch's meaning: in masks True means "do not attend", a float
    mask is added to the scores, `is_causal` is a hint that needs `attn_mask`. With `need_weights=False` (torch's
    default is True) the (L, S) matrix is only stored if a mask brings it; otherwise weights and output are composed of
    torch ops. A query that may attend to nothing gives zeros, where torch gives zeros or NaN.

    >>> import torch, trainwright as tw
    >>> mha, x = tw.nn.MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 3, 8)
    >>> mha(x, x, x, need_weights=False)[0].shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, *arguments: Any, **options: Any
    ) -> None:
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            check_int(_OP, name, size, minimum=1)
        if embed_dim % num_heads:
            raise value_error(_OP, "num_heads", f"a divisor of embed_dim, {embed_dim}", num_heads)
        check_number(_OP, "dropout", dropout)
        if not 0.0 <= dropout <= 1.0:
            raise value_error(_OP, "dropout", "a probability in [0, 1]", dropout)
        given = (
            dict(zip(("bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim"), arguments)) | options
        )
        for name in ("kdim", "vdim"):
            if given.get(name) is not None:
                check_int(_OP, name, given[name], minimum=1)
        super().__init__(embed_dim, num_heads, dropout, *arguments, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = self._check(query, key, value, key_padding_mask, attn_mask)
        for name, flag in (("need_weights", need_weights), ("is_causal", is_causal)):
            check_bool(_OP, name, flag)
        if is_causal and attn_mask is None:
            raise value_error(_OP, "attn_mask", "the causal mask that is_causal hints at", None)
        q, k, v = (self._by_head(x) for x in self._project(query, key, value, batched))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._merged_mask(query, attn_mask, key_padding_mask)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self._by_head(self.bias_k).expand(k.shape[0], -1, -1, -1)], 1)
            v = torch.cat([v, self._by_head(self.bias_v).expand(v.shape[0], -1, -1, -1)], 1)
        if self.add_zero_attn:
            k, v = (nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        if mask is not None and mask.shape[-1] != k.shape[1]:
            mask = nn.functional.pad(mask, (0, k.shape[1] - mask.shape[-1]))
        dropout_p = self.dropout if self.training else 0.0

        weights = None
        if need_weights:
            out, weights = _composed(q, k, v, mask, dropout_p)
        else:
            result = flash_attention(
                q, k, v, bias=mask, causal=causal, causal_align="top-left", dropout_p=dropout_p
            )
            assert isinstance(result, Tensor)
            out = result
        out = linear(out.flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attn: Tensor | None
    ) -> bool:
        """Raise unless the shapes fit; whether there is a batch dimension."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(_OP, name, x)
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise value_error(_OP, name, "2 or 3 dimensions, as query", tuple(x.shape))
        batched = query.dim() == 3
        tokens, batch = (1, 0) if self.batch_first else (0, 1)
        lead: list[int | None] = [None, None] if batched else [None]
        if batched:
            lead[batch] = query.shape[batch]
        check_tensor(_OP, "query", query, shape=(*lead, self.embed_dim))
        check_tensor(_OP, "key", key, shape=(*lead, self.kdim))
        check_tensor(_OP, "value", value, shape=(*key.shape[:-1], self.vdim))
        N = query.shape[batch] if batched else 1
        L, S = (x.shape[tokens if batched else 0] for x in (query, key))
        for name, mask in (("key_padding_mask", padding), ("attn_mask", attn)):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or not (
                mask.dtype == torch.bool or mask.is_floating_point()
            ):
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise type_error(_OP, name, "None or a tensor of bool or floats", got)
        if padding is not None and padding.shape != ((N, S) if batched else (S,)):
            expected = f"shape ({N}, {S})" if batched else f"shape ({S},)"
            raise value_error(_OP, "key_padding_mask", expected, tuple(padding.shape))
        heads = N * self.num_heads
        if attn is not None and attn.shape not in ((L, S), (heads, L, S)):
            expected = f"shape ({L}, {S}) or ({heads}, {L}, {S})"
            raise value_error(_OP, "attn_mask", expected, tuple(attn.shape))
        return batched

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (N, T, E)."""

        def batch_first(x: Tensor) -> Tensor:
            if not batched:
                return x[None]
            return x if self.batch_first else x.transpose(0, 1)

        if self.in_proj_weight is not None and query is key and key is value:
            packed = linear(batch_first(query), self.in_proj_weight, self.in_proj_bias)
            q, k, v = packed.chunk(3, -1)
            return q, k, v
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (query, key, value)
        q, k, v = (linear(batch_first(x), w, b) for x, w, b in zip(inputs, weights, biases))
        return q, k, v

    def _merged_mask(
        self, query: Tensor, attn: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """Both masks as one term of the scores, broadcastable to (N, H, L, S)."""

        def term(mask: Tensor) -> Tensor:
            if mask.dtype != torch.bool:
                return mask
            zero = torch.zeros((), dtype=query.dtype, device=mask.device)
            return torch.where(mask, -math.inf, zero)

        merged = None
        if attn is not None:
            merged = term(attn)
            merged = merged[None, None] if attn.dim() == 2 else merged.unflatten(0, (-1, self.num_heads))  # fmt: skip
        if padding is not None:
            per_key = term(padding if padding.dim() == 2 else padding[None])[:, None, None]
            merged = per_key if merged is None else merged + per_key
        return merged


def _composed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """(N, L, H, D) output and the (N, H, L, S) weights behind it."""
    scores = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)
    if mask is not None:
        scores = scores + mask
        nothing = (mask == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(nothing, 0.0)
        weights = torch.softmax(scores, -1).masked_fill(nothing, 0.0)
    else:
        weights = torch.softmax(scores, -1)
    weights = nn.functional.dropout(weights, dropout_p)
    return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v), weights
