"""Cross entropy with class indices: class weights, label smoothing, softcap and z-loss, in one pass over the logits."""

from __future__ import annotations

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
from trainwright.ops._cross_entropy_tiles import (
    NONE,
    OPTIONS,
    REDUCTIONS,
    TILE_GRAD_OPS,
    check_targets,
    finish,
    scale_of,
    tile_grad_reference,
    tile_state_reference,
)
from trainwright.ops._library import acc_dtype

__all__ = ["cross_entropy"]

FWD = f"(Tensor logits, Tensor target, Tensor? weight, {OPTIONS}, int reduction) -> (Tensor, Tensor, Tensor)"
FWD_BWD = (
    f"(Tensor logits, Tensor target, Tensor? weight, {OPTIONS}, int reduction, float upstream) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
BWD = f"(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, Tensor scale, {OPTIONS}) -> Tensor"


def _fwd_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N, V = logits.shape
    check_targets(target, V, ignore_index)
    state = logits.new_empty((N, 4), dtype=torch.float64)
    tile_state_reference(
        state, logits, target, weight, 0, V, ignore_index, label_smoothing, softcap
    )
    scale = scale_of(target, weight, ignore_index, reduction)
    loss, lse = finish(
        state, target, weight, scale, V, ignore_index, label_smoothing, z_loss, reduction
    )
    return loss.to(acc_dtype(logits.dtype)), lse, scale


def _bwd_reference(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, scale: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    grad = torch.empty_like(logits)
    tile_grad_reference(
        grad, dloss, logits, target, weight, lse, scale, 0, logits.shape[1], ignore_index, label_smoothing, z_loss,
        softcap,
    )  # fmt: skip
    return grad


def _fwd_bwd_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, reduction: int, upstream: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss, lse, scale = _fwd_reference(
        logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction
    )
    dloss = torch.full_like(loss, upstream)
    grad = _bwd_reference(
        dloss, logits, target, weight, lse, scale, ignore_index, label_smoothing, z_loss, softcap
    )  # fmt: skip
    return loss, lse, scale, grad


def _fwd_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc, N = acc_dtype(logits.dtype), logits.shape[0]
    loss = logits.new_empty((N,) if reduction == NONE else (), dtype=acc)
    return loss, logits.new_empty(N, dtype=torch.float64), logits.new_empty(2, dtype=torch.float64)


def _fwd_bwd_fake(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_fwd_fake(logits, *rest[:-1]), torch.empty_like(logits)


def _bwd_fake(dloss: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


_FORWARD = _library.define_backends(
    "cross_entropy", "cross_entropy_fwd" + FWD, _fwd_reference, _fwd_fake
)
_BACKWARD = _library.define_backends(
    "cross_entropy", "cross_entropy_bwd" + BWD, _bwd_reference, _bwd_fake
)
_fwd_bwd = _library.define("cross_entropy_fwd_bwd" + FWD_BWD, _fwd_bwd_reference, _fwd_bwd_fake)


class _Forecast:
    """The upstream gradient that the next backward of a scalar loss will bring: the last one, once it came twice.

    It is 1 for a plain `loss.backward()`, 1/n in accumulation, the scale under a loss scaler. A wrong forecast costs
    time and never changes a bit.
    """

    def __init__(self) -> None:
        self.value, self.steady = 1.0, True

    def saw(self, value: float) -> None:
        self.value, self.steady = value, value == self.value


_forecasts: dict[tuple[int, torch.dtype], _Forecast] = {}


class _CrossEntropy(torch.autograd.Function):
    """With a steady forecast, forward makes the gradient as well, while each row is in cache, and backward hands it out
    once. For another upstream gradient it is computed again in the same memory; for a second backward, in new memory.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: tuple[int, float, float, float],
        reduction: int, backend: str, forecast: _Forecast | None,
    ) -> Tensor:  # fmt: skip
        logits = logits.contiguous()
        ctx.grad, ctx.forecast = None, forecast
        if forecast is not None and forecast.steady:
            ctx.upstream = forecast.value
            loss, lse, scale, ctx.grad = _fwd_bwd(
                logits, target, weight, *options, reduction, forecast.value
            )
        else:
            loss, lse, scale = _FORWARD[backend](logits, target, weight, *options, reduction)
        ctx.save_for_backward(logits, target, weight, lse, scale)
        ctx.options, ctx.backend = options, backend
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        saved = ctx.saved_tensors
        dloss = dloss.contiguous()
        if ctx.forecast is not None:
            ctx.forecast.saw(dloss.item())
        if ctx.grad is None:
            return _BACKWARD[ctx.backend](dloss, *saved, *ctx.options), *[None] * 6
        grad, ctx.grad = ctx.grad, None
        if dloss.item() != ctx.upstream:
            TILE_GRAD_OPS[ctx.backend](grad, dloss, *saved, 0, grad.shape[1], *ctx.options)
        return grad, *[None] * 6


def check_options(
    op: str, classes: int, device: torch.device, weight_name: str, weight: Any, ignore_index: Any, label_smoothing: Any,
    z_loss: Any, softcap: Any, reduction: Any,
) -> tuple[int, float, float, float]:  # fmt: skip
    """The checks that cross_entropy and linear_cross_entropy share; the options as the kernels take them."""
    if weight is not None:
        check_tensor(op, weight_name, weight, shape=(classes,), device=device)
        if weight.requires_grad:
            raise value_error(
                op, weight_name, "a tensor that does not require a gradient", "one that does"
            )
    check_int(op, "ignore_index", ignore_index)
    check_number(op, "label_smoothing", label_smoothing, minimum=0.0)
    if label_smoothing > 1:
        raise value_error(op, "label_smoothing", "at most 1", label_smoothing)
    check_number(op, "z_loss", z_loss, minimum=0.0)
    if softcap is not None:
        check_number(op, "softcap", softcap)
        if softcap <= 0:
            raise value_error(op, "softcap", "None or a number above 0", softcap)
    if reduction not in REDUCTIONS:
        raise value_error(op, "reduction", '"none", "mean" or "sum"', repr(reduction))
    return ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0)


def check_target(op: str, target: Any, shape: torch.Size, device: torch.device) -> None:
    if isinstance(target, Tensor) and target.is_floating_point():
        raise type_error(
            op, "target", "class indices, int64 or int32 (class probabilities are not supported)", target.dtype
        )  # fmt: skip
    check_tensor(
        op, "target", target, dtypes=(torch.int64, torch.int32), shape=shape, device=device
    )


@dispatch.register(
    "cross_entropy",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("cuda", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross entropy between logits and class indices, as `torch.nn.functional.cross_entropy`, with softcap and z-loss.

    Per row, with z = softcap · tanh(logits / softcap), lse = log Σ exp(z), ε = label_smoothing, w = weight or 1:
    ``loss = (1 − ε) · w[t] · (lse − z[t]) + ε / V · Σ_j w[j] · (lse − z[j])``, plus ``z_loss · lse²``.
    "mean" divides the sum of the first by Σ w[t] and that of the second by the number of rows, over the kept rows.

    Args:
        logits: (N, V), (V,) or (N, V, d1, ...) as in torch; fp32, bf16, fp16 or fp64; any strides. Contiguous with V
            last is fastest, other layouts are copied first.
        target: (N,), () or (N, d1, ...); int64 or int32, 0 <= target < V or ignore_index.
        weight: (V,), any floating dtype, a constant (no gradient flows to it), or None.
        ignore_index: rows with this target count for nothing: loss 0, gradient 0, NaN or inf in them goes nowhere.
        label_smoothing: ε, 0 to 1.
        z_loss: coefficient of lse², at least 0.
        softcap: above 0, or None.
        reduction: "mean", "sum" or "none".
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        fp32 (fp64 for fp64 logits): a scalar, or the shape of target for "none". All rows ignored: mean 0, gradient 0.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        IndexError: a target is out of range (CPU; on a GPU the loss is NaN).
        trainwright.BackendError: no backend can run the call.

    Numerics: fp32 within a tile of 2048 logits, fp64 across tiles and rows, in a fixed order: repeats are bit-equal, on
    the CPU for any number of threads. The gradient is rounded once to the dtype of logits. Under autocast the dtype of
    logits is kept. A scalar loss on the CPU makes its gradient in the forward pass, for the upstream gradient that came
    last, so the logits are read from memory once. Extra memory is the gradient and O(N).

    Source: online softmax: Milakov and Gimelshein, arXiv:1805.02867; z-loss: PaLM, arXiv:2204.02311.

    >>> import torch, trainwright as tw
    >>> tw.cross_entropy(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
    tensor(0.2395)
    """
    check_tensor("cross_entropy", "logits", logits, min_dim=1)
    rows = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else torch.Size()
    classes = logits.shape[min(logits.dim() - 1, 1)]
    if classes == 0:
        raise value_error("cross_entropy", "logits", "at least one class", tuple(logits.shape))
    check_target("cross_entropy", target, rows, logits.device)
    options = check_options(
        "cross_entropy", classes, logits.device, "weight", weight, ignore_index, label_smoothing, z_loss, softcap,
        reduction,
    )  # fmt: skip
    chosen = dispatch.resolve("cross_entropy", backend, logits.device, logits.dtype, V=classes)
    flat = logits.movedim(1, -1) if logits.dim() > 2 else logits
    flat = flat.reshape(-1, classes)
    acc = acc_dtype(logits.dtype)
    weight = None if weight is None else weight.to(acc).contiguous()
    forecast = None
    if (
        chosen == "cpu"
        and reduction != "none"
        and logits.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    ):
        forecast = _forecasts.setdefault((classes, logits.dtype), _Forecast())
    loss = _CrossEntropy.apply(
        flat, target.reshape(-1).long().contiguous(), weight, options, REDUCTIONS[reduction], chosen, forecast
    )  # fmt: skip
    return loss.reshape(rows) if reduction == "none" else loss


@dispatch.self_check("cross_entropy")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    target = torch.tensor([0, 36, -100, 7])
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}
    return _library.outputs_and_gradients(
        cross_entropy, backend, device, options, logits=torch.randn(4, 37), target=target
    )
