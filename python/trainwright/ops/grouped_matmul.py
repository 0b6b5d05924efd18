"""One matrix product per group of rows: the linear layers of a mixture of experts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import FLOAT_DTYPES, check_tensor, value_error
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__ = ["grouped_matmul"]

FWD = "(Tensor x, Tensor weights, Tensor offsets, ScalarType dtype) -> Tensor"
WGRAD = "(Tensor x, Tensor dy, Tensor offsets, ScalarType dtype) -> Tensor"


def _groups(offsets: Tensor, rows: int) -> list[slice]:
    ends = [0, *offsets.tolist()]
    if ends != sorted(ends) or ends[-1] > rows:
        expected = f"end rows in ascending order within [0, {rows}]"
        raise value_error("grouped_matmul", "offsets", expected, ends[1:])
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _members(offsets: Tensor, rows: int) -> Tensor:
    """(E, N, 1): whether a row is in a group; needs no values on the host, so it can be compiled."""
    row = torch.arange(rows, device=offsets.device)
    begins = torch.cat([offsets.new_zeros(1), offsets])[:-1]
    return ((row >= begins[:, None]) & (row < offsets[:, None]))[..., None]


def _fwd_reference(x: Tensor, weights: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    acc = acc_dtype(dtype)
    if torch.compiler.is_compiling():  # every row times every matrix
        inside = _members(offsets, x.shape[0])
        return torch.where(inside, x.to(acc) @ weights.to(acc), 0.0).sum(0).to(dtype)
    out = x.new_zeros((x.shape[0], weights.shape[2]), dtype=dtype)
    for rows, w in zip(_groups(offsets, x.shape[0]), weights):
        out[rows] = (x[rows].to(acc) @ w.to(acc)).to(dtype)
    return out


def _wgrad_reference(x: Tensor, dy: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    acc = acc_dtype(dtype)
    if torch.compiler.is_compiling():
        inside = _members(offsets, x.shape[0])
        left, right = (torch.where(inside, t.to(acc), 0.0) for t in (x, dy))
        return (left.transpose(1, 2) @ right).to(dtype)
    out = x.new_zeros((offsets.shape[0], x.shape[1], dy.shape[1]), dtype=dtype)
    for e, rows in enumerate(_groups(offsets, x.shape[0])):
        out[e] = (x[rows].to(acc).t() @ dy[rows].to(acc)).to(dtype)
    return out


def _fwd_fake(x: Tensor, weights: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[2]), dtype=dtype)


def _wgrad_fake(x: Tensor, dy: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1], dy.shape[1]), dtype=dtype)


_PRODUCT = _library.define_backends(
    "grouped_matmul", "grouped_matmul" + FWD, _fwd_reference, _fwd_fake
)
_WGRAD = _library.define_backends(
    "grouped_matmul", "grouped_matmul_wgrad" + WGRAD, _wgrad_reference, _wgrad_fake
)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, offsets: Tensor, backend: str) -> Tensor:
        need_x, need_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weights else None, weights if need_x else None, offsets)
        ctx.backend = backend
        return _PRODUCT[backend](x, weights, offsets, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weights, offsets = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _PRODUCT[ctx.backend](dy, weights.transpose(1, 2), offsets, dy.dtype)
        if ctx.needs_input_grad[1]:
            dw = _WGRAD[ctx.backend](x, dy, offsets, dy.dtype)
        return dx, dw, None, None


@dispatch.register(
    "grouped_matmul",
    Candidate("cpu", FLOAT_DTYPES),
    Candidate("triton", FLOAT_DTYPES[:3]),
    Candidate("cuda", FLOAT_DTYPES[:3]),
    Candidate("torch", FLOAT_DTYPES),
)
def grouped_matmul(
    x: Tensor, weights: Tensor, offsets: Tensor, *, backend: str | None = None
) -> Tensor:
    """The rows of each group times the matrix of that group, as in a mixture of experts.

    ``y[n] = x[n] · weights[e]`` for the rows n in [offsets[e − 1], offsets[e]), offsets[−1] = 0. Rows past the last
    group give 0, and get zero gradients.

    Args:
        x: (N, K), rows sorted by group; fp32, bf16, fp16 or fp64; any strides.
        weights: (E, K, C), dtype of x, any strides (a transposed view of (E, C, K) costs nothing).
        offsets: (E,) int32, the end row of each group, ascending, at most N; equal ends make an empty group. As
            torch's grouped_mm takes them.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        (N, C) in the dtype of x. The gradient of the weights of an empty group is 0.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape; on the CPU also for ends that are not
            ascending within [0, N] (RuntimeError inside torch.compile). On a GPU the values are not read back: such
            ends give rows of 0 or of a neighbouring group, never an access outside the tensors.
        trainwright.BackendError: no backend can run the call.

    Numerics: sums in fp32 (fp64 for fp64), rounded once; repeats are bit-equal. On the "cpu" backend a row has the bits
    that it has in any other grouping. Under autocast x and weights are cast to the autocast dtype.

    Source: Gale et al., "MegaBlocks", MLSys 2023 (experts as one grouped product, no capacity and no padding).

    >>> import torch, trainwright as tw
    >>> x, w = torch.ones(3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> tw.grouped_matmul(x, w, torch.tensor([1, 2], dtype=torch.int32))
    tensor([[1., 1.],
            [2., 2.],
            [0., 0.]])
    """
    op = "grouped_matmul"
    check_tensor(op, "x", x, shape=(None, None))
    check_tensor(op, "weights", weights, shape=(None, x.shape[1], None), device=x.device)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weights))
    check_tensor(op, "weights", weights, dtypes=(x.dtype,))
    check_tensor(
        op, "offsets", offsets, dtypes=(torch.int32,), shape=(weights.shape[0],), device=x.device
    )
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        _groups(offsets, x.shape[0])
    chosen = dispatch.resolve(op, backend, x.device, x.dtype)
    return _GroupedMatmul.apply(x, weights, offsets.contiguous(), chosen)


@dispatch.self_check("grouped_matmul")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    x, weights = torch.randn(23, 9), torch.randn(4, 9, 6)
    offsets = torch.tensor([5, 5, 17, 21], dtype=torch.int32)
    return _library.outputs_and_gradients(
        grouped_matmul, backend, device, x=x, weights=weights, offsets=offsets
    )
