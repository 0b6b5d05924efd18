"""`DataParallel`: replicas of a module whose gradients are averaged, by token weight, while the backward runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.errors import check_bool, check_int, check_number, type_error, value_error
from trainwright.parallel import _checks, _feedback, _parcels
from trainwright.parallel._driver import TIMEOUT_SHARE
from trainwright.parallel._replicas import BufferSync, broadcast
from trainwright.parallel._wire import connect
from trainwright.parallel.buckets import Reducer, StepStats

__all__ = ["DataParallel"]

WIRE_ERROR = "wire_error"
UNUSED = ("error", "zero", "skip")


class DataParallel(nn.Module):
    """Train replicas of `module` on all ranks of a group as one process would train on the whole batch.

    After ``loss.backward()`` returns, each parameter's gradient is ``sum_r w_r g_r / sum_r w_r`` over the ranks r,
    with the weights that `loss_weight` sets (default 1). It is the same on all ranks, to the bit. Communication runs
    during the backward, in buckets; the forward never communicates, so evaluation and ``no_grad`` cost nothing and
    may differ between ranks.

    Args:
        module: parameters on one device. They, and the buffers, are set to those of the group's rank 0.
        group: a `torch.distributed` group; None is all ranks. NCCL for GPUs, Gloo for CPUs.
        bucket_mb: size of a bucket in MiB, or "auto" (see `FlatLayout.build`). It changes no bit of the result.
        wire_dtype: None sends gradients without loss; `torch.bfloat16` halves the bytes of fp32 gradients; "int8" sends
            a quarter: codes with one fp32 step per 64 elements, and what their rounding loses is added to the next
            gradient (error feedback, 4 bytes per parameter and more for the averages). They are always summed in fp32
            (fp64 for fp64, but fp32 over int8). Where int8's blocks begin, and so the rounding, depends on the buckets.
        unused: what becomes of a parameter that got no gradient: "error" raises in the same backward, on every rank,
            naming it; "zero" counts it as zero; "skip" does too, but leaves None where no rank had a gradient.
        deterministic: sum in rank order at every position, so that neither bucket size nor placement changes a bit.
            None is True on CPU, False on GPU (where NCCL's all-reduce sums fp32; 16-bit gradients are always summed in
            fp32, in rank order).
        broadcast_buffers: after each step, set the buffers to those of the group's rank 0, or of the first rank
            that has a batch in `join` (in training mode, and only if some rank has changed one). Done without bumping
            versions, so graphs that saved a buffer stay valid.
        timeout: seconds after which a rank that does not take part raises `CollectiveError` on all others.

    Raises:
        TypeError, ValueError: an argument; parameters on several devices, or averaged by another such object.
        LayoutError: parameters differ between ranks; the message names the first one that does.
        CollectiveError: here or in a later backward: a rank died, stalled or diverged.
        RuntimeError: `torch.distributed` is not initialised; in a backward: the `unused` policy, a replaced parameter.

    Gradients are reduced by hooks on the parameters, so calling ``dp.module`` or any part of it directly works too,
    and what matters for `no_sync` and `accumulate` is where the backward runs. `torch.autograd.grad` does not run
    these hooks and returns this rank's own gradient. Parameters may be tied, used repeatedly, recomputed (both
    checkpoint modes), frozen and unfrozen between steps (on all ranks alike), strided, empty, complex and of mixed
    dtype.

    Hooks: those on tensors (`Tensor.register_hook`) and modules see and may change this rank's own gradients, as they
    are before the average. A `register_post_accumulate_grad_hook` runs when this rank's gradient has been added up; by
    then it may have left for its bucket, ``.grad`` is None, and the average is there when the backward returns.

    A gradient that is there before the backward is averaged with it, as in torch. Names are those of `module`:
    `state_dict`, `named_parameters` and attributes pass through. A copy (`copy.deepcopy`, or what `torch.save` wrote)
    is made by all ranks together, and only of an object on the default group.

    >>> import os, torch, torch.distributed as dist, trainwright as tw
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> dp = tw.parallel.DataParallel(torch.nn.Linear(2, 1, bias=False))
    >>> dp(torch.ones(3, 2)).mean().backward()
    >>> dp.weight.grad.tolist()
    [[1.0, 1.0]]
    >>> dist.destroy_process_group()
    """

    module: nn.Module
    _reducers: ClassVar[weakref.WeakSet[Reducer]] = weakref.WeakSet()  # of all objects

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Any = None,
        bucket_mb: float | str = "auto",
        wire_dtype: torch.dtype | str | None = None,
        unused: str = "error",
        deterministic: bool | None = None,
        broadcast_buffers: bool = True,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        if not isinstance(module, nn.Module):
            raise type_error(op, "module", "an nn.Module", type(module).__name__)
        if bucket_mb != "auto":
            check_number(op, "bucket_mb", bucket_mb)
            if not float(bucket_mb) > 0:
                raise value_error(op, "bucket_mb", 'a positive number or "auto"', bucket_mb)
        if wire_dtype not in (None, torch.bfloat16, "int8"):
            raise value_error(op, "wire_dtype", 'None, torch.bfloat16 or "int8"', wire_dtype)
        if unused not in UNUSED:
            raise value_error(op, "unused", f"one of {', '.join(UNUSED)}", repr(unused))
        if deterministic is not None:
            check_bool(op, "deterministic", deterministic)
        check_bool(op, "broadcast_buffers", broadcast_buffers)
        check_number(op, "timeout", timeout)
        if not timeout > 0:
            raise value_error(op, "timeout", "a positive number of seconds", timeout)
        places = _checks.places(module)
        if not places:
            raise value_error(
                op, "module", "a module with parameters to train", type(module).__name__
            )
        device = _checks.one_device(op, places)
        _checks.averaged_once(op, places, self._reducers)
        self.module = module
        self._options = {
            "bucket_mb": bucket_mb, "wire_dtype": wire_dtype, "unused": unused, "deterministic": deterministic,
            "broadcast_buffers": broadcast_buffers, "timeout": timeout,
        }  # fmt: skip
        self._group = group
        wire = connect(op, group, device, timeout, TIMEOUT_SHARE * timeout)
        ordered = device.type == "cpu" if deterministic is None else deterministic
        self._reducer = self._reducer_class(wire.world)(
            module, wire, device,
            bucket_mb=bucket_mb,
            wire_dtype=wire_dtype,
            unused=unused, ordered=ordered, timeout=timeout,
        )  # fmt: skip
        handles = self._reducer.handles
        self._reducers.add(self._reducer)
        self._finalizer = weakref.finalize(self, _shut, self._reducer.driver, handles)
        if wire.world > 1:
            try:
                self._reducer.compare_layouts(list(module.named_buffers()))
                wait = self._reducer.driver.wait_for
                tensors = [p for _, p, _, _ in places]
                broadcast(wire, [*tensors, *module.buffers()], wait)
                if broadcast_buffers:
                    self._reducer.buffers = BufferSync(module, wire)
            except BaseException:
                self.close()
                raise

    def _reducer_class(self, world: int) -> Callable[..., Reducer]:
        return Reducer

    # ---- the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._reducer.check_idle()
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of `module`, with its keys. Over the int8 wire it also has "wire_error": this rank's error feedback."""
        found = self.module.state_dict(*args, **kwargs)
        if self._reducer.feedback is not None:
            found[WIRE_ERROR] = self._reducer.feedback.by_name()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `module`'s; "wire_error" is used if this wire is int8, and ignored otherwise."""
        rest = {k: v for k, v in state_dict.items() if k != WIRE_ERROR}
        if WIRE_ERROR in state_dict and self._reducer.feedback is not None:
            self._reducer.feedback.load(state_dict[WIRE_ERROR])
        return self.module.load_state_dict(rest, *args, **kwargs)

    def error_feedback(self) -> dict[str, Tensor]:
        """The int8 wire's errors by parameter, flat fp32 on the CPU: the mean over the ranks, on the group's rank 0,
        and nothing elsewhere. Collective; empty for another wire.
        """
        feedback = self._reducer.feedback
        if feedback is None:
            return {}
        mine = _feedback.total(feedback.by_name())
        return _feedback.mean(_parcels.collect(self._reducer.driver, mine) or [{}])

    def load_error_feedback(self, errors: Mapping[str, Tensor]) -> None:
        """Continue with what `error_feedback` returned, at any world size: every rank passes the same."""
        if self._reducer.feedback is not None:
            self._reducer.feedback.load({"sent": errors})

    def __reduce__(self) -> Any:
        if self._group not in (None, dist.group.WORLD):
            raise TypeError(
                f"{type(self).__name__}: cannot be copied or pickled with a group of its own; save its state_dict()"
            )
        feedback = self._reducer.feedback
        errors = feedback.by_name() if feedback is not None else None
        return _made_again, (type(self), self.module, self._options, self.training, errors)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    # ---- averaging

    def loss_weight(self, n: float | Tensor) -> None:
        """Set this rank's weight of the next backward only, e.g. the number of tokens in its mean loss.

        With weight 0 this rank's gradient counts for nothing, even if it is NaN, and `unused` does not apply to it.
        """
        if isinstance(n, Tensor):
            n = n.item()
        check_number("DataParallel.loss_weight", "n", n, minimum=0)
        self._reducer.weight = float(n)

    @contextlib.contextmanager
    def accumulate(self, i: int, n: int) -> Iterator[None]:
        """Microbatch `i` of `n`: all of them, on all ranks, are averaged by weight; only the last communicates.

        Run the backward of a microbatch inside, and do not divide its loss by `n`. Until the last one, the
        parameters hold no gradient: the weighted sums are kept in fp32. A gradient from before microbatch 0 is added
        to the result.
        """
        op = "DataParallel.accumulate"
        check_int(op, "i", i)
        check_int(op, "n", n)
        if not 0 <= i < n:
            raise value_error(op, "i", f"a number in 0..{n - 1}", i)
        self._reducer.enter_micro(i, n)
        try:
            yield
        finally:
            self._reducer.exit_micro()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As torch's: gradients of backwards inside are added to `.grad` and not averaged; the next one outside
        averages.

        Weights are not applied inside; scaling is yours. `accumulate` does it for you.
        """
        if self._reducer.micro is not None:
            raise RuntimeError("DataParallel: no_sync: cannot stand inside accumulate")
        before, self._reducer.no_sync = self._reducer.no_sync, True
        try:
            yield
        finally:
            self._reducer.no_sync = before

    def sync(self) -> None:
        """Take part in a step with no backward of its own, so that the other ranks do not wait in vain.

        For a rank whose backward touches no parameter (its gradients count as zeros, by the `unused` policy), or
        that has run out of data: ``dp.loss_weight(0); dp.sync()`` contributes nothing, and `unused` does not apply.
        """
        self._reducer.check_idle()
        self._reducer.sync()

    @contextlib.contextmanager
    def join(self, after_step: Callable[[], Any] | None = None) -> Iterator[None]:
        """For ranks with different numbers of batches: wrap the loop over them.

        A rank whose loop has ended takes part in the others' steps with weight 0, so that every average is that of the
        ranks that have a batch, until all loops have ended. After each such step it calls `after_step`, which must do
        what the others do after their backward (clip, `optimizer.step()`, a scheduler, `zero_grad()`), so that its
        parameters stay equal to theirs. Without it, the ranks that were left behind get, at the end, the parameters and
        buffers of one that made the last step (their optimizers are not told). Collective; every rank must use it.

            def finish():
                optimizer.step()
                optimizer.zero_grad()

            with dp.join(finish):
                for x in batches:
                    dp(x).mean().backward()
                    finish()
        """
        _check_after_step(after_step)
        yield
        if self._reducer.wire.world > 1:
            self._reducer.check_idle()
            while self._shadow():
                if after_step is not None:
                    after_step()
            leader = self._reducer.leader
            if after_step is None and leader is not None:
                tensors = [*self.module.parameters(), *self.module.buffers()]
                broadcast(self._reducer.wire, tensors, self._reducer.driver.wait_for, leader)

    def _shadow(self) -> bool:
        """Take part in a step of ranks that have a batch; False if there are none."""
        return self._reducer.shadow()

    def stats(self) -> StepStats:
        """What communication cost in the last step."""
        return self._reducer.stats

    def close(self) -> None:
        """Stop communicating and drop the hooks; `module` stays as it is. Also done when this object is deleted."""
        self._finalizer()


def _check_after_step(after_step: Any) -> None:
    if after_step is not None and not callable(after_step):
        raise type_error(
            "DataParallel.join", "after_step", "None or a function", type(after_step).__name__
        )


def _made_again(
    kind: type[DataParallel],
    module: nn.Module,
    options: dict[str, Any],
    training: bool,
    errors: Any,
) -> DataParallel:
    """A copy, on the default group: collective, as every construction."""
    made = kind.__new__(kind)
    DataParallel.__init__(made, module, **options)
    made.training = training
    if made._reducer.feedback is not None:
        made._reducer.feedback.load(errors)
    return made


def _shut(driver: Any, handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    driver.close()
