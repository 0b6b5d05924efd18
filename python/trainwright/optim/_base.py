"""What the fused optimizers share: options of the constructor, state that keeps its dtype, clipping and loss scaling
folded into the step.

Mixed in front of the torch optimizer of the same name, which brings its constructor checks, hooks and `state_dict`:

    class AdamW(FusedOptimizer, torch.optim.AdamW): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.errors import (
    FLOAT_DTYPES,
    check_bool,
    check_int,
    check_number,
    type_error,
    value_error,
)
from trainwright.ops.grad_norm import GRAD_STATS

LOW_PRECISION = (torch.bfloat16, torch.float16)
# torch's choices of implementation: the constructor's, never a checkpoint's.
FLAGS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class StepInfo:
    """What the last `step()` found, as device tensors: reading a value waits for the device.

    Attributes:
        grad_norm: 0-d fp32, the global 2-norm of the unscaled gradients before clipping; None if neither clipping nor a
            loss scaler needed it.
        skipped: 0-d bool; a loss scaler's overflow made the step leave everything as it was.
    """

    grad_norm: Tensor | None
    skipped: Tensor


@dataclass(frozen=True)
class Options:
    """The keyword arguments that torch's optimizers do not have. They belong to the instance, not to a checkpoint."""

    master_weights: str
    max_grad_norm: float | None
    backend: str | None
    state_dtype: torch.dtype = torch.float32


class _Loaded:
    """Carries a tensor of a checkpoint past torch's `load_state_dict`, which would cast it to the parameter's dtype."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _box_tensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    boxed = {
        key: {k: _Loaded(v) if isinstance(v, Tensor) else v for k, v in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": boxed}


def state_dtype(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def new_step(p: Tensor, value: float = 0.0) -> Tensor:
    """A parameter's step count: 0-d fp64 on its device, exact to 2^53 (torch's fp32 count stops at 2^24)."""
    return torch.full((), value, dtype=torch.float64, device=p.device)


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin; see the module. A subclass sets `moments`, the state tensors of the parameter's shape."""

    moments: tuple[str, ...] = ()
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # that its kernels know
    _step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf for step()
    finds_overflow = True  # LossScaler: step() looks for inf and NaN itself
    _options: Options
    last_step: StepInfo

    # ---- construction

    def _set_options(
        self,
        *,
        differentiable: bool,
        master_weights: str,
        state_dtype: torch.dtype | str,
        stochastic_rounding: bool,
        seed: int,
        max_grad_norm: float | None,
        backend: str | None,
    ) -> None:
        op = type(self).__name__
        if differentiable:
            raise value_error(op, "differentiable", "False (the step is one kernel)", True)
        if master_weights not in ("auto", "fp32", "none", "split16"):
            raise value_error(
                op, "master_weights", "'auto', 'fp32', 'split16' or 'none'", repr(master_weights)
            )
        if master_weights == "split16":
            raise ValueError(f"{op}: master_weights: 'split16' is not supported yet, use 'fp32'")
        if state_dtype not in (torch.float32, torch.bfloat16, "int8"):
            raise value_error(
                op, "state_dtype", "torch.float32, torch.bfloat16 or 'int8'", state_dtype
            )
        if not isinstance(state_dtype, torch.dtype) or state_dtype not in self.state_dtypes:
            raise ValueError(
                f"{op}: state_dtype: {state_dtype} is not supported yet, use torch.float32"
            )
        check_bool(op, "stochastic_rounding", stochastic_rounding)
        if stochastic_rounding:
            raise ValueError(f"{op}: stochastic_rounding: not supported yet, use fp32 masters")
        check_int(op, "seed", seed)
        if max_grad_norm is not None:
            check_number(op, "max_grad_norm", max_grad_norm, minimum=0.0)
        if backend is not None and backend not in dispatch.BACKENDS:
            raise value_error(
                op, "backend", f"one of {', '.join(dispatch.BACKENDS)}", repr(backend)
            )
        self._options = Options(master_weights, max_grad_norm, backend, state_dtype)
        self.last_step = StepInfo(None, torch.zeros((), dtype=torch.bool))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a parameter listed twice is a ValueError."""
        op = type(self).__name__
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"]
            if isinstance(params, Iterable) and not isinstance(params, Tensor | set):
                params = list(params)
                param_group = {**param_group, "params": params}
                tensors = [p[1] if isinstance(p, tuple) else p for p in params]
                if len({id(p) for p in tensors}) != len(tensors):
                    raise ValueError(
                        f"{op}: params: a parameter is listed twice in a parameter group"
                    )
        super().add_param_group(param_group)
        for i, p in enumerate(self.param_groups[-1]["params"]):
            problem = (
                f"dtype {p.dtype}"
                if p.dtype not in FLOAT_DTYPES
                else f"layout {p.layout}"
                if p.layout is not torch.strided
                else "an expanded tensor"
                if any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride()))
                else None
            )
            if problem:
                self.param_groups.pop()
                raise type_error(
                    op, f"params[{i}]", "a dense fp32, bf16, fp16 or fp64 tensor", problem
                )

    # ---- state

    def _wants_master(self, p: Tensor) -> bool:
        return p.dtype in LOW_PRECISION and self._options.master_weights != "none"

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else self._options.state_dtype

    def refresh_masters(self) -> None:
        """Set the fp32 masters to the parameters: call it after parameters were edited by hand."""
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if "master" in self.state.get(p, {}):
                        self.state[p]["master"].copy_(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of the torch optimizer of the same name.

        State is copied and keeps its precision, whatever the dtype of the parameters; the implementation flags and the
        options of the constructor stay as they are.
        """
        handle = self.register_load_state_dict_pre_hook(_box_tensors)  # after the user's hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _unbox(self, p: Tensor, name: str, value: Any) -> Any:
        tensor = value.value if isinstance(value, _Loaded) else value
        if name == "step":
            return new_step(p, float(tensor))
        if not isinstance(tensor, Tensor):
            return tensor
        own = name in self.moments or name == "master"
        if own and tensor.shape != p.shape:
            where = f"load_state_dict: {name}"
            raise value_error(type(self).__name__, where, f"shape {tuple(p.shape)}", tuple(tensor.shape))  # fmt: skip
        dtype = torch.float32 if name == "master" else self._state_dtype(p) if own else tensor.dtype
        return tensor.detach().to(device=p.device, dtype=dtype, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options, "last_step": self.last_step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # From load_state_dict: state and groups of the checkpoint. From pickle or deepcopy: everything.
        loading = "_options" not in state
        if loading:
            for old, new in zip(self.param_groups, state["param_groups"]):
                for key, value in old.items():
                    if key in FLAGS or key not in new:
                        new[key] = value
            for p, values in state["state"].items():
                if isinstance(p, Tensor):
                    for name in list(values):
                        values[name] = self._unbox(p, name, values[name])
                    if not self._wants_master(p):
                        values.pop("master", None)
        super().__setstate__(state)

    # ---- step

    def _overflow_and_clip(self, grads: dict[torch.device, list[Tensor]]) -> Tensor | None:
        """Set `last_step`. Returns (2,) fp64: the multiplier of the gradients and whether to skip; None for (1, no)."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        limit = self._options.max_grad_norm
        home = next(iter(grads), torch.device("cpu"))
        if scale is None and found is None and limit is None:
            self.last_step = StepInfo(None, torch.zeros((), dtype=torch.bool, device=home))
            return None
        stats = torch.zeros(2, dtype=torch.float64, device=home)
        for device, members in grads.items():
            chosen = dispatch.resolve("grad_norm", self._options.backend, device, members[0].dtype)
            stats = stats + GRAD_STATS[chosen](members, 2.0).to(home)
        norm = stats[0].sqrt()
        multiplier = torch.ones((), dtype=torch.float64, device=home)
        if scale is not None:
            multiplier = torch.as_tensor(scale).to(home, torch.float64).reshape(()).reciprocal()
            norm = norm * multiplier
        if limit is not None:
            multiplier = multiplier * (limit / (norm + 1e-6)).clamp(max=1.0)
        if found is not None:
            skipped = torch.as_tensor(found).to(home).reshape(-1).ne(0).any()
        elif scale is not None:
            skipped = stats[1] != 0
        else:
            skipped = torch.zeros((), dtype=torch.bool, device=home)
        self.last_step = StepInfo(norm.float(), skipped)
        return torch.stack([multiplier, skipped.double()])

    def _hyper(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """(groups, len(names)) fp64: each group's options; "betas" gives two. Tensors on a device are read there."""
        rows: list[list[Any]] = []
        on_device = False
        for group in self.param_groups:
            row: list[Any] = []
            for name in names:
                value = group[name]
                row.extend(value) if isinstance(value, tuple | list) else row.append(value)
            on_device = on_device or any(
                isinstance(v, Tensor) and v.device.type != "cpu" for v in row
            )
            rows.append(row)
        if not on_device:
            numbers = [[float(v) for v in row] for row in rows]
            return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
        cells = [torch.as_tensor(v).to(device, torch.float64).reshape(()) for row in rows for v in row]  # fmt: skip
        return torch.stack(cells).view(len(rows), -1)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
