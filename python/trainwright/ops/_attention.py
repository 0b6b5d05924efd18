"""The torch ops under `flash_attention` and `flash_attention_varlen`, and their autograd function.

One pair of ops serves both. Dense: q (B, Tq, H, D), k (B, Tk, G, D), v (B, Tk, G, Dv), lse (B, H, Tq). Packed
(`cu_seqlens_*`, int32 (S + 1,), contiguous): the same with B = 1 and the sequences end to end; rows outside of
[cu_seqlens[0], cu_seqlens[S]) have out 0, lse -inf and gradients 0. B below is S then.

alibi_slopes (B, H), any strides, and sinks (H,), contiguous, in the accumulator's dtype; bias 4-D, each dim full or 1,
its own dtype, any strides, dense only; seed 0-d int64, only with dropout_p > 0; max_seqlen_* Tq, Tk in the dense form,
a bound on the lengths in the packed one; left, right -1 for no limit, right 0 for causal; softcap 0 for none.
The pair (b, h, i, j) is dropped if word j % 4 of philox(key seed, counter (j // 4, i, h, b)) is below round(dropout_p *
2^32). Backward: empty tensors for what `need` (q, k, v, alibi_slopes, bias, sinks) does not ask for; the last three in
the accumulator's dtype, the bias's summed over its broadcast dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.ops import _library
from trainwright.ops._attention_reference import Options, bwd_reference, fwd_reference
from trainwright.ops._library import acc_dtype

OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? bias, Tensor? sinks, Tensor? seed, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int left, int right, bool top_left, float softcap, "
    "float dropout_p"
)
FWD = f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)"
BWD = (
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {OPTIONS}, bool[] need) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    B, Tq, H, _ = q.shape
    return q.new_empty(B, Tq, H, v.shape[-1]), q.new_empty(B, H, Tq, dtype=acc_dtype(q.dtype))


def _bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    *options, need = rest
    o = Options(*options)

    def grad(needed: bool, like: Tensor | None, dtype: torch.dtype) -> Tensor:
        return q.new_empty(like.shape if needed and like is not None else (0,), dtype=dtype)

    acc = acc_dtype(q.dtype)
    return (
        *(grad(n, x, q.dtype) for n, x in zip(need[:3], (q, k, v))),
        *(grad(n, x, acc) for n, x in zip(need[3:], (o.alibi, o.bias, o.sinks))),
    )


def _define(name: str, schema: str, reference: _library.Op, fake: _library.Op) -> dict[str, _library.Op]:  # fmt: skip
    ops = _library.define_backends("flash_attention", name + schema, reference, fake)
    # The reference as an op of its own: it reads cu_seqlens on the host, which a compiler cannot trace.
    ops["torch"] = _library.define(f"{name}_reference{schema}", reference, fake)
    return ops


FORWARD = _define("flash_attention_fwd", FWD, fwd_reference, _fwd_fake)
BACKWARD = _define("flash_attention_bwd", BWD, bwd_reference, _bwd_fake)


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v, alibi_slopes, bias, sinks; the options that have no gradient follow."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seed: Tensor | None, numbers: Sequence[Any],
        backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tensors = (cu_seqlens_q, cu_seqlens_k, alibi, bias, sinks, seed)
        out, lse = FORWARD[backend](q, k, v, *tensors, *numbers)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.numbers, ctx.backend = numbers, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if dlse is not None:
            dlse = dlse.contiguous()
        need = list(ctx.needs_input_grad[:6])
        grads = BACKWARD[ctx.backend](dout, dlse, q, k, v, out, lse, *tensors, *ctx.numbers, need)
        grads = [g if n else None for g, n in zip(grads, need)]
        if grads[4] is not None:
            grads[4] = grads[4].to(tensors[3].dtype)
        return (*grads, *[None] * 5)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Under autocast, attention runs in the autocast dtype; fp64 stays."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    if seed is None:  # from the default generator, without reading it back to the host
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64).to(device)
    wrapped = seed & (2**64 - 1)
    wrapped -= 2**64 if wrapped >= 2**63 else 0
    return torch.tensor(wrapped, dtype=torch.int64, device=device)


def attention(
    backend: str, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: tuple[Tensor, Tensor] | None = None,
    max_seqlen: tuple[int, int], alibi_slopes: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float, window: tuple[int, int], top_left: bool, softcap: float | None, dropout_p: float, seed: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) on `backend`, of arguments that have been checked."""
    acc = acc_dtype(q.dtype)
    cu_q, cu_k = cu_seqlens or (None, None)
    if alibi_slopes is not None:
        B = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        alibi_slopes = alibi_slopes.to(acc).expand(B, q.shape[2])
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    if sinks is not None:
        sinks = sinks.to(acc).contiguous()
    if (
        torch.compiler.is_compiling()
    ):  # torch refuses one tensor as two arguments of an autograd function
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
        cu_k = cu_k.view_as(cu_k) if cu_k is not None and cu_k is cu_q else cu_k
    drawn = seed_tensor(seed, q.device) if dropout_p > 0 else None
    numbers = (*max_seqlen, float(scale), *window, top_left, float(softcap or 0.0), float(dropout_p))  # fmt: skip
    result: tuple[Tensor, Tensor] = Attention.apply(
        q, k, v, alibi_slopes, bias, sinks, cu_q, cu_k, drawn, numbers, backend
    )
    return result
