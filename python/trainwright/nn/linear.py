"""`tw.nn.Linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright.ops.linear import linear

__all__ = ["Linear"]


class Linear(nn.Linear):
    """`torch.nn.Linear` on `tw.linear`, with an optional fused activation; same initialisation and state dict.

    Args:
        in_features, out_features: sizes K and N.
        bias: with a bias (N,), or without.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, activation=self.activation, residual=residual)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.activation is None else f"{text}, activation={self.activation!r}"
