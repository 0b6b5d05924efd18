"""Matrix product with the shapes of torch.matmul, another output dtype on request, and a split of K."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate, Yield
from trainwright.errors import FLOAT_DTYPES, check_int, check_tensor, type_error, value_error
from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__ = ["matmul"]

SCHEMA = "(Tensor a, Tensor b, ScalarType dtype, int splits) -> Tensor"
MAX_SPLITS = 64


def _reference(a: Tensor, b: Tensor, dtype: torch.dtype, splits: int) -> Tensor:
    """a (B, M, K), b (B, K, N): the parts of K in order, the total rounded once. 0 parts: one, here."""
    K = a.shape[2]
    splits = max(1, min(splits, K))
    if splits == 1 and a.dtype == b.dtype == dtype:  # torch sums in fp32 already
        return torch.bmm(a, b)
    acc = acc_dtype(dtype)
    total = a.new_zeros((a.shape[0], a.shape[1], b.shape[2]), dtype=acc)
    for s in range(splits):
        part = slice(s * K // splits, (s + 1) * K // splits)
        total = total + torch.bmm(a[:, :, part].to(acc), b[:, part].to(acc))
    return total.to(dtype)


def _fake(a: Tensor, b: Tensor, dtype: torch.dtype, splits: int) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=dtype)


_PRODUCT = _library.define_backends("matmul", "matmul" + SCHEMA, _reference, _fake)


def _splits(backend: str, B: int, M: int, N: int, K: int) -> int:
    """Parts of K for `split_k=None`: enough that every core has work, from the sizes alone."""
    if backend == "cpu":  # a product of one task or two, long enough to be worth the threads
        return min(MAX_SPLITS, K // 4096) if B * M * N <= 1 << 14 and K >= 1 << 14 else 1
    if backend == "torch":
        return 1
    if backend == "triton":  # its launcher knows tiles and multiprocessors: stream-K
        return 0
    tiles = B * -(-M // 128) * -(-N // 128)
    return max(1, min(132 // max(tiles, 1), K // 1024, MAX_SPLITS))  # 132: SMs of an H100


def _product(
    backend: str, a: Tensor, b: Tensor, dtype: torch.dtype, split_k: int | None = None
) -> Tensor:
    B, M, K = a.shape
    splits = _splits(backend, B, M, b.shape[2], K) if split_k is None else split_k
    return _PRODUCT[backend](a, b, dtype, splits)


def _one_matrix(x: Tensor) -> bool:
    return math.prod(x.shape[:-2]) == 1


def _batches(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    return x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:])


class _Matmul(torch.autograd.Function):
    """a (..., M, K), b (..., K, N), both with at least two dimensions."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, batch: tuple[int, ...], dtype: torch.dtype, split_k: int | None, backend: str
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(a, b)
        ctx.batch, ctx.backend = batch, backend
        (M, K), N = a.shape[-2:], b.shape[-1]
        if _one_matrix(b):  # the batches of a are rows of one product
            rows = a.reshape(1, math.prod(batch) * M, K)
            y = _product(backend, rows, b.reshape(1, K, N), dtype, split_k)
        else:
            y = _product(backend, _batches(a, batch), _batches(b, batch), dtype, split_k)
        return y.view(*batch, M, N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad[:2]
        batch, backend = ctx.batch, ctx.backend
        (M, K), N = a.shape[-2:], b.shape[-1]
        da = db = None
        if _one_matrix(b):
            rows = dy.reshape(1, math.prod(batch) * M, N)
            if need_a:
                bt = b.reshape(1, K, N).transpose(1, 2)
                da = _product(backend, rows, bt, a.dtype).view(a.shape)
            if need_b:
                at = a.reshape(1, math.prod(batch) * M, K).transpose(1, 2)
                db = _product(backend, at, rows, b.dtype).view(b.shape)
            return da, db, None, None, None, None
        dy = _batches(dy, batch)
        if need_a:
            da = _of_shape(
                lambda dtype: _product(backend, dy, _batches(b, batch).transpose(1, 2), dtype),
                a, batch,
            )  # fmt: skip
        if need_b:
            db = _of_shape(
                lambda dtype: _product(backend, _batches(a, batch).transpose(1, 2), dy, dtype),
                b, batch,
            )  # fmt: skip
        return da, db, None, None, None, None


def _of_shape(gradient: Any, x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """The gradient of `x`: one that is broadcast sums over its copies before it is rounded."""
    shape = (*batch, *x.shape[-2:])
    if shape == tuple(x.shape):
        return gradient(x.dtype).view(x.shape)
    return gradient(acc_dtype(x.dtype)).view(shape).sum_to_size(x.shape).to(x.dtype)


# The libraries under torch lead by a few per cent where only the product counts.
_PLAIN = (("special", 0),)
_YIELDS = (
    Yield("cpu", torch.bfloat16, "this CPU multiplies bf16 in hardware, and torch uses it", _PLAIN, native_bf16=True),
    Yield("cpu", torch.float32, "MKL is faster in fp32", _PLAIN, mkl=True),
    Yield("cpu", torch.float64, "MKL is faster in fp64", _PLAIN),
)  # fmt: skip
_CUDA_YIELDS = tuple(
    Yield("cuda", dtype, "cuBLAS is faster without a split of K or another output dtype", _PLAIN)
    for dtype in FLOAT_DTYPES[:3]
)


def _broadcast(a: Tensor, b: Tensor) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except RuntimeError:
        expected = f"leading dimensions that broadcast with {tuple(a.shape[:-2])}"
        raise value_error("matmul", "b", expected, tuple(b.shape[:-2])) from None


@dispatch.register(
    "matmul",
    Candidate("cpu", FLOAT_DTYPES, yields=_YIELDS),
    Candidate("triton", FLOAT_DTYPES[:3], yields=_CUDA_YIELDS),
    Candidate("cuda", FLOAT_DTYPES[:3], yields=_CUDA_YIELDS),
    Candidate("torch", FLOAT_DTYPES),
)
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    split_k: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Matrix product ``a · b`` with the shapes of `torch.matmul`.

    ``y[..., m, n] = Σ_k a[..., m, k] b[..., k, n]``

    Args:
        a: (..., M, K) or (K,); fp32, bf16, fp16 or fp64; any strides.
        b: (..., K, N) or (K,); dtype of a, any strides. Leading dimensions broadcast.
        out_dtype: of the result: fp32, bf16 or fp16 (fp64 for fp64); default the dtype of a. fp32 keeps the sums.
        split_k: parts that K is summed in, each on cores of its own; None chooses from the sizes.
        backend: None, "cpu", "cuda", "triton" or "torch". None leaves to torch what its libraries multiply
            faster; `tw.explain` says so.

    Returns:
        (..., M, N) in `out_dtype`; without M for a (K,), without N for b (K,).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        trainwright.BackendError: no backend can run the call.

    Numerics: sums in fp32 (fp64 for fp64), the parts of K added in order, rounded once; gradients likewise, also those
    of a broadcast argument. Repeats are bit-equal; on the "cpu" backend the bits depend on `split_k` alone, not on
    threads or strides; bf16 with AVX512-BF16 or AMX takes subnormal numbers as 0. Under autocast a and b are cast to
    the autocast dtype, which is then the default of `out_dtype`.

    Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008 (CPU blocking).

    >>> import torch, trainwright as tw
    >>> tw.matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
    tensor([[11.]])
    """
    op = "matmul"
    check_tensor(op, "a", a, min_dim=1)
    check_tensor(op, "b", b, min_dim=1, device=a.device)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = (x if x.dtype == torch.float64 else x.to(dtype) for x in (a, b))
    check_tensor(op, "b", b, dtypes=(a.dtype,))
    if split_k is not None:
        check_int(op, "split_k", split_k, minimum=1)
    same_width = (torch.float64,) if a.dtype == torch.float64 else FLOAT_DTYPES[:3]
    if out_dtype is not None and out_dtype not in same_width:
        names = ", ".join(str(d) for d in same_width)
        raise type_error(op, "out_dtype", f"None or one of {names}", out_dtype)
    rows, columns = a.dim() > 1, b.dim() > 1
    a, b = a if rows else a[None], b if columns else b[:, None]
    if b.shape[-2] != a.shape[-1]:
        raise value_error(op, "b", f"{a.shape[-1]} rows, the columns of a", b.shape[-2])
    batch = _broadcast(a, b)
    special = int(split_k not in (None, 1) or out_dtype not in (None, a.dtype))
    chosen = dispatch.resolve(op, backend, a.device, a.dtype, special=special)
    y = _Matmul.apply(a, b, batch, out_dtype or a.dtype, split_k, chosen)
    if not columns:
        y = y.squeeze(-1)
    return y if rows else y.squeeze(-2 if columns else -1)


@dispatch.self_check("matmul")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    a, b = torch.randn(2, 7, 33), torch.randn(33, 20)
    return _library.outputs_and_gradients(matmul, backend, device, {"split_k": 3}, a=a, b=b)
