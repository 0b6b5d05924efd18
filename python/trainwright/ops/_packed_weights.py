"""Weights that stay packed for the CPU's matrix products over the microbatches of a step (`tw.packed_weights`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwright.errors import check_int
from trainwright.ops._library import acc_dtype
from trainwright.ops.gemm import GEMM, gemm_pack_, gemm_packed, gemm_packed_size

__all__ = ["packed_weights", "product_with"]

MOST_ROWS = 512  # beyond, the product takes so long that packing is a few per cent of it
GRID = 8  # rows and columns of a weight that are compared at each use

Key = tuple[Any, ...]


@dataclass
class _Packed:
    weight: Tensor  # holds the memory, so that nothing else comes to lie at its address
    version: int
    samples: Tensor
    panels: Tensor

    def is_of(self, weight: Tensor) -> bool:
        return self.version == weight._version and torch.equal(self.samples, _samples(weight))


@dataclass
class _Cache:
    max_bytes: int
    bytes: int = 0
    entries: dict[Key, _Packed] = field(default_factory=dict)

    def panels(self, weight: Tensor, b: Tensor, a_dtype: torch.dtype) -> Tensor | None:
        """Of b (K, N), which is `weight` or its transpose; None where there is no room for them."""
        storage, pointer = weight.untyped_storage()._cdata, weight.data_ptr()
        key = (storage, pointer, b.shape, b.stride(), b.dtype, a_dtype)
        entry = self.entries.get(key)
        if entry is None:
            size = gemm_packed_size(b, a_dtype)
            acc = acc_dtype(b.dtype)
            if self.bytes + size * acc.itemsize > self.max_bytes:
                return None
            self.bytes += size * acc.itemsize
            panels = torch.empty(size, dtype=acc)
        elif entry.is_of(weight):
            return entry.panels
        else:
            panels = entry.panels
        gemm_pack_(panels, b, a_dtype)
        self.entries[key] = _Packed(
            weight.detach(), weight._version, _samples(weight).clone(), panels
        )
        return panels


class _Active(threading.local):
    cache: _Cache | None = None


_active = _Active()


def _samples(weight: Tensor) -> Tensor:
    """A grid of its elements, as bits: a NaN equals itself."""
    n, k = weight.shape
    some = weight.detach()[:: max(1, n // GRID), :: max(1, k // GRID)]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return some.view(bits)


def product_with(weight: Tensor, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op `gemm` of a backend, for a second operand that is `weight` or its transpose."""
    cache = _active.cache
    # Only parameters: what a step makes of them, such as a copy in another dtype, it makes anew each time.
    kept = type(weight) is torch.nn.Parameter and backend == "cpu"
    if cache is None or not kept or torch.compiler.is_compiling():
        return GEMM[backend]

    def product(a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        few = 0 < a.shape[0] <= MOST_ROWS and b.numel() > 0
        panels = cache.panels(weight, b, a.dtype) if few else None
        return GEMM["cpu"](a, b, *rest) if panels is None else gemm_packed(a, b, panels, *rest)

    return product


@contextlib.contextmanager
def packed_weights(*, max_bytes: int = 1 << 30) -> Iterator[None]:
    """Keep the weights of `tw.linear` packed for the CPU between the microbatches of a step.

    A product on the CPU begins by copying the weight into the order in which its kernel reads it. For few rows that is
    a good part of its time, and with gradient accumulation each microbatch repeats it. Within this context a weight is
    copied once for the forward and once for the gradient of x; leaving the context drops the copies. Results have the
    same bits.

    Args:
        max_bytes: of all copies together; a weight that finds no room is copied at each use, as without the context. A
            copy has N·K numbers in fp32 (fp64 for fp64), half as many for bf16 on a CPU that multiplies bf16.

    A copy is made anew when the parameter was changed: by an in-place operation or an optimizer, of torch or of ours
    (its version counts), also by one that writes to `.data` or to the memory without counting, provided that it changes
    a grid of 8 or more rows and columns somewhere, which is compared at each use. Only a write that evades the version
    *and* leaves this grid as it was goes unnoticed: keep such writes outside the context.

    It holds for the thread that entered it, on the "cpu" backend, for a `torch.nn.Parameter` as weight and up to 512
    rows of x; it does nothing under torch.compile. Contexts nest: the inner one keeps copies of its own.

    >>> import torch, trainwright as tw
    >>> layer = tw.nn.Linear(64, 64)
    >>> with tw.packed_weights():
    ...     for x in torch.randn(4, 8, 64):
    ...         layer(x).sum().backward()
    """
    check_int("packed_weights", "max_bytes", max_bytes, minimum=0)
    outer, _active.cache = _active.cache, _Cache(max_bytes)
    try:
        yield
    finally:
        _active.cache = outer
