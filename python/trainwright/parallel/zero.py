"""`Zero`: data parallel whose optimizer state (and, by stage, more) is divided among the ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import check_int, type_error, value_error
from trainwright.ops._optimizer_formats import STATE_BLOCK
from trainwright.ops.grad_norm import clip_grad_norm_
from trainwright.optim._base import FusedOptimizer
from trainwright.optim.adamw import AdamW
from trainwright.parallel import (
    _checks,
    _feedback,
    _late_parameters,
    _parcels,
    _sharded_step,
    _zero_state,
)
from trainwright.parallel._blocks import Block, find_blocks, ranges_of
from trainwright.parallel._gathering import BlockSet
from trainwright.parallel._replicas import broadcast
from trainwright.parallel._shard_set import ShardSet
from trainwright.parallel._sharded_reducer import ShardedReducer
from trainwright.parallel._shards import Range, divide
from trainwright.parallel._uses import Uses
from trainwright.parallel.buckets import Reducer, StepStats
from trainwright.parallel.data import WIRE_ERROR, DataParallel, _check_after_step
from trainwright.parallel.layout import FlatLayout, bucket_bytes

__all__ = ["Zero"]

STAGES = (1, 2, 3)
OVERLAPS = ("auto", "forward", "off")


class Zero(DataParallel):
    """`DataParallel` whose optimizer updates on each rank only a part of the elements, and keeps state for these alone.

    Gradients, and the parameters after each step, have the bits that `DataParallel` with the same optimizer has, for
    any world size: an update depends on nothing but its element, and `max_grad_norm`, loss scaling and stochastic
    rounding see the whole. After `optimizer.step()` the ranks exchange the parts of the parameters that they updated.

    With Ψ parameters in fp32 and AdamW on W ranks a rank holds, in bytes of parameters, gradients and state:

    =======  ================
    stage 1  8Ψ + 8Ψ / W
    stage 2  4Ψ + 12Ψ / W
    stage 3  16Ψ / W
    =======  ================

    and in stage 3, during a forward or backward, the block in use and, with ``overlap="auto"``, the next one.

    In stage 2 an average reaches only the rank that owns it: parameters have no ``.grad`` after a backward, and the
    ranges' gradients are reset by `zero_grad` of this object or of `optimizer`, not by that of `module`. While
    `accumulate` or `no_sync` adds up microbatches, their sums are whole. A second backward without `zero_grad` adds
    its averages to those of the first, where `DataParallel` averages the sum: the same up to rounding. Norms are summed
    rank by rank in fp64, so they may differ in the last of its bits. Stage 3 does the same.

    In stage 3 the parameters, too, are divided. Before a part of the module runs, forward or backward, the ranks
    exchange its parameters (a block: see `bucket_mb`), and after it they are freed; the next block, by the order of the
    pass before, comes meanwhile. So a *forward* communicates, in evaluation and under `no_grad` too: all ranks run the
    same parts in the same order, and only gradients are not exchanged there. Outside of a forward or backward a
    parameter keeps its name, shape and dtype, but reads as NaN: `gathered` makes all of them whole, and `state_dict`
    does so by itself (collective). Parameters may be looked up from anywhere inside the module's forward. What is kept
    of them longer (a view, ``.detach()``) reads as NaN too, on a CPU with torch 2.13; elsewhere reading it is an
    illegal access: keep a ``.clone()``. A backward with ``create_graph=True`` leaves the blocks that it uses whole
    until the next forward. The module and its parts must not be compiled; a function around it may be, and calls it
    eagerly.

    Args:
        module: see `DataParallel`; parameters of fp32, bf16, fp16 or fp64 (not complex).
        optimizer: a class of `tw.optim` that updates each element by itself: not `Lamb`, not `Muon`.
        stage: 1 divides the optimizer's state, masters included; 2 the gradients too; 3 the parameters too.
        params: what the optimizer gets: parameters of `module`, or groups of them with options of their own. None is
            all parameters in one group.
        overlap: "off" waits for each block of stage 3 when it is needed: less memory, and not a bit of difference.
            "forward" lets the parameters of stages 1 and 2 arrive under the next forward instead of at the end of
            `optimizer.step()`: whoever looks a parameter up in its module, lists the parameters or takes a state dict
            gets complete values, but a tensor kept from before (``w = module.weight``) has them only after the next use
            of that parameter, or after `synchronize`. No part of the module may then be compiled, as in stage 3.
        group, bucket_mb, wire_dtype, unused, deterministic, broadcast_buffers, timeout: see `DataParallel`. `bucket_mb`
            is also the size from which stage 3 divides a module into blocks ("auto": as for buckets).
        **optimizer_kwargs: options of the optimizer.

    Raises:
        TypeError, ValueError: an argument; those of the optimizer come from its constructor.
        LayoutError, CollectiveError, RuntimeError: see `DataParallel`.

    Attributes:
        optimizer: an `optimizer` for the parameters of `module`. `step` is collective; all ranks must call it. Groups,
            schedulers, `torch.amp.GradScaler` and `tw.LossScaler` work as without Zero, and all ranks skip a step
            together. Its `state` is this rank's; to save it, use the methods of Zero. To keep state and masters on the
            host, use `tw.optim.Offload(zero.optimizer)` in the optimizer's place, and save as before.

    Source: ZeRO (Rajbhandari et al., 2020), with ranges of elements as in its flat buffers.

    >>> import torch, torch.distributed as dist, trainwright as tw
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> zero = tw.parallel.Zero(torch.nn.Linear(2, 1, bias=False), tw.optim.SGD, stage=1, lr=1.0)
    >>> before = zero.weight.detach().clone()
    >>> zero(torch.ones(3, 2)).mean().backward()
    >>> zero.optimizer.step()
    >>> (before - zero.weight).round().tolist()
    [[1.0, 1.0]]
    >>> dist.destroy_process_group()
    """

    optimizer: Any

    def __reduce__(self) -> Any:
        raise TypeError(
            "Zero: cannot be copied or pickled: each rank has a part; save full_state_dict() or sharded_state_dict()"
        )

    def __init__(
        self,
        module: nn.Module,
        optimizer: type[FusedOptimizer] = AdamW,
        *,
        stage: int,
        params: Iterable[Any] | None = None,
        overlap: str = "auto",
        group: Any = None,
        bucket_mb: float | str = "auto",
        wire_dtype: torch.dtype | str | None = None,
        unused: str = "error",
        deterministic: bool | None = None,
        broadcast_buffers: bool = True,
        timeout: float = 60.0,
        **optimizer_kwargs: Any,
    ) -> None:
        op = "Zero"
        _check(op, module, optimizer, stage, overlap)
        if overlap not in OVERLAPS:
            raise value_error(op, "overlap", '"auto", "forward" or "off"', repr(overlap))
        unit = STATE_BLOCK if optimizer_kwargs.get("state_dtype") == "int8" else 1
        self._wanted = stage, unit, bucket_mb
        self._uses: Uses | None = None
        self._eager: Callable[..., Any] | None = (
            None  # the module, which torch.compile must not trace
        )
        super().__init__(
            module, group=group, bucket_mb=bucket_mb, wire_dtype=wire_dtype, unused=unused,
            deterministic=deterministic, broadcast_buffers=broadcast_buffers, timeout=timeout,
        )  # fmt: skip
        try:
            places = _checks.places(module)
            self._stage = (
                1 if self._reducer.wire.world == 1 else stage
            )  # they are the same thing then
            given = [p for _, p, _, _ in places] if params is None else list(params)
            self._set = self._divide_parameters(places, overlap)
            self._sharded: Any = _sharded_step.build(
                optimizer, self._stage, self._set, given, optimizer_kwargs
            )
            self.optimizer = self._sharded
            if isinstance(self._reducer, ShardedReducer):
                self._reducer.home = self._set
                self._reducer.handles.append(_sharded_step.refuse_others(self._set))
        except BaseException:
            self.close()
            raise

    def _reducer_class(self, world: int) -> Callable[..., Reducer]:
        if world == 1 or self._wanted[0] == 1:
            return Reducer
        return functools.partial(ShardedReducer, divide=self._ranges)

    def _layout(self, places: Sequence[_checks.Place], world: int) -> FlatLayout:
        named = [(name, p) for name, p, _, _ in places]
        return FlatLayout.build(named, world=world, bucket_mb=self._wanted[2])

    def _blocks(self, places: Sequence[_checks.Place], world: int) -> list[Block]:
        params = [p for _, p, _, _ in places]
        total = sum(p.numel() * p.itemsize for p in params)
        limit = bucket_bytes(self._wanted[2], total, params[0].device.type if params else "cpu")
        return find_blocks(
            self.module, params, limit_bytes=limit, world=world, unit=self._wanted[1]
        )

    def _ranges(self, places: Sequence[_checks.Place], world: int) -> list[list[Range]]:
        """Who owns which elements of the parameters."""
        if self._wanted[0] == 3 and world > 1:
            return ranges_of(self._blocks(places, world), [p.numel() for _, p, _, _ in places])
        return divide(self._layout(places, world), self._wanted[1])[::-1]

    def _divide_parameters(self, places: Sequence[_checks.Place], overlap: str) -> ShardSet:
        reducer, unit = self._reducer, self._wanted[1]
        wire, driver = reducer.wire, reducer.driver
        device = places[0][1].device if places else torch.device("cpu")
        if self._stage < 3:
            layout, ranges = self._layout(places, wire.world), self._ranges(places, wire.world)
            home = ShardSet(places, ranges, wire, driver, device, unit, layout)
            if overlap == "forward" and wire.world > 1:
                reducer.handles += _late_parameters.watch(self.module, home)
                self._eager = torch.compiler.disable(self.module.__call__)
                reducer.refresh_places(_checks.places(self.module))
            return home
        reducer.remember_shapes()
        blocks = self._blocks(places, wire.world)
        whole = BlockSet(places, blocks, wire, driver, device, unit, prefetch=overlap != "off")
        self._uses = Uses(self.module, whole)
        self._eager = torch.compiler.disable(self.module.__call__)
        reducer.handles += self._uses.handles
        reducer.refresh_places(_checks.places(self.module))
        return whole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._eager is None:
            return super().forward(*args, **kwargs)
        self._reducer.check_idle()
        return self._eager(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait for the parameters that ``overlap="forward"`` lets arrive late. Not collective."""
        self._set.complete()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all parameters are whole on every rank; what was written to them, by all ranks alike, is kept.
        Collective.

        After an edit, `optimizer.refresh_masters()` lets fp32 masters follow. Stages 1 and 2 have nothing to gather.
        """
        with self._whole(fetch=True):
            yield

    @contextlib.contextmanager
    def _whole(self, *, fetch: bool) -> Iterator[None]:
        home, uses = self._set, self._uses
        home.complete()
        if uses is None or not isinstance(home, BlockSet) or uses.keep_whole:
            yield
            return
        if uses.running:
            raise RuntimeError("Zero: gathered: the module is running")
        home.make_all_whole(fetch=fetch)
        uses.keep_whole = True
        try:
            yield
        finally:
            uses.keep_whole = False
            home.keep_own_parts()

    @contextlib.contextmanager
    def join(self, after_step: Callable[[], Any] | None = None) -> Iterator[None]:
        """See `DataParallel.join`. Without `after_step`, a rank whose loop has ended calls `optimizer.step()`, which is
        collective, and `zero_grad()`. In stage 3 it takes part in the others' forwards and backwards by repeating the
        order in which its own last step used the blocks.

        Raises:
            RuntimeError: stage 3, and this rank has never made a step, so that it does not know that order.
        """
        _check_after_step(after_step)
        with super().join(after_step or self._plain_step):
            yield

    def _shadow(self) -> bool:
        if isinstance(self._set, BlockSet):
            self._set.repeat_last_step()
        return super()._shadow()

    def _plain_step(self) -> None:
        self.optimizer.step()
        self.zero_grad()

    # ---- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """That of `module` and of the optimizer, whose gradients stage 2 keeps apart from the parameters."""
        if self._set.late and set_to_none:
            for p in self._set.params:  # the module would wait for their values
                p.grad = None
        else:
            self.module.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`; returns the norm before.

        As `tw.clip_grad_norm_` on one process. Tied parameters count once. `max_grad_norm` of the optimizer does the
        same inside its step, without a pass of its own, and is the way for a model that `parallelize` has split (here a
        RuntimeError).
        """
        if getattr(self._sharded, "of_split_model", False):
            raise RuntimeError(
                "Zero: clip_grad_norm: expected a whole model, got one that parallelize has split; give the optimizer"
                " max_grad_norm"
            )
        if self._stage == 1:
            return clip_grad_norm_(self._set.params, max_norm, norm_type)
        return self._set.clip(max_norm, norm_type)

    def stats(self) -> StepStats:
        """What communication cost in the last step: that of the gradients in the last backward that communicated, and
        that of the parameters in the last `optimizer.step()` or, in stage 3, between the last two.
        """
        stats, cost = super().stats(), self._set.last_cost
        return dataclasses.replace(
            stats,
            exposed_ms=stats.exposed_ms + cost.exposed_ms,
            busy_ms=stats.busy_ms + cost.busy_ms,
            sent_bytes=stats.sent_bytes + cost.sent_bytes,
        )

    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state, masters included, that this rank holds now; without what
        `tw.optim.Offload` keeps on the host.
        """
        home, gathered = self._set, 0
        tensors = [p.grad for p in home.params if p.grad is not None]
        if isinstance(home, BlockSet):
            gathered = sum(block.held_bytes for block in home.blocks)
            tensors += [nothing for block in home.blocks for nothing in block.nothing]
        else:
            tensors += home.params
        for shards in self._set.shards:
            tensors += shards
            for shard in shards:
                tensors += [shard.grad] if shard.grad is not None else []
                values = self._sharded.state.get(shard, {}).values()
                if not self._sharded.offloaded:
                    tensors += [v for v in values if isinstance(v, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return gathered + sum(storages.values())

    # ---- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of `module`, with its keys. In stage 3 collective, and a copy."""
        with self._whole(fetch=True):
            found = super().state_dict(*args, **kwargs)
            if self._uses is None:
                return found
            for key, value in found.items():
                found[key] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
            return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        with self._whole(fetch=True):
            return super().load_state_dict(state_dict, *args, **kwargs)

    def full_state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` on the group's rank 0, ``{}`` elsewhere. Collective.

        Copies on the CPU: what ``module.state_dict()`` and the state_dict() of the same optimizer without Zero hold,
        so either side can load the other's. Over the int8 wire also "wire_error", what `error_feedback` returns.
        """
        errors = self.error_feedback()
        parts = _parcels.collect(self._set.driver, _zero_state.optimizer_part(self._sharded))
        with self._whole(fetch=True):
            if self._set.wire.rank:
                return {}
            model = {k: _zero_state.cpu(v) for k, v in self.module.state_dict().items()}
        full = {"model": model, "optimizer": _zero_state.full_optimizer(self._sharded, parts)}
        return {**full, WIRE_ERROR: errors} if errors else full

    def load_full_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Load what `full_state_dict` returned at any world size. Collective; only rank 0's argument is read.

        State is converted to the formats of this optimizer as its `load_state_dict` does.

        Raises:
            ValueError: on all ranks: rank 0's state is of another module or optimizer.
        """
        with self._whole(fetch=False):
            groups, part = self._share_out(sd)
        self._load(groups, part)

    def _share_out(self, sd: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The model of rank 0's state on all ranks; the groups, and each rank's part of the optimizer's state."""
        world = self._set.wire.world
        letters: list[Any] = []
        if self._set.wire.rank == 0:
            try:
                if not (isinstance(sd, Mapping) and {"model", "optimizer"} <= sd.keys()):
                    got = list(sd) if isinstance(sd, Mapping) else type(sd).__name__
                    raise TypeError(f'expected a dict with "model" and "optimizer", got {got}')
                self.module.load_state_dict(sd["model"])
                groups, wholes = _zero_state.by_name(self._sharded, sd["optimizer"])
                _zero_state.check_groups(self._sharded, groups)
                names, ranges = self._set.names, self._set.ranges
                letters = [
                    (
                        None,
                        groups,
                        _zero_state.parts_for(r, names, ranges, wholes),
                        sd.get(WIRE_ERROR, {}),
                    )
                    for r in range(world)
                ]
            except Exception as error:
                letters = [(f"{type(error).__name__}: {error}", [], {}, {})] * world
        problem, groups, part, errors = _parcels.hand_out(self._set.driver, letters)
        if problem is not None:
            raise ValueError(f"Zero.load_full_state_dict: sd: {problem}")
        self.load_error_feedback(errors)
        if world > 1:
            tensors = [*self._set.params, *self.module.buffers()]
            broadcast(self._set.wire, tensors, self._set.driver.wait_for)
        return groups, part

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model and the optimizer, as copies on the CPU. Not collective.

        Buffers, and whatever else the module's state_dict holds, are in rank 0's part.
        """
        shard = _zero_state.shard_of(self.module, self._sharded)
        feedback = self._reducer.feedback
        if feedback is not None:
            shard[WIRE_ERROR] = {
                kind: {name: _zero_state.cpu(values) for name, values in by_name.items()}
                for kind, by_name in feedback.by_name().items()
            }
        return shard

    def load_sharded_state_dict(self, list_of_shards: Sequence[Mapping[str, Any]]) -> None:
        """Load the `sharded_state_dict` of all ranks of a run, of any world size and bucket size, bit for bit.

        Every rank passes all of them, in any order. Collective.

        Raises:
            ValueError: the list is not complete, or of another module or optimizer.
        """
        shards = _zero_state.check_shards(list_of_shards)
        groups = shards[0]["optimizer"]["param_groups"]
        _zero_state.check_groups(self._sharded, groups)
        with self._whole(fetch=False):
            self.module.load_state_dict(_zero_state.joined_model(self.module, self._set, shards))
        errors = [shard[WIRE_ERROR] for shard in shards if WIRE_ERROR in shard]
        if self._reducer.feedback is not None and len(errors) == len(shards):
            same = len(shards) == self._set.wire.world
            mean = {"sent": _feedback.mean([_feedback.total(e) for e in errors])}
            self._reducer.feedback.load(errors[self._set.wire.rank] if same else mean)
        rank, names, ranges = self._set.wire.rank, self._set.names, self._set.ranges
        part: dict[str, Any] = {}
        for i, (name, p) in enumerate(zip(names, self._set.params)):
            found = [s for shard in shards for s in shard["optimizer"]["state"].get(name, ())]
            if found:
                whole = {name: _zero_state.join_states(name, found, p.numel())}
                part |= _zero_state.parts_for(rank, [name], [ranges[i]], whole)
        self._load(groups, part)

    def _load(self, groups: Sequence[Any], part: Mapping[str, Any]) -> None:
        self._set.refresh()
        _zero_state.load_optimizer(self._sharded, groups, part)
        torch.autograd.graph.increment_version(
            self._set.params
        )  # Offload looks whether they were edited
        self._set.gather(set(range(len(self._set.params))))  # new masters may have moved them


def _check(op: str, module: Any, optimizer: Any, stage: Any, overlap: Any) -> None:
    check_int(op, "stage", stage)
    if stage not in STAGES:
        raise value_error(
            op,
            "stage",
            ", ".join(map(str, STAGES)),
            stage,
        )
    if not (isinstance(optimizer, type) and issubclass(optimizer, FusedOptimizer)):
        got = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise type_error(op, "optimizer", "a class of tw.optim, such as tw.optim.AdamW", got)
    if not optimizer.elementwise:
        raise value_error(
            op, "optimizer", "one that updates each element by itself (AdamW, Adam, SGD, Lion, RMSprop)",
            f"{optimizer.__name__}, which needs whole parameters",
        )  # fmt: skip
    where = 'with overlap="forward"'
    if isinstance(module, nn.Module):
        for name, part in module.named_modules() if stage == 3 or overlap == "forward" else ():
            if (
                isinstance(part, torch._dynamo.OptimizedModule)
                or part._compiled_call_impl is not None
            ):
                raise value_error(
                    op, "module", f"no part compiled {'in stage 3' if stage == 3 else where}",
                    f"{name or 'the module itself'}; compile nothing, or use stage 1 or 2",
                )  # fmt: skip
        for name, p in module.named_parameters():
            if p.is_complex():
                raise type_error(op, f"module: {name}", "a real parameter", p.dtype)
