"""`tw.nn.LayerNorm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright.ops.layer_norm import layer_norm

__all__ = ["LayerNorm"]


class LayerNorm(nn.Module):
    """`tw.layer_norm` with learnable weight and bias; the state dict is that of `torch.nn.LayerNorm`.

    Args:
        dim: size C of the last dimension.
        eps: added to the variance.
        elementwise_affine: with a weight (C,), or without weight and bias.
        bias: with a bias (C,); only with `elementwise_affine`.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            value = torch.empty(dim, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual)
