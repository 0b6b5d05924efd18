"""What the fused optimizers share: options of the constructor, state that keeps its dtype, clipping and loss scaling
folded into the step.

Mixed in front of the torch optimizer of the same name, which brings its constructor checks, hooks and `state_dict`:

    class AdamW(FusedOptimizer, torch.optim.AdamW): ...
"""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

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
from trainwright.ops._optimizer import (
    ALL_FLAGS,
    OptimizerOp,
    Spec,
    State,
    needs,
    pack_spec,
    unpack_spec,
)
from trainwright.ops._optimizer_formats import INT8_STATE
from trainwright.ops.grad_norm import GRAD_STATS
from trainwright.optim._checks import check_options
from trainwright.optim._hyper import HyperTable, is_capturing
from trainwright.optim._plan import Batch, Plan
from trainwright.optim._state import load as load_state
from trainwright.optim._state import master_format, new_master, new_state, new_step, state_format
from trainwright.optim.checkpoint import import_adam_state, layout_of

# torch's choices of implementation: the constructor's, never a checkpoint's.
FLAGS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class StepInfo:
    """What the last `step()` found, as device tensors: reading a value waits for the device.

    Attributes:
        grad_norm: 0-d fp32, the global 2-norm of the unscaled gradients before clipping; None if neither clipping nor a
            loss scaler needed it.
        skipped: 0-d bool; a loss scaler's overflow made the step leave everything as it was.
        lost_update_fraction: 0-d fp32, of the elements whose update was not zero the share whose stored value (the
            master, if there is one) did not move; None unless the constructor's `count_lost_updates` asked for it.
    """

    grad_norm: Tensor | None
    skipped: Tensor
    lost_update_fraction: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The keyword arguments that torch's optimizers do not have. They belong to the instance, not to a checkpoint."""

    master_weights: str = "auto"
    state_dtype: torch.dtype | str = torch.float32
    stochastic_rounding: bool = False
    seed: int = 0
    max_grad_norm: float | None = None
    count_lost_updates: bool = False
    backend: str | None = None


if TYPE_CHECKING:
    from typing import TypedDict

    class FusedOptions(TypedDict, total=False):
        """`Options` as keyword arguments."""

        master_weights: str
        state_dtype: torch.dtype | str
        stochastic_rounding: bool
        seed: int
        max_grad_norm: float | None
        count_lost_updates: bool
        backend: str | None


def op_module(name: str) -> ModuleType:
    """`trainwright.ops.<name>`: a from-import would give an op of that name."""
    return importlib.import_module(f"trainwright.ops.{name}")


class _Loaded:
    """Carries a tensor of a checkpoint past torch's `load_state_dict`, which would cast it to the parameter's dtype."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _box_tensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    layout = layout_of(state_dict)
    if layout != "torch":
        if not isinstance(optimizer, torch.optim.Adam):
            where = f"{type(optimizer).__name__}.load_state_dict"
            raise value_error(where, "state_dict", "the layout of torch", f"{layout}'s (of Adam)")
        state_dict = import_adam_state(state_dict)
    boxed = {
        key: {k: _Loaded(v) if isinstance(v, Tensor) else v for k, v in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": boxed}


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin; see the module. A subclass names its op's module and the group options that are its hyper-parameters."""

    module: ClassVar[ModuleType]  # OP, STEP
    hyper: ClassVar[tuple[str, ...]]  # keys of a group; "betas" gives two numbers
    elementwise: ClassVar[bool] = (
        True  # an element's update depends on no other element of its parameter
    )
    _step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf for step()
    finds_overflow = True  # LossScaler: step() looks for inf and NaN itself
    _options: Options
    last_step: StepInfo

    @property
    def op(self) -> OptimizerOp:
        return self.module.OP

    def _states(self, flags: int) -> tuple[State, ...]:
        """The states that a group with these flags has."""
        return self.op.present(flags)

    def _flags(self, group: dict[str, Any]) -> int:
        """Which of the op's optional states a group has."""
        return 0

    def _counts_steps(self) -> bool:
        return True

    # ---- construction

    def _set_options(
        self,
        *,
        differentiable: bool = False,
        master_weights: str = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        count_lost_updates: bool = False,
        backend: str | None = None,
    ) -> None:
        op = type(self).__name__
        if differentiable:
            raise value_error(op, "differentiable", "False (the step is one kernel)", True)
        if master_weights not in ("auto", "fp32", "none", "split16"):
            raise value_error(
                op, "master_weights", "'auto', 'fp32', 'split16' or 'none'", repr(master_weights)
            )
        if state_dtype not in (torch.float32, torch.bfloat16, "int8"):
            raise value_error(
                op, "state_dtype", "torch.float32, torch.bfloat16 or 'int8'", state_dtype
            )
        check_bool(op, "stochastic_rounding", stochastic_rounding)
        check_bool(op, "count_lost_updates", count_lost_updates)
        check_int(op, "seed", seed)
        if max_grad_norm is not None:
            check_number(op, "max_grad_norm", max_grad_norm, minimum=0.0)
        if backend is not None and backend not in dispatch.BACKENDS:
            raise value_error(
                op, "backend", f"one of {', '.join(dispatch.BACKENDS)}", repr(backend)
            )
        self._options = Options(
            master_weights, state_dtype, stochastic_rounding, seed, max_grad_norm, count_lost_updates, backend
        )  # fmt: skip
        self.last_step = StepInfo(None, torch.zeros((), dtype=torch.bool))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a parameter listed twice is a ValueError, and the group's options are checked."""
        op = type(self).__name__
        if isinstance(param_group, dict):
            check_options(op, {**self.defaults, **param_group})
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
            problem = self._problem(p)
            if problem:
                self.param_groups.pop()
                raise type_error(
                    op, f"params[{i}]", "a dense fp32, bf16, fp16 or fp64 tensor", problem
                )
            if p.dtype == torch.float16 and self._options.master_weights == "split16":
                self.param_groups.pop()
                expected = "'fp32' or 'none' for fp16 parameters (bf16 is the high half of fp32)"
                raise value_error(op, "master_weights", expected, "'split16'")

    def _problem(self, p: Tensor) -> str | None:
        """What about a parameter the kernels cannot handle."""
        if p.dtype not in FLOAT_DTYPES:
            return f"dtype {p.dtype}"
        if p.layout is not torch.strided:
            return f"layout {p.layout}"
        expanded = any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride()))
        return "an expanded tensor" if expanded else None

    # ---- state

    def refresh_masters(self) -> None:
        """Set the masters to the parameters: call it after parameters were edited by hand."""
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state.get(p, {}).get("master")
                    if master is not None:
                        master.zero_() if master.dtype == torch.int16 else master.copy_(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of the torch optimizer of the same name; Adam and AdamW load those of
        Apex, DeepSpeed and bitsandbytes too (`import_adam_state`).

        State is copied; it is kept in the formats that the constructor was given, whatever the dtype of the parameters,
        and converted if the checkpoint has others (from and to "split16" masters only after the model was loaded; to
        them a bf16 parameter that lies half-way below its fp32 master moves to the other neighbour, which is how
        "split16" rounds: the master stays exact). The implementation flags and the options of the constructor stay as
        they are.
        """
        handle = self.register_load_state_dict_pre_hook(_box_tensors)  # after the user's hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

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
                    plain = {k: v.value if isinstance(v, _Loaded) else v for k, v in values.items()}
                    state["state"][p] = self._in_own_formats(p, plain)
        super().__setstate__(state)
        self.__dict__.pop("_plan", None)

    def _in_own_formats(self, p: Tensor, values: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state of p, in any formats, in those of the options."""
        form = state_format(p, self._options.state_dtype)
        master = master_format(p, self._options.master_weights)
        states = self._states(ALL_FLAGS)
        return load_state(
            type(self).__name__, states, p, values, form, master, self._counts_steps()
        )

    # ---- for Offload, whose host optimizer takes the place of the step

    def _host_class(self) -> type[FusedOptimizer]:
        """The optimizer that the host runs."""
        return type(self)

    def _state_moved(self, state: Any) -> None:
        """It is now in this dict, on the host."""

    @contextlib.contextmanager
    def _updated_parameters(self, *, step: bool) -> Iterator[None]:
        """Inside, the groups hold the parameters that an update writes; with `step`, it is one."""
        yield

    def _edit_mark(self, p: Tensor) -> tuple[int, int]:
        """Changes when a parameter is edited."""
        return p._version, p.data_ptr()

    # ---- step

    def _start(self, p: Tensor, state: dict[str, Any], flags: int) -> None:
        """Make what p's state lacks."""
        before = len(state)
        if self._counts_steps() and "step" not in state:
            state["step"] = new_step(p)
        form = state_format(p, self._options.state_dtype)
        for s in self._states(flags):
            if s.name not in state:
                state |= new_state(p, s, form)
                self._started(s.name, state)
        master = master_format(p, self._options.master_weights)
        if master and "master" not in state:
            state["master"] = new_master(p, master)
        if len(state) > before and is_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: step: the CUDA graph being captured would make the state anew whenever it "
                "runs; run a step before"
            )

    def _started(self, name: str, state: dict[str, Any]) -> None:
        """A state tensor was made, perhaps in the middle of a run."""

    def _all_flags(self) -> list[int]:
        return list(map(self._flags, self.param_groups))

    def _offsets(self, params: list[Tensor]) -> list[int]:
        return [getattr(p, "shard_offset", 0) for p in params]

    def _backend(self, device: torch.device, batch: Batch | None) -> str:
        """Who runs the step of a batch, or of the last one."""
        if batch is not None:
            specs = {unpack_spec(bits & 0xFF) for bits in batch.spec}
            self._needs = needs(sorted(specs, key=pack_spec), self._options.count_lost_updates)
            self._dtype = batch.params[0].dtype
        return dispatch.resolve(
            self.op.name, self._options.backend, device, self._dtype, **self._needs
        )

    def _collect(self) -> dict[torch.device, Batch]:
        batches: dict[torch.device, Batch] = {}
        device, batch = None, Batch()
        options = self._options
        for index, group in enumerate(self.param_groups):
            flags = self._flags(group)
            present = self._states(flags)
            for p in group["params"]:
                grad = p.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    name = type(self).__name__
                    raise RuntimeError(
                        f"{name} does not support sparse gradients (got layout {grad.layout})"
                    )
                if p.device != device:
                    device = p.device
                    batch = batches.setdefault(device, Batch())
                state = self.state[p]
                self._start(p, state, flags)
                form = state_format(p, options.state_dtype)
                master = master_format(p, options.master_weights)
                names = [s.name for s in present]
                if form == INT8_STATE:
                    names = [key for name in names for key in (name, name + "_scale")]
                if master:
                    batch.masters.append(state["master"])
                batch.params.append(p)
                batch.grads.append(grad)
                batch.names.append(names)
                batch.states += [state[name] for name in names]
                batch.steps.append(state["step"])
                batch.spec.append(
                    pack_spec(Spec(index, flags, options.stochastic_rounding, form, master))
                )
        for batch in batches.values():
            batch.offsets = self._offsets(batch.params)
        return batches

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure`, if given, returned."""
        loss = run_closure(closure)
        seed, counting = self._options.seed, self._options.count_lost_updates
        capturing = is_capturing()
        plan: Plan | None = self.__dict__.get("_plan")
        # A captured step brings its table along: it runs again when this one has other addresses.
        grads = plan.refresh(self) if plan is not None and not capturing else None
        lost: dict[torch.device, Tensor | None] = {}

        def count_on(device: torch.device) -> Tensor | None:
            if counting:
                lost[device] = torch.zeros(2, dtype=torch.float64, device=device)
            return lost.get(device)

        if plan is not None and grads is not None:
            control = self._overflow_and_clip({plan.device: grads})
            plan.step(self._hyper(plan.device), control, seed, count_on(plan.device))
        else:
            batches = self._collect()
            control = self._overflow_and_clip({d: b.grads for d, b in batches.items()})
            for device, b in batches.items():
                here = None if control is None else control.to(device)
                self.module.STEP[self._backend(device, b)](
                    b.params, b.grads, b.masters, b.states, b.steps, b.spec, b.offsets, self._hyper(device), here, seed,
                    count_on(device),
                )  # fmt: skip
                torch.autograd.graph.increment_version(b.params)
            if not capturing:
                self._plan = Plan.make(self, batches)
        if counting:
            self._report_lost([x for x in lost.values() if x is not None])
        return loss

    def _report_lost(self, counts: list[Tensor]) -> None:
        home = self.last_step.skipped.device
        total = torch.zeros(2, dtype=torch.float64, device=home)
        for x in counts:
            total = total + x.to(home)
        fraction = (total[1] / total[0].clamp(min=1.0)).float()
        self.last_step = replace(self.last_step, lost_update_fraction=fraction)

    def _overflow_and_clip(self, grads: dict[torch.device, list[Tensor]]) -> Tensor | None:
        """Set `last_step`. Returns (2,) fp64: the multiplier of the gradients and whether to skip; None for (1, no)."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        limit = self._options.max_grad_norm
        home = next(iter(grads), torch.device("cpu"))
        if scale is None and found is None and limit is None:
            self.last_step = StepInfo(None, self._never(home))
            return None
        stats = self._grad_stats(grads, home)
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

    def _never(self, device: torch.device) -> Tensor:
        """False, on the device. Kept, so that a step without clipping and scaling launches one kernel alone."""
        kept: Tensor | None = self.__dict__.get("_false")
        if kept is None or kept.device != device:
            kept = torch.zeros((), dtype=torch.bool, device=device)
            if not is_capturing():  # there it is False only once the graph has run
                self._false = kept
        return kept

    def _grad_stats(self, grads: dict[torch.device, list[Tensor]], home: torch.device) -> Tensor:
        """(2,) fp64: the sum of squares, and whether an element is not finite."""
        stats = torch.zeros(2, dtype=torch.float64, device=home)
        for device, members in grads.items():
            chosen = dispatch.resolve("grad_norm", self._options.backend, device, members[0].dtype)
            stats = stats + GRAD_STATS[chosen](members, 2.0).to(home)
        return stats

    def _hyper(self, device: torch.device) -> Tensor:
        """(groups, columns) fp64: each group's options; "betas" gives two."""
        table: HyperTable = self.__dict__.setdefault("_hyper_table", HyperTable())
        return table.on(device, list(map(operator.itemgetter(*self.hyper), self.param_groups)))


def run_closure(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
