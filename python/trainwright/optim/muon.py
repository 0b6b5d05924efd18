"""`tw.optim.Muon`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainwright.errors import check_int, check_number, value_error
from trainwright.ops._optimizer import Spec, State
from trainwright.ops._optimizer_formats import INT8_STATE
from trainwright.ops.muon import (
    MOMENTUM,
    Call,
    Member,
    Orthogonalization,
    check_adjust_lr_fn,
    check_ns_dtype,
    step_matrices,
)
from trainwright.ops.newton_schulz import COEFFICIENTS, EPS, MAX_STEPS, check_coefficients
from trainwright.optim._base import FusedOptimizer, run_closure
from trainwright.optim._checks import check_options
from trainwright.optim._state import master_format, state_format

__all__ = ["Muon"]


class Muon(FusedOptimizer, torch.optim.Muon):
    """`torch.optim.Muon` with fused momentum, and Newton-Schulz batched over all matrices of one shape.

    The formula is that of `tw.muon_`; the products of symmetric matrices are computed by half. Constructor and
    `state_dict` are compatible with torch's in both directions; the state of a parameter is ``momentum_buffer`` and,
    where used, ``master``, and for int8 codes ``momentum_buffer_scale``. ``p.grad`` is never written.

    Which matrices a parameter is: a 2-D parameter is one; a 3-D parameter is a batch of them, each orthogonalised by
    itself (experts, heads; for a `Conv1d` use AdamW, or a 4-D weight); one of 4 and more dimensions, a convolution's
    weight, is flattened to (out, everything else). Parameters of 0 and 1 dimension belong to another optimizer.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch, per
            group too; `lr` may be a tensor.
        ns_dtype: dtype of the matrices that are orthogonalised. None: bf16 on a GPU (as torch everywhere), fp32 on the
            CPU, fp64 for fp64 parameters.
        master_weights: "fp32" or "auto" keeps an fp32 master of each bf16 or fp16 parameter, "split16" (bf16 only) the
            16-bit remainder that makes the parameter an exact fp32 number; "none" updates the parameter itself. After
            editing parameters by hand call `refresh_masters()`.
        state_dtype: of the momentum: torch.float32, torch.bfloat16, or "int8": 8-bit codes with a scale for each 256
            elements (fp64 parameters keep fp64).
        stochastic_rounding, seed: round the momentum, and parameters without a master, at random with the right mean,
            so that small updates are not lost; the bits depend on (seed, element, step) alone. The state has a ``step``
            then.
        max_grad_norm: clip the global 2-norm of all gradients inside the step; ``p.grad`` is not rewritten.
        backend: None, "cpu", "triton" or "torch".

    Raises:
        ValueError: an option is out of range; a parameter has fewer than 2 dimensions (named by index and, for named
            parameters, by name) or is listed twice.
        TypeError: an option or parameter is of the wrong kind.

    Gradients may have another dtype and other strides than their parameter. With a `GradScaler` or `tw.LossScaler` the
    gradients are unscaled inside the step, and a step that overflowed leaves parameters, momentum and masters as they
    were. `last_step` holds what a step found, on the device; `step()` never waits for a GPU.

    >>> import torch, trainwright as tw
    >>> p = torch.zeros(2, 2, requires_grad=True)
    >>> opt = tw.optim.Muon([p], lr=1.0)
    >>> p.grad = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> opt.step()
    >>> p.detach().round(decimals=1)
    tensor([[-0.7000,  0.0000],
            [ 0.0000, -1.1000]])
    """

    elementwise: ClassVar[bool] = False
    hyper: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum", "nesterov")
    _ns_dtype: torch.dtype | None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        master_weights: str = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_options("Muon", defaults)
        self._set_options(
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            max_grad_norm=max_grad_norm,
            backend=backend,
        )
        check_ns_dtype("Muon", ns_dtype)
        self._ns_dtype = ns_dtype
        # Not torch.optim.Muon's own constructor, which refuses all but two dimensions.
        torch.optim.Optimizer.__init__(self, params, defaults)

    def _states(self, flags: int) -> tuple[State, ...]:
        return MOMENTUM.states

    def _counts_steps(self) -> bool:
        return self._options.stochastic_rounding

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the options of the group are checked, and that its parameters are matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _orthogonalization(group)
            for i, p in enumerate(group["params"]):
                if p.dim() < 2:
                    name = f" ({group['param_names'][i]!r})" if "param_names" in group else ""
                    raise value_error(
                        "Muon", f"params[{i}]{name}", "at least 2 dimensions (AdamW takes the others)", tuple(p.shape)
                    )  # fmt: skip
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ns_dtype": self._ns_dtype}

    def _members(self) -> dict[torch.device, list[Member]]:
        members: dict[torch.device, list[Member]] = {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                grad = p.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"Muon does not support sparse gradients (got layout {grad.layout})"
                    )
                state = self.state[p]
                self._start(p, state, 0)
                options = self._options
                form = state_format(p, options.state_dtype)
                master = master_format(p, options.master_weights)
                spec = Spec(index, 0, options.stochastic_rounding, form, master)
                states = [state["momentum_buffer"]]
                if form == INT8_STATE:
                    states.append(state["momentum_buffer_scale"])
                exact = state["master"] if master else None
                step = state["step"] if options.stochastic_rounding else None
                member = Member(p, grad, states, exact, spec, step)
                members.setdefault(p.device, []).append(member)
        return members

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure`, if given, returned."""
        loss = run_closure(closure)
        members = self._members()
        kinds = [_orthogonalization(group) for group in self.param_groups]
        control = self._overflow_and_clip({d: [m.grad for m in ms] for d, ms in members.items()})
        for device, mine in members.items():
            here = None if control is None else control.to(device)
            if here is not None and device.type == "cpu" and here[1] != 0:
                continue  # the kernels would change nothing either, but they would multiply
            seed, backend = self._options.seed, self._options.backend
            call = Call(kinds, self._hyper(device), here, self._ns_dtype, seed, backend)
            step_matrices(mine, call)
        return loss


def _orthogonalization(group: dict[str, Any]) -> Orthogonalization:
    check_coefficients("Muon", "ns_coefficients", group["ns_coefficients"])
    check_number("Muon", "eps", group["eps"], minimum=0.0)
    check_int("Muon", "ns_steps", group["ns_steps"], minimum=0)
    if group["ns_steps"] > MAX_STEPS:
        raise value_error("Muon", "ns_steps", f"at most {MAX_STEPS}", group["ns_steps"])
    check_adjust_lr_fn("Muon", group["adjust_lr_fn"])
    a, b, c = group["ns_coefficients"]
    coefficients = (float(a), float(b), float(c))
    return Orthogonalization(
        coefficients, float(group["eps"]), group["ns_steps"], group["adjust_lr_fn"]
    )
