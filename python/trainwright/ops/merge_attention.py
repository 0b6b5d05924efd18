"""Attention over the union of two sets of keys, from the results over each (ring attention, split keys)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor
from trainwright.ops import _library
from trainwright.ops._attention import transforms_active
from trainwright.ops._attention_formula import vjp
from trainwright.ops._library import acc_dtype

__all__ = ["merge_attention"]

PARTS = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b"
FWD = f"merge_attention_fwd({PARTS}) -> (Tensor, Tensor)"
BWD = (
    f"merge_attention_bwd(Tensor dout, Tensor? dlse, {PARTS}, bool[] need) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of both parts, and their lse, -inf where neither has a key."""
    top = torch.maximum(lse_a, lse_b).detach()
    empty = top == -math.inf
    shift = top.masked_fill(empty, 0.0)
    a, b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = (a + b).masked_fill(empty, 1.0)
    return a / total, b / total, (shift + torch.log(total)).masked_fill(empty, -math.inf)


def _by_row(x: Tensor) -> Tensor:
    """(B, H, T) beside (B, T, H, Dv)."""
    return x.transpose(1, 2)[..., None]


def _formula(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """lse in the accumulator's dtype."""
    weight_a, weight_b, lse = _weights(lse_a, lse_b)

    def part(weight: Tensor, lse: Tensor, out: Tensor) -> Tensor:
        nothing = _by_row(lse == -math.inf)
        return _by_row(weight).masked_fill(nothing, 0.0) * out.to(lse.dtype).masked_fill(
            nothing, 0.0
        )

    out = part(weight_a, lse_a, out_a) + part(weight_b, lse_b, out_b)
    return out.to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


def _bwd_reference(
    dout: Tensor, dlse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, need: Sequence[bool]
) -> tuple[Tensor, ...]:  # fmt: skip
    acc = lse_a.dtype
    weight_a, weight_b, _ = _weights(lse_a, lse_b)
    no_a, no_b = lse_a == -math.inf, lse_b == -math.inf
    a, b = (x.to(acc).masked_fill(_by_row(no), 0.0) for x, no in ((out_a, no_a), (out_b, no_b)))
    dout = dout.to(acc)
    dot = (dout * (a - b)).sum(-1).transpose(1, 2)
    up = torch.zeros_like(lse_a) if dlse is None else dlse
    grads = (
        (_by_row(weight_a) * dout).masked_fill(_by_row(no_a), 0.0).to(out_a.dtype),
        (weight_a * (up + weight_b * dot)).masked_fill(no_a, 0.0),
        (_by_row(weight_b) * dout).masked_fill(_by_row(no_b), 0.0).to(out_b.dtype),
        (weight_b * (up - weight_a * dot)).masked_fill(no_b, 0.0),
    )
    return tuple(g if n else g.new_empty(0) for g, n in zip(grads, need))


def _fwd_fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    return out_a.new_empty(out_a.shape, dtype=dtype), lse_a.new_empty(lse_a.shape)


def _bwd_fake(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *parts, need = rest
    return tuple(x.new_empty(x.shape if n else (0,)) for x, n in zip(parts, need))


_FORWARD = _library.define_backends("merge_attention", FWD, _formula, _fwd_fake)
_BACKWARD = _library.define_backends("merge_attention", BWD, _bwd_reference, _bwd_fake)


class _Merge(torch.autograd.Function):
    """Contiguous parts on a backend with kernels; derivatives of the backward come from the formula."""

    @staticmethod
    def forward(
        ctx: Any, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, backend: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b)
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        result: tuple[Tensor, Tensor] = _FORWARD[backend](out_a, lse_a, out_b, lse_b)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        parts, need = ctx.saved_tensors, list(ctx.needs_input_grad[:4])
        if dout is None and dlse is None:
            return (None,) * 5
        grads: Sequence[Tensor | None]
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            grads = vjp(_formula, parts, (dout, dlse))
        else:
            if dout is None:
                dtype = torch.promote_types(parts[0].dtype, parts[2].dtype)
                dout = parts[0].new_zeros(parts[0].shape, dtype=dtype)
            dlse = None if dlse is None else dlse.contiguous()
            grads = _BACKWARD[ctx.backend](dout.contiguous(), dlse, *parts, need)
        return *(g if n else None for g, n in zip(grads, need)), None


@dispatch.register(
    "merge_attention",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a − lse)·out_a + exp(lse_b − lse)·out_b``. A part with lse
    −inf counts for nothing, whatever its out; two of them give (0, −inf).

    Args:
        out_a, out_b: (B, T, H, Dv), same shape and device. Keep a running result in fp32: ``merge_attention(total, lse,
            out, lse_out)`` with `total` fp32 and `out` bf16 gives fp32.
        lse_a, lse_b: (B, H, T), natural log, as `flash_attention` returns them.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        (out, lse): the dtype that out_a and out_b promote to, and fp32 (fp64 for fp64). Differentiable in all four
        arguments, any number of times; second derivatives and `torch.func` run on the torch reference.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.

    Numerics: in fp32 (fp64 for fp64), `out` rounded once to its dtype; repeats are bit-equal.

    Source: Dao et al., "FlashAttention", NeurIPS 2022 (rescaling by the log-sum-exp).

    >>> import torch, trainwright as tw
    >>> one, zero = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> tw.merge_attention(one, zero, 3 * one, zero)[0].flatten()
    tensor([2., 2.])
    """
    op = "merge_attention"
    check_tensor(op, "out_a", out_a, shape=(None,) * 4)
    check_tensor(op, "out_b", out_b, shape=out_a.shape, device=out_a.device)
    B, T, H, _ = out_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(op, name, lse, shape=(B, H, T), device=out_a.device)
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    backend = dispatch.resolve(op, backend, out_a.device, dtype)
    acc = acc_dtype(dtype)
    parts = (out_a, lse_a.to(acc), out_b, lse_b.to(acc))
    if backend == "torch" or (not torch.compiler.is_compiling() and transforms_active()):
        return _formula(*parts)
    result: tuple[Tensor, Tensor] = _Merge.apply(*(x.contiguous() for x in parts), backend)
    return result


@dispatch.self_check("merge_attention")
def _check_merge(backend: str, device: torch.device) -> list[Tensor]:
    out, lse = torch.randn(2, 1, 5, 2, 4), torch.randn(2, 1, 2, 5)
    return _library.outputs_and_gradients(
        merge_attention, backend, device, out_a=out[0], lse_a=lse[0], out_b=out[1], lse_b=lse[1]
    )
