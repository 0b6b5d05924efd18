"""The reducer: notices when gradients are ready, launches their buckets in one order, and closes the step.

Autograd calls a hook of `Counts` each time a gradient has been accumulated into a parameter. A bucket is launched when
all its parameters have had as many such calls as in the step before (in the first step, at its end), and never before
the bucket in front of it, so that all ranks launch the same sequence. When the outermost backward ends, a callback of
the engine launches what is left, exchanges footers (which parameters had a gradient), waits for the averages and
applies the `unused` policy, all inside the `loss.backward()` that started it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.parallel import _checks, _gradients
from trainwright.parallel._counts import Counts
from trainwright.parallel._driver import Driver
from trainwright.parallel._feedback import Feedback
from trainwright.parallel._footer import Footer
from trainwright.parallel._job import Job, Round
from trainwright.parallel._replicas import BufferSync
from trainwright.parallel._step import Backward, Plan, StepStats, Sums, wide
from trainwright.parallel._wire import Wire
from trainwright.parallel.layout import Bucket, FlatLayout

__all__ = ["Reducer", "StepStats"]

_task_id = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_wanted = attrgetter("requires_grad")
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Reducer:
    """Averages the gradients of a module over the ranks of `wire`, at the end of each backward.

    Args:
        module: the owner of the parameters.
        wire: channels of the group.
        device: of all parameters.
        bucket_mb, wire_dtype, unused, ordered, timeout: see `DataParallel`.

    `no_sync`, `micro` and `weight` are set by `DataParallel`'s methods and read where the backward runs.
    """

    def __init__(
        self,
        module: nn.Module,
        wire: Wire,
        device: torch.device,
        *,
        bucket_mb: float | str,
        wire_dtype: Any,
        unused: str,
        ordered: bool,
        timeout: float,
    ) -> None:
        self.no_sync = False
        self.joined = False  # inside the shadow steps of `join`
        self.leader: int | None = None  # after them: a rank that made the last step, if not all did
        self.micro: tuple[int, int] | None = None  # inside accumulate(i, n)
        self.weight: float | None = None  # of the next backward
        self.buffers: BufferSync | None = None
        self.stats = StepStats()
        self.wire = wire
        self._bucket_mb = bucket_mb
        self._unused = unused
        self._timeout = timeout
        self._places = _checks.places(module)
        self._shapes: list[Tensor] = [p for _, p, _, _ in self._places]
        self._device = device
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._now: Backward | None = None
        self._parameters = [p for _, p, _, _ in self._places]
        self._counts = Counts(len(self._places))
        self._touched = bytearray(len(self._places))  # 1: got a gradient since the last step
        self._step = 0
        self._sums = Sums()
        names = [name for name, _, _, _ in self._places]
        self.feedback = (
            Feedback(names, wire.world, wire.rank, device) if wire_dtype == "int8" else None
        )
        me = weakref.ref(self)

        def check_layouts() -> None:
            reducer = me()
            if reducer is not None and reducer._now is not None:
                layout = reducer._now.plan.layout
                _checks.compare_layouts(wire, layout, timeout, moment=f"step {reducer._step}")

        self.driver = Driver(
            wire, device, wire_dtype=None if self.feedback else wire_dtype, ordered=ordered, timeout=timeout,
            check_layouts=check_layouts,
        )  # fmt: skip
        self.handles = []
        for i, (_, p, _, _) in enumerate(self._places):
            wanted = p.requires_grad
            p.requires_grad_(True)  # only then can a hook be put on it; the hook stays
            self.handles.append(p.register_post_accumulate_grad_hook(self._counts.hook(i, me)))
            p.requires_grad_(wanted)

    def plan(self) -> Plan:
        """For the parameters that require a gradient now."""
        mask = tuple(map(_wanted, self._parameters))
        plan = self._plans.get(mask)
        if plan is None:
            active = [i for i, wanted in enumerate(mask) if wanted]
            layout = FlatLayout.build(
                [(self._places[i][0], self._shapes[i]) for i in active],
                world=self.wire.world, bucket_mb=self._bucket_mb, device_type=self._device.type,
            )  # fmt: skip
            plan = self._plans[mask] = Plan(layout, active, self._parameters)
        return plan

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def remember_shapes(self) -> None:
        """Keep what a layout needs to know of the parameters, before they lose their memory."""
        self._shapes = [
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for _, p, _, _ in self._places
        ]

    def refresh_places(self, places: list[_checks.Place]) -> None:
        """The dicts that hold the parameters have been replaced."""
        self._places = places

    def compare_layouts(self, buffers: Sequence[tuple[str, Tensor]]) -> None:
        """At construction: raise on all ranks if parameters, buffers or what is frozen differ."""
        wire = self.wire
        everything = [*[(name, p) for name, p, _, _ in self._places], *buffers]
        state = FlatLayout.build(everything, world=wire.world, bucket_mb=1024, group="state")
        for layout in (state, self.plan().layout):
            assert wire.control is not None
            mine = torch.tensor([int(layout.fingerprint[:15], 16)])
            every = torch.empty(wire.world, dtype=torch.int64)
            self.driver.wait_for(wire.control.all_gather(every, mine))
            if (every != every[0]).any():
                _checks.compare_layouts(wire, layout, self._timeout, moment="construction")

    # ---- from the first hook of a backward to the last

    def enter(self, task: int) -> None:
        """The first hook in a graph task: that of the backward, or a nested one of a reentrant checkpoint."""
        if self._now is None:
            self._now = self._begin()
            _open.add(self)
        self._counts.task = task
        if task not in self._now.tasks:
            self._now.tasks.add(task)
            _queue_callback(self._on_task_end)

    def complete(self, place: int) -> None:
        """A bucket is full, or a parameter that lies in several has its gradient."""
        b = self._now
        assert b is not None
        several = b.plan.buckets_at.get(place)
        if several is None:
            b.ready.append(place)
        else:
            pending = self._counts.pending
            for bucket in several:
                pending[bucket] -= 1
            b.ready += [bucket for bucket in several if not pending[bucket]]
        self._launch_ready(b)

    def late(self, index: int) -> None:
        """A gradient came after those that were expected: after its bucket was launched, perhaps."""
        b = self._now
        slot = None if b is None else b.plan.slot_of.get(index)
        if b is not None and slot in b.taken:
            b.late.add(slot)

    def _begin(self) -> Backward:
        self.driver.raise_error()
        _checks.check_places(self._places, self._parameters)
        weight, self.weight = 1.0 if self.weight is None else self.weight, None
        plan = self.plan()
        self._sums.check(self.micro, plan, self.no_sync)
        last = self.micro is None or self.micro[0] == self.micro[1] - 1
        alone = last and self.wire.world == 1 and self._sums.plan is None and weight
        if self.no_sync or alone:
            self._counts.begin(plan.expected, plan.place, None)
            return Backward(plan, "local" if self.no_sync else "alone", weight)
        b = Backward(plan, "sync" if last else "add", weight)
        self._counts.begin(plan.expected, plan.place, plan.members)
        if not last and self._sums.plan is None:
            self._sums.start(plan, self.driver)
        if last:
            total = self._sums.weight + weight
            fingerprint = int(plan.layout.fingerprint[:15], 16)
            self.driver.begin(
                Round(self._step, total, self._sums.plan is not None, fingerprint, self.joined)
            )
        return b

    def _launch_ready(self, b: Backward) -> None:
        if (
            not b.plan.counted
        ):  # a gradient may still be added to, whose bucket is full by the usual count of one
            return
        order, pending = b.plan.order, self._counts.pending
        while b.launched < len(order) and pending[order[b.launched]] == 0:
            b.launched += 1
            self._launch(b, order[b.launched - 1])

    def _launch(self, b: Backward, index: int) -> None:
        bucket, plan = b.plan.layout.buckets[index], b.plan
        job = self._job(b, bucket)
        slots, averaged = plan.slots_in[index], self._averages_return(b)
        plain = None
        if plan.whole[index]:
            plain = _gradients.take_plain(plan.tensors[index], averaged=averaged)
        if plain is not None:  # nearly always
            job.grads, job.outs = [*plain], plain if averaged else []
            b.taken.update(zip(slots, zip(plain, plain if averaged else [None] * len(plain))))
            if averaged:
                b.plain.append((plan.tensors[index], plain))
        else:
            self._take_pieces(b, job)
            job.missing = any(g is None for g in job.grads)
            b.missing |= job.missing
        if job.sums is not None:
            self.driver.add(job, b.weight)
        if b.mode == "sync":
            if self.feedback is not None:
                job.errors = self.feedback.of(plan, bucket)
            self.driver.reduce(job)

    def _take_pieces(self, b: Backward, job: Job) -> None:
        for piece in job.bucket.pieces:
            slot = piece.slot
            taken = b.taken.get(slot)
            if taken is None:
                taken = b.taken[slot] = self._take(b, slot)
            grad, out = taken
            if b.plan.cut[slot]:
                grad, out = _gradients.cut(grad, piece), _gradients.cut(out, piece)
            job.grads.append(grad)
            if out is not None:
                job.outs.append(out)

    def _averages_return(self, b: Backward) -> bool:
        """Whether the averages go back to the parameters' gradients."""
        return b.mode == "sync"

    def _job(self, b: Backward, bucket: Bucket) -> Job:
        return Job(bucket, [], [], sums=self._sums.flat.get(bucket.index))

    def _take(self, b: Backward, slot: int) -> tuple[Tensor | None, Tensor | None]:
        """A parameter's gradient, which it loses until the step ends, and the tensor for the average."""
        name, p, _, _ = self._places[b.plan.params[slot]]
        grad, out, shared = _gradients.take(
            name, p, averaged=b.mode == "sync", contiguous=b.plan.cut[slot]
        )
        if shared is not None:
            b.shared[slot] = shared
        return grad, out

    # ---- the end of a backward

    def _on_task_end(self) -> None:
        node = _node()
        if node is None:
            self._finish()
            return
        # A nested backward has ended, inside a node of the outer one. Take part in the outer one too, to see its
        # end: from the node that it runs next, since it may have no parameter of ours.
        following = next((n for n, _ in node.next_functions if n is not None), None)
        if following is not None:
            handle: list[Any] = []

            def enter(*_: Any) -> None:
                handle[0].remove()
                if self._now is not None:
                    self.enter(_task_id())

            handle.append(following.register_prehook(enter))

    def sync(self) -> None:
        """End the step on a rank whose backward touched no parameter, or that has none."""
        if self._now is not None:
            raise RuntimeError("DataParallel: sync: a backward is running")
        self._now = self._begin()
        self._finish()

    def shadow(self) -> bool:
        """Take part in a step of ranks that still have batches. Returns False, with the gradients as they were, if
        there are none.
        """
        parameters = self._parameters
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        self._forget_touched()
        header = self.driver.last_header  # of a step that some rank made
        self.joined, self.weight = True, 0.0
        try:
            self.sync()
        finally:
            self.joined = False
        if not self.driver.round.over:
            return True
        for p, grad in zip(parameters, before):
            p.grad = grad
        here = [r for r, row in enumerate(header) if not row.joined]
        self.leader = here[0] if 0 < len(here) < len(header) else None
        return False

    def check_idle(self) -> None:
        """Outside a backward none can be open, unless the last one was interrupted by an exception."""
        b = self._now
        if b is None or _task_id() != -1:
            return
        self._now, self._counts.task = None, -1
        _open.discard(self)
        self._sums.drop()
        if b.mode == "sync" and self.wire.world > 1:
            self.driver.interrupted()

    def _finish(self) -> None:
        b = self._now
        if b is None:
            return
        # Other replicas in the same backward first send what they have: to wait for ours before would deadlock with
        # a rank that closes them in the other order.
        for other in list(_open):
            if other._now is not None and other._now.tasks & b.tasks:
                other._flush(other._now)
        self._flush(b)
        problem = None
        if b.mode == "sync":
            problem = self._close(b)
        elif b.mode == "alone":
            self.stats = StepStats(self._step, buckets=len(b.plan.order))
            self._step += 1
            problem = self._settle(b, [self._footer(b)], [b.weight])
        elif b.mode == "add":
            self._sums.weight += b.weight
        if b.mode in ("sync", "add"):
            self._learn(b.plan)
        self._now, self._counts.task = None, -1
        _open.discard(self)
        if problem is not None:
            raise problem

    def _learn(self, plan: Plan) -> None:
        """Expect as many calls of each hook as there were, if there were any."""
        expected, left = plan.expected, self._counts.left
        if any(left):
            for index, rest in enumerate(left):
                if rest != expected[index]:
                    expected[index] -= rest
                    plan.counted = True
        else:
            plan.counted = True

    def _flush(self, b: Backward) -> None:
        """Launch what no hook has launched, and say so."""
        if b.flushed:
            return
        b.flushed = True
        self._note_touched(b.plan)
        if b.mode in ("local", "alone"):
            return
        rest = b.plan.order[b.launched :]
        b.launched = len(b.plan.order)
        b.ready += [index for index in rest if index not in b.ready]
        for index in rest:
            self._launch(b, index)
        if b.mode == "add":
            for job in self._late_jobs(b, b.late)[0]:
                job.sums = self._sums.flat[job.bucket.index]
                self.driver.add(job, b.weight)
        else:
            self.driver.finish(self._footer(b).data)

    def _late_jobs(self, b: Backward, slots: set[int]) -> tuple[list[Job], dict[int, Tensor]]:
        """Buckets of gradients that came after their launch: more hook calls than in the step before."""
        fresh = {slot: self._take(b, slot) for slot in slots}
        outs: dict[int, Tensor] = {}
        jobs = []
        for slot in slots if b.mode == "sync" else ():
            out = b.taken[slot][1]
            assert out is not None
            outs[slot] = torch.empty_like(out)
        for bucket in b.plan.layout.buckets:
            if not any(piece.slot in slots for piece in bucket.pieces):
                continue
            written = [piece for piece in bucket.pieces if piece.slot in outs]
            grads = [
                _gradients.cut(fresh.get(piece.slot, (None,))[0], piece) for piece in bucket.pieces
            ]
            parts = [_gradients.part(outs[piece.slot], piece) for piece in written]
            offsets = [piece.offset for piece in written]
            missing = any(g is None for g in grads)
            jobs.append(Job(bucket, grads, parts, offsets, missing=missing))
        return jobs, outs

    def _add_late(self, b: Backward, jobs: list[Job], outs: dict[int, Tensor]) -> None:
        for slot, more in outs.items():
            out = b.taken[slot][1]
            assert out is not None
            out.add_(more)

    def _note_touched(self, plan: Plan) -> None:
        left, touched = self._counts.left, self._touched
        for index, (rest, calls) in enumerate(zip(left, plan.expected)):
            if rest != calls:
                touched[index] = 1

    def _forget_touched(self) -> None:
        self._touched[:] = bytes(len(self._touched))

    def _used(self, b: Backward) -> bytes:
        """Per slot, 1 if the parameter got a gradient. A hook also runs for one that autograd leaves undefined."""
        used = bytearray(map(self._touched.__getitem__, b.plan.params))
        if b.mode == "alone":
            for slot, index in enumerate(b.plan.params):
                used[slot] &= self._parameters[index].grad is not None
        elif b.missing and self._sums.plan is None:
            for slot, (grad, _) in b.taken.items():
                used[slot] &= grad is not None or slot in b.late
        return bytes(used)

    def _footer(self, b: Backward) -> Footer:
        changed = self.buffers is not None and b.mode == "sync" and self.buffers.changed()
        return Footer.of(
            hooks_ran=bool(b.tasks),
            buffers_changed=changed,
            used=self._used(b),
            late=b.late,
            order=b.ready,
        )

    def _close(self, b: Backward) -> RuntimeError | None:
        """Wait for the averages; all ranks take the same decisions from the same footers."""
        round_ = self.driver.round
        begun = time.perf_counter()
        self.driver.wait()
        exposed_ms = 1e3 * (time.perf_counter() - begun)
        footers = [Footer(data, len(b.plan.params)) for data in round_.footer]
        late = set().union(*[f.late for f in footers])
        if late:
            jobs, outs = self._late_jobs(b, late)
            for job in jobs:
                if self._sums.plan is not None:
                    job.sums = self.driver.new_sums(job.bucket, wide(job.bucket.dtype))
                    self.driver.add(job, b.weight)
            self.driver.again(jobs)
            self.driver.wait()
            self._add_late(b, jobs, outs)
        if self.buffers is not None and any(f.buffers_changed for f in footers):
            here = (r for r, row in enumerate(round_.header) if not row.joined)
            self.buffers.broadcast(self.driver.wait_for, next(here, 0))
        if not b.plan.learned:
            # Launch from now on in the order in which the buckets of the first rank with a backward filled up.
            order = next((f.order for f in footers if f.hooks_ran), None)
            if order is not None:
                b.plan.order, b.plan.learned = order, True
        self.stats = StepStats(
            self._step, exposed_ms, round_.busy_ms, round_.sent_bytes, len(b.plan.order)
        )
        self._step += 1
        round_.jobs.clear()
        return self._settle(b, footers, round_.weights)

    def _settle(
        self, b: Backward, footers: list[Footer], weights: list[float]
    ) -> RuntimeError | None:
        """Give the parameters their averages, by the policy for those without a gradient; returns its error."""
        used = [f.slots for f in footers]
        complete = all(u.count(0) == 0 for u in used)
        anywhere = used[0] if complete else bytes(map(max, *used)) if len(used) > 1 else used[0]
        self._give(b, anywhere, self._unused == "zero")
        self._sums.drop()
        self._forget_touched()
        if complete or self._unused != "error":
            return None
        names = [slot.name for slot in b.plan.layout.slots]
        return _checks.unused_error(names, self.wire.ranks, used, weights)

    def _give(self, b: Backward, anywhere: bytes, zero: bool) -> None:
        """`anywhere`: per slot, 0 if no rank used it; `zero`: such a parameter's gradient is zero, not None."""
        parameters, done = self._parameters, 0
        for tensors, averages in b.plain:
            for p, average in zip(tensors, averages):
                p.grad = average
            done += len(averages)
        for slot, index in enumerate(b.plan.params) if done < len(b.plan.params) else ():
            grad, out = b.taken.get(slot, (None, None))
            p = parameters[index]
            if out is not None and (grad is not None or zero or anywhere[slot]):
                if out.dim() != p.dim():
                    out = torch.view_as_complex(out)
                p.grad = out
                if slot in b.shared:
                    p.grad = b.shared[slot].copy_(out)
            elif zero and p.grad is None:
                p.grad = torch.zeros_like(p, requires_grad=False)
        for index, before in self._sums.base.items():
            p = parameters[index]
            p.grad = before if p.grad is None else before.add_(p.grad)

    # ---- accumulation

    def enter_micro(self, i: int, n: int) -> None:
        self.check_idle()
        if self.micro is not None or self.no_sync:
            raise RuntimeError(
                "DataParallel: accumulate: cannot be nested, nor stand inside no_sync"
            )
        self._sums.enter(i, n, self._parameters)
        self.micro = i, n

    def exit_micro(self) -> None:
        assert self.micro is not None
        self._sums.leave(*self.micro)
        self.micro = None


_open: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those with a backward in progress
