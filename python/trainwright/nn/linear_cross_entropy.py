"""`tw.nn.LinearCrossEntropyLoss`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainwright.ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy in one: `tw.linear_cross_entropy` with the parameters of `torch.nn.Linear`.

    Args:
        in_features: C, channels of hidden.
        num_classes: V, rows of the weight.
        bias: with a learnable bias (V,), or without.
        class_weight: (V,) class weights, kept as a buffer, or None.
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in `tw.linear_cross_entropy`.

    To tie the head to an embedding: ``loss.weight = embedding.weight``.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        self.weight = nn.Parameter(
            torch.empty(num_classes, in_features, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.softcap, self.reduction = softcap, reduction
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch.nn.Linear: uniform within 1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            self.weight,
            target,
            bias=self.bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
        )
