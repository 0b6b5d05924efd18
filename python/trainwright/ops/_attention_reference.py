"""Attention in plain torch, with the (Tq, Tk) matrix in memory: the specification, and what runs every option.

Options beyond the kernels: a cap on the score, ALiBi, a bias, sinks and dropout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.ops._library import acc_dtype


class _Extra(NamedTuple):
    """What only the torch reference knows: a cap, terms of the score, a sink and dropout."""

    softcap: float | None = None
    alibi: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None


def _visible(q: Tensor, k: Tensor, left: int, right: int, top_left: bool) -> Tensor:
    """(Tq, Tk): query i stands at position p = i + offset and sees keys p - left .. p + right."""
    Tq, Tk = q.shape[1], k.shape[1]
    position = torch.arange(Tq, device=q.device) + (0 if top_left else Tk - Tq)
    ahead = torch.arange(Tk, device=q.device) - position[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    return seen


def _alibi_distance(q: Tensor, k: Tensor) -> Tensor:
    Tq, Tk = q.shape[1], k.shape[1]
    i, j = torch.arange(Tq, device=q.device), torch.arange(Tk, device=q.device)
    return (i[:, None] + (Tk - Tq) - j).abs().to(acc_dtype(q.dtype))


def uniform_bits(seed: Tensor, B: int, H: int, Tq: int, Tk: int) -> Tensor:
    """(B, H, Tq, Tk) 32-bit numbers as int64: word j % 4 of philox(seed, (j // 4, i, h, b))."""
    mask, device = 0xFFFFFFFF, seed.device
    key = [seed & mask, (seed >> 32) & mask]
    axes = [(Tk + 3) // 4, Tq, H, B]
    c = [
        torch.arange(n, device=device).view([-1 if d == 3 - a else 1 for d in range(4)])
        for a, n in enumerate(axes)
    ]

    def product(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:  # high and low 32 bits
        low, high = multiplier * (x & 0xFFFF), multiplier * (x >> 16)
        return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & mask

    for _ in range(10):
        hi0, lo0 = product(0xD2511F53, c[0])
        hi1, lo1 = product(0xCD9E8D57, c[2])
        c = [hi1 ^ c[1] ^ key[0], lo1, hi0 ^ c[3] ^ key[1], lo0]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    words = torch.stack([x.expand(B, H, Tq, axes[0]) for x in c], dim=-1)
    return words.reshape(B, H, Tq, 4 * axes[0])[..., :Tk]


def _masked_matmul(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """a @ b for an `a` that is 0 where not seen: an inf or NaN of b only reaches the rows that see it."""
    odd = ~torch.isfinite(b)
    hit = seen.to(a.dtype) @ odd.to(a.dtype) > 0
    return torch.where(hit, a @ b, a @ b.masked_fill(odd, 0.0))


class _Probabilities(NamedTuple):
    seen: Tensor  # (.., Tq, Tk) bool
    p: Tensor  # (B, H, Tq, Tk): softmax over the real keys, 0 where not seen
    lse: Tensor  # (B, H, Tq): natural log, over the real keys
    slope: Tensor | float  # derivative of the capped score
    keep: Tensor | float  # dropout: 0 or 1 / (1 - p)
    share: Tensor | float  # (B, H, Tq, 1): what the sink leaves


def _probabilities(
    q: Tensor, k: Tensor, scale: float, left: int, right: int, top_left: bool, extra: _Extra
) -> _Probabilities:
    acc = acc_dtype(q.dtype)
    q_, k_ = _by_head(q, q.shape[2]), _by_head(k, q.shape[2])
    s = (q_ @ k_.transpose(-1, -2)) * scale
    slope: Tensor | float = 1.0
    if extra.softcap is not None:
        capped = torch.tanh(s / extra.softcap)
        s, slope = extra.softcap * capped, 1.0 - capped.square()
    seen = _visible(q, k, left, right, top_left)
    if extra.bias is not None:
        s = s + extra.bias.to(acc)
        seen = seen & (extra.bias != -math.inf)
    if extra.alibi is not None:
        s = s - extra.alibi.to(acc)[..., None, None] * _alibi_distance(q, k)
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    # Not exp(s - lse): next to a score of finfo.min, log(n) is lost in lse.
    p = torch.softmax(s, dim=-1).masked_fill(~seen, 0.0)
    share: Tensor | float = 1.0
    if extra.sinks is not None:
        share = torch.sigmoid(lse - extra.sinks.to(acc)[:, None])[..., None]
    keep: Tensor | float = 1.0
    if extra.dropout_p > 0.0:
        assert extra.seed is not None
        drop = round(extra.dropout_p * 2**32)
        bits = uniform_bits(extra.seed, *s.shape)
        keep = (bits >= drop).to(acc) * (2**32 / max(2**32 - drop, 1))
    return _Probabilities(seen, p, lse, slope, keep, share)


def _by_head(x: Tensor, H: int) -> Tensor:
    """(B, T, G, C) as (B, H, T, C) in the accumulator's dtype."""
    x = x.to(acc_dtype(x.dtype)).transpose(1, 2)
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def _sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """(B, H, T, C) summed over the query heads of each group, as `like` (B, T, G, C)."""
    B, T, G, C = like.shape
    x = x.reshape(B, G, x.shape[1] // max(G, 1), T, C).sum(2) if x.shape[1] != G else x
    return x.transpose(1, 2).to(like.dtype).contiguous()


_NO_EXTRA = _Extra()


def fwd_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, top_left: bool,
    extra: _Extra = _NO_EXTRA,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = _probabilities(q, k, scale, left, right, top_left, extra)
    out = _masked_matmul(x.p * x.keep * x.share, _by_head(v, q.shape[2]), x.seen)
    return out.transpose(1, 2).to(q.dtype).contiguous(), x.lse


def _bwd_all(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    scale: float, left: int, right: int, top_left: bool, extra: _Extra = _NO_EXTRA,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq, dk, dv, the gradient of the score (B, H, Tq, Tk) and that of the sinks."""
    H = q.shape[2]
    x = _probabilities(q, k, scale, left, right, top_left, extra)
    g, v_ = _by_head(dout, H), _by_head(v, H)
    delta = (g * _by_head(out, H)).sum(-1, keepdim=True)
    ds = x.p * x.share * (x.keep * (g @ v_.transpose(-1, -2)) - delta)
    if dlse is not None:
        ds = ds + x.p * dlse[..., None]
    ds = ds.masked_fill(~x.seen, 0.0)
    dqk = ds * x.slope * scale
    dqk = dqk.masked_fill(~x.seen, 0.0)
    seen_t = x.seen.transpose(-1, -2)
    dq = _masked_matmul(dqk, _by_head(k, H), x.seen)
    dk = _masked_matmul(dqk.transpose(-1, -2), _by_head(q, H), seen_t)
    dv = _masked_matmul((x.p * x.keep * x.share).transpose(-1, -2), g, seen_t)
    dsinks = None
    if extra.sinks is not None:
        dsinks = -((1.0 - x.share) * delta).sum((0, 2, 3))
    return (
        dq.transpose(1, 2).to(q.dtype).contiguous(),
        _sum_groups(dk, k),
        _sum_groups(dv, v),
        ds,
        dsinks,
    )


def bwd_reference(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, left: int, right: int, top_left: bool, need_dq: bool, need_dk: bool, need_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = _bwd_all(dout, dlse, q, k, v, out, scale, left, right, top_left)[:3]
    dq, dk, dv = (
        x if need else q.new_empty(0) for x, need in zip(grads, (need_dq, need_dk, need_dv))
    )
    return dq, dk, dv


class AttentionReference(torch.autograd.Function):
    """Every option, on the torch reference."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        seed: Tensor | None, scale: float, left: int, right: int, top_left: bool, softcap: float | None,
        dropout_p: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        extra = _Extra(softcap, alibi, bias, sinks, dropout_p, seed)
        out, lse = fwd_reference(q, k, v, scale, left, right, top_left, extra)
        ctx.save_for_backward(q, k, v, out, alibi, bias, sinks, seed)
        ctx.options, ctx.softcap, ctx.dropout_p = (scale, left, right, top_left), softcap, dropout_p
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, alibi, bias, sinks, seed = ctx.saved_tensors
        extra = _Extra(ctx.softcap, alibi, bias, sinks, ctx.dropout_p, seed)
        if dout is None:
            dout = torch.zeros_like(out)
        scale, left, right, top_left = ctx.options
        dq, dk, dv, ds, dsinks = _bwd_all(
            dout, dlse, q, k, v, out, scale, left, right, top_left, extra
        )
        dalibi = dbias = None
        if alibi is not None and ctx.needs_input_grad[3]:
            dalibi = -(ds * _alibi_distance(q, k)).sum((2, 3))
            dalibi = (dalibi if alibi.dim() == 2 else dalibi.sum(0)).to(alibi.dtype)
        if bias is not None and ctx.needs_input_grad[4]:
            dbias = ds.sum_to_size(bias.shape).to(bias.dtype)
        if sinks is not None and dsinks is not None:
            dsinks = dsinks.to(sinks.dtype)
        return dq, dk, dv, dalibi, dbias, dsinks, *[None] * 7
