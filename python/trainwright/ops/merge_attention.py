"""Attention over the union of two sets of keys, from the results over each (ring attention, split keys)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__ = ["merge_attention"]


@dispatch.register("merge_attention", Candidate("torch", FLOAT_DTYPES))
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
        backend: None or "torch".

    Returns:
        (out, lse): the dtype that out_a and out_b promote to, and fp32 (fp64 for fp64). Differentiable in all four
        arguments, any number of times.

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
    dispatch.resolve(op, backend, out_a.device, dtype)
    acc = acc_dtype(dtype)
    a, b = lse_a.to(acc), lse_b.to(acc)
    top = torch.maximum(a, b).detach()
    empty = top == -math.inf
    shift = top.masked_fill(empty, 0.0)
    weight_a, weight_b = torch.exp(a - shift), torch.exp(b - shift)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)

    def part(weight: Tensor, lse: Tensor, out: Tensor) -> Tensor:
        nothing = (lse == -math.inf).transpose(1, 2)[..., None]
        share = (weight / total).transpose(1, 2)[..., None]
        return share.masked_fill(nothing, 0.0) * out.to(acc).masked_fill(nothing, 0.0)

    out = part(weight_a, a, out_a) + part(weight_b, b, out_b)
    lse = (shift + torch.log(total)).masked_fill(empty, -math.inf)
    return out.to(dtype), lse


@dispatch.self_check("merge_attention")
def _check_merge(backend: str, device: torch.device) -> list[Tensor]:
    out, lse = torch.randn(2, 1, 5, 2, 4), torch.randn(2, 1, 2, 5)
    return _library.outputs_and_gradients(
        merge_attention, backend, device, out_a=out[0], lse_a=lse[0], out_b=out[1], lse_b=lse[1]
    )
