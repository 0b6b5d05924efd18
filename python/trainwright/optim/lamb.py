"""`tw.optim.Lamb`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from trainwright.errors import value_error
from trainwright.optim._base import FusedOptimizer, op_module
from trainwright.optim._checks import check_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trainwright.optim._base import FusedOptions

__all__ = ["Lamb"]


class Lamb(FusedOptimizer):
    """LAMB in one multi-tensor call per device, with masters, clipping and loss scaling folded in.

    The formula is that of `tw.lamb_`. The state of a parameter is ``step`` (0-d fp64), ``exp_avg``, ``exp_avg_sq``
    and, where used, ``master``, and for int8 codes ``<name>_scale``.

    Args:
        params, lr, betas, eps, weight_decay, maximize: per group too; `lr` may be a tensor.
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

    A parameter marked as a shard of a larger one (``shard_offset``) is a ValueError in `step()`: its ratio is that of
    norms of the whole.

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, requires_grad=True)
    >>> opt = tw.optim.Lamb([p], lr=0.5)
    >>> p.grad = torch.tensor([1.0, -1.0])
    >>> opt.step()
    >>> [round(x, 4) for x in p.tolist()]
    [0.5, 1.5]
    """

    module = op_module("lamb")
    elementwise: ClassVar[bool] = False
    hyper: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay", "maximize")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        check_options(type(self).__name__, defaults)
        self._set_options(**options)
        super().__init__(params, defaults)

    def _offsets(self, params: list[Tensor]) -> list[int]:
        for i, p in enumerate(params):
            if hasattr(p, "shard_offset"):
                expected = "whole parameters (the ratio is that of norms of the whole)"
                raise value_error("Lamb", f"params[{i}]", expected, f"a shard at {p.shard_offset}")
        return super()._offsets(params)
