"""When stage 3 of ZeRO needs a block: from a module's forward, and from the backward of it.

Forward: a module's own parameters are made whole when it begins, and others at the moment when somebody looks them up
(`self.head.weight` in the forward of the parent): the dicts that hold parameters tell. A block stays whole until the
module ends that owns all of it, or, if that does not run, the module that looked it up.

Backward: the last node of each module that used a block makes it whole again. Autograd runs nodes in descending order
of their sequence numbers, so once it has come to a node from before a module's forward, that module is done and its
blocks are free. Recomputation (both checkpoint modes) is a forward inside the backward: what it makes whole stays
until the backward of the same module is done.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainwright.parallel._gathering import WHOLE, BlockSet, Gathered

_task_id = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_sequence_number = torch._C._autograd._get_sequence_nr


class Parameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name; tells `Uses` when one is looked up."""

    uses: weakref.ref[Uses]

    def __getitem__(self, key: str) -> nn.Parameter | None:
        p = super().__getitem__(key)
        uses = self.uses()
        if p is not None and uses is not None and uses.running:
            uses.look_up(p)
        return p

    def __reduce__(self) -> Any:  # a copy of the module is an ordinary one
        return dict, (), None, None, iter(dict(self).items())


class Forward:
    """A forward that runs. `used`: what it or a part of it needed; `held`: what is freed when it ends."""

    __slots__ = ("begin", "held", "module", "used")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.begin = _sequence_number()
        self.used: dict[Gathered, None] = {}
        self.held: dict[Gathered, None] = {}


class Open(NamedTuple):
    """A module whose backward has begun and is not done: from sequence number `begin` on, of nodes made by `thread`."""

    begin: int
    thread: int
    task: int


class Uses:
    """Hooks on all modules of `module`; see the head of the file."""

    def __init__(self, module: nn.Module, home: BlockSet) -> None:
        self.running: list[Forward] = []
        self._home = home
        self._holds: dict[Gathered, int] = dict.fromkeys(home.blocks, 0)
        self._open: dict[Gathered, list[Open]] = {gathered: [] for gathered in home.blocks}
        self._recomputed: set[Gathered] = set()
        self._tasks: set[int] = set()
        self.keep_whole = False  # all blocks are, because the user wants them to be
        # A backward has been recorded, and needs again what it used: nothing is freed until the next forward.
        self._graph_of_backward = False
        names = dict(module.named_modules())
        self._anchor = {gathered: names[gathered.block.anchor] for gathered in home.blocks}
        self._own: dict[nn.Module, list[Gathered]] = {}
        me = weakref.ref(self)
        self.handles: list[Any] = []
        for owner in names.values():
            own = [p for p in owner._parameters.values() if p is not None]
            blocks = [home.block_of[home.index[id(p)]] for p in own if id(p) in home.index]
            self._own[owner] = list(dict.fromkeys(blocks))
            parameters = Parameters(owner._parameters)
            parameters.uses = me
            owner._parameters = parameters
            self.handles += [
                owner.register_forward_pre_hook(_enter(me), prepend=True),
                owner.register_forward_hook(_leave(me), always_call=True),
                owner.register_state_dict_pre_hook(_refuse(me)),
            ]

    # ---- forward

    def enter(self, module: nn.Module) -> None:
        if self.keep_whole:
            return
        if not self.running and _task_id() == -1:
            self._start_over()
        frame = Forward(module)
        self.running.append(frame)
        for gathered in self._own[module]:
            self._use(gathered, frame)

    def look_up(self, p: nn.Parameter) -> None:
        index = self._home.index.get(id(p))
        if index is not None:
            self._use(self._home.block_of[index], self.running[-1])

    def _use(self, gathered: Gathered, frame: Forward) -> None:
        if gathered in frame.used:
            return
        anchor = self._anchor[gathered]
        holder = next((f for f in reversed(self.running) if f.module is anchor), frame)
        frame.used[gathered] = holder.used[gathered] = None
        if gathered not in holder.held:
            holder.held[gathered] = None
            self._holds[gathered] += 1
        if _task_id() != -1:
            self._recomputed.add(gathered)
        self._home.need(gathered)

    def leave(self, module: nn.Module, output: Any) -> None:
        while self.running:
            frame = self.running.pop()
            if frame.module is module:
                break
            self._let_go(frame, None)
        else:
            return
        self._let_go(frame, output)

    def _let_go(self, frame: Forward, output: Any) -> None:
        if frame.used:
            tensors = list(_tensors_in(output))
            watched = torch.is_grad_enabled() and self._watch_backward(frame, tensors)
            self._hand_on(frame, tensors, everything=torch.is_grad_enabled() and not watched)
        for gathered in frame.held:
            self._holds[gathered] -= 1
            self._free_if_unused(gathered)

    def _hand_on(self, frame: Forward, tensors: list[Tensor], *, everything: bool) -> None:
        """The caller of a module uses the blocks of parameters that the module returns, views included. It uses
        `everything` if the module keeps its results elsewhere than in what it returns.
        """
        if not self.running:
            return
        returned = {x.untyped_storage().data_ptr() for x in tensors if x.layout is torch.strided}
        for gathered in frame.used:
            if gathered.state != WHOLE:  # an error ended the module
                continue
            if everything or any(
                value.untyped_storage().data_ptr() in returned for value in gathered.values
            ):
                self._use(gathered, self.running[-1])

    def _free_if_unused(self, gathered: Gathered) -> None:
        used = self._holds[gathered] or self._open[gathered] or gathered in self._recomputed
        if not (used or self._graph_of_backward):
            self._home.free(gathered)

    # ---- backward

    def _watch_backward(self, frame: Forward, tensors: list[Tensor]) -> bool:
        """Whether there is anything to watch."""
        nodes = {x.grad_fn for x in tensors if x.grad_fn is not None}
        me, thread = weakref.ref(self), threading.get_ident()
        blocks, watched = tuple(frame.used), False
        for node in nodes:
            end = node._sequence_nr()
            if end < frame.begin:  # of an input that is returned as it came
                continue

            def begin(_: Any, begin: int = frame.begin, end: int = end) -> None:
                uses = me()
                if uses is not None:
                    uses._open_backward(blocks, begin, end, thread)

            node.register_prehook(begin)
            watched = True
        return watched

    def _open_backward(
        self, blocks: tuple[Gathered, ...], begin: int, end: int, thread: int
    ) -> None:
        """The backward of a module's forward, nodes `begin` to `end`, begins: what came after it is done."""
        if self.keep_whole:
            return
        self._graph_of_backward |= torch.is_grad_enabled()  # create_graph
        task = _task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            _queue_callback(lambda: self._close_task(task))
        for gathered, opened in self._open.items():
            self._open[gathered] = [o for o in opened if o.thread != thread or o.begin < end]
        for gathered in blocks:
            self._open[gathered].append(Open(begin, thread, task))
            self._recomputed.discard(gathered)
        for gathered in self._open:
            if gathered.state == WHOLE:
                self._free_if_unused(gathered)
        for gathered in blocks:
            self._home.need(gathered)

    def _close_task(self, task: int) -> None:
        """A backward has ended: all of it, or a nested one of a reentrant checkpoint."""
        if _node() is None:
            self._tasks.clear()
            self._forget_backward()
            return
        for gathered, opened in self._open.items():
            self._open[gathered] = [o for o in opened if o.task != task]

    def _forget_backward(self) -> None:
        self._recomputed.clear()
        for gathered in self._open:
            self._open[gathered].clear()
            self._free_if_unused(gathered)

    def _start_over(self) -> None:
        """The outermost forward begins. What an exception has left open is closed."""
        self._tasks.clear()
        self._graph_of_backward = False
        self._holds = dict.fromkeys(self._holds, 0)
        self._forget_backward()
        self._home.new_round(of_step=torch.is_grad_enabled())


def _enter(me: weakref.ref[Uses]) -> Any:
    def hook(module: nn.Module, _: Any) -> None:
        uses = me()
        if uses is not None:
            uses.enter(module)

    return hook


def _leave(me: weakref.ref[Uses]) -> Any:
    def hook(module: nn.Module, _: Any, output: Any) -> None:
        uses = me()
        if uses is not None:
            uses.leave(module, output)

    return hook


def _refuse(me: weakref.ref[Uses]) -> Any:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        uses = me()
        if uses is not None and not uses.keep_whole and not keep_vars:
            raise RuntimeError(
                "Zero: stage 3: the parameters of the module are divided among the ranks; call state_dict,"
                " full_state_dict or sharded_state_dict of Zero, or use `with zero.gathered():`"
            )

    return hook


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """Of what a module returns: nested containers, and the attributes of objects."""
    for x in _pytree.tree_leaves(output):
        if isinstance(x, Tensor):
            yield x
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            yield from _tensors_in([getattr(x, field.name) for field in dataclasses.fields(x)])
