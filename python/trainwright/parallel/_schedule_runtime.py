"""Carries out one rank's part of a schedule over torch.distributed's point-to-point messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from trainwright.parallel.schedule import Action, Schedule

Group = dist.ProcessGroup | None
TAGS = 1 << 20
_next_tag: dict[Group, int] = {}


def perform(
    schedule: Schedule, tensors: dict[str, Tensor], like: Tensor, group: Group
) -> Iterator[Action]:
    """Do this rank's actions in order; yield each compute where it stands, for the caller to do before it goes on.

    Every rank of the group has to perform the same schedule, to its end, and calls on one group have to come in the
    same order everywhere.

    Args:
        schedule: over the ranks of `group`; sizes count elements.
        tensors: name of a buffer -> contiguous tensor of one dimension. A compute that writes a buffer puts its result
            here; buffers that receive are made here.
        like: dtype and device of what is received.
        group: process group; None is the default group.
    """
    # Not part of the generator: tags are given out in the order of the calls, not of the first steps.
    return _steps(schedule, tensors, like, group, _tags_for(schedule, group))


def _steps(
    schedule: Schedule, tensors: dict[str, Tensor], like: Tensor, group: Group, first: int
) -> Iterator[Action]:
    rank = dist.get_rank(group)
    flying: dict[int, list[dist.Work]] = {}  # by tag
    posted: list[Action] = []
    for action in schedule.ranks[rank]:
        if action.kind in ("send", "recv"):
            if action.writes and action.writes not in tensors:
                tensors[action.writes] = like.new_empty(schedule.buffers[rank][action.writes])
            posted.append(action)
            continue
        _start(posted, tensors, first, group, flying)
        posted = []
        if action.kind == "wait":
            for work in flying.pop(action.tag):
                work.wait()
        else:
            yield action


def _tags_for(schedule: Schedule, group: Group) -> int:
    """The number of the schedule's tag 0. Schedules in flight in a group share none; every rank counts alike."""
    highest = max((a.tag for actions in schedule.ranks for a in actions), default=-1)
    first = _next_tag.get(group, 1)
    _next_tag[group] = (first + highest + 1) % TAGS
    return first


def _start(
    actions: Sequence[Action], tensors: dict[str, Tensor], first: int, group: Group, flying: dict[int, list[dist.Work]]
) -> None:  # fmt: skip
    """Start messages together, so that none of them waits for another to be started (NCCL)."""
    if not actions:
        return
    operations = []
    for action in actions:
        sending = action.kind == "send"
        name = action.reads[0] if sending else action.writes
        peer = action.peer if group is None else dist.get_global_rank(group, action.peer)
        call = dist.isend if sending else dist.irecv
        tensor = tensors[name][: action.size]
        operations.append(dist.P2POp(call, tensor, peer, group, first + action.tag))
    works = dist.batch_isend_irecv(operations)
    if len(works) == len(operations):
        for action, work in zip(actions, works, strict=True):
            flying.setdefault(action.tag, []).append(work)
    else:  # one for all of them: whoever waits first waits for all
        for number, tag in enumerate(dict.fromkeys(a.tag for a in actions)):
            flying.setdefault(tag, []).extend(works if number == 0 else [])
