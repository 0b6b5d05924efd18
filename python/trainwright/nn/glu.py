"""`tw.nn.SwiGLU` and `tw.nn.GeGLU`."""

from __future__ import annotations

from torch import Tensor, nn

from trainwright.ops.glu import geglu, swiglu

__all__ = ["GeGLU", "SwiGLU"]


class SwiGLU(nn.Module):
    """`tw.swiglu` as a module without parameters: ``module(gate, up)`` is ``silu(gate) · up``."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


class GeGLU(nn.Module):
    """`tw.geglu` as a module without parameters: ``module(gate, up)`` is ``gelu(gate) · up``.

    Args:
        approximate: "none", or "tanh" for the tanh form of GELU.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
