"""`tw.nn.RMSNorm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright.ops.rms_norm import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """`tw.rms_norm` with a learnable weight; the state dict is that of `torch.nn.RMSNorm`.

    Args:
        dim: size C of the last dimension.
        eps: added to the mean square.
        elementwise_affine: with a weight (C,), or without.
        weight_offset: added to the weight; the weight starts at ``1 - weight_offset``.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.weight_offset = dim, eps, weight_offset
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(
            x, self.weight, self.eps, residual=residual, weight_offset=self.weight_offset
        )
