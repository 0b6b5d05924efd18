"""`tw.optim.SGD`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from trainwright.optim._base import FusedOptimizer, op_module
from trainwright.optim._checks import check_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trainwright.optim._base import FusedOptions

__all__ = ["SGD"]


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` in one multi-tensor kernel per device, with masters, clipping and loss scaling folded in.

    The formula is that of `tw.sgd_`. Constructor and `state_dict` are compatible with torch's in both directions; the
    state of a parameter is ``step`` (0-d fp64, so that it stays exact), ``momentum_buffer`` where there is
    momentum, ``master`` where used, and for int8 codes ``momentum_buffer_scale``. Momentum switched on in the middle of
    a run starts with that step's gradient, and the count with it.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch, per group too; `lr` may be a
            tensor.
        foreach, fused: accepted and kept in the groups; the same kernel runs in any case.
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
    >>> opt = tw.optim.SGD([p], lr=0.5, momentum=0.9)
    >>> p.grad = torch.tensor([1.0, -1.0])
    >>> opt.step()
    >>> p.tolist()
    [0.5, 1.5]
    """

    module = op_module("sgd")
    hyper: ClassVar[tuple[str, ...]] = (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "maximize",
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        numbers = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize,
        )  # fmt: skip
        check_options(type(self).__name__, numbers)
        self._set_options(differentiable=differentiable, **options)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach, fused=fused,
        )  # fmt: skip

    def _flags(self, group: dict[str, Any]) -> int:
        return 1 if group["momentum"] != 0 else 0

    def _started(self, name: str, state: dict[str, Any]) -> None:
        state["step"].zero_()  # step 1 copies the gradient
