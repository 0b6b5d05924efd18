"""The matrix product under `linear`, as an op on 2-D tensors of any strides; not a public function.

``gemm(a, b, bias, residual, activation, dtype, save_pre)`` gives ``(activation(a·b + bias) + residual, pre)``:
a (M, K), b (K, N), bias (N,), residual (M, N) in `dtype`, the output's; sums in fp32 (fp64 for fp64), rounded
once. a, b and bias may differ in dtype, except that fp64 does not mix. `pre` is a·b + bias in `dtype` with
`save_pre`, else empty. On the CPU an element of the output depends on its row of a and its column of b alone:
not on strides, M, N or threads.

Into memory that is there already, in its dtype and rounded once: ``gemm_out_(c, a, b, bias)`` does c = a·b + bias,
``gemm_add_(c, a, b)`` does c += a·b (for sums over chunks keep c in fp32).

For a b that several products share: ``gemm_pack_(packed, b, a_dtype)`` lays b out as the CPU kernel reads it, into
`gemm_packed_size` numbers in the dtype of the sums, and ``gemm_packed(a, b, packed, ...)`` has the bits of `gemm`; of b
it takes shape and dtype alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.ops import _library
from trainwright.ops._library import acc_dtype

__all__: list[str] = []

SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, int activation, ScalarType dtype, bool save_pre)"
    " -> (Tensor, Tensor)"
)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}  # trainwright/activation.h


def activate(z: Tensor, activation: int) -> Tensor:
    if activation == 1:
        return F.relu(z)
    if activation == 2:
        return F.gelu(z)
    if activation == 3:
        return F.gelu(z, approximate="tanh")
    return F.silu(z) if activation == 4 else z


def gemm_reference(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int, dtype: torch.dtype,
    save_pre: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = [t for t in (a, b, bias, residual) if t is not None]
    if any(t.dtype != dtype for t in tensors):  # else torch's own product sums in fp32 already
        tensors = [t.to(acc_dtype(dtype)) for t in tensors]
        a, b = tensors[:2]
        bias = None if bias is None else tensors[2]
        residual = None if residual is None else tensors[-1]
    z = a @ b if bias is None else torch.addmm(bias, a, b)
    y = activate(z, activation)
    if residual is not None:
        y = y + residual
    return y.to(dtype), z.to(dtype) if save_pre else a.new_empty(0, dtype=dtype)


def gemm_fake(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int, dtype: torch.dtype,
    save_pre: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=dtype), a.new_empty(shape if save_pre else (0,), dtype=dtype)


def gemm_out_reference(c: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    c.copy_(gemm_reference(a, b, bias, None, 0, c.dtype, False)[0])


def gemm_add_reference(c: Tensor, a: Tensor, b: Tensor) -> None:
    acc = acc_dtype(c.dtype)
    c.copy_(c.to(acc) + a.to(acc) @ b.to(acc))


def gemm_pack_reference(packed: Tensor, b: Tensor, a_dtype: torch.dtype) -> None:
    packed.copy_(b.to(packed.dtype).reshape(-1))


def gemm_packed_reference(
    a: Tensor, b: Tensor, packed: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return gemm_reference(a, packed.view(b.shape).to(b.dtype), *rest)


def gemm_packed_fake(a: Tensor, b: Tensor, packed: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return gemm_fake(a, b, *rest)


def _in_place_fake(*args: Any) -> None:
    return None


GEMM = _library.define_backends("gemm", "gemm" + SCHEMA, gemm_reference, gemm_fake)
gemm = GEMM["cpu"]
# Of its own: `gemm` on CUDA tensors is the reference, that is cuBLAS.
GEMM["cuda"] = _library.define("gemm_cuda" + SCHEMA, gemm_reference, gemm_fake)
gemm_out_ = _library.define(
    "gemm_out_(Tensor(a!) c, Tensor a, Tensor b, Tensor? bias) -> ()",
    gemm_out_reference,
    _in_place_fake,
)
gemm_add_ = _library.define(
    "gemm_add_(Tensor(a!) c, Tensor a, Tensor b) -> ()", gemm_add_reference, _in_place_fake
)
gemm_packed_size = _library.define(
    "gemm_packed_size(Tensor b, ScalarType a_dtype) -> int",
    lambda b, a_dtype: b.numel(),
    lambda b, a_dtype: b.numel(),
)
gemm_pack_ = _library.define(
    "gemm_pack_(Tensor(a!) packed, Tensor b, ScalarType a_dtype) -> ()",
    gemm_pack_reference,
    _in_place_fake,
)
gemm_packed = _library.define(
    "gemm_packed" + SCHEMA.replace("Tensor b,", "Tensor b, Tensor packed,"),
    gemm_packed_reference,
    gemm_packed_fake,
)
