"""`tw.optim.RMSprop`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from trainwright.optim._base import FusedOptimizer, op_module
from trainwright.optim._checks import check_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trainwright.optim._base import FusedOptions

__all__ = ["RMSprop"]


class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` in one multi-tensor kernel per device, with masters, clipping and loss scaling folded in.

    The formula is that of `tw.rmsprop_`. Constructor and `state_dict` are compatible with torch's in both directions;
    the state of a parameter is ``step`` (0-d fp64, so that it stays exact), ``square_avg`` and, where used,
    ``momentum_buffer``, ``grad_avg``, ``master``, and for int8 codes ``<name>_scale``.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, centered, maximize: as in torch, per group too; `lr` may be a
            tensor.
        foreach, capturable: accepted and kept in the groups; the same kernel runs in any case.
        differentiable: must be False.
        master_weights: for bf16 and fp16 parameters "fp32" (which "auto" means too) keeps an fp32 master, "split16"
            (bf16 only) the 16-bit remainder that makes the parameter an exact fp32 number, "none" updates the
            parameter itself. After editing parameters by hand call `refresh_masters()`.
        state_dtype: torch.float32, torch.bfloat16, or "int8": 8-bit codes with a scale for each 256 elements. fp64
            parameters keep fp64 state.
        stochastic_rounding, seed: round low-precision states, and parameters without a master, at random with the right
            mean, so that small updates are not lost; the bits depend on (seed, element, step) alone.
        max_grad_norm: clip the global 2-norm of all gradients inside the step; ``p.grad`` is not rewritten.
        count_lost_updates: report `last_step.lost_update_fraction`.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Gradients may have another dtype and other strides than their parameter. With a `GradScaler` or `tw.LossScaler` the
    gradients are unscaled inside the step, and a step that overflowed leaves parameters, state, masters and step counts
    as they were. `last_step` holds what a step found, on the device: `step()` never waits for it.

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, requires_grad=True)
    >>> opt = tw.optim.RMSprop([p], lr=0.05)
    >>> p.grad = torch.tensor([1.0, -1.0])
    >>> opt.step()
    >>> p.tolist()
    [0.5, 1.5]
    """

    module = op_module("rmsprop")
    hyper: ClassVar[tuple[str, ...]] = (
        "lr",
        "alpha",
        "eps",
        "weight_decay",
        "momentum",
        "maximize",
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        numbers = dict(
            lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            maximize=maximize,
        )  # fmt: skip
        check_options(type(self).__name__, numbers)
        self._set_options(differentiable=differentiable, **options)
        super().__init__(
            params, lr, alpha, eps, weight_decay, momentum, centered, capturable=capturable, foreach=foreach,
            maximize=maximize,
        )  # fmt: skip

    def _flags(self, group: dict[str, Any]) -> int:
        return (group["momentum"] != 0) | bool(group["centered"]) << 1
