"""Gated activations: swiglu and geglu. They share kernels, which take the activation as a name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor, value_error
from trainwright.ops import _library

__all__ = ["geglu", "swiglu"]

FWD = "(Tensor gate, Tensor up, str activation) -> Tensor"
BWD = (
    "(Tensor dy, Tensor gate, Tensor up, str activation, bool need_gate, bool need_up) "
    "-> (Tensor, Tensor)"
)


def _value_and_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if activation == "silu":
        s = torch.sigmoid(x)
        return x * s, s + x * s * torch.sigmoid(-x)
    if activation == "gelu":
        cdf = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
        return x * cdf, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    twice = 2 * math.sqrt(2 / math.pi)  # (1 + tanh(v)) / 2 = sigmoid(2v)
    u = x * (twice + twice * 0.044715 * x * x)
    s = torch.sigmoid(u)
    slope = s + x * s * torch.sigmoid(-u) * (twice + 3 * twice * 0.044715 * x * x)
    return x * s, torch.where(x.abs() > 30, (x > 0).to(x.dtype), slope)


def _wide(x: Tensor) -> Tensor:
    return (x if x.dtype == torch.float64 else x.float()).contiguous()


def _fwd_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return (_value_and_slope(_wide(gate), activation)[0] * _wide(up)).to(gate.dtype)


def _bwd_reference(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    value, slope = _value_and_slope(_wide(gate), activation)
    dgate, dup = gate.new_empty(0), gate.new_empty(0)
    if need_gate:
        dgate = (_wide(dy) * _wide(up) * slope).to(gate.dtype)
    if need_up:
        dup = (_wide(dy) * value).to(gate.dtype)
    return dgate, dup


def _fwd_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _bwd_fake(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    return (
        gate.new_empty(gate.shape if need_gate else (0,)),
        gate.new_empty(gate.shape if need_up else (0,)),
    )


_FORWARD = _library.define_backends("glu", "glu_fwd" + FWD, _fwd_reference, _fwd_fake)
_BACKWARD = _library.define_backends("glu", "glu_bwd" + BWD, _bwd_reference, _bwd_fake)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.backend = activation, backend
        return _FORWARD[backend](gate, up, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        need_gate, need_up = ctx.needs_input_grad[:2]
        dgate, dup = _BACKWARD[ctx.backend](dy, gate, up, ctx.activation, need_gate, need_up)
        return dgate if need_gate else None, dup if need_up else None, None, None


_CANDIDATES = (
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)


def _glu(op: str, gate: Tensor, up: Tensor, activation: str, backend: str | None) -> Tensor:
    check_tensor(op, "gate", gate)
    check_tensor(op, "up", up, dtypes=(gate.dtype,), shape=gate.shape, device=gate.device)
    chosen = dispatch.resolve(op, backend, gate.device, gate.dtype)
    return _GLU.apply(gate, up, activation, chosen)


@dispatch.register("swiglu", *_CANDIDATES)
def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """Gated SiLU: ``silu(gate) · up`` with ``silu(x) = x / (1 + exp(-x))``.

    Args:
        gate: any shape; fp32, bf16, fp16 or fp64. Any strides; rows that are contiguous inside, such as the halves of
            ``x.chunk(2, -1)``, are read where they are.
        up: same shape, dtype and device as gate.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        Contiguous, shape and dtype of gate.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: computed in fp32 (fp64 for fp64), rounded once. Backward recomputes the activation from gate: only gate
    and up are kept. Under autocast the input dtype is kept.

    Source: Shazeer, "GLU variants improve transformer", 2020.

    >>> import torch, trainwright as tw
    >>> tw.swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
    tensor([0.0000, 1.4621])
    """
    return _glu("swiglu", gate, up, "silu", backend)


@dispatch.register("geglu", *_CANDIDATES)
def geglu(
    gate: Tensor, up: Tensor, *, approximate: str = "none", backend: str | None = None
) -> Tensor:
    """Gated GELU: ``gelu(gate) · up`` with ``gelu(x) = x · (1 + erf(x / √2)) / 2``.

    Args:
        gate: any shape; fp32, bf16, fp16 or fp64. Any strides; rows that are contiguous inside, such as the halves of
            ``x.chunk(2, -1)``, are read where they are.
        up: same shape, dtype and device as gate.
        approximate: "none", or "tanh" for ``x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2``.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        Contiguous, shape and dtype of gate.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: computed in fp32 (fp64 for fp64), rounded once; on the CPU with full relative accuracy in the tails of
    the gate as well. Backward recomputes the activation from gate: only gate and up are kept. Under autocast the input
    dtype is kept.

    Source: Shazeer, "GLU variants improve transformer", 2020.

    >>> import torch, trainwright as tw
    >>> tw.geglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
    tensor([0.0000, 1.6827])
    """
    if approximate not in ("none", "tanh"):
        raise value_error("geglu", "approximate", "'none' or 'tanh'", repr(approximate))
    return _glu("geglu", gate, up, "gelu" if approximate == "none" else "gelu_tanh", backend)


@dispatch.self_check("swiglu")
def _check_swiglu(backend: str, device: torch.device) -> list[Tensor]:
    gate, up = torch.randn(5, 33), torch.randn(5, 33)
    return _library.outputs_and_gradients(swiglu, backend, device, gate=gate, up=up)


@dispatch.self_check("geglu")
def _check_geglu(backend: str, device: torch.device) -> list[Tensor]:
    gate, up = torch.randn(5, 33), torch.randn(5, 33)
    return _library.outputs_and_gradients(geglu, backend, device, gate=gate, up=up)
