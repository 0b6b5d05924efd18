"""Attention in plain torch, with the (Tq, Tk) matrix in memory: the specification, and the backend "torch".

The packed form (`cu_seqlens`) is a loop over its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.ops._library import acc_dtype


class Options(NamedTuple):
    """What a call asks beyond q, k, v, in the order of the schema (`_attention`); left, right: -1 for no limit."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    alibi: Tensor | None  # (B, H)
    bias: Tensor | None  # (B | 1, H | 1, Tq | 1, Tk | 1)
    sinks: Tensor | None  # (H,)
    seed: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    left: int
    right: int
    top_left: bool
    softcap: float  # 0: none
    dropout_p: float
    first_batch: int = 0  # index of the first sequence, for dropout


def visible(q: Tensor, k: Tensor, o: Options) -> Tensor:
    """(.., Tq, Tk): query i stands at position p = i + offset and sees keys p - left .. p + right with a bias above
    -inf."""
    Tq, Tk = q.shape[1], k.shape[1]
    position = torch.arange(Tq, device=q.device) + (0 if o.top_left else Tk - Tq)
    ahead = torch.arange(Tk, device=q.device) - position[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if o.left >= 0:
        seen = seen & (ahead >= -o.left)
    if o.right >= 0:
        seen = seen & (ahead <= o.right)
    return seen if o.bias is None else seen & (o.bias != -math.inf)


def alibi_distance(q: Tensor, k: Tensor) -> Tensor:
    """(Tq, Tk): |i + (Tk - Tq) - j|."""
    Tq, Tk = q.shape[1], k.shape[1]
    i, j = torch.arange(Tq, device=q.device), torch.arange(Tk, device=q.device)
    return (i[:, None] + (Tk - Tq) - j).abs().to(acc_dtype(q.dtype))


def uniform_bits(
    seed: Tensor,
    B: int,
    H: int,
    Tq: int,
    Tk: int,
    first_batch: int = 0,
    first_head: int | Tensor = 0,
) -> Tensor:
    """(B, H, Tq, Tk) 32-bit numbers as int64: word j % 4 of philox(seed, (j // 4, i, first_head + h, first_batch +
    b))."""
    mask, device = 0xFFFFFFFF, seed.device
    key = [seed & mask, (seed >> 32) & mask]
    axes = [(Tk + 3) // 4, Tq, H, B]
    c = [
        torch.arange(n, device=device).view([-1 if d == 3 - a else 1 for d in range(4)])
        for a, n in enumerate(axes)
    ]
    c[2], c[3] = c[2] + first_head, c[3] + first_batch

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


def kept_weights(shape: Sequence[int], o: Options, dtype: torch.dtype) -> Tensor | float:
    """(B, H, Tq, Tk): 0 where dropout drops the pair, else 1 over the share that is kept."""
    if o.dropout_p <= 0.0:
        return 1.0
    assert o.seed is not None
    drop = round(o.dropout_p * 2**32)
    B, H, Tq, Tk = shape
    bits = uniform_bits(o.seed[0], B, H, Tq, Tk, o.first_batch, o.seed[1])
    return (bits >= drop).to(dtype) * (2**32 / max(2**32 - drop, 1))


def by_head(x: Tensor, H: int) -> Tensor:
    """(B, T, G, C) as (B, H, T, C) in the accumulator's dtype."""
    x = x.to(acc_dtype(x.dtype)).transpose(1, 2)
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def _sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """(B, H, T, C) summed over the query heads of each group, as `like` (B, T, G, C)."""
    B, T, G, C = like.shape
    x = x.reshape(B, G, x.shape[1] // max(G, 1), T, C).sum(2) if x.shape[1] != G else x
    return x.transpose(1, 2).to(like.dtype)


def _masked_matmul(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """a @ b over the terms that are seen; `a` is 0 elsewhere, where b may be NaN or inf: 0 times those is not 0."""
    odd = ~torch.isfinite(b)
    if b.device.type == "cpu" and not odd.any():  # on a GPU that would wait for it
        return a @ b

    def meets(terms: Tensor, values: Tensor) -> Tensor:
        return terms.to(a.dtype) @ values.to(a.dtype) > 0

    plus, minus = b == math.inf, b == -math.inf
    up = meets(a > 0, plus) | meets(a < 0, minus)
    down = meets(a > 0, minus) | meets(a < 0, plus)
    nothing = meets(seen, b.isnan()) | meets(seen & ((a == 0) | a.isnan()), plus | minus)
    result = a @ b.masked_fill(odd, 0.0)
    result = result.masked_fill(up, math.inf).masked_fill(down, -math.inf)
    return result.masked_fill(nothing | (up & down), math.nan)


class _Probabilities(NamedTuple):
    seen: Tensor  # (.., Tq, Tk) bool
    p: Tensor  # (B, H, Tq, Tk): softmax over the real keys, 0 where not seen
    lse: Tensor  # (B, H, Tq): natural log, over the real keys
    slope: Tensor | float  # derivative of the capped score
    keep: Tensor | float  # dropout
    share: Tensor | float  # (B, H, Tq, 1): what the sink leaves

    @property
    def weights(self) -> Tensor:
        """Of v: 0 where not seen, also in a row whose share is NaN."""
        return (self.p * self.keep * self.share).masked_fill(~self.seen, 0.0)


def _probabilities(q: Tensor, k: Tensor, o: Options) -> _Probabilities:
    acc = acc_dtype(q.dtype)
    s = (by_head(q, q.shape[2]) @ by_head(k, q.shape[2]).transpose(-1, -2)) * o.scale
    slope: Tensor | float = 1.0
    if o.softcap > 0.0:
        capped = torch.tanh(s / o.softcap)
        s, slope = o.softcap * capped, 1.0 - capped.square()
    if o.bias is not None:
        s = s + o.bias.to(acc)
    if o.alibi is not None:
        s = s - o.alibi.to(acc)[..., None, None] * alibi_distance(q, k)
    seen = visible(q, k, o)
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    # Not exp(s - lse): next to a score of finfo.min, log(n) is lost in lse.
    p = torch.softmax(s, dim=-1).masked_fill(~seen, 0.0)
    share: Tensor | float = 1.0
    if o.sinks is not None:
        share = torch.sigmoid(lse - o.sinks.to(acc)[:, None])
        share = share.masked_fill(lse == -math.inf, 0.0)[..., None]
    return _Probabilities(seen, p, lse, slope, kept_weights(s.shape, o, acc), share)


def _forward(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    x = _probabilities(q, k, o)
    out = _masked_matmul(x.weights, by_head(v, q.shape[2]), x.seen)
    return out.transpose(1, 2).to(q.dtype), x.lse


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, o: Options, need: Sequence[bool]
) -> list[Tensor | None]:  # fmt: skip
    H = q.shape[2]
    x = _probabilities(q, k, o)
    g = by_head(dout, H)
    delta = (g * by_head(out, H)).sum(-1, keepdim=True)
    delta = delta.masked_fill(x.lse[..., None] == -math.inf, 0.0)
    ds = x.p * x.share * (x.keep * (g @ by_head(v, H).transpose(-1, -2)) - delta)
    if dlse is not None:
        ds = ds + x.p * dlse[..., None]
    ds = ds.masked_fill(~x.seen, 0.0)
    dqk = (ds * x.slope * o.scale).masked_fill(~x.seen, 0.0)
    seen_t = x.seen.transpose(-1, -2)
    grads: list[Tensor | None] = [None] * 6
    if need[0]:
        grads[0] = _masked_matmul(dqk, by_head(k, H), x.seen).transpose(1, 2).to(q.dtype)
    if need[1]:
        grads[1] = _sum_groups(_masked_matmul(dqk.transpose(-1, -2), by_head(q, H), seen_t), k)
    if need[2]:
        grads[2] = _sum_groups(_masked_matmul(x.weights.transpose(-1, -2), g, seen_t), v)
    if need[3]:
        grads[3] = -(ds * alibi_distance(q, k)).sum((2, 3))
    if need[4]:
        assert o.bias is not None
        grads[4] = ds.sum_to_size(o.bias.shape)
    if need[5]:
        grads[5] = -((1.0 - x.share) * delta).sum((0, 2, 3))
    return grads


def sequences(o: Options, T: tuple[int, int]) -> Iterator[tuple[slice, slice, Options]]:
    """The rows of q, the rows of k and the options of each packed sequence; the whole if the call is dense."""
    if o.cu_seqlens_q is None or o.cu_seqlens_k is None:
        yield slice(0, T[0]), slice(0, T[1]), o
        return
    starts_q, starts_k = o.cu_seqlens_q.tolist(), o.cu_seqlens_k.tolist()
    for n in range(len(starts_q) - 1):
        alibi = None if o.alibi is None else o.alibi[n : n + 1]
        one = o._replace(cu_seqlens_q=None, cu_seqlens_k=None, alibi=alibi, first_batch=n)
        yield slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2]), one


def fwd_reference(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    o = Options(*options)  # type: ignore[arg-type]
    B, Tq, H, _ = q.shape
    out = q.new_zeros(B, Tq, H, v.shape[3])
    lse = q.new_full((B, H, Tq), -math.inf, dtype=acc_dtype(q.dtype))
    with torch.autocast(
        q.device.type, enabled=False
    ):  # it would round the operands of the products
        for rows, keys, one in sequences(o, (Tq, k.shape[1])):
            out[:, rows], lse[..., rows] = _forward(q[:, rows], k[:, keys], v[:, keys], one)
    return out, lse


def bwd_reference(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *options_and_need: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    *options, need = options_and_need
    assert isinstance(need, Sequence)
    o = Options(*options)  # type: ignore[arg-type]
    acc = acc_dtype(q.dtype)

    def zeros(needed: bool, like: Tensor | None, dtype: torch.dtype) -> Tensor:
        shape = like.shape if needed and like is not None else (0,)
        return q.new_zeros(shape, dtype=dtype)

    dq, dk, dv = (zeros(n, x, q.dtype) for n, x in zip(need[:3], (q, k, v)))
    dalibi, dbias, dsinks = (zeros(n, x, acc) for n, x in zip(need[3:], (o.alibi, o.bias, o.sinks)))
    with torch.autocast(q.device.type, enabled=False):
        for n, (rows, keys, one) in enumerate(sequences(o, (q.shape[1], k.shape[1]))):
            parts = _backward(
                dout[:, rows], None if dlse is None else dlse[..., rows], q[:, rows], k[:, keys], v[:, keys],
                out[:, rows], one, need,
            )  # fmt: skip
            for grad, part, at in zip((dq, dk, dv), parts[:3], (rows, keys, keys)):
                if part is not None:
                    grad[:, at] = part
            if parts[3] is not None:
                dalibi[slice(None) if one is o else slice(n, n + 1)] = parts[3]
            if parts[4] is not None:
                dbias += parts[4]
            if parts[5] is not None:
                dsinks += parts[5]
    return dq, dk, dv, dalibi, dbias, dsinks
