"""The torch ops under `flash_attention` and `flash_attention_varlen`, and their autograd function.

One pair of ops serves both. Dense: q (B, Tq, H, D), k (B, Tk, G, D), v (B, Tk, G, Dv), lse (B, H, Tq). Packed
(`cu_seqlens_*`, int32 (S + 1,), contiguous): the same with B = 1 and the sequences end to end; rows outside of
[cu_seqlens[0], cu_seqlens[S]) have out 0, lse -inf and gradients 0. B below is S then.

alibi_slopes (B, H), any strides, and sinks (H,), contiguous, in the accumulator's dtype; bias 4-D, each dim full or 1,
its own dtype, any strides, dense only; seed int64 (2,): the seed and the first head, only with dropout_p > 0;
max_seqlen_* Tq, Tk in the dense form, a bound on the lengths in the packed one; left, right -1 for no limit, right 0
for causal; softcap 0 for none. The pair (b, h, i, j) is dropped if word j % 4 of philox(key seed[0], counter (j // 4,
i, seed[1] + h, b)) is below round(dropout_p * 2^32). Backward: empty tensors for what `need` (q, k, v, alibi_slopes,
bias, sinks) does not ask for; the last three in the accumulator's dtype, the bias's summed over its broadcast dims.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from trainwright import dispatch
from trainwright.ops import _library
from trainwright.ops._attention_formula import formula, jvp, vjp
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


# The arguments of both autograd functions end in those without a gradient: cu_seqlens_q, cu_seqlens_k, seed, the
# numbers of the schema (a tuple) and the backend.
Fixed = tuple[Tensor | None, Tensor | None, Tensor | None, Sequence[Any], str]


def _tensors(alibi: Any, bias: Any, sinks: Any, fixed: Fixed) -> tuple[Tensor | None, ...]:
    """The optional tensors in the order of the schema."""
    return (*fixed[:2], alibi, bias, sinks, fixed[2])


def _forward_formula(
    q: Tensor, k: Tensor, v: Tensor, alibi: Any, bias: Any, sinks: Any, fixed: Fixed
) -> tuple[Tensor, Tensor]:
    o = Options(*_tensors(alibi, bias, sinks, fixed), *fixed[3])  # type: ignore[arg-type]
    return formula(q, k, v, o)


def _backward_formula(dout: Any, dlse: Any, *inputs: Any, fixed: Fixed) -> list[Tensor | None]:
    return vjp(functools.partial(_forward_formula, fixed=fixed), inputs, (dout, dlse))


def _one_by_one(apply: Any, size: int, in_dims: Any, args: Any) -> tuple[Any, Any]:
    """A vmap rule: one call per element, with the bits of those calls."""
    calls = []
    for i in range(size):
        one = [x.select(d, i) if isinstance(d, int) else x for x, d in zip(args, in_dims)]
        calls.append(apply(*one))
    results = [None if r[0] is None else torch.stack(r) for r in zip(*calls)]
    return tuple(results), tuple(None if r is None else 0 for r in results)


_NONE = (None,) * 5
_PLAIN = (True, True, True, False, False, False)


def _wanted(
    grads: Sequence[Tensor], need: Sequence[bool], bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What the backward op gives, with None for what is not needed."""
    if tuple(need) == _PLAIN:
        return *grads[:3], None, None, None
    dq, dk, dv, dalibi, dbias, dsinks = (g if n else None for g, n in zip(grads, need))
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    return dq, dk, dv, dalibi, dbias, dsinks


class AttentionBackward(torch.autograd.Function):
    """Gradients of (out, lse) by q, k, v, alibi_slopes, bias, sinks, None where `need` is False. Its own derivatives
    come from the formula."""

    @staticmethod
    def forward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None, bias: Tensor | None,
        sinks: Tensor | None, out: Tensor, lse: Tensor, need: Sequence[bool], *fixed: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        tensors = _tensors(alibi, bias, sinks, fixed)
        dlse = None if dlse is None else dlse.contiguous()
        grads = BACKWARD[fixed[4]](dout, dlse, q, k, v, out, lse, *tensors, *fixed[3], list(need))
        return _wanted(grads, need, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (*differentiable, _, _, ctx.need), fixed = inputs[:11], inputs[11:]
        ctx.save_for_backward(*differentiable, *fixed[:3])
        ctx.save_for_forward(*differentiable, *fixed[:3])
        ctx.plain = fixed[3:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        saved = ctx.saved_tensors  # once: checkpointing recomputes at the first access
        inputs, fixed = saved[:8], (*saved[8:], *ctx.plain)
        function = functools.partial(_backward_formula, fixed=fixed)
        if all(u is None for u in upstream):
            return (None,) * 16
        return *vjp(function, inputs, upstream), *[None] * 8

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        inputs, fixed = saved[:8], (*saved[8:], *ctx.plain)
        function = functools.partial(_backward_formula, fixed=fixed)
        return tuple(jvp(function, inputs, tangents[:8], ctx.need))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(AttentionBackward.apply, info.batch_size, in_dims, args)


def transforms_active() -> bool:
    """Whether torch.func or forward mode is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v, alibi_slopes, bias, sinks, in eager and under torch.compile."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seed: Tensor | None, numbers: Sequence[Any],
        backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tensors = (cu_seqlens_q, cu_seqlens_k, alibi, bias, sinks, seed)
        out, lse = FORWARD[backend](q, k, v, *tensors, *numbers)
        ctx.save_for_backward(
            q, k, v, alibi, bias, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, seed
        )
        ctx.plain = numbers, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # once: checkpointing recomputes at the first access
        q, k, v, alibi, bias, sinks, out, lse, cu_q, cu_k, seed = saved
        numbers, backend = ctx.plain
        need = ctx.needs_input_grad[:6]
        if dout is None:
            dout = torch.zeros_like(out)
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transforms_active()):
            grads = AttentionBackward.apply(
                dout, dlse, *saved[:8], need, cu_q, cu_k, seed, numbers, backend
            )
            return *grads, *_NONE
        grads = BACKWARD[backend](
            dout, None if dlse is None else dlse.contiguous(), q, k, v, out, lse, cu_q, cu_k, alibi, bias, sinks, seed,
            *numbers, need,
        )  # fmt: skip
        return *_wanted(grads, need, bias), *_NONE


class TransformedAttention(torch.autograd.Function):
    """`Attention` for torch.func and forward mode, which want another interface, with forward mode by the formula. That
    interface costs 70 us a call, and torch.compile does not take a function with a forward mode."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, alibi, bias, sinks = args[:6]
        tensors = _tensors(alibi, bias, sinks, args[6:])
        result: tuple[Tensor, Tensor] = FORWARD[args[10]](q, k, v, *tensors, *args[9])
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:6], *output, *inputs[6:9])
        ctx.save_for_forward(*inputs[:6], *output, *inputs[6:9])
        ctx.plain = inputs[9:]
        ctx.set_materialize_grads(False)

    backward = Attention.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        function = functools.partial(_forward_formula, fixed=(*saved[8:], *ctx.plain))
        return tuple(jvp(function, saved[:6], tangents[:6], (True, True)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(TransformedAttention.apply, info.batch_size, in_dims, args)


def seed_tensor(seed: int | None, first_head: int, device: torch.device) -> Tensor:
    if seed is None:  # from the default generator, without reading it back to the host
        drawn = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
        return torch.cat((drawn, drawn.new_full((1,), first_head))).to(device)
    wrapped = seed & (2**64 - 1)
    wrapped -= 2**64 if wrapped >= 2**63 else 0
    return torch.tensor((wrapped, first_head), dtype=torch.int64, device=device)


_TERMS = ("softcap", "dropout_p", "alibi_slopes", "bias", "sinks")


def attention(
    op: str, backend: str | None, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: tuple[Tensor, Tensor] | None = None,
    max_seqlen: tuple[int, int], alibi_slopes: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float, window: tuple[int, int], top_left: bool, softcap: float | None, dropout_p: float, seed: int | None,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of arguments that have been checked, on the backend that `dispatch` chooses for `op`."""
    sizes = {"D": q.shape[-1], "Dv": v.shape[-1]}
    if cu_seqlens is not None:
        sizes["varlen"] = 1
    terms = alibi_slopes, bias, sinks
    if softcap or dropout_p or not (alibi_slopes is bias is sinks is None):
        used = zip(_TERMS, (softcap, dropout_p or None, *terms))
        sizes |= {option: 1 for option, value in used if value is not None}
    chosen = dispatch.resolve(op, backend, q.device, q.dtype, **sizes)
    cu_q, cu_k = cu_seqlens if cu_seqlens is not None else (None, None)
    if alibi_slopes is not None:
        B = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        alibi_slopes = alibi_slopes.to(acc_dtype(q.dtype)).expand(B, q.shape[2])
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    if sinks is not None:
        sinks = sinks.to(acc_dtype(q.dtype)).contiguous()
    drawn = seed_tensor(seed, first_head, q.device) if dropout_p > 0 else None
    numbers = (*max_seqlen, scale, *window, top_left, float(softcap or 0.0), float(dropout_p))
    compiling = torch.compiler.is_compiling()
    if compiling:  # torch refuses one tensor as two arguments of an autograd function
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
        cu_k = cu_k.view_as(cu_k) if cu_k is not None and cu_k is cu_q else cu_k
    result: tuple[Tensor, Tensor]
    if not compiling and transforms_active():
        function: Any = TransformedAttention
    elif compiling or (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad or _any_wants(terms))
    ):
        function = Attention
    else:  # an autograd function costs as much as a short call
        result = FORWARD[chosen](q, k, v, cu_q, cu_k, alibi_slopes, bias, sinks, drawn, *numbers)
        return result
    result = function.apply(q, k, v, alibi_slopes, bias, sinks, cu_q, cu_k, drawn, numbers, chosen)
    return result


def _any_wants(tensors: Sequence[Tensor | None]) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)
