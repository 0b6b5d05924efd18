"""Carries out one rank's part of a schedule over torch.distributed's point-to-point messages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.parallel.schedule import Action, Schedule

Group = dist.ProcessGroup | None
TAGS = 1 << 20
_next_tag: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Links(Protocol):
    """How the ranks of a schedule reach each other."""

    rank: int  # of this process in the schedule

    def groups(self) -> Sequence[dist.ProcessGroup]: ...

    def route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The process group of messages with a rank of the schedule, and its global rank."""


def world_of(group: Group) -> dist.ProcessGroup:
    """The group itself, or the default one."""
    actual = dist.group.WORLD if group is None else group
    assert actual is not None
    return actual


class OneGroup:
    """The ranks of a schedule are those of a process group."""

    def __init__(self, group: Group) -> None:
        self.group = world_of(group)
        self.rank = dist.get_rank(self.group)

    def groups(self) -> Sequence[dist.ProcessGroup]:
        return [self.group]

    def route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        return self.group, dist.get_global_rank(self.group, peer)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as it travels."""
    return x.reshape(-1).view(torch.uint8)


Place = Callable[[Action], Tensor]


def perform(
    schedule: Schedule, tensors: dict[str, Tensor], device: torch.device, links: Links, place: Place | None = None,
    pauses: bool = False,
) -> Iterator[Action]:  # fmt: skip
    """Do this rank's actions in order; yield each compute where it stands, for the caller to do before it goes on.

    Every rank has to perform the same schedule, to its end, and calls over one group have to come in the same order
    everywhere.

    Args:
        schedule: over the ranks of `links`; sizes in bytes.
        tensors: name of a buffer -> its bytes (`as_bytes`). A compute that writes a buffer puts its result here;
            buffers that receive are made here, once each, unless `place` says where they are.
        device: of what is received.
        links: the way to the other ranks.
        place: gives the memory, as bytes, that a receive is to fill.
        pauses: yield each wait too, just before it: all messages up to there are started, and it waits when it goes on.
    """
    # Not part of the generator: tags are given out in the order of the calls, not of the first steps.
    return _steps(
        schedule, tensors, device, links, place, pauses, _tags_for(schedule, links.groups())
    )


def _steps(
    schedule: Schedule, tensors: dict[str, Tensor], device: torch.device, links: Links, place: Place | None,
    pauses: bool, first: dict[dist.ProcessGroup, int],
) -> Iterator[Action]:  # fmt: skip
    flying: dict[int, list[dist.Work]] = {}  # by tag
    posted: list[Action] = []
    sizes = schedule.buffers[links.rank]
    for action in schedule.ranks[links.rank]:
        if action.kind in ("send", "recv"):
            if action.writes and place is not None:
                tensors[action.writes] = place(action)
            elif action.writes and action.writes not in tensors:
                tensors[action.writes] = _receive_buffer(sizes[action.writes], device)
            posted.append(action)
            continue
        _start(posted, tensors, first, links, flying)
        posted = []
        if action.kind == "wait":
            if pauses:
                yield action
            for work in flying.pop(action.tag):
                work.wait()
        else:
            yield action


def _receive_buffer(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _tags_for(
    schedule: Schedule, groups: Sequence[dist.ProcessGroup]
) -> dict[dist.ProcessGroup, int]:
    """The number of the schedule's tag 0 in each group. Schedules in flight in a group share none; every rank counts
    alike."""
    highest = max((a.tag for actions in schedule.ranks for a in actions), default=-1)
    first = {}
    for group in groups:
        first[group] = _next_tag.get(group, 1)
        _next_tag[group] = (first[group] + highest + 1) % TAGS
    return first


def _start(
    actions: Sequence[Action], tensors: dict[str, Tensor], first: dict[dist.ProcessGroup, int], links: Links,
    flying: dict[int, list[dist.Work]],
) -> None:  # fmt: skip
    """Start messages together, so that none of them waits for another to be started (NCCL)."""
    batches: dict[dist.ProcessGroup, list[tuple[Action, dist.P2POp]]] = {}
    for action in actions:
        sending = action.kind == "send"
        group, peer = links.route(action.peer)
        tensor = tensors[action.reads[0] if sending else action.writes][: action.size]
        call = dist.isend if sending else dist.irecv
        operation = dist.P2POp(call, tensor, peer, group, first[group] + action.tag)
        batches.setdefault(group, []).append((action, operation))
    for batch in batches.values():
        works = dist.batch_isend_irecv([operation for _, operation in batch])
        if len(works) == len(batch):
            for (action, _), work in zip(batch, works, strict=True):
                flying.setdefault(action.tag, []).append(work)
        else:  # one for all of them (NCCL): a wait for any tag waits for it
            for tag in dict.fromkeys(a.tag for a, _ in batch):
                flying.setdefault(tag, []).extend(works)
