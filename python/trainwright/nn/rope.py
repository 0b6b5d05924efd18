"""`tw.nn.RotaryEmbedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import value_error
from trainwright.ops.rope import rope

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(nn.Module):
    """`tw.rope` with tables for positions 0 .. max_positions - 1: pair p at position t turns by t · base^(-2p / dim).

    The tables are computed in fp64 and kept in fp32 whatever dtype the module is cast to; no state dict holds them.

    Args:
        dim: number R of rotated elements of a head, even.
        max_positions: rows of the tables.
        base: ratio of the longest wavelength to the shortest.
        interleaved: pairs are (2p, 2p + 1) instead of (p, p + R/2).

    >>> import torch, trainwright as tw
    >>> turn = tw.nn.RotaryEmbedding(64, 2048)
    >>> q, k = turn(torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64))
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim < 0 or dim % 2:
            raise value_error("RotaryEmbedding", "dim", "an even number", dim)
        self.dim, self.max_positions, self.base = dim, max_positions, base
        self.interleaved = interleaved
        for name in ("cos", "sin"):
            table = torch.empty(max_positions, dim // 2, dtype=torch.float32, device=device)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the tables, e.g. after `to_empty`."""
        if self.cos.is_meta:
            return
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / max(
            self.dim, 1
        )
        positions = torch.arange(self.max_positions, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base**-exponents)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Moves between devices reach the tables, casts (model.bfloat16()) do not.
        moved = super()._apply(fn, recurse)
        for name in ("cos", "sin"):
            if getattr(self, name).dtype != torch.float32:
                setattr(self, name, getattr(self, name).float())
                self.reset_parameters()
        return moved

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate q (B, T, H, D) and k (B, T, G, D) by `positions`, integers (T,) or (B, T); 0 .. T - 1 by default."""
        if positions is not None:
            cos, sin = self.cos[positions], self.sin[positions]
        elif q.shape[1] > self.max_positions:
            wanted = f"at most {self.max_positions} positions"
            raise value_error("RotaryEmbedding", "q", wanted, q.shape[1])
        else:
            cos, sin = self.cos[: q.shape[1]], self.sin[: q.shape[1]]
        return rope(q, k, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.max_positions}, base={self.base}, interleaved={self.interleaved}"
