"""RMS norm over the last dimension, optionally with a residual addition in front.

Schema, torch reference, fake, autograd, public function, in that order: every op file reads like this one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_number, check_tensor
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__ = ["rms_norm"]

FWD = "(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset) -> (Tensor, Tensor, Tensor)"
BWD = (
    "(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, bool need_dx, bool need_dw) "
    "-> (Tensor, Tensor)"
)


def _fwd_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    h = total.to(acc_dtype(x.dtype))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = h * rstd
    if weight is not None:
        y = y * (weight.to(h.dtype) + weight_offset)
    return y.to(x.dtype), x.new_empty(0) if residual is None else total, rstd.flatten()


def _bwd_reference(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, g, rstd = x.to(rstd.dtype), dy.to(rstd.dtype), rstd.view(*x.shape[:-1], 1)
    dx, dw = x.new_empty(0), h.new_empty(0)
    if need_dw:
        dw = (g * h * rstd).reshape(rstd.numel(), x.shape[-1]).sum(0)
    if need_dx:
        g = g if weight is None else g * (weight.to(h.dtype) + weight_offset)
        d = rstd * (g - h * rstd.square() * (g * h).mean(-1, keepdim=True))
        dx = (d if dsum is None else d + dsum.to(h.dtype)).to(x.dtype)
    return dx, dw


def _fwd_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), total, x.new_empty(rows, dtype=acc_dtype(x.dtype))


def _bwd_fake(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    return dx, rstd.new_empty(x.shape[-1] if need_dw else 0)


_FORWARD = _library.define_backends("rms_norm", "rms_norm_fwd" + FWD, _fwd_reference, _fwd_fake)
_BACKWARD = _library.define_backends("rms_norm", "rms_norm_bwd" + BWD, _bwd_reference, _bwd_fake)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        w = None if weight is None else weight.contiguous()
        y, total, rstd = _FORWARD[backend](x, residual, w, eps, weight_offset)
        ctx.save_for_backward(x if residual is None else total, w, rstd)
        ctx.weight_offset, ctx.backend, ctx.has_residual = (
            weight_offset,
            backend,
            residual is not None,
        )
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> Any:
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_w = ctx.needs_input_grad[:3]
        if not ctx.has_residual:
            dsum = None
        if dy is None:  # only the sum was used
            return dsum, dsum, None, None, None, None
        dsum = None if dsum is None else dsum.contiguous()
        dx, dw = _BACKWARD[ctx.backend](
            dy.contiguous(),
            dsum,
            x,
            weight,
            rstd,
            ctx.weight_offset,
            need_x or need_residual,
            need_w,
        )
        return (
            dx if need_x else None,
            dx if need_residual else None,
            dw.to(weight.dtype) if need_w else None,
            None,
            None,
            None,
        )


@dispatch.register(
    "rms_norm",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES[:3], limits=(("C", 24576),)),
    Candidate("cuda", (torch.float64,), limits=(("C", 12288),)),
    Candidate("triton", FLOAT_DTYPES, limits=(("C", 65536),)),
    Candidate("torch", FLOAT_DTYPES),
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square layer norm over the last dimension.

    ``y = h / sqrt(mean(h²) + eps) · (weight + weight_offset)`` with ``h = x + residual``.

    Args:
        x: (..., C); fp32, bf16, fp16 or fp64; any strides.
        weight: (C,), any of those dtypes, or None for no scaling.
        eps: added to the mean square; at least 0.
        residual: same shape, dtype and device as x. It is added in x's dtype (rounded once) before the norm.
        weight_offset: added to the weight, e.g. 1.0 for Gemma.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        y, shape and dtype of x; with `residual`, the pair ``(y, x + residual)``.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: statistics and products in fp32 (fp64 for fp64), rounded once to x's dtype; the weight gradient is summed
    in fp32 in a fixed order, so repeats are bit-equal. Under autocast the input dtype is kept.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.

    >>> import torch, trainwright as tw
    >>> tw.rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.8485, 1.1314])
    """
    check_tensor("rms_norm", "x", x, min_dim=1)
    if weight is not None:
        check_tensor("rms_norm", "weight", weight, shape=(x.shape[-1],), device=x.device)
    if residual is not None:
        check_tensor(
            "rms_norm", "residual", residual, dtypes=(x.dtype,), shape=x.shape, device=x.device
        )
    check_number("rms_norm", "eps", eps, minimum=0.0)
    check_number("rms_norm", "weight_offset", weight_offset)
    chosen = dispatch.resolve("rms_norm", backend, x.device, x.dtype, C=x.shape[-1])
    y, total = _RMSNorm.apply(x, residual, weight, float(eps), float(weight_offset), chosen)
    return y if residual is None else (y, total)


@dispatch.self_check("rms_norm")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    x, residual, weight = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33)
    return _library.outputs_and_gradients(
        rms_norm, backend, device, x=x, residual=residual, weight=weight
    )
