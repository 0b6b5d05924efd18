"""The state of a step: which layout holds, how far a backward is, what an accumulation has gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainwright.parallel._driver import Driver
from trainwright.parallel.layout import FlatLayout


@dataclass(frozen=True)
class StepStats:
    """What communication cost in one step.

    Attributes:
        step: number of the step, from 0; a backward that does not communicate is not a step.
        exposed_ms: time that the backward waited for communication at its end (`Zero`: and for parameters).
        busy_ms: time during which at least one collective was in flight (0 on GPU: not measured there).
        sent_bytes: bytes this rank sent for gradients.
        buckets: number of buckets.
    """

    step: int = -1
    exposed_ms: float = 0.0
    busy_ms: float = 0.0
    sent_bytes: int = 0
    buckets: int = 0

    @property
    def overlap(self) -> float:
        """Fraction of the communication that the backward hid: 1 - exposed / busy."""
        return max(0.0, 1.0 - self.exposed_ms / self.busy_ms) if self.busy_ms else 1.0


class Plan:
    """A layout with what the hooks need to know about it. One per set of parameters that require a gradient.

    Args:
        active: indices of those parameters, in order of registration.
        parameters: these and the others.
    """

    def __init__(
        self, layout: FlatLayout, active: Sequence[int], parameters: Sequence[nn.Parameter]
    ) -> None:
        self.layout = layout
        self.params = list(active[::-1])  # slot -> index of the parameter
        self.slot_of = {index: slot for slot, index in enumerate(self.params)}
        self.slots_in = [[piece.slot for piece in b.pieces] for b in layout.buckets]
        buckets_of: list[list[int]] = [[] for _ in layout.slots]
        for b, slots in enumerate(self.slots_in):
            for slot in slots:
                buckets_of[slot].append(b)
        self.cut = [len(buckets) > 1 for buckets in buckets_of]  # slot: lies in several pieces
        self.tensors = [[parameters[self.params[s]] for s in slots] for slots in self.slots_in]
        self.whole = [not any(map(self.cut.__getitem__, slots)) for slots in self.slots_in]
        # Places, for `Counts`: the buckets, and one for each parameter that lies in several of them.
        self.members = [len(set(slots)) for slots in self.slots_in]
        self.place = [0] * len(parameters)
        self.buckets_at: dict[int, list[int]] = {}  # of the latter places
        for slot, buckets in enumerate(buckets_of):
            self.place[self.params[slot]] = buckets[0]
            if len(set(buckets)) > 1:
                self.place[self.params[slot]] = len(self.members)
                self.buckets_at[len(self.members)] = sorted(set(buckets))
                self.members.append(1)
        self.order = list(range(len(layout.buckets)))  # of launches
        self.learned = False
        self.expected = [0] * len(parameters)  # hook calls per backward ...
        for index in active:
            self.expected[index] = 1
        self.counted = False  # ... as there were in one of them
        self.cuts: list[
            tuple[int, ...]
        ] = []  # per bucket, where each rank keeps averages of its own part alone


@dataclass
class Backward:
    """The state of one running backward.

    `mode` is what happens to its gradients: "sync" (averaged over the ranks), "add" (a microbatch: added to the sums
    that the last one will average), "local" (left where they are: inside no_sync), or "alone" (the same, on a single
    rank).
    """

    plan: Plan
    mode: str
    weight: float
    tasks: set[int] = field(default_factory=set)  # graph tasks that have a callback
    ready: list[int] = field(default_factory=list)  # buckets in the order in which they filled up
    launched: int = 0  # how many buckets of plan.order
    taken: dict[int, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    # Of `taken`, parameters whose averages come in the gradients' own memory, and these.
    plain: list[tuple[Sequence[nn.Parameter], list[Tensor]]] = field(default_factory=list)
    # Gradients in memory that others see: the user, or autograd, which may need it yet. Written after the backward.
    shared: dict[int, Tensor] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # slots with a gradient after their launch
    flushed: bool = False
    missing: bool = False  # a bucket without one of its gradients has been launched
    averages: dict[int, Tensor] = field(default_factory=dict)  # by bucket, of this rank's part


class Sums:
    """The microbatches of one accumulation so far: per bucket sum(weight x gradient), and sum(weight)."""

    def __init__(self) -> None:
        self.done = 0  # microbatches
        self.drop()

    def drop(self) -> None:
        self.plan: Plan | None = None
        self.flat: dict[int, Tensor] = {}
        self.weight = 0.0
        self.base: dict[int, Tensor] = {}  # gradients from before the accumulation, by parameter

    def enter(self, i: int, n: int, parameters: Sequence[nn.Parameter]) -> None:
        """Microbatch `i` of `n` begins; the first sets the gradients from before aside."""
        if i == 0:
            self.drop()
            if n > 1:
                for index, p in enumerate(parameters):
                    if p.grad is not None:
                        self.base[index], p.grad = p.grad, None
        elif i != self.done:
            raise ValueError(
                f"DataParallel: accumulate: i: expected {self.done} (microbatches come in order), got {i}"
            )

    def leave(self, i: int, n: int) -> None:
        self.done = i + 1 if i + 1 < n else 0

    def start(self, plan: Plan, driver: Driver) -> None:
        self.plan = plan
        for bucket in plan.layout.buckets:
            self.flat[bucket.index] = driver.new_sums(bucket, wide(bucket.dtype))

    def check(self, micro: tuple[int, int] | None, plan: Plan, no_sync: bool) -> None:
        """Raise if a backward that now begins does not belong to the accumulation that has begun."""
        if self.plan is None or (micro is not None and not no_sync and plan is self.plan):
            return
        reason = "requires_grad changed" if micro is not None else "a backward ran outside of it"
        done = self.done
        self.drop()
        raise RuntimeError(
            f"DataParallel: accumulate: {reason} after {done} microbatches, whose gradients are dropped;"
            " start again with accumulate(0, n)"
        )


def wide(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32
