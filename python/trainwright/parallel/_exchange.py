"""Shards on the move: the collectives that the tensor-parallel layers overlap with their matrix products.

All follow a schedule of point-to-point messages, run the same on Gloo and NCCL, take shards of any size (also empty
ones), and add in an order that depends on the shapes and the number of ranks alone, so that overlap, chunk count and
timing never change a bit. Every rank of the group must call them in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.errors import type_error, value_error
from trainwright.parallel._gather_schedules import all_gather_matmul_schedule
from trainwright.parallel._panel_schedules import all_gather_panels_schedule
from trainwright.parallel._reduce_schedules import (
    matmul_all_reduce_schedule,
    matmul_reduce_scatter_schedule,
)
from trainwright.parallel._schedule_runtime import Group, OneGroup, as_bytes, perform
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.cost_model import CANDIDATES, Choice, CostModel, calibrate, choose
from trainwright.parallel.schedule import Action, Schedule

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCES = ("ordered", "ring")
PACKED_ROWS = 16  # of one operand: about as long to multiply as the other operand takes to be packed once more


def check_group(op: str, group: Group) -> None:
    """Raise unless torch.distributed runs and this rank is in `group`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{op}: torch.distributed is not initialised: call torch.distributed.init_process_group "
            "first, in a program started with torchrun"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise type_error(
            op, "group", "None or a process group that this rank is in", type(group).__name__
        )
    if dist.get_rank(group) < 0:
        raise value_error(op, "group", "a group that this rank is in", "a group without it")


@dataclass(frozen=True)
class How:
    """How a split product communicates; `op` names it in the log of decisions.

    `width` is the largest shard of the dimension that is split (over all weights of a gathered input), by which all
    ranks predict alike.
    """

    op: str
    group: Group
    overlap: bool = True
    wire_dtype: torch.dtype | None = None
    reduce: str = "ordered"
    width: int = 0

    @staticmethod
    def checked(
        op: str, group: Group, overlap: object, wire_dtype: object, reduce: object, width: int = 0
    ) -> How:
        check_group(op, group)
        if overlap not in ("auto", "off"):
            raise value_error(op, "overlap", "'auto' or 'off'", repr(overlap))
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise value_error(
                op, "wire_dtype", "None, torch.float32, torch.bfloat16 or torch.float16", wire_dtype
            )
        if reduce not in REDUCES:
            raise value_error(op, "reduce", "'ordered' or 'ring'", repr(reduce))
        return How(op, group, overlap == "auto", wire_dtype, reduce, width)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """What values of `dtype` travel in: the narrower of it and wire_dtype."""
        narrower = self.wire_dtype is not None and self.wire_dtype.itemsize < dtype.itemsize
        return self.wire_dtype if narrower and self.wire_dtype is not None else dtype

    def model(self, dtype: torch.dtype, device: torch.device) -> Callable[[], CostModel]:
        return functools.partial(calibrate, self.group, dtype=dtype, device=device)


def gather_shapes(shape: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """By dimension, that of every rank."""
    world = dist.get_world_size(group)
    mine = torch.tensor([list(shape)], dtype=torch.int64, device=device)
    if world == 1:
        every = mine
    else:
        every = mine.new_empty(world, len(shape))
        _all_gather(every, mine, group=group)
    return every.t().tolist()


def gather_sizes(size: int, group: Group, device: torch.device) -> list[int]:
    """The `size` of every rank."""
    return gather_shapes([size], group, device)[0]


_MAKERS: dict[str, Callable[..., Schedule]] = {
    "rows": all_gather_matmul_schedule,
    "panels": all_gather_panels_schedule,
    "scatter": matmul_reduce_scatter_schedule,
    "all": matmul_all_reduce_schedule,
}


@functools.lru_cache(maxsize=512)
def _schedule(
    kind: str, sizes: tuple[int, ...], options: tuple[tuple[str, object], ...], chunks: int, overlap: bool
) -> Schedule:  # fmt: skip
    return _MAKERS[kind](sizes, chunks=chunks, overlap=overlap, **dict(options))


def planned(
    kind: str, sizes: Sequence[int], how: How, like: Tensor, sent_bytes: int, repeated_flops: float,
    fixed_chunks: int | None, **options: object,
) -> tuple[Schedule, Choice]:  # fmt: skip
    """The schedule of a call, and the choice that it came from."""
    key = (tuple(sizes), tuple(options.items()))
    build = functools.partial(_schedule, kind, *key)
    candidates = CANDIDATES if fixed_chunks is None else (fixed_chunks,)
    if not how.overlap:
        return build(candidates[0], False), Choice(None, False, candidates[0], False)
    dtype = str(like.dtype).removeprefix("torch.")
    numbers = "".join(f" {n}={v}" for n, v in options.items())
    call = f"{how.op} {kind} {list(sizes)}{numbers} {dtype} over {how.world} ranks"
    choice = choose(
        call, sent_bytes, how.world - 1, like.device, how.model(like.dtype, like.device), build,
        repeated_flops, candidates,
    )  # fmt: skip
    return build(choice.chunks, choice.overlap), choice


def _on_wire(x: Tensor, how: How) -> Tensor:
    return x.to(how.wire(x.dtype)).contiguous()


def _off_wire(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the products take it: they mix dtypes, but not fp64 with others."""
    return x.to(dtype) if dtype == torch.float64 else x


def gathered_rows(
    mine: Tensor, sizes: Sequence[int], how: How, row_flops: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, part) until all rows of all ranks were there: this rank's own first, then those of rank-1, rank-2,
    ...
    as they arrive, in parts of rows. `all_gather_matmul_schedule` says when what is sent.

    A yielded part is valid until the next one is asked for. It is in the dtype that travels.

    Args:
        mine: (sizes[rank], K), this rank's rows, not to be modified before the iterator ends.
        sizes: rows of every rank.
        row_flops: of the products of a row.
    """
    own, width = _on_wire(mine, how), mine.shape[1]
    row_bytes = width * own.element_size()
    if row_bytes == 0 or how.world == 1:
        for rank, rows in enumerate(sizes):
            if rows:
                part = own if rank == how.rank else own.new_empty(rows, 0)
                yield shard_slice(sizes, rank), _off_wire(part, mine.dtype)
        return
    schedule, choice = planned(
        "rows", sizes, how, mine, max(sizes) * row_bytes * (how.world - 1),
        PACKED_ROWS * row_flops * how.world, None, row_bytes=row_bytes, row_cost=row_flops,
    )  # fmt: skip
    tensors, begins = {}, [_starts(split_evenly(n, choice.chunks)) for n in sizes]
    for j, name in enumerate(schedule.holds[how.rank]):
        first, rows = begins[how.rank][j]
        tensors[name] = as_bytes(own[first : first + rows])
    for action in perform(schedule, tensors, mine.device, OneGroup(how.group)):
        rank, j = map(int, action.content[1:].split("."))  # y<rank>.<part>
        first, rows = begins[rank][j]
        part = tensors[action.reads[0]][: rows * row_bytes].view(own.dtype).view(rows, width)
        first += shard_slice(sizes, rank).start
        yield slice(first, first + rows), _off_wire(part, mine.dtype)
    choice.done()


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of every part."""
    return [(shard_slice(sizes, j).start, n) for j, n in enumerate(sizes)]


def gathered_panels(
    mine: Tensor, sizes: Sequence[int], how: How, item_flops: float, fixed_chunks: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (columns, panel) until all columns were there: some columns of the rows of all ranks, (Σ sizes, width).

    A product over the rows of a panel adds them in the order of the ranks, as one process would. A yielded panel is
    valid until the next one is asked for, and in the dtype that travels.

    Args:
        mine: (sizes[rank], columns), this rank's rows, not to be modified before the iterator ends.
        sizes: rows of every rank.
        item_flops: of the products of one element.
        fixed_chunks: the number of panels, where what the caller does with them depends on it.
    """
    columns, total = mine.shape[1], sum(sizes)
    if how.world == 1:
        widths = split_evenly(columns, fixed_chunks or 1)
        for first, width in _starts(widths):
            if width:
                here = slice(first, first + width)
                yield here, _off_wire(_on_wire(mine[:, here], how), mine.dtype)
        return
    wire = how.wire(mine.dtype)
    item = wire.itemsize
    schedule, choice = planned(
        "panels", sizes, how, mine, max(sizes) * columns * item * (how.world - 1),
        PACKED_ROWS * item_flops * total, fixed_chunks, columns=columns, item_bytes=item, item_cost=item_flops,
    )  # fmt: skip
    widths = split_evenly(columns, choice.chunks)
    slots = [
        torch.empty(total * widths[0] * item, dtype=torch.uint8, device=mine.device)
        for _ in widths[:2]
    ]

    def panel(number: int) -> Tensor:
        size = total * widths[number] * item
        return slots[number % 2][:size].view(wire).view(total, widths[number])

    def place(action: Action) -> Tensor:
        owner, number = map(int, action.content[1:].split(":"))  # x<owner>:<panel>
        return as_bytes(panel(number)[shard_slice(sizes, owner)])

    tensors: dict[str, Tensor] = {}
    for action in perform(schedule, tensors, mine.device, OneGroup(how.group), place):
        number = int(action.content.split(":")[1])
        here = shard_slice(widths, number)
        if action.writes:
            panel(number)[shard_slice(sizes, how.rank)] = mine[:, here]
            tensors[action.writes] = place(action)
        elif widths[number]:
            yield here, _off_wire(panel(number), mine.dtype)
    choice.done()


def all_gather_flat(value: Tensor, group: Group) -> Tensor:
    """(W, *shape): a small tensor of the same shape from every rank."""
    world = dist.get_world_size(group)
    if world == 1 or not value.numel():
        return value.expand(world, *value.shape)
    every = value.new_empty(world * value.numel())
    _all_gather(every, value.reshape(-1), group=group)
    return every.view(world, *value.shape)


def ordered_all_reduce(value: Tensor, group: Group) -> Tensor:
    """Sum of a small tensor over ranks, in rank order: every rank gets the same bits."""
    if dist.get_world_size(group) == 1:
        return value
    total, *rest = all_gather_flat(value, group).unbind()
    for part in rest:
        total = total.add_(part)
    return total
