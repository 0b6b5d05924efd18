"""Split an existing model over a process group by a plan, and put it together again."""

from __future__ import annotations

import fnmatch
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.errors import type_error, value_error
from trainwright.parallel._exchange import check_group, gather_shapes
from trainwright.parallel._schedule_runtime import Group, world_of
from trainwright.parallel._shard_norm import clip_by_whole_norm, squares_of_whole
from trainwright.parallel.sequence import sum_gradients
from trainwright.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
)
from trainwright.parallel.vocab import VocabParallelEmbedding

__all__ = ["Parallelized", "Style", "parallelize"]

OP = "parallelize"
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@dataclass(frozen=True)
class Style:
    """How `parallelize` splits a module.

    Attributes:
        kind: "column" or "row", for a linear layer (`ColumnParallelLinear`, `RowParallelLinear`); "vocab", for an
            embedding (`VocabParallelEmbedding`); "sequence", for a module that stays whole and runs on this rank's rows
            (`sum_gradients`).
        options: further arguments of that class, as ``{"sequence_parallel": True, "reduce": "ring"}``.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocab": (nn.Embedding,),
    "sequence": (nn.Module,),
}


SPLIT = {"column": ColumnParallelLinear, "row": RowParallelLinear, "vocab": VocabParallelEmbedding}


def parallelize(
    model: nn.Module, plan: Mapping[str, str | Style], *, group: Group = None
) -> Parallelized:
    """Replace the modules that a plan names by sharded ones, in place.

    Args:
        model: the same on every rank; the values of the group's first rank are taken.
        plan: pattern of module names, as of `fnmatch` ("blocks.*.mlp.up"), -> "column", "row", "vocab" or "sequence",
            or a
            `Style` with options. Every pattern has to match, and every module is matched at most once.
        group: process group; None is the default group.

    Returns:
        What puts the model together again: `Parallelized`.

    State dict keys stay, with this rank's shards as values. A parameter that two modules share stays shared; both must
    be split alike. The model's own code has to do with local sizes, such as heads: ``view(..., -1, head_dim)``.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: before anything is replaced: a pattern that matches nothing, a module of a type that its
            style cannot split, a shared parameter that would be torn apart, or a plan that differs between ranks.

    Example::

        tp = parallelize(model, {
            "blocks.*.attention.[qkv]": "column", "blocks.*.attention.out": "row",
            "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row", "embedding": "vocab",
        })
        optimizer = tp.optimizer(tw.optim.AdamW, model.parameters(), lr=1e-3, max_grad_norm=1.0)

    Together with data parallel, on 2 x 2 ranks: split first, then average over the ranks that hold the same part. Zero
    gets the optimizer's class, which knows of the split::

        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = parallelize(model, plan, group=mesh["tp"].get_group())
        dp = DataParallel(model, group=mesh["dp"].get_group())  # or
        zero = Zero(model, tp.optimizer_class(tw.optim.AdamW), stage=2, group=mesh["dp"].get_group(), max_grad_norm=1.0)

    The int8 wire is not for a split model: where its blocks begin depends on the shapes, so what each rank holds whole
    would no longer stay the same on all of them.
    """
    check_group(OP, group)
    if not isinstance(model, nn.Module):
        raise type_error(OP, "model", "an nn.Module", type(model).__name__)
    chosen = _matched(model, plan)
    _check_shared(model, chosen)
    text = repr([(name, s.kind, sorted(s.options)) for name, s in chosen.items()])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    (every,) = gather_shapes([zlib.crc32(text.encode())], group, device)
    if len(set(every)) > 1:
        raise value_error(OP, "plan", "the same plan on every rank", "plans that differ")
    return Parallelized(model, chosen, group)


def _matched(model: nn.Module, plan: Mapping[str, str | Style]) -> dict[str, Style]:
    """Style by module name, in the order of the model."""
    if not isinstance(plan, Mapping):
        raise type_error(OP, "plan", "a dict of pattern -> style", type(plan).__name__)
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, given in plan.items():
        style = Style(given) if isinstance(given, str) else given
        if not isinstance(style, Style):
            raise type_error(OP, f"plan[{pattern!r}]", "a str or a Style", type(given).__name__)
        if style.kind in SPLIT:
            known = inspect.signature(SPLIT[style.kind]).parameters
            wrong = [o for o in style.options if o not in known or o in ("group", "whole")]
            if wrong:
                expected = f"options of {SPLIT[style.kind].__name__}"
                raise value_error(OP, f"plan[{pattern!r}]", expected, repr(wrong[0]))
        if style.kind not in KINDS:
            kinds = ", ".join(map(repr, KINDS))
            raise value_error(OP, f"plan[{pattern!r}]", f"one of {kinds}", repr(style.kind))
        matches = fnmatch.filter(names, pattern)
        if not matches:
            got = f"{pattern!r}, which matches none of {', '.join(names[:8])}, ..."
            raise value_error(OP, "plan", "patterns that match modules", got)
        for name in matches:
            if name in found:
                both = f"{found[name][0]!r} and {pattern!r}"
                raise value_error(OP, "plan", f"one pattern for {name}", both)
            _check_type(name, model.get_submodule(name), style)
            found[name] = (pattern, style)
    return {name: found[name][1] for name in names if name in found}


def _check_type(name: str, module: nn.Module, style: Style) -> None:
    """Only what the sharded module does too: an embedding or a linear layer of a subclass may compute something
    else."""
    from trainwright.nn.linear import Linear

    exact = {"column": (nn.Linear, Linear), "row": (nn.Linear, Linear), "vocab": (nn.Embedding,)}
    expected = exact.get(style.kind)
    if expected and type(module) not in expected:
        wanted = " or ".join(f"{t.__module__.split('.')[0]}.nn.{t.__name__}" for t in expected)
        raise type_error(OP, f"plan: {name} as {style.kind!r}", wanted, type(module).__name__)
    if getattr(module, "activation", None) is not None:
        raise value_error(OP, f"plan: {name}", "a linear layer without activation", module.activation)  # fmt: skip
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        value = getattr(module, option, None)
        if style.kind == "vocab" and value:
            raise value_error(OP, f"plan: {name}", f"an embedding without {option}", value)


def _check_shared(model: nn.Module, chosen: dict[str, Style]) -> None:
    """Every owner of a shared parameter is split along the same dimension, or none is."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(name)
    for names in owners.values():
        kinds = [chosen[n].kind if n in chosen else "whole" for n in names]
        if len({"vocab" if kind == "column" else kind for kind in kinds}) > 1:
            named = ", ".join(f"{n} {kind}" for n, kind in zip(names, kinds))
            raise value_error(OP, "plan", "modules that share a parameter to be split alike", named)


class Parallelized:
    """A model that `parallelize` split: shards to whole tensors and back. Collective methods are called by every rank.

    Attributes:
        shards: by parameter name, which part every rank holds; a parameter without an entry is whole everywhere.
    """

    def __init__(self, model: nn.Module, chosen: dict[str, Style], group: Group) -> None:
        self.model, self.group = model, world_of(group)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.shards: dict[str, Shard] = {}
        self._originals: dict[str, nn.Module] = {}
        self._undo: list[Callable[[], None]] = []
        twins: dict[int, nn.Parameter] = {}  # id of a whole parameter -> its shard
        for name, style in chosen.items():
            module = model.get_submodule(name)
            if style.kind == "sequence":
                self._undo.append(sum_gradients(module, group=group))
                continue
            given = {k: p for k, p in module.named_parameters(recurse=False)}
            split = self._split(module, style)
            for key, p in given.items():
                setattr(split, key, twins.setdefault(id(p), getattr(split, key)))
            split.train(module.training)
            self._replace(name, split)
            self._originals[name] = module
        for module in self._originals.values():  # their memory is free from now on
            for key, p in module.named_parameters(recurse=False):
                empty = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                setattr(module, key, empty)

    def _split(self, module: Any, style: Style) -> nn.Module:
        options = {**style.options, "group": self.group, "whole": module}
        if style.kind == "vocab":
            return VocabParallelEmbedding(
                module.num_embeddings, module.embedding_dim, module.padding_idx, **options
            )
        kind = ColumnParallelLinear if style.kind == "column" else RowParallelLinear
        return kind(module.in_features, module.out_features, module.bias is not None, **options)

    def _replace(self, name: str, new: nn.Module) -> None:
        parent, _, key = name.rpartition(".")
        setattr(self.model.get_submodule(parent), key, new)
        for parameter, shard in getattr(new, "shards", {}).items():
            self.shards[f"{name}.{parameter}"] = shard

    # ---- whole tensors and shards

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has the shape of parameter `name` unsharded, such as its Adam moments."""
        shard = self.shards.get(name)
        return whole if shard is None else shard.of(whole, self.rank).contiguous()

    def whole(self, name: str, part: Tensor, *, everywhere: bool = False) -> Tensor | None:
        """The inverse of `part`: a collective. On the CPU of the group's first rank, None elsewhere; with `everywhere`
        on every rank, on its device."""
        shard = self.shards.get(name)
        if shard is None:
            keep = part.detach() if everywhere else part.detach().cpu()
            return keep if everywhere or self.rank == 0 else None
        longest = max(end - begin for begin, end in shard.ranges)
        mine = part.detach().movedim(shard.dim, 0)
        padded = mine.new_zeros(longest, *mine.shape[1:])
        padded[: mine.shape[0]] = mine
        parts = None
        if everywhere or self.rank == 0:
            parts = [torch.empty_like(padded) for _ in range(self.world)]
        if everywhere:
            dist.all_gather(parts, padded, group=self.group)
        else:
            dist.gather(padded, parts, dist.get_global_rank(self.group, 0), group=self.group)
        if parts is None:
            return None
        whole = mine.new_empty(shard.length, *mine.shape[1:])
        for (begin, end), values in zip(shard.ranges, parts):
            whole[begin:end] = values[: end - begin]
        whole = whole.movedim(0, shard.dim).contiguous()
        return whole if everywhere else whole.cpu()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the unsharded model, complete on the CPU of the group's first rank and empty elsewhere."""
        found = {name: self.whole(name, value) for name, value in self.model.state_dict().items()}
        return {name: value for name, value in found.items() if value is not None}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of the unsharded model's state dict, which every rank passes whole.

        Raises:
            ValueError: names or shapes are not those of the unsharded model; nothing was loaded.
        """
        op, own = "load_full_state_dict", self.model.state_dict()
        if state.keys() != own.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            got = f"{missing[:4]} missing, {extra[:4]} too many"
            raise value_error(op, "state", "the names of the model", got)
        for name, value in own.items():
            shape, shard = list(value.shape), self.shards.get(name)
            if shard is not None:
                shape[shard.dim] = shard.length
            if list(state[name].shape) != shape:
                raise value_error(op, name, f"shape {tuple(shape)}", tuple(state[name].shape))
        self.model.load_state_dict({name: self.part(name, v) for name, v in state.items()})

    def restore(self) -> None:
        """Put the original modules back, with the weights that the shards have now: the model is whole on every
        rank."""
        shared: dict[int, nn.Parameter] = {}
        for name, module in self._originals.items():
            split = self.model.get_submodule(name)
            for key, p in list(split.named_parameters(recurse=False)):
                if id(p) not in shared:
                    values = self.whole(f"{name}.{key}", p, everywhere=True)
                    assert values is not None
                    shared[id(p)] = nn.Parameter(values.clone(), p.requires_grad)
                setattr(module, key, shared[id(p)])
            module.train(split.training)
            self._replace(name, module)
        for undo in self._undo:
            undo()
        self._originals.clear()
        self._undo.clear()
        self.shards.clear()

    # ---- norms and optimizers

    def optimizer(self, kind: type[Optimizer], params: Iterable[Any], **options: Any) -> Optimizer:
        """``kind(params, **options)``, an optimizer of `tw.optim` whose `max_grad_norm` clips by the norm of the whole
        model's gradient: every element counts once, however many ranks hold it."""
        return clip_by_whole_norm(kind, self)(params, **options)

    def optimizer_class(self, kind: type[Optimizer]) -> type[Optimizer]:
        """`kind` with that norm, for `Zero`, which makes the optimizer itself."""
        found: type[Optimizer] = clip_by_whole_norm(kind, self)
        return found

    def grad_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, every element counted once: a collective; 0-d fp32."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return squares_of_whole(self, grads)[0].sqrt().float()

    def once(self, name: str, gradient: Tensor) -> Tensor:
        """The part of a sharded parameter's gradient that no rank before this one holds."""
        shard = self.shards[name]
        begin, end = shard.ranges[self.rank]
        seen = max((e for _, e in shard.ranges[: self.rank]), default=0)
        first = min(max(begin, seen), end)
        return gradient.narrow(shard.dim, first - begin, end - first)
