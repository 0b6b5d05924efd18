"""Rotary position embedding of queries and keys in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_bool, check_tensor, value_error
from trainwright.ops import _library

__all__ = ["rope"]

# `inverse` rotates the other way, which is the gradient: one op serves forward and backward.
SCHEMA = (
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, bool inverse) "
    "-> (Tensor, Tensor)"
)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, T, H, D); cos, sin (..., T, 1, R / 2) in the dtype of the arithmetic."""
    half = cos.shape[-1]
    h, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :]
    a, b = (h[..., 0::2], h[..., 1::2]) if interleaved else (h[..., :half], h[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((y.to(x.dtype), rest), -1).contiguous()


def _reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    acc = _library.acc_dtype(q.dtype)
    c, s = cos.to(acc).unsqueeze(-2), sin.to(acc).unsqueeze(-2)
    s = -s if inverse else s
    k_out = q.new_empty(0) if k is None else _rotate(k, c, s, interleaved)
    return _rotate(q, c, s, interleaved), k_out


def _fake(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


_ROPE = _library.define_backends("rope", "rope" + SCHEMA, _reference, _fake)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.backend = interleaved, backend
        ctx.set_materialize_grads(False)
        return _ROPE[backend](q, k, cos, sin, interleaved, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> Any:
        cos, sin = ctx.saved_tensors
        dq = dq if ctx.needs_input_grad[0] else None
        dk = dk if ctx.needs_input_grad[1] else None
        if dq is None and dk is not None:
            dk, _ = _ROPE[ctx.backend](dk, None, cos, sin, ctx.interleaved, True)
        elif dq is not None:
            dq, out = _ROPE[ctx.backend](dq, dk, cos, sin, ctx.interleaved, True)
            dk = None if dk is None else out
        return dq, dk, None, None, None, None


def _check_table(name: str, table: Tensor, q: Tensor, cos: Tensor) -> None:
    check_tensor("rope", name, table, device=q.device)
    B, T, D = q.shape[0], q.shape[1], q.shape[3]
    half = table.shape[-1] if table.dim() else 0
    if tuple(table.shape) not in ((T, half), (B, T, half)) or 2 * half > D:
        wanted = f"shape ({T}, R/2) or ({B}, {T}, R/2) with R <= {D}"
        raise value_error("rope", name, wanted, tuple(table.shape))
    if table.shape != cos.shape or table.dtype != cos.dtype:
        wanted = f"the shape and dtype of cos, {tuple(cos.shape)} {cos.dtype}"
        raise value_error("rope", name, wanted, f"{tuple(table.shape)} {table.dtype}")
    if table.requires_grad and torch.is_grad_enabled():
        raise value_error("rope", name, "a table without gradient", "requires_grad=True")


@dispatch.register(
    "rope",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES, limits=(("D", 4096),)),
    Candidate("triton", FLOAT_DTYPES, limits=(("D", 4096),)),
    Candidate("torch", FLOAT_DTYPES),
)
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys.

    Of every head the first R elements are rotated in pairs, the rest passes through; for the pair (a, b) number p at
    position t: ``a' = a · cos[t, p] - b · sin[t, p]``, ``b' = b · cos[t, p] + a · sin[t, p]``.

    Args:
        q: (B, T, H, D); fp32, bf16, fp16 or fp64. Any strides; slices of a fused projection whose heads are contiguous
            inside are read where they are.
        k: (B, T, G, D), dtype and device of q.
        cos: (T, R/2), or (B, T, R/2) where positions differ within the batch; R <= D; any of those dtypes.
        sin: shape and dtype of cos. The tables get no gradient: one that requires it is a ValueError.
        interleaved: pairs are (2p, 2p + 1) instead of (p, p + R/2).
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        The rotated q and k, contiguous, in their own dtype.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: computed in fp32 (fp64 for fp64), rounded once. The gradient is the rotation the other way: only the
    tables are kept for it. Under autocast the input dtype is kept.

    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.

    >>> import math, torch, trainwright as tw
    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> q, k = tw.rope(x, x, torch.tensor([[0.0]]), torch.tensor([[1.0]]))  # a quarter turn
    >>> q.flatten()
    tensor([0., 1.])
    """
    check_tensor("rope", "q", q, shape=(None, None, None, None))
    B, T, _, D = q.shape
    check_tensor("rope", "k", k, dtypes=(q.dtype,), shape=(B, T, None, D), device=q.device)
    _check_table("cos", cos, q, cos)
    _check_table("sin", sin, q, cos)
    check_bool("rope", "interleaved", interleaved)
    chosen = dispatch.resolve("rope", backend, q.device, q.dtype, D=D)
    return _Rope.apply(q, k, cos, sin, interleaved, chosen)


@dispatch.self_check("rope")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    angle = torch.rand(3, 4).to(device)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    q, k = torch.randn(2, 3, 4, 10), torch.randn(2, 3, 2, 10)
    return _library.outputs_and_gradients(rope, backend, device, tables, q=q, k=k)
