"""Linear layer with bias, activation and residual addition in the epilogue of the matrix product."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate, Yield
from trainwright.errors import FLOAT_DTYPES, check_tensor, type_error, value_error
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype
from trainwright.ops._packed_weights import product_with
from trainwright.ops.gemm import ACTIVATIONS, GEMM

__all__ = ["linear"]

BWD = "(Tensor dy, Tensor? pre, int activation, bool with_bias) -> (Tensor, Tensor)"


def _activation_bwd(dy: Tensor, z: Tensor, activation: int) -> Tensor:
    if activation == 1:
        return torch.ops.aten.threshold_backward(dy, z, 0.0)
    if activation == 2:
        return torch.ops.aten.gelu_backward(dy, z)
    if activation == 4:
        return torch.ops.aten.silu_backward(dy, z)
    dy, z16, z = dy.to(acc_dtype(z.dtype)), z, z.to(acc_dtype(z.dtype))
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (z + 0.044715 * z**3))
    inner = z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z)
    inner = torch.where(t.abs() == 1, 0.0, inner)  # aten's gelu_backward has inf * 0 far out
    return (dy * (0.5 * (1 + t) + 0.5 * inner)).to(z16.dtype)


def _bwd_reference(
    dy: Tensor, pre: Tensor | None, activation: int, with_bias: bool
) -> tuple[Tensor, Tensor]:
    dz = dy if pre is None else _activation_bwd(dy, pre, activation)
    acc = acc_dtype(dy.dtype)
    dbias = dz.sum(0, dtype=acc) if with_bias else dz.new_empty((0, dy.shape[1]), dtype=acc)
    return dy.new_empty(0) if pre is None else dz, dbias


def _bwd_fake(
    dy: Tensor, pre: Tensor | None, activation: int, with_bias: bool
) -> tuple[Tensor, Tensor]:
    shape = (dy.shape[1],) if with_bias else (0, dy.shape[1])
    dbias = dy.new_empty(shape, dtype=acc_dtype(dy.dtype))
    return dy.new_empty(0) if pre is None else torch.empty_like(dy), dbias


_BACKWARD = _library.define_backends("linear", "linear_bwd" + BWD, _bwd_reference, _bwd_fake)


class _Linear(torch.autograd.Function):
    """x (M, K), residual (M, N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int, backend: str
    ) -> Tensor:  # fmt: skip
        if bias is not None:
            bias = bias.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        # The slope of relu can be read off its result: one tensor less to keep.
        reuse = activation == ACTIVATIONS["relu"] and residual is None
        need_pre = activation != 0 and (need_x or need_weight or need_bias)
        y, pre = product_with(weight, backend)(
            x, weight.t(), bias, residual, activation, x.dtype, need_pre and not reuse
        )
        ctx.save_for_backward(
            x if need_weight else None,
            weight if need_x else None,
            None if not need_pre else y if reuse else pre,
        )
        ctx.activation, ctx.backend = activation, backend
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, pre = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
        product = GEMM[ctx.backend]
        dz, dx, dw, dbias = dy, None, None, None
        if pre is not None or need_bias:
            slope, dbias = _BACKWARD[ctx.backend](dy.contiguous(), pre, ctx.activation, need_bias)
            dz = dy if pre is None else slope
            dbias = dbias.to(dy.dtype) if need_bias else None
        if need_x:
            dx, _ = product_with(weight, ctx.backend)(dz, weight, None, None, 0, dz.dtype, False)
        if need_weight:
            dw, _ = product(dz.t(), x, None, None, 0, dz.dtype, False)
        return dx, dw, dbias, dy if need_residual else None, None, None


def _autocast(x: Tensor, other: Tensor | None) -> Tensor | None:
    """`other` in the dtype that autocast for x's device asks for; fp64 and integers stay."""
    if other is None or not other.is_floating_point() or other.dtype == torch.float64:
        return other
    return other.to(torch.get_autocast_dtype(x.device.type))


# Without activation and residual the product is all there is, and the libraries under torch lead by a few per cent.
_PLAIN = (("fused", 0),)
_YIELDS = (
    Yield("cpu", torch.bfloat16, "this CPU multiplies bf16 in hardware, and torch uses it", native_bf16=True),
    Yield("cpu", torch.float32, "MKL is faster in fp32 without activation and residual", _PLAIN, mkl=True),
    Yield("cpu", torch.float64, "MKL is faster in fp64 without activation and residual", _PLAIN),
)  # fmt: skip
_CUDA_YIELDS = tuple(
    Yield("cuda", dtype, "cuBLAS is faster without activation and residual", _PLAIN)
    for dtype in FLOAT_DTYPES[:3]
)


@dispatch.register(
    "linear",
    Candidate("cpu", FLOAT_DTYPES, yields=_YIELDS),
    Candidate("triton", FLOAT_DTYPES[:3], yields=_CUDA_YIELDS),
    Candidate("cuda", FLOAT_DTYPES[:3], yields=_CUDA_YIELDS),
    Candidate("torch", FLOAT_DTYPES),
)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Linear layer with a fused activation and residual addition.

    ``y = activation(x · weightᵀ + bias) + residual``

    Args:
        x: (..., K); fp32, bf16, fp16 or fp64; any strides.
        weight: (N, K), as in torch.nn.Linear; dtype of x, any strides.
        bias: (N,) in the dtype of x, or None.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        residual: (..., N) in the dtype of x, added after the activation.
        backend: None, "cpu", "cuda", "triton" or "torch". None leaves to torch what its libraries multiply faster (on
            an Intel CPU fp32 without activation and residual; bf16 where the CPU has bf16 instructions): `tw.explain`.

    Returns:
        (..., N) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: sums, bias, activation and residual in fp32 (fp64 for fp64), rounded once to x's dtype; so are the
    products of the backward. With an activation, backward reads x · weightᵀ + bias as rounded to x's dtype. On the
    "cpu" backend a row of y has the same bits whatever the other rows are, for any strides and number of threads. Under
    autocast all tensors are cast to the autocast dtype, and gradients come back in their own.

    Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008 (CPU blocking).

    >>> import torch, trainwright as tw
    >>> tw.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [-1.0, 0.0]]), activation="relu")
    tensor([[11.,  0.]])
    """
    check_tensor("linear", "x", x, min_dim=1)
    check_tensor("linear", "weight", weight, shape=(None, x.shape[-1]), device=x.device)
    out_shape = (*x.shape[:-1], weight.shape[0])
    if bias is not None:
        check_tensor("linear", "bias", bias, shape=out_shape[-1:], device=x.device)
    if residual is not None:
        check_tensor("linear", "residual", residual, shape=out_shape, device=x.device)
    if activation is not None and not isinstance(activation, str):
        raise type_error("linear", "activation", "a str or None", type(activation).__name__)
    if activation not in ACTIVATIONS:
        names = ", ".join(a for a in ACTIVATIONS if a is not None)
        raise value_error("linear", "activation", f"None or one of {names}", repr(activation))
    if torch.is_autocast_enabled(x.device.type):
        weight, bias, residual = (_autocast(x, t) for t in (weight, bias, residual))  # type: ignore[assignment]
        x = _autocast(x, x)  # type: ignore[assignment]
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None:
            check_tensor("linear", name, tensor, dtypes=(x.dtype,))
    fused = int(activation is not None or residual is not None)
    chosen = dispatch.resolve("linear", backend, x.device, x.dtype, fused=fused)
    rows, N = math.prod(x.shape[:-1]), weight.shape[0]
    if residual is not None:
        residual = residual.reshape(rows, N)
    y = _Linear.apply(
        x.reshape(rows, weight.shape[1]), weight, bias, residual, ACTIVATIONS[activation], chosen
    )
    return y.view(out_shape)


@dispatch.self_check("linear")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    x, weight, bias, residual = (
        torch.randn(*shape) for shape in ((7, 33), (20, 33), (20,), (7, 20))
    )
    return _library.outputs_and_gradients(
        linear,
        backend,
        device,
        {"activation": "gelu"},
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
    )
