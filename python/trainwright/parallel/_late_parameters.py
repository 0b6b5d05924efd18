"""Stages 1 and 2 of ZeRO: what other ranks have updated arrives while the next forward runs.

After a step every bucket of parameters is on its way, those of the modules that run first in front. A parameter is
waited for when somebody looks it up in its module, as a forward does (`self.weight`), before the forward of a module
that owns it (which may keep it elsewhere, as an LSTM does), or together with all others when somebody lists the
parameters, as `state_dict` and `parameters` do. Whoever holds the tensor itself is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import ItemsView, ValuesView
from typing import Any

from torch import nn

from trainwright.parallel._shard_set import ShardSet
from trainwright.parallel.errors import CollectiveError


class Parameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name; whoever looks one up gets it complete."""

    home: weakref.ref[ShardSet]

    def _complete(self) -> None:
        home = self.home()
        if home is not None and home.coming:
            home.complete()

    def __getitem__(self, key: str) -> nn.Parameter | None:
        p = super().__getitem__(key)
        home = self.home()
        if p is not None and home is not None and home.coming:
            home.arrive(p)
        return p

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._complete()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self._complete()
        return super().values()

    def __reduce__(self) -> Any:  # a copy of the module is an ordinary one
        self._complete()
        return dict, (), None, None, iter(dict(self).items())


class _Last:
    """A handle like those of the hooks, removed before the channels close: what is under way still arrives."""

    def __init__(self, home: ShardSet) -> None:
        self._home = home

    def remove(self) -> None:
        with contextlib.suppress(CollectiveError):
            self._home.complete()


def watch(module: nn.Module, home: ShardSet) -> list[Any]:
    """Let the parameters of `home` arrive late; returns the handles of the hooks."""
    home.late = True
    me = weakref.ref(home)
    handles: list[Any] = [_Last(home)]
    for owner in module.modules():
        own = [p for p in owner._parameters.values() if p is not None and id(p) in home.index]
        parameters = Parameters(owner._parameters)
        parameters.home = me
        owner._parameters = parameters
        if own:
            handles.append(owner.register_forward_pre_hook(_enter(me, own), prepend=True))
    return handles


def _enter(me: weakref.ref[ShardSet], own: list[nn.Parameter]) -> Any:
    def hook(_: nn.Module, __: Any) -> None:
        home = me()
        if home is not None and home.coming:
            for p in own:
                home.arrive(p)

    return hook
