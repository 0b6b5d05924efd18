"""Attention as a formula of differentiable torch ops: what forward mode and second derivatives are computed from.

The kernels give the value and the first derivative. Everything beyond those is a vector-Jacobian product of `formula`,
so it needs the (Tq, Tk) matrix in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.ops._attention_reference import (
    Options,
    alibi_distance,
    by_head,
    kept_weights,
    sequences,
    visible,
)
from trainwright.ops._library import acc_dtype

Maybe = Tensor | None


def _over_seen(a: Tensor, b: Tensor, seen: Tensor, scores: bool) -> Tensor:
    """The products of q (i, d), k (j, d) (`scores`) or of p (i, j), v (j, d). A pair (i, j) that is not seen must
    pass nothing on, backwards neither, and 0 times inf or NaN is NaN: with such operands each pair is taken apart."""
    if bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return a @ b.transpose(-1, -2) if scores else a @ b
    a = torch.where(seen[..., None], a.unsqueeze(-2 if scores else -1), 0.0)
    b = torch.where(seen[..., None], b.unsqueeze(-3), 0.0)
    return (a * b).sum(-1 if scores else -2)


def _one(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    H, acc = q.shape[2], acc_dtype(q.dtype)
    seen = visible(q, k, o)
    by_query, by_key = seen.any(-1, keepdim=True), seen.any(-2)[..., None]
    empty = ~by_query[..., 0]
    # Rows that nobody sees, or that see nothing, may hold inf or NaN, which times a gradient of 0 is NaN.
    q_, k_, v_ = by_head(q, H), by_head(k, H), by_head(v, H)
    q_, k_, v_ = (torch.where(m, x, 0.0) for m, x in ((by_query, q_), (by_key, k_), (by_key, v_)))
    s = _over_seen(q_, k_, seen, True) * o.scale
    if o.softcap > 0.0:
        s = o.softcap * torch.tanh(s / o.softcap)
    if o.bias is not None:
        s = s + o.bias.to(acc)
    if o.alibi is not None:
        s = s - o.alibi.to(acc)[..., None, None] * alibi_distance(q, k)
    s = s.masked_fill(~seen, -math.inf).masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(s, -1)
    p = torch.softmax(s, -1)
    if o.sinks is not None:
        p = p * torch.sigmoid(lse - o.sinks.to(acc)[:, None])[..., None]
    p = p.masked_fill(~seen, 0.0) * kept_weights(s.shape, o, acc)
    out = _over_seen(p, v_, seen, False).transpose(1, 2).to(q.dtype)
    return out, lse.masked_fill(empty, -math.inf)


def formula(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) as `flash_attention_fwd` gives them."""
    if o.cu_seqlens_q is None:
        return _one(q, k, v, o)
    (_, T, H, _), Dv = q.shape, v.shape[-1]
    nothing = q.new_zeros(1, T, H, Dv), q.new_full((1, H, T), -math.inf, dtype=acc_dtype(q.dtype))
    outs, lses, done = [], [], 0
    for rows, keys, one in sequences(o, (T, k.shape[1])):
        out, lse = _one(q[:, rows], k[:, keys], v[:, keys], one)
        outs += [nothing[0][:, done : rows.start], out]
        lses += [nothing[1][..., done : rows.start], lse]
        done = rows.stop
    outs, lses = [*outs, nothing[0][:, done:]], [*lses, nothing[1][..., done:]]
    return torch.cat(outs, 1), torch.cat(lses, 2)


Function = Callable[..., tuple[Tensor, ...]]


def _of_present(
    function: Callable[..., Sequence[Maybe]], inputs: Sequence[Maybe], wanted: Sequence[bool]
) -> tuple[Function, list[Tensor]]:
    """`function` of those of its arguments that are tensors, returning the wanted results; those arguments."""

    def call(*present: Tensor) -> tuple[Tensor, ...]:
        left = iter(present)
        results = function(*(None if x is None else next(left) for x in inputs))
        return tuple(r for r, w in zip(results, wanted, strict=True) if w and r is not None)

    return call, [x for x in inputs if x is not None]


def _spread(results: Sequence[Tensor], where: Sequence[bool]) -> list[Maybe]:
    left = iter(results)
    return [next(left) if w else None for w in where]


def _exact(inputs: Sequence[Maybe]) -> torch.autocast:
    """Autocast would round the operands of the products, and of those of their gradients."""
    device = next(x.device.type for x in inputs if x is not None)
    return torch.autocast(device, enabled=False)


def vjp(
    function: Callable[..., Sequence[Maybe]], inputs: Sequence[Maybe], upstream: Sequence[Maybe]
) -> list[Maybe]:
    """The gradient of sum(function(*inputs) * upstream) by each input; None stands for an absent one."""
    call, present = _of_present(function, inputs, [u is not None for u in upstream])
    with _exact(inputs):
        _, pull_back = _functional_vjp(call, present)
        grads = pull_back(tuple(u for u in upstream if u is not None))
    return _spread(grads, [x is not None for x in inputs])


def jvp(
    function: Callable[..., Sequence[Maybe]], inputs: Sequence[Maybe], tangents: Sequence[Maybe],
    wanted: Sequence[bool],
) -> list[Maybe]:  # fmt: skip
    """The derivative of each wanted result of `function` along `tangents`, as the transpose of its transpose: forward
    mode itself does not nest."""
    call, present = _of_present(function, inputs, wanted)
    moving = [torch.zeros_like(x) if t is None else t for x, t in zip(inputs, tangents) if x is not None]  # fmt: skip
    with _exact(inputs):
        results, pull_back = _functional_vjp(call, present)
        zeros = [torch.zeros_like(r) for r in results]
        _, transpose = _functional_vjp(lambda *u: pull_back(u), zeros)
        along = transpose(tuple(moving))
    return _spread(along, wanted)


def _functional_vjp(function: Function, at: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Any]:
    results, pull_back = torch.func.vjp(function, *at)[:2]
    return results, pull_back
