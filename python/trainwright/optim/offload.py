"""`tw.optim.Offload`: the optimizer's masters and state live on the host, and the step runs there.

Bytes over the link per parameter and step: the gradient down and the parameter up, 4 for bf16, 8 for fp32. The device
keeps parameters and gradients only: of the 16 bytes of fp32 AdamW 8, of the 16 of bf16 with fp32 masters 4.

    link down   g0  g1      g2      g3
    host               step0   step1   step2   step3
    link up                    p0      p1      p2     p3

Gradients come down in chunks through two buffers: chunk i + 2 follows as soon as the host is done with chunk i, and
parameters go up while the host works on the next chunk.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from trainwright.errors import check_number, type_error, value_error
from trainwright.optim._base import FusedOptimizer, StepInfo, run_closure
from trainwright.optim._copy_engine import CopyEngine, copy_engine

__all__ = ["Offload"]

ALIGNMENT = 64  # of a gradient in its buffer: a cache line
AMP = ("grad_scale", "found_inf")  # what a scaler sets on the optimizer for a step


class Offload(torch.optim.Optimizer):
    """Moves an optimizer's masters, state and step to the host; parameters and gradients stay on their device.

    The same bits as the optimizer itself on the CPU, for all of its options, and the same `state_dict`: a checkpoint
    goes from one to the other in both directions. It is used in the optimizer's place: parameter groups (the same
    objects), LR schedulers, gradient accumulation, `max_grad_norm`, `GradScaler` and `tw.LossScaler` work as there. The
    norm is computed by the device from all gradients, in one read, before the first of them is needed on the host.

    Args:
        optimizer: an optimizer of `tw.optim` over the device's parameters, all on one device; state that it has is
            moved. Don't use it any more.
        chunk_mb: size of one of the two gradient buffers in MiB. A larger parameter is a chunk of its own.
        engine: how to copy (`trainwright.optim._copy_engine`); None: side streams on CUDA, ordinary copies elsewhere.

    `step()` returns when the host's part is done; the last parameters may still be on their way up, and what the device
    is given to do next waits for them. A parameter edited between steps is noticed by its version counter, and its new
    value is used; after an edit through ``.data``, which leaves no trace, call `refresh_masters()`.

    Attributes:
        last_step: as of the optimizer.

    Raises:
        TypeError, ValueError: not an optimizer of `tw.optim`; parameters on several devices; a backend that does not
            run on the host.

    Source: Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021.

    >>> import torch, trainwright as tw
    >>> p = torch.ones(2, requires_grad=True)  # on an accelerator
    >>> opt = tw.optim.Offload(tw.optim.AdamW([p], lr=0.5, weight_decay=0.0, max_grad_norm=1.0))
    >>> p.grad = torch.tensor([3.0, -4.0])
    >>> opt.step()
    >>> p.tolist(), opt.last_step.grad_norm.item()
    ([0.5, 1.5], 5.0)
    """

    _step_supports_amp_scaling = True
    finds_overflow = True

    def __init__(
        self, optimizer: FusedOptimizer, *, chunk_mb: float = 64.0, engine: CopyEngine | None = None
    ) -> None:
        if not isinstance(optimizer, FusedOptimizer):
            raise type_error(
                "Offload", "optimizer", "an optimizer of tw.optim", type(optimizer).__name__
            )
        check_number("Offload", "chunk_mb", chunk_mb, minimum=0.0)
        backend = optimizer._options.backend
        if backend not in (None, "cpu", "torch"):
            raise value_error(
                "Offload", "optimizer", "backend None, 'cpu' or 'torch'", repr(backend)
            )
        groups = optimizer.param_groups
        device = self._require_one_device([p for group in groups for p in group["params"]])
        with optimizer._updated_parameters(step=False):
            self._build(optimizer, chunk_mb, engine or copy_engine(device))
        super().__init__(groups, optimizer.defaults)  # the same group dicts
        self.param_groups = groups
        for p, state in optimizer.state.items():
            self._host.state[self._twins[p]] = {
                k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in state.items()
            }
        optimizer.state.clear()
        self._share_state()
        optimizer._state_moved(self.state)

    @staticmethod
    def _require_one_device(params: list[Tensor]) -> torch.device:
        devices = sorted({str(p.device) for p in params})
        if len(devices) != 1:
            raise value_error(
                "Offload", "optimizer", "parameters on one device", ", ".join(devices)
            )
        return params[0].device

    def _build(self, optimizer: FusedOptimizer, chunk_mb: float, engine: CopyEngine) -> None:
        """All but what torch's Optimizer holds: a twin on the host of each parameter, and the optimizer over them."""
        self._chunk_mb, self._engine = chunk_mb, engine
        groups = optimizer.param_groups
        self._twins: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, tuple[int, int]] = {}  # of a parameter when its twin was equal
        self._buffers = [self._engine.empty_bytes(0) for _ in range(2)]
        self._last_upload: Any = None
        self._control: Tensor | None = None
        self._lost: list[Tensor] = []  # the chunks' counts of updates lost to rounding
        host_groups = [
            {**group, "params": [self._make_twin(p) for p in group["params"]]} for group in groups
        ]
        host = object.__new__(optimizer._host_class())
        host.__setstate__(
            {**optimizer.__getstate__(), "state": defaultdict(dict), "param_groups": host_groups}
        )
        # The multiplier of the gradients comes from the device, which has seen all of them.
        host.__dict__["_overflow_and_clip"] = lambda grads: self._control
        host.__dict__["_report_lost"] = self._lost.extend
        self._host, self._device = host, optimizer
        if optimizer._options.backend == "cpu":  # the norm is the device's work
            optimizer._options = dataclasses.replace(optimizer._options, backend=None)

    def _make_twin(self, p: Tensor) -> Tensor:
        twin = self._engine.empty_like(p.detach()).requires_grad_()
        twin.grad_dtype = None  # gradients of any dtype
        if hasattr(p, "shard_offset"):  # the parameter is a shard of a larger one
            twin.shard_offset = p.shard_offset  # type: ignore[attr-defined]
        self._twins[p] = twin
        return twin

    @property
    def last_step(self) -> StepInfo:
        return self._device.last_step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters must be on the device of the others."""
        if (
            "param_groups" not in self.__dict__
            or self.param_groups is not self._device.param_groups
        ):
            super().add_param_group(param_group)  # from __init__
            return
        self._device.add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._require_one_device([*self._twins, *group["params"]])
        except ValueError:
            self.param_groups.pop()
            raise
        with self._device._updated_parameters(step=False):
            twins = [self._make_twin(p) for p in group["params"]]
            self._host.add_param_group({**group, "params": twins})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self._device.zero_grad(set_to_none)

    # ---- state

    def _share_state(self) -> None:
        """`state` by device parameter: the same dicts as the host optimizer's."""
        self.state.clear()
        for p, twin in self._twins.items():
            if twin in self._host.state:
                self.state[p] = self._host.state[twin]

    def _take_over(self) -> None:
        """What the user may have changed in groups and state."""
        for group, host_group in zip(self.param_groups, self._host.param_groups):
            # A learning rate on the device comes down here once, not behind every chunk of gradients.
            host_group.update({k: _on_host(v) for k, v in group.items() if k != "params"})
        self._host.state.clear()
        for p, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":  # Zero has loaded it
                    state[key] = value.to("cpu")
            self._host.state[self._twins[p]] = state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, as if it had run on the CPU."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._take_over()
        saved: dict[str, Any] = self._host.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of the optimizer, or of the torch optimizer of its name."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._take_over()
        self._fetch_all()  # the remainders of bf16 parameters become fp32 masters with the parameters' values
        self._host.load_state_dict(state_dict)
        for group, host_group in zip(self.param_groups, self._host.param_groups):
            group.update({k: v for k, v in host_group.items() if k != "params"})
        self._share_state()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def refresh_masters(self) -> None:
        """Take over the values that the parameters have now, masters included: after they were edited by hand."""
        self._take_over()
        with self._device._updated_parameters(step=False):
            self._fetch_all()
        self._host.refresh_masters()

    @torch.no_grad()
    def _fetch_all(self) -> None:
        self._versions.clear()
        self._wait_for_uploads()
        self._refresh_twins(list(self._twins))

    def __getstate__(self) -> dict[str, Any]:
        options = {"chunk_mb": self._chunk_mb, "engine": self._engine}
        return {"optimizer": self._device, "state": dict(self.state), "options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        self._build(optimizer, **state["options"])
        values = defaultdict(dict, state["state"])
        groups = optimizer.param_groups
        super().__setstate__(
            {"defaults": optimizer.defaults, "state": values, "param_groups": groups}
        )

    # ---- step

    def _wait_for_uploads(self) -> None:
        """Before a twin is written."""
        if self._last_upload is not None:
            self._engine.synchronize(self._last_upload)
            self._last_upload = None

    def _refresh_twins(self, params: list[Tensor]) -> None:
        """Bring down the parameters that are not as they were sent up: new ones, and those edited since."""
        mark = self._device._edit_mark
        edited = [p for p in params if self._versions.get(p) != mark(p)]
        if edited:
            self._engine.begin()
            twins = [self._twins[p].detach() for p in edited]
            self._engine.synchronize(self._engine.copy_down(twins, [p.detach() for p in edited]))
            self._remember(edited)

    def _remember(self, params: list[Tensor]) -> None:
        for p in params:
            self._versions[p] = self._device._edit_mark(p)

    def _chunks(self, params: list[Tensor]) -> Iterator[list[Tensor]]:
        chunk: list[Tensor] = []
        size = 0
        for p in params:
            count = _padded_bytes(cast(Tensor, p.grad))
            if chunk and size + count > self._chunk_mb * 2**20:
                yield chunk
                chunk, size = [], 0
            chunk.append(p)
            size += count
        if chunk:
            yield chunk

    def _download(self, chunk: list[Tensor], buffer: Tensor) -> tuple[list[Tensor], Any]:
        """Start bringing the gradients of a chunk into `buffer`. Returns its views, and the ticket."""
        views, begin = [], 0
        grads = [cast(Tensor, p.grad).detach() for p in chunk]
        for g in grads:
            flat = buffer[begin : begin + g.numel() * g.element_size()].view(g.dtype)
            strides = torch.empty_like(
                g, device="meta"
            ).stride()  # the gradient's own if it is dense
            views.append(flat.as_strided(g.shape, strides))
            begin += _padded_bytes(g)
        return views, self._engine.copy_down(views, grads)

    def _gradients(self) -> list[Tensor]:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            if p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"Offload does not support sparse gradients (got layout {p.grad.layout})"
                )
        return params

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure`, if given, returned."""
        loss = run_closure(closure)
        self._take_over()
        with self._device._updated_parameters(step=True):
            params = self._step()
        self._remember(params)
        self._share_state()
        return loss

    def _step(self) -> list[Tensor]:
        """Returns the parameters that were updated."""
        params = self._gradients()
        chunks = list(self._chunks(params))
        size = max((sum(_padded_bytes(cast(Tensor, p.grad)) for p in c) for c in chunks), default=0)
        if size > self._buffers[0].numel():
            self._buffers = [self._engine.empty_bytes(size) for _ in range(2)]
        self._wait_for_uploads()
        self._refresh_twins(params)
        self._engine.begin()
        try:
            # The multiplier comes over the same link: behind the first chunk, without which the host cannot begin, and
            # not behind the second.
            coming = [self._download(c, b) for c, b in zip(chunks[:1], self._buffers)]
            self._control = self._multiplier(params)
            coming += [self._download(c, b) for c, b in zip(chunks[1:2], self._buffers[1:])]
            for i, chunk in enumerate(chunks):
                views, ticket = coming[i]
                self._engine.synchronize(ticket)
                twins = [self._twins[p] for p in chunk]
                self._host_step(twins, views)
                if i + 2 < len(chunks):
                    coming.append(self._download(chunks[i + 2], self._buffers[i % 2]))
                self._last_upload = self._engine.copy_up(
                    [p.detach() for p in chunk], [t.detach() for t in twins]
                )
        finally:
            self._engine.finish()
        if self._device._options.count_lost_updates:
            self._device._report_lost(self._lost)
            self._lost.clear()
        return params

    def _multiplier(self, params: list[Tensor]) -> Tensor | None:
        """The optimizer's own answer to overflow and clipping, from the gradients on the device."""
        device = self._device
        try:
            for name in AMP:
                if hasattr(self, name):
                    setattr(device, name, getattr(self, name))
            grads = {params[0].device: [cast(Tensor, p.grad) for p in params]} if params else {}
            control = device._overflow_and_clip(grads)
        finally:
            for name in AMP:
                device.__dict__.pop(name, None)
        return None if control is None else control.to("cpu")

    def _host_step(self, twins: list[Tensor], grads: list[Tensor]) -> None:
        """The host optimizer's step of these parameters: those that have a gradient."""
        try:
            for twin, grad in zip(twins, grads):
                twin.grad = grad
            self._host.step()
        finally:
            for twin in twins:
                twin.grad = None


def _on_host(value: Any) -> Any:
    """The value of an option, its tensors on the host."""
    if isinstance(value, Tensor):
        return value if value.device.type == "cpu" else value.to("cpu")
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value


def _padded_bytes(t: Tensor) -> int:
    return -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT
