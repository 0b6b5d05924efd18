"""Orthogonalisation of matrices by Newton-Schulz iteration, the heart of Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import (
    FLOAT_DTYPES,
    check_int,
    check_number,
    check_tensor,
    type_error,
    value_error,
)
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__ = ["newton_schulz"]

# Jordan et al. 2024: the largest slope at zero for which five steps keep every singular value near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
MAX_STEPS = 99  # as torch.optim.Muon

# x (B, M, N); coefficients: three for each step.
SCHEMA = "(Tensor x, float[] coefficients, float eps) -> Tensor"


def _reference(x: Tensor, coefficients: list[float], eps: float) -> Tensor:
    wide = x.to(acc_dtype(x.dtype))
    norm = torch.linalg.vector_norm(x.double(), dim=(1, 2), keepdim=True)
    y = (wide.double() / norm.clamp(min=eps)).to(wide.dtype)
    tall = y.shape[1] > y.shape[2]
    if tall:
        y = y.mT
    for a, b, c in zip(coefficients[::3], coefficients[1::3], coefficients[2::3]):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y.mT if tall else y).to(x.dtype).contiguous()


def _fake(x: Tensor, coefficients: list[float], eps: float) -> Tensor:
    return x.new_empty(x.shape)


NEWTON_SCHULZ = _library.define_backends(
    "newton_schulz", "newton_schulz_fwd" + SCHEMA, _reference, _fake
)


def check_coefficients(op: str, argument: str, value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise type_error(op, argument, "three numbers", type(value).__name__)
    if len(value) != 3:
        raise value_error(op, argument, "three numbers", len(value))
    for i, c in enumerate(value):
        check_number(op, f"{argument}[{i}]", c)


@dispatch.register(
    "newton_schulz",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES[:3]),
    Candidate("torch", FLOAT_DTYPES),
)
def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    eps: float = EPS,
    backend: str | None = None,
) -> Tensor:
    """Replace each matrix G = U S Vᵀ by U S' Vᵀ with every singular value of S' near 1, without a decomposition.

    ``X = G / max(‖G‖_F, eps)``, then `steps` times ``A = X Xᵀ; X = a X + (b A + c A²) X`` (on the transpose if G is
    tall). With the default coefficients and 5 steps a singular value above 0.2 % of ‖G‖_F ends between 0.7 and 1.2.

    Args:
        x: (..., M, N): any number of matrices; fp32, bf16, fp16 or fp64; any strides. It must not require a gradient
            (or call under `torch.no_grad()`): the op has none.
        steps: number of iterations, 0 to 99.
        coefficients: (a, b, c).
        eps: least norm that is divided by: a zero matrix stays zero.
        backend: None, "cpu", "triton" or "torch".

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape; x requires a gradient.
        trainwright.BackendError: no backend can run the call.

    Numerics: norms in fp64, so that no scale of G overflows or vanishes. "cpu" and "torch": every intermediate matrix
    in fp32 (fp64 for fp64), whatever the dtype of x, rounded once at the end. "triton": intermediate matrices in x's
    dtype, sums in fp32. A matrix has the same bits alone and in any batch, for any thread count; repeats are bit-equal.
    NaN or inf spreads over its own matrix only.

    Cost: 15 m²n + 5 m³ FLOPs for 5 steps, m ≤ n: of the symmetric products only one triangle is computed.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    >>> import torch, trainwright as tw
    >>> tw.newton_schulz(torch.tensor([[30.0, 0.0, 0.0], [0.0, 40.0, 0.0]])).round(decimals=1)
    tensor([[0.7000, 0.0000, 0.0000],
            [0.0000, 1.1000, 0.0000]])
    """
    op = "newton_schulz"
    check_tensor(op, "x", x, min_dim=2)
    check_int(op, "steps", steps, minimum=0)
    if steps > MAX_STEPS:
        raise value_error(op, "steps", f"at most {MAX_STEPS}", steps)
    check_coefficients(op, "coefficients", coefficients)
    check_number(op, "eps", eps, minimum=0.0)
    if x.requires_grad and torch.is_grad_enabled():
        raise value_error(op, "x", "a tensor without gradient (x.detach())", "requires_grad=True")
    chosen = dispatch.resolve(op, backend, x.device, x.dtype)
    flat = [float(c) for c in coefficients] * steps
    batch = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return NEWTON_SCHULZ[chosen](batch, flat, float(eps)).view(x.shape)


@dispatch.self_check("newton_schulz")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    wide, tall = torch.randn(2, 20, 33).to(device), torch.randn(33, 20).to(device)
    return [newton_schulz(wide, backend=backend), newton_schulz(tall, backend=backend)]
