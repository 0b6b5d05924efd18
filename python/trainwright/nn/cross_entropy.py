"""`tw.nn.CrossEntropyLoss`."""

from __future__ import annotations

from torch import Tensor, nn

from trainwright.ops.cross_entropy import cross_entropy

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """`tw.cross_entropy` as a module, with the arguments of `torch.nn.CrossEntropyLoss`.

    Args:
        weight: (V,) class weights, kept as a buffer, or None.
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in `tw.cross_entropy`.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.softcap, self.reduction = softcap, reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            logits,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
        )
