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

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor, value_error
from trainwright.ops import _library
from trainwright.ops.cross_entropy import (
    NONE,
    REDUCTIONS,
    SUM,
    TILE_GRAD_OPS,
    TILE_STATE_OPS,
    acc_dtype,
    check_options,
    check_target,
    check_targets,
    finish,
    scale_of,
)

__all__ = ["linear_cross_entropy"]

PARTS = 16  # a tile of rows is this fraction of the logits
PARTS_COLUMNS = (
    32  # a tile of columns; smaller, as the BLAS packs copies of all hidden rows beside it
)
PARTS_WIDENED = 128  # the same where 16-bit inputs make fp32 tiles and fp32 copies of hidden
MIN_COLUMNS, MIN_ROWS = 64, 64  # narrower products run far below the machine's rate
MAX_TILE = 1 << 25  # elements; larger tiles are no faster

Options = tuple[int, float, float, float]  # ignore_index, label_smoothing, z_loss, softcap
Needs = list[bool]  # gradients wanted for hidden, weight, bias

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
FWD = f"({_INPUTS}, {_OPTIONS}, int reduction, str backend) -> (Tensor, Tensor, Tensor)"
BWD = (
    f"(Tensor dloss, {_INPUTS}, Tensor lse, Tensor scale, {_OPTIONS}, str backend, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
FWD_BWD = f"({_INPUTS}, {_OPTIONS}, int reduction, str backend, bool[3] needs) -> (Tensor, Tensor, Tensor, Tensor)"

F = TypeVar("F", bound=Callable[..., Any])


def _plain(function: F) -> F:
    """Runs without autocast (the wrapper has cast the inputs, the products choose their dtypes) and autograd."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        with torch.autocast(device, enabled=False), torch.no_grad():
            return function(*args)

    return run  # type: ignore[return-value]


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """fp32 for 16-bit inputs on the CPU, where torch's 16-bit products need bf16 instructions to be any fast."""
    return acc_dtype(hidden.dtype) if hidden.device.type == "cpu" else hidden.dtype


def _kept(
    hidden: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows that count, their targets, and their indices (None: all rows).

    Ignored rows must not meet a product: 0 * NaN is NaN. On a GPU they are zeroed, which needs no synchronisation.
    """
    keep = target != ignore_index
    if hidden.device.type != "cpu":
        return torch.where(keep[:, None], hidden, 0), target, None
    index = None if bool(keep.all()) else keep.nonzero()[:, 0]
    if index is not None:
        hidden, target = hidden[index], target[index]
    return hidden.to(_compute_dtype(hidden)), target, index


def _spread(values: Tensor, index: Tensor | None, N: int) -> Tensor:
    """Rows back at their places, zeros elsewhere."""
    if index is None:
        return values
    return values.new_zeros((N, *values.shape[1:])).index_copy_(0, index, values)


def _product(h: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(h, w.t(), out=out) if b is None else torch.addmm(b, h, w.t(), out=out)


def _tiles(h: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Walks the vocabulary: (first column, rows of the weight, logits), every tile in the same memory."""
    n, V = len(h), len(weight)
    parts = PARTS_COLUMNS if weight.dtype == h.dtype else PARTS_WIDENED
    columns = min(
        max(V // parts, MIN_COLUMNS), max(MAX_TILE // max(n, 1), MIN_COLUMNS), max(V // 2, 1)
    )
    buffer = h.new_empty(n * columns)
    for first in range(0, V if n else 0, columns):
        w = weight[first : first + columns].to(h.dtype)
        b = None if bias is None else bias[first : first + columns].to(h.dtype)
        yield first, w, _product(h, w, b, buffer[: n * len(w)].view(n, len(w)))


@_plain
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    V = len(weight)
    check_targets(target, V, ignore_index, "linear_cross_entropy")
    h, t, index = _kept(hidden, target, ignore_index)
    state = h.new_empty((len(h), 4), dtype=torch.float64)
    for first, _, tile in _tiles(h, weight, bias):
        TILE_STATE_OPS[backend](
            state, tile, t, class_weight, first, V, ignore_index, label_smoothing, softcap
        )
    scale = scale_of(t, class_weight, ignore_index, reduction)
    loss, lse = finish(
        state, t, class_weight, scale, V, ignore_index, label_smoothing, z_loss, reduction
    )
    if reduction == NONE:
        loss = _spread(loss, index, len(hidden))
    return loss.to(acc_dtype(hidden.dtype)), _spread(lse, index, len(hidden)), scale


@_plain
def _backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    lse: Tensor, scale: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    backend: str, needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N, V = len(hidden), len(weight)
    h, t, index = _kept(hidden, target, ignore_index)
    if index is not None:
        lse, dloss = lse[index], dloss[index] if dloss.dim() else dloss
    dh = h.new_zeros(h.shape if needs[0] else 0, dtype=acc_dtype(h.dtype))
    dw = (
        weight.new_zeros(weight.shape)
        if needs[1] and not len(h)
        else weight.new_empty(weight.shape if needs[1] else 0)
    )
    db = h.new_zeros(V if needs[2] else 0, dtype=acc_dtype(h.dtype))
    for first, w, g in _tiles(h, weight, bias):
        TILE_GRAD_OPS[backend](
            g, dloss, g, t, class_weight, lse, scale, first, V, ignore_index, label_smoothing, z_loss, softcap
        )  # fmt: skip
        last = first + len(w)
        if needs[0]:
            if dh.dtype == g.dtype:
                dh.addmm_(g, w)
            else:
                dh += torch.mm(g, w)
        if needs[1]:
            if weight.dtype == g.dtype:
                torch.mm(g.t(), h, out=dw[first:last])
            else:
                dw[first:last] = torch.mm(g.t(), h)
        if needs[2]:
            torch.sum(g, 0, dtype=db.dtype, out=db[first:last])
    dh = _spread(dh.to(hidden.dtype), index, N) if needs[0] else dh.to(hidden.dtype)
    return dh, dw, db.to(weight.dtype)


def _rows_per_tile(n: int, V: int) -> int:
    """Rows of a tile of all columns."""
    return min(n // PARTS, max(MAX_TILE // V, MIN_ROWS))


def _walks_rows(hidden: Tensor, n: int, V: int) -> bool:
    """Whether a scalar loss makes its gradients in forward: many rows, gradients that are their own accumulators."""
    return _rows_per_tile(n, V) >= MIN_ROWS and hidden.dtype == acc_dtype(hidden.dtype)


@_plain
def _forward_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, reduction: int, backend: str,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A scalar loss and its gradients for an upstream gradient of 1."""
    N, V = len(hidden), len(weight)
    options = (ignore_index, label_smoothing, z_loss, softcap)
    check_targets(target, V, ignore_index, "linear_cross_entropy")
    h, t, index = _kept(hidden, target, ignore_index)
    rows, acc = _rows_per_tile(len(h), V), acc_dtype(hidden.dtype)
    one = h.new_ones((), dtype=acc)
    if not _walks_rows(hidden, len(h), V):
        inputs = (hidden, weight, bias, target, class_weight)
        loss, lse, scale = _forward(*inputs, *options, reduction, backend)
        return loss, *_backward(one, *inputs, lse, scale, *options, backend, needs)
    scale = scale_of(t, class_weight, ignore_index, reduction)
    loss = h.new_zeros((), dtype=torch.float64)
    dh = h.new_empty(h.shape if needs[0] else 0)
    dw = h.new_empty(weight.shape if needs[1] else 0)  # the first tile writes, the others add
    db = h.new_zeros(V if needs[2] else 0)
    buffer = h.new_empty(rows * V)
    state = h.new_empty((rows, 4), dtype=torch.float64)
    for first in range(0, len(h), rows):
        hr, tr = h[first : first + rows], t[first : first + rows]
        g = _product(hr, weight, bias, buffer[: len(hr) * V].view(len(hr), V))
        sr = state[: len(hr)]
        TILE_STATE_OPS[backend](
            sr, g, tr, class_weight, 0, V, ignore_index, label_smoothing, softcap
        )
        part, lse = finish(
            sr, tr, class_weight, scale, V, ignore_index, label_smoothing, z_loss, SUM
        )
        loss += part
        TILE_GRAD_OPS[backend](g, one, g, tr, class_weight, lse, scale, 0, V, *options)
        if needs[0]:
            torch.mm(g, weight, out=dh[first : first + rows])
        if needs[1]:
            if first:
                dw.addmm_(g.t(), hr)
            else:
                torch.mm(g.t(), hr, out=dw)
        if needs[2]:
            db += g.sum(0)
    return loss.to(acc), _spread(dh, index, N) if needs[0] else dh, dw, db


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


_fwd = _library.define("linear_cross_entropy_fwd" + FWD, _forward, _forward_fake)
_bwd = _library.define("linear_cross_entropy_bwd" + BWD, _backward, _backward_fake)
_fwd_bwd = _library.define(
    "linear_cross_entropy_fwd_bwd" + FWD_BWD, _forward_backward, _forward_backward_fake
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
        backend: None, "cpu", "triton" or "torch": who runs the loss; the products are torch's.

    Returns:
        fp32 (fp64 for fp64): a scalar, or the shape of target for "none". All rows ignored: 0, with zero gradients.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        IndexError: a target is out of range (CPU; on a GPU the loss is NaN).
        trainwright.BackendError: no backend can run the call.

    Numerics: on the CPU 16-bit inputs are widened tile by tile: products, softmax and every accumulation are fp32,
    rounded once. On a GPU tiles of logits are rounded to the dtype of hidden, as torch's linear rounds them; the weight
    gradient is one product per tile and the hidden gradient is summed in fp32. Repeats are bit-equal. Under autocast
    hidden, weight and bias are cast to the autocast dtype.

    Time: four products of N x C x V, or three for a scalar loss of 1024 rows or more in fp32 or fp64, which makes its
    gradients in forward and scales them by the upstream gradient in backward. Without a gradient for weight (or hidden)
    one less.

    Memory beyond the gradients: one tile, at most a sixteenth of the logits (at least 64 columns or rows), and what the
    BLAS packs. 16-bit inputs on the CPU: a 64th, and fp32 copies of hidden and its gradient.

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
    if reduction != "none" and wants_gradient and _walks_rows(hidden, len(inputs[0]), classes):
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
