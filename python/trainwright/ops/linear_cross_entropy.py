"""Cross entropy of hidden @ weight.T + bias without the (N, V) logits: they exist one tile at a time.

Forward walks the vocabulary: a tile of logits (all rows, some columns) is a matrix product, and cross_entropy's tile
kernel adds it to the running state of the rows. Backward makes each tile again, turns it into its gradient in place,
and two products give its share of the hidden gradient and the finished rows of the weight gradient. That is four
products, nothing is accumulated in 16 bits, and it is right for any upstream gradient.

A scalar loss knows its gradient up to a factor, so in fp32 and fp64, with enough rows, it walks rows instead (some
rows, all columns): one pass of three products that adds up the weight gradient.

Rows with ignore_index are left out of the products on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor, value_error
from trainwright.ops import _library
from trainwright.ops._cross_entropy_tiles import NONE, OPTIONS, REDUCTIONS
from trainwright.ops._library import acc_dtype
from trainwright.ops._logit_tiles import Needs, backward, forward, forward_backward, walks_rows
from trainwright.ops.cross_entropy import check_options, check_target

__all__ = ["linear_cross_entropy"]

Options = tuple[int, float, float, float]  # ignore_index, label_smoothing, z_loss, softcap

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
FWD = f"({_INPUTS}, {OPTIONS}, int reduction, str backend) -> (Tensor, Tensor, Tensor)"
BWD = (
    f"(Tensor dloss, {_INPUTS}, Tensor lse, Tensor scale, {OPTIONS}, str backend, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
FWD_BWD = f"({_INPUTS}, {OPTIONS}, int reduction, str backend, bool[3] needs) -> (Tensor, Tensor, Tensor, Tensor)"


def _forward_fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    N = hidden.shape[0]
    loss = hidden.new_empty((N,) if rest[-2] == NONE else (), dtype=acc_dtype(hidden.dtype))
    return loss, hidden.new_empty(N, dtype=torch.float64), hidden.new_empty(2, dtype=torch.float64)


def _gradients_fake(hidden: Tensor, weight: Tensor, needs: Needs) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
        weight.new_empty(len(weight) if needs[2] else 0),
    )


def _backward_fake(
    dloss: Tensor, hidden: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients_fake(hidden, weight, rest[-1])


def _forward_backward_fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    loss = hidden.new_empty((), dtype=acc_dtype(hidden.dtype))
    return loss, *_gradients_fake(hidden, weight, rest[-1])


_fwd = _library.define("linear_cross_entropy_fwd" + FWD, forward, _forward_fake)
_bwd = _library.define("linear_cross_entropy_bwd" + BWD, backward, _backward_fake)
_fwd_bwd = _library.define(
    "linear_cross_entropy_fwd_bwd" + FWD_BWD, forward_backward, _forward_backward_fake
)


class _LinearCrossEntropy(torch.autograd.Function):
    """reduction="none": gradients are computed in backward, from the upstream gradient of each token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        options: Options, reduction: int, backend: str,
    ) -> Tensor:  # fmt: skip
        inputs = (hidden, weight, bias, target, class_weight)
        loss, lse, scale = _fwd(*inputs, *options, reduction, backend)
        ctx.save_for_backward(*inputs, lse, scale)
        ctx.options, ctx.backend = options, backend
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[:3])
        grads = _bwd(dloss.contiguous(), *ctx.saved_tensors, *ctx.options, ctx.backend, needs)
        return *(g if need else None for g, need in zip(grads, needs)), *[None] * 5


class _ScalarLinearCrossEntropy(torch.autograd.Function):
    """A scalar loss makes its gradients in forward, for an upstream gradient of 1; backward scales them in place and
    hands them out. A second backward (retain_graph) computes them again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        options: Options, reduction: int, backend: str, needs: Needs, compiling: bool,
    ) -> Tensor:  # fmt: skip
        inputs = (hidden, weight, bias, target, class_weight)
        loss, *grads = _fwd_bwd(*inputs, *options, reduction, backend, needs)
        ctx.needs, ctx.compiling = needs, compiling
        if compiling:  # the traced backward is pure
            ctx.save_for_backward(*grads)
        else:
            ctx.save_for_backward(*inputs)
            ctx.grads, ctx.rest = grads, (*options, reduction, backend, needs)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if ctx.compiling:
            grads = [g * dloss.to(g.dtype) for g in ctx.saved_tensors]
        else:
            saved = ctx.saved_tensors
            grads = ctx.grads or list(_fwd_bwd(*saved, *ctx.rest)[1:])
            ctx.grads = None
            if dloss.device.type != "cpu" or dloss.item() != 1.0:
                for g in grads:
                    g.mul_(dloss.to(g.dtype))
        return *(g if need else None for g, need in zip(grads, ctx.needs)), *[None] * 7


@dispatch.register(
    "linear_cross_entropy",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES),
    Candidate("torch", FLOAT_DTYPES),
)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """`tw.cross_entropy(hidden @ weight.T + bias, target)` that never stores the logits whole.

    Args:
        hidden: (N, C) or (..., C); fp32, bf16, fp16 or fp64; any strides.
        weight: (V, C), dtype of hidden.
        target: (N,) or (...); int64 or int32, 0 <= target < V or ignore_index.
        bias: (V,), dtype of hidden, or None.
        class_weight: (V,), the `weight` of `tw.cross_entropy`: a constant, any floating dtype, or None.
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in `tw.cross_entropy`.
        backend: None, "cpu", "triton" or "torch": who runs the loss. The products are torch's, but for 16-bit inputs on
            a CPU that does not multiply them in hardware: there they are `tw.linear`'s.

    Returns:
        fp32 (fp64 for fp64): a scalar, or the shape of target for "none". All rows ignored: 0, with zero gradients.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        IndexError: a target is out of range (CPU; on a GPU the loss is NaN).
        trainwright.BackendError: no backend can run the call.

    Numerics: products, softmax and every accumulation are fp32 (fp64 for fp64). With 16-bit inputs the weight gradient
    is one product per tile over all rows, rounded once, so it needs no fp32 copy; the hidden gradient is summed over
    tiles in fp32. On a CPU 16-bit inputs are widened as they are multiplied and the logits stay fp32; on a GPU, and on
    a CPU that multiplies bf16 in hardware, tiles of logits are rounded to the dtype of hidden, as torch's linear rounds
    them, and so is a tile's share of the hidden gradient. Repeats are bit-equal. Under autocast hidden, weight and bias
    are cast to the autocast dtype.

    Time: four products of N x C x V, or three for a scalar loss of 1024 rows or more in fp32 or fp64, which makes its
    gradients in forward and scales them by the upstream gradient in backward. Without a gradient for weight (or hidden)
    one less.

    Memory beyond the gradients: one tile, at most a sixteenth of the logits (at least 64 columns or rows), what the
    products pack, and for 16-bit inputs an fp32 hidden gradient: less than a tenth of the logits in all.

    Source: chunks with an in-place gradient: Liger-Kernel, arXiv:2410.10989; recomputation: cut cross-entropy,
    arXiv:2411.09009.

    >>> import torch, trainwright as tw
    >>> tw.linear_cross_entropy(torch.eye(3), 2 * torch.eye(3), torch.tensor([0, 1, -100]))
    tensor(0.2395)
    """
    op = "linear_cross_entropy"
    check_tensor(op, "hidden", hidden, min_dim=1)
    autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    dtypes = FLOAT_DTYPES[:3] if autocast else (hidden.dtype,)
    check_tensor(
        op, "weight", weight, dtypes=dtypes, shape=(None, hidden.shape[-1]), device=hidden.device
    )
    classes = weight.shape[0]
    if classes == 0:
        raise value_error(op, "weight", "at least one class", tuple(weight.shape))
    if bias is not None:
        check_tensor(op, "bias", bias, dtypes=dtypes, shape=(classes,), device=hidden.device)
    check_target(op, target, hidden.shape[:-1], hidden.device)
    options = check_options(
        op, classes, hidden.device, "class_weight", class_weight, ignore_index, label_smoothing, z_loss, softcap,
        reduction,
    )  # fmt: skip
    if autocast:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    chosen = dispatch.resolve(op, backend, hidden.device, hidden.dtype, V=classes)
    if class_weight is not None:
        class_weight = class_weight.to(acc_dtype(hidden.dtype)).contiguous()
    inputs = (
        hidden.reshape(target.numel(), hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        target.reshape(-1).long().contiguous(),
        class_weight,
    )
    needs = [t is not None and t.requires_grad for t in inputs[:3]]
    wants_gradient = any(needs) and torch.is_grad_enabled()
    if reduction != "none" and wants_gradient and walks_rows(hidden, len(inputs[0]), classes):
        return _ScalarLinearCrossEntropy.apply(
            *inputs, options, REDUCTIONS[reduction], chosen, needs, torch.compiler.is_compiling()
        )
    loss = _LinearCrossEntropy.apply(*inputs, options, REDUCTIONS[reduction], chosen)
    return loss.reshape(target.shape) if reduction == "none" else loss


@dispatch.self_check("linear_cross_entropy")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    inputs = {"hidden": torch.randn(5, 9), "weight": torch.randn(33, 9), "bias": torch.randn(33)}
    target = torch.tensor([0, 32, -100, 7, 1])
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "reduction": "none"}
    return _library.outputs_and_gradients(
        linear_cross_entropy, backend, device, options, **inputs, target=target
    )
