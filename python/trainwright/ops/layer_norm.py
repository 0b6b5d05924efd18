"""Layer norm over the last dimension, optionally with a residual addition in front."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_number, check_tensor
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__ = ["layer_norm"]

FWD = (
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor)"
)
BWD = (
    "(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor stats, bool need_dx, bool need_dw) "
    "-> (Tensor, Tensor, Tensor)"
)


def _fwd_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    h = total.to(acc_dtype(x.dtype))
    mean = h.mean(-1, keepdim=True)
    low = (h - mean).mean(-1, keepdim=True)  # what rounding took from the mean
    centred = (h - mean) - low
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight.to(h.dtype)
    if bias is not None:
        y = y + bias.to(h.dtype)
    stats = torch.cat((mean, low, rstd), -1).reshape(-1, 3)
    return y.to(x.dtype), x.new_empty(0) if residual is None else total, stats


def _bwd_reference(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g = dy.to(stats.dtype)
    mean, low, rstd = stats.view(*x.shape[:-1], 3).split(1, -1)
    xhat = ((x.to(stats.dtype) - mean) - low) * rstd
    dx, dw, db = x.new_empty(0), g.new_empty(0), g.new_empty(0)
    if need_dw:
        dw = (g * xhat).reshape(stats.shape[0], x.shape[-1]).sum(0)
        db = g.reshape(stats.shape[0], x.shape[-1]).sum(0)
    if need_dx:
        g = g if weight is None else g * weight.to(g.dtype)
        d = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
        dx = (d if dsum is None else d + dsum.to(g.dtype)).to(x.dtype)
    return dx, dw, db


def _fwd_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), total, x.new_empty((rows, 3), dtype=acc_dtype(x.dtype))


def _bwd_fake(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    size = x.shape[-1] if need_dw else 0
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    return dx, stats.new_empty(size), stats.new_empty(size)


_FORWARD = _library.define_backends("layer_norm", "layer_norm_fwd" + FWD, _fwd_reference, _fwd_fake)
_BACKWARD = _library.define_backends(
    "layer_norm", "layer_norm_bwd" + BWD, _bwd_reference, _bwd_fake
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        w = None if weight is None else weight.contiguous()
        b = None if bias is None else bias.contiguous()
        y, total, stats = _FORWARD[backend](x, residual, w, b, eps)
        ctx.save_for_backward(x if residual is None else total, w, stats)
        ctx.backend, ctx.has_residual = backend, residual is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> Any:
        x, weight, stats = ctx.saved_tensors
        need_x, need_residual, need_w, need_b = ctx.needs_input_grad[:4]
        if not ctx.has_residual:
            dsum = None
        if dy is None:  # only the sum was used
            return dsum, dsum, None, None, None, None
        dsum = None if dsum is None else dsum.contiguous()
        dx, dw, db = _BACKWARD[ctx.backend](
            dy.contiguous(), dsum, x, weight, stats, need_x or need_residual, need_w or need_b
        )
        return (
            dx if need_x else None,
            dx if need_residual else None,
            dw.to(weight.dtype) if need_w else None,
            db.to(ctx.bias_dtype) if need_b else None,
            None,
            None,
        )


@dispatch.register(
    "layer_norm",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES[:3], limits=(("C", 12288),)),
    Candidate("cuda", (torch.float64,), limits=(("C", 6144),)),
    Candidate("triton", FLOAT_DTYPES, limits=(("C", 65536),)),
    Candidate("torch", FLOAT_DTYPES),
)
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm over the last dimension.

    ``y = (h - mean(h)) / sqrt(var(h) + eps) · weight + bias`` with ``h = x + residual`` and the biased variance.

    Args:
        x: (..., C); fp32, bf16, fp16 or fp64; any strides.
        weight: (C,), any of those dtypes, or None for no scaling.
        bias: (C,), any of those dtypes, or None for no shift; it needs no weight.
        eps: added to the variance; at least 0.
        residual: same shape, dtype and device as x. It is added in x's dtype (rounded once) before the norm.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        y, shape and dtype of x; with `residual`, the pair ``(y, x + residual)``.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: statistics and products in fp32 (fp64 for fp64), rounded once to x's dtype. The variance takes a second
    pass over the row, which also corrects the rounding of the mean: rows with a large common offset keep full accuracy.
    The gradients of weight and bias are summed in fp32 in an order that depends on the number of rows alone. Under
    autocast the input dtype is kept.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    >>> import torch, trainwright as tw
    >>> tw.layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    check_tensor("layer_norm", "x", x, min_dim=1)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_tensor("layer_norm", name, vector, shape=(x.shape[-1],), device=x.device)
    if residual is not None:
        check_tensor(
            "layer_norm", "residual", residual, dtypes=(x.dtype,), shape=x.shape, device=x.device
        )
    check_number("layer_norm", "eps", eps, minimum=0.0)
    chosen = dispatch.resolve("layer_norm", backend, x.device, x.dtype, C=x.shape[-1])
    y, total = _LayerNorm.apply(x, residual, weight, bias, float(eps), chosen)
    return y if residual is None else (y, total)


@dispatch.self_check("layer_norm")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    x, residual, weight, bias = (torch.randn(*shape) for shape in ((5, 33), (5, 33), (33,), (33,)))
    return _library.outputs_and_gradients(
        layer_norm, backend, device, x=x, residual=residual, weight=weight, bias=bias
    )
