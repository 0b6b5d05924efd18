"""`tw.LossScaler`: dynamic loss scaling with a floor and hysteresis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.errors import check_bool, check_int, check_number, type_error, value_error
from trainwright.ops.grad_norm import GRAD_SCALE, GRAD_STATS

__all__ = ["LossScaler"]


class LossScaler:
    """Dynamic loss scaling with `torch.amp.GradScaler`'s methods, a smallest scale, and hysteresis.

    With an optimizer of `tw.optim` a step costs one read of the gradients beyond the update: norm, finite check,
    unscaling and clipping are part of `optimizer.step()`, ``p.grad`` keeps its scaled values, and nothing waits for the
    device.
    Other optimizers work as with GradScaler (torch's fused ones without, all others with one synchronisation).

    Args:
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without overflow.
        growth_interval: see above.
        backoff: multiplies the scale on an overflow.
        min_scale: the scale never falls below it.
        hysteresis: overflows in a row before the scale backs off; it then does so on each one until a good step.
        enabled: with False every method does nothing but call through.

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, requires_grad=True)
    >>> opt, scaler = tw.optim.AdamW([p], lr=0.5, weight_decay=0.0), tw.LossScaler(init_scale=1024.0)
    >>> scaler.scale(p.sum()).backward()
    >>> scaler.step(opt)
    >>> scaler.update()
    >>> p.tolist(), opt.last_step.skipped.item(), scaler.get_scale()
    ([0.5, 0.5], False, 1024.0)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        backoff: float = 0.5,
        min_scale: float = 1.0,
        hysteresis: int = 1,
        *,
        enabled: bool = True,
    ) -> None:
        op = "LossScaler"
        numbers = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff": backoff,
                   "min_scale": min_scale}  # fmt: skip
        for name, value in numbers.items():
            check_number(op, name, value)
            if value <= 0:
                raise value_error(op, name, "a positive number", value)
        for name, count in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            check_int(op, name, count, minimum=1)
        if growth_factor <= 1.0:
            raise value_error(op, "growth_factor", "a number above 1", growth_factor)
        if backoff >= 1.0:
            raise value_error(op, "backoff", "a number below 1", backoff)
        if init_scale < min_scale:
            raise value_error(op, "init_scale", f"at least min_scale={min_scale}", init_scale)
        check_bool(op, "enabled", enabled)
        self.growth_factor, self.growth_interval = float(growth_factor), growth_interval
        self.backoff, self.min_scale, self.hysteresis = float(backoff), float(min_scale), hysteresis
        self._enabled = enabled
        self._scale = torch.full((), float(init_scale))
        self._good_steps = torch.zeros((), dtype=torch.int32)
        self._overflows = torch.zeros((), dtype=torch.int32)
        self._stage: dict[int, str] = {}  # id(optimizer) -> "unscaled" or "stepped", since update()
        self._found: dict[int, Tensor] = {}  # id(optimizer) -> 0-d bool

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """The scale as a number; waits for the device."""
        return float(self._scale) if self._enabled else 1.0

    def _move(self, device: torch.device) -> None:
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._good_steps = self._good_steps.to(device)
            self._overflows = self._overflows.to(device)

    def scale(self, outputs: Any) -> Any:
        """outputs × scale: a tensor, or an iterable of tensors."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._move(outputs.device)
            return outputs * self._scale
        if isinstance(outputs, Iterable):
            items = [self.scale(o) for o in outputs]
            return type(outputs)(items) if isinstance(outputs, list | tuple) else items
        expected = "a tensor or an iterable of tensors"
        raise type_error("LossScaler.scale", "outputs", expected, type(outputs).__name__)

    def _check(self, optimizer: torch.optim.Optimizer, action: str) -> None:
        stage = self._stage.get(id(optimizer))
        if stage == "stepped":
            raise RuntimeError(f"{action}() after step() of this optimizer: call update() first.")
        if stage == "unscaled" and action == "unscale_":
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )

    def _grads(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, list[Tensor]]:
        grads: dict[torch.device, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is not None:
                    # The values of an uncoalesced gradient may overflow only when they are added up.
                    g = g.coalesce()._values() if g.is_sparse else g
                    grads.setdefault(g.device, []).append(g)
        return grads

    def _find(self, grads: dict[torch.device, list[Tensor]]) -> Tensor:
        found = torch.zeros((), dtype=torch.bool, device=self._scale.device)
        for device, members in grads.items():
            chosen = dispatch.resolve("grad_norm", None, device, members[0].dtype)
            found = found | GRAD_STATS[chosen](members, 2.0)[1].ne(0).to(found.device)
        return found

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, in place, and look for overflow: to read or change them before `step`."""
        if not self._enabled:
            return
        self._check(optimizer, "unscale_")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.dtype == torch.float16:
                    raise ValueError(
                        "LossScaler.unscale_: fp16 gradients would underflow; tw.optim unscales them inside step()"
                    )
                if p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
        grads = self._grads(optimizer)
        self._found[id(optimizer)] = self._find(grads)
        factor = self._scale.double().reciprocal()
        for device, members in grads.items():
            chosen = dispatch.resolve("grad_norm", None, device, members[0].dtype)
            GRAD_SCALE[chosen](members, factor.to(device))
            torch.autograd.graph.increment_version(members)
        self._stage[id(optimizer)] = "unscaled"

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)` with unscaled gradients, or no update at all if any of them overflowed."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("LossScaler.step: a closure is not supported.")
        self._check(optimizer, "step")
        key, unscaled = id(optimizer), self._stage.get(id(optimizer)) == "unscaled"
        fused: Any = optimizer
        result = None
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            inside = getattr(optimizer, "finds_overflow", False)
            if not unscaled and not inside:
                self._found[key] = self._find(self._grads(optimizer))
            fused.grad_scale = None if unscaled else self._scale
            fused.found_inf = self._found[key].float() if key in self._found else None
            try:
                result = optimizer.step(**kwargs)
            finally:
                del fused.grad_scale, fused.found_inf
            if not unscaled and inside:
                self._found[key] = fused.last_step.skipped
        else:
            if not unscaled:
                self.unscale_(optimizer)
            if not bool(self._found[key]):
                result = optimizer.step(**kwargs)
        self._stage[key] = "stepped"
        return result

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale for the next iteration: from what the steps since the last call found, or to `new_scale`."""
        if not self._enabled:
            return
        if new_scale is not None:
            value = torch.as_tensor(new_scale, dtype=torch.float32).to(self._scale.device)
            if value.numel() != 1:
                raise value_error("LossScaler.update", "new_scale", "one number", tuple(value.shape))  # fmt: skip
            self._scale = value.detach().reshape(()).clone()
        else:
            if not self._found:
                raise RuntimeError("LossScaler.update: no step() or unscale_() since the last update()")  # fmt: skip
            found = torch.stack([f.to(self._scale.device) for f in self._found.values()]).any()
            self._overflows = torch.where(found, self._overflows + 1, 0)
            good = torch.where(found, 0, self._good_steps + 1)
            grow, shrink = good >= self.growth_interval, self._overflows >= self.hysteresis
            grown = self._scale * self.growth_factor
            grown = torch.where(grown.isfinite(), grown, self._scale)
            shrunk = (self._scale * self.backoff).clamp(min=self.min_scale)
            self._scale = torch.where(shrink, shrunk, torch.where(grow, grown, self._scale))
            self._good_steps = torch.where(grow, 0, good)
        self._stage.clear()
        self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys (it can load them) and ours; empty when disabled. Waits for the device."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._good_steps),
            "min_scale": self.min_scale,
            "hysteresis": self.hysteresis,
            "_overflow_tracker": int(self._overflows),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of GradScaler; what GradScaler does not have stays as constructed."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("LossScaler.load_state_dict: the state is empty (saved while disabled?)")  # fmt: skip
        device = self._scale.device
        self._scale = torch.full((), float(state_dict["scale"]), device=device)
        self.growth_factor = float(state_dict["growth_factor"])
        self.backoff = float(state_dict["backoff_factor"])
        self.growth_interval = int(state_dict["growth_interval"])
        self.min_scale = float(state_dict.get("min_scale", self.min_scale))
        self.hysteresis = int(state_dict.get("hysteresis", self.hysteresis))
        trackers = (state_dict["_growth_tracker"], state_dict.get("_overflow_tracker", 0))
        self._good_steps, self._overflows = (
            torch.full((), int(n), dtype=torch.int32, device=device) for n in trackers
        )
