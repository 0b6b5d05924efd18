"""`Zero`'s model and optimizer state as plain CPU tensors: this rank's part, the whole, and the ways between them.

A shard holds, by parameter name, ranges of elements: ``(begin, tensor)`` for values, a dict with "begin" and "end"
beside the tensors of the optimizer's state. Ranges say nothing of buckets or ranks, so shards of any world size make
the whole, and the whole gives those of any other. One parameter is assembled at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.ops._optimizer_formats import STATE_BLOCK, int8_decode
from trainwright.optim._base import FLAGS
from trainwright.parallel._shard_set import ShardSet
from trainwright.parallel._sharded_step import ShardedStep
from trainwright.parallel._shards import Range

FORMAT = 1
State = dict[str, Any]


def cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _per_element(key: str, value: Any) -> bool:
    """Whether a state has the parameter's shape: all but the step count and the scales of int8 codes."""
    return isinstance(value, Tensor) and key != "step" and not key.endswith("_scale")


# ---- this rank's part


def groups_by_name(optimizer: ShardedStep) -> list[State]:
    """The groups' options, with names for parameters."""
    names, index = optimizer._set.names, optimizer._set.index
    return [
        {
            **{k: cpu(v) for k, v in group.items() if k != "params"},
            "params": [names[index[id(p)]] for p in params],
        }
        for group, params in zip(optimizer.param_groups, optimizer.given)
    ]


def optimizer_part(optimizer: ShardedStep) -> dict[str, list[State]]:
    """By parameter the states of this rank's ranges."""
    part: dict[str, list[State]] = {}
    for name, shards in zip(optimizer._set.names, optimizer._set.shards):
        found = [
            {
                "begin": s.shard_offset,
                "end": s.shard_offset + s.numel(),
                **{k: cpu(v) for k, v in optimizer.state[s].items()},
            }
            for s in shards
            if s in optimizer.state
        ]
        if found:
            part[name] = found
    return part


def shard_of(module: nn.Module, optimizer: ShardedStep) -> State:
    """What `Zero.sharded_state_dict` returns."""
    home = optimizer._set
    home.refresh()
    values = {
        name: [(s.shard_offset, cpu(s.data)) for s in shards]
        for name, shards in zip(home.names, home.shards)
        if shards
    }
    rest = {
        k: cpu(v) for k, v in module.state_dict(keep_vars=True).items() if id(v) not in home.index
    }
    return {
        "format": FORMAT, "world": home.wire.world, "rank": home.wire.rank,
        "model": {"parameters": values, "rest": rest if home.wire.rank == 0 else {}},
        "optimizer": {"state": optimizer_part(optimizer), "param_groups": groups_by_name(optimizer)},
    }  # fmt: skip


# ---- ranges to wholes, and back


def check_shards(shards: Any) -> list[State]:
    """Shards in order of rank; raises unless they are those of all ranks of one run."""
    where = "Zero.load_sharded_state_dict: list_of_shards"
    if not isinstance(shards, Sequence) or not shards:
        raise ValueError(f"{where}: expected a list of all ranks' sharded_state_dict()")
    for i, shard in enumerate(shards):
        if not isinstance(shard, Mapping) or shard.get("format") != FORMAT:
            raise ValueError(f"{where}[{i}]: expected a sharded_state_dict() of format {FORMAT}")
    world = shards[0]["world"]
    ranks = sorted(shard["rank"] for shard in shards)
    if ranks != list(range(world)) or any(shard["world"] != world for shard in shards):
        got = [(shard["rank"], shard["world"]) for shard in shards]
        raise ValueError(f"{where}: expected each rank of {world} once, got (rank, world) {got}")
    return sorted(shards, key=lambda shard: int(shard["rank"]))


def join_values(
    name: str, parts: Sequence[tuple[int, Tensor]], numel: int, dtype: torch.dtype
) -> Tensor:
    """The whole of a tensor, flat."""
    whole, count = torch.empty(numel, dtype=dtype), 0
    for begin, values in parts:
        if begin + values.numel() > numel:
            raise ValueError(
                f"Zero: {name}: expected {numel} elements, got a shard with elements up to"
                f" {begin + values.numel()}"
            )
        whole[begin : begin + values.numel()] = values
        count += values.numel()
    if count != numel:
        raise ValueError(f"Zero: {name}: expected {numel} elements, the shards have {count}")
    return whole


def joined_model(module: nn.Module, home: ShardSet, shards: Sequence[State]) -> State:
    """The module's `state_dict` from all shards in order of rank."""
    rest = shards[0]["model"]["rest"]
    model: State = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if id(value) not in home.index:
            if key in rest:
                model[key] = rest[key]
            continue
        name = home.names[home.index[id(value)]]
        parts = [part for shard in shards for part in shard["model"]["parameters"].get(name, ())]
        if parts:
            model[key] = join_values(name, parts, value.numel(), parts[0][1].dtype).view(
                value.shape
            )
    return model | {key: value for key, value in rest.items() if key not in model}


def join_states(name: str, parts: Sequence[State], numel: int) -> State:
    """The optimizer's state of a whole parameter, with flat tensors."""
    first = parts[0]
    whole: State = {}
    for key, value in first.items():
        if key in ("begin", "end"):
            continue
        if _per_element(key, value):
            pieces = [(part["begin"], part[key].reshape(-1)) for part in parts]
            whole[key] = join_values(f"{name}: {key}", pieces, numel, value.dtype)
        elif key.endswith("_scale"):
            pieces = [(part["begin"] // STATE_BLOCK, part[key]) for part in parts]
            whole[key] = join_values(
                f"{name}: {key}", pieces, -(-numel // STATE_BLOCK), value.dtype
            )
        else:
            whole[key] = value
    return whole


def cut_state(whole: State, begin: int, end: int) -> State:
    """A range of a whole state. int8 codes become fp32 where the range begins inside one of their blocks."""
    part: State = {}
    for key, value in whole.items():
        if key.endswith("_scale"):
            continue
        scale = whole.get(key + "_scale")
        if not _per_element(key, value):
            part[key] = value
        elif scale is None:
            part[key] = value.reshape(-1)[begin:end]
        elif begin % STATE_BLOCK:
            part[key] = int8_decode(value.reshape(-1), scale)[begin:end]
        else:
            part[key] = value.reshape(-1)[begin:end]
            part[key + "_scale"] = scale[begin // STATE_BLOCK : -(-end // STATE_BLOCK)]
    return part


def parts_for(
    rank: int, names: Sequence[str], ranges: Sequence[Sequence[Range]], wholes: Mapping[str, State]
) -> dict[str, list[State]]:
    """`optimizer_part` of a rank from the states of whole parameters."""
    return {
        name: [
            {"begin": r.begin, "end": r.end, **cut_state(wholes[name], r.begin, r.end)}
            for r in mine
            if r.owner == rank
        ]
        for name, mine in zip(names, ranges)
        if name in wholes
    }


# ---- into the optimizer


def check_groups(optimizer: ShardedStep, groups: Sequence[State]) -> None:
    """Raise unless groups of a checkpoint, with names, hold the same parameters as the optimizer's."""
    mine = groups_by_name(optimizer)
    if len(groups) != len(mine):
        raise ValueError(f"Zero: param_groups: expected {len(mine)} groups, got {len(groups)}")
    for i, (theirs, ours) in enumerate(zip(groups, mine)):
        if list(theirs["params"]) != ours["params"]:
            other = next(
                (f"{b}, got {a}" for a, b in zip(theirs["params"], ours["params"]) if a != b),
                f"{len(ours['params'])} parameters, got {len(theirs['params'])}",
            )
            raise ValueError(f"Zero: param_groups[{i}]: params: expected {other}")


def load_optimizer(
    optimizer: ShardedStep, groups: Sequence[State], part: Mapping[str, list[State]]
) -> None:
    """Replace options and this rank's states."""
    check_groups(optimizer, groups)
    for mine, theirs in zip(optimizer.param_groups, groups):
        mine.update({k: v for k, v in theirs.items() if k not in ("params", *FLAGS)})
    optimizer.state.clear()
    for name, shards in zip(optimizer._set.names, optimizer._set.shards):
        by_begin = {state["begin"]: state for state in part.get(name, ())}
        for s in shards:
            if s.shard_offset in by_begin:
                values = {
                    k: v for k, v in by_begin[s.shard_offset].items() if k not in ("begin", "end")
                }
                optimizer.state[s] = optimizer._in_own_formats(s, values)
    optimizer.__dict__.pop("_plan", None)


def full_optimizer(optimizer: ShardedStep, parts: Sequence[Mapping[str, list[State]]]) -> State:
    """All ranks' parts as the unsharded optimizer's `state_dict()` would be."""
    home = optimizer._set
    number, groups = 0, []
    state: dict[int, State] = {}
    for group in groups_by_name(optimizer):
        names = group["params"]
        groups.append({**group, "params": list(range(number, number + len(names)))})
        for i, name in enumerate(names, number):
            p = home.params[home.names.index(name)]
            found = [s for part in parts for s in part.get(name, ())]
            if found:
                whole = join_states(name, found, p.numel())
                state[i] = {
                    k: v.view(p.shape) if _per_element(k, v) else v for k, v in whole.items()
                }
        number += len(names)
    return {"state": state, "param_groups": groups}


def by_name(optimizer: ShardedStep, full: State) -> tuple[list[State], dict[str, State]]:
    """Groups and states of an unsharded `state_dict`, with names for numbers."""
    mine = groups_by_name(optimizer)
    groups, wholes = [], {}
    if len(full["param_groups"]) != len(mine):
        got = len(full["param_groups"])
        raise ValueError(f"Zero: param_groups: expected {len(mine)} groups, got {got}")
    for i, (theirs, ours) in enumerate(zip(full["param_groups"], mine)):
        if len(theirs["params"]) != len(ours["params"]):
            expected = f"{len(ours['params'])} parameters, got {len(theirs['params'])}"
            raise ValueError(f"Zero: param_groups[{i}]: params: expected {expected}")
        groups.append({**theirs, "params": ours["params"]})
        for number, name in zip(theirs["params"], ours["params"]):
            if number in full["state"]:
                wholes[name] = full["state"][number]
    home = optimizer._set
    for name, state in wholes.items():
        shape = home.params[home.names.index(name)].shape
        for key, value in state.items():
            if _per_element(key, value) and value.shape != shape:
                raise ValueError(
                    f"Zero: optimizer: {name}: {key}: expected shape {tuple(shape)}, got {tuple(value.shape)}"
                )
    return groups, wholes
