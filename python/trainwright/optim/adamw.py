"""`tw.optim.AdamW`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from trainwright.optim._base import FusedOptimizer, op_module
from trainwright.optim._checks import check_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trainwright.optim._base import FusedOptions

__all__ = ["AdamW"]


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` in one multi-tensor kernel per device, with masters, clipping and loss scaling folded in.

    The formula is that of `tw.adamw_`. Constructor and `state_dict` are compatible with torch's in both directions; the
    state of a parameter is ``step`` (0-d fp64, so that it stays exact), ``exp_avg``, ``exp_avg_sq`` and, where used,
    ``max_exp_avg_sq``, ``master``, and for int8 codes ``<name>_scale``.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch, per group too; `lr` and `betas` may be
            tensors.
        foreach, capturable, fused: accepted and kept in the groups; the same kernel runs in any case, and its step can
            be captured in a CUDA graph once a step has run outside of it (backend "cuda").
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
    >>> opt = tw.optim.AdamW([p], lr=0.5, weight_decay=0.0, max_grad_norm=1.0)
    >>> p.grad = torch.tensor([3.0, -4.0])
    >>> opt.step()
    >>> p.tolist(), opt.last_step.grad_norm.item()
    ([0.5, 1.5], 5.0)
    """

    module = op_module("adamw")
    hyper: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay", "maximize")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        numbers = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
        )
        check_options(type(self).__name__, numbers)
        self._set_options(differentiable=differentiable, **options)
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, fused=fused,
        )  # fmt: skip

    def _flags(self, group: dict[str, Any]) -> int:
        return 1 if group["amsgrad"] else 0
