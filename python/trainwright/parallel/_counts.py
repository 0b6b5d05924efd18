"""How many gradients a backward still has to give: what the reducer's hooks count, one call per parameter.

The hooks are most of what the reducer costs where parameters are many and small, so what they read and write are flat
lists that they hold themselves, and a step only fills in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_task_id = torch._C._current_graph_task_id
NEVER = 1 << 60  # more calls than any backward makes


class Listener(Protocol):
    """Who the hooks tell."""

    def enter(self, task: int) -> None:
        """The first hook of a graph task: that of a backward, or a nested one of a reentrant checkpoint."""

    def complete(self, place: int) -> None:
        """A place has had all its calls."""

    def late(self, index: int) -> None:
        """A parameter has had more calls than expected."""


class Counts:
    """`left`: per parameter, calls still expected in this backward. `place`: per parameter, what it is part of (of the
    plan: a bucket). `pending`: per place, parameters that are not complete. `task`: the graph task of the last call.
    """

    def __init__(self, parameters: int) -> None:
        self.task = -1
        self.left = [0] * parameters
        self.place = [0] * parameters
        self.pending = [NEVER]

    def begin(self, expected: list[int], place: list[int], members: list[int] | None) -> None:
        """A backward begins; `members` per place, None if no place is to become complete."""
        self.left[:], self.place[:] = expected, place
        self.pending[:] = [NEVER] * (max(place, default=0) + 1) if members is None else members

    def hook(self, index: int, listener: weakref.ref[Any]) -> Callable[[Tensor], None]:
        """That of parameter `index`. It does nothing once `listener`, a `Listener`, is gone."""
        left, place, pending, task_id = self.left, self.place, self.pending, _task_id

        def hook(_: Tensor) -> None:
            if task_id() != self.task:
                alive = listener()
                if alive is not None:
                    alive.enter(task_id())
            left[index] = calls = left[index] - 1
            if calls == 0:
                at = place[index]
                pending[at] = others = pending[at] - 1
                if others == 0:
                    alive = listener()
                    if alive is not None:
                        alive.complete(at)
            elif calls < 0:
                alive = listener()
                if alive is not None:
                    alive.late(index)

        return hook
