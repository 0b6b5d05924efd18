"""Sums over ranks of partial products, as the schedules of matmul -> reduce-scatter and matmul -> all-reduce have
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainwright.ops._library import acc_dtype
from trainwright.parallel._exchange import PACKED_ROWS, How, planned
from trainwright.parallel._schedule_runtime import OneGroup, as_bytes, perform
from trainwright.parallel._sizes import shard_slice, split_evenly
from trainwright.parallel.cost_model import Choice
from trainwright.parallel.schedule import Action, Schedule


class _Reduction:
    """Sums over ranks of products, computed part by part as `schedule` says. `finish` ends it; what is done between
    construction and `finish` runs under the last messages.

    `product(target, chunk)` gives this rank's part of chunk `chunk` of what rank `target` keeps, in the accumulation
    dtype. Products that travel are rounded to `wire`, and the one that stays too: the sum depends on no rank's place.
    """

    def __init__(
        self, schedule: Schedule, choice: Choice, product: Callable[[int, int], Tensor], how: How,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.product, self.choice, self.how, self.dtype = product, choice, how, dtype
        self.acc = acc_dtype(dtype)
        self.wire = how.wire(self.acc)
        self.tensors: dict[str, Tensor] = {}
        self.sums: dict[tuple[int, int], Tensor] = {}  # (target, chunk) -> flat sum
        self.actions = perform(schedule, self.tensors, device, OneGroup(how.group), pauses=True)
        left = sum(a.kind == "compute" and a.content[0] == "p" for a in schedule.ranks[how.rank])
        for action in self.actions:
            if action.kind == "wait":
                # What waits after the last product may wait for a rank that has gone on to another collective; plain
                # has nothing to go on with.
                if left == 0 and choice.overlap:
                    break
                continue
            self._do(action)
            left -= action.content[0] == "p"

    def _do(self, action: Action) -> None:
        kind, place = action.content[0], action.content.split(">")[-1].lstrip("y")
        target, chunk = map(int, place.split("."))
        if kind == "p":
            part = self.product(target, chunk).reshape(-1)
            if self.how.reduce == "ordered":
                part = part.to(self.wire)
            self.tensors[action.writes] = as_bytes(part)
            return
        total = self._ring_sum(action) if self.how.reduce == "ring" else self._ordered_sum(action)
        if kind == "q":
            self.tensors[action.writes] = as_bytes(total.to(self.wire))
            return
        self.sums[target, chunk] = total.to(self.dtype)
        if action.writes:
            self.tensors[action.writes] = as_bytes(self.sums[target, chunk])

    def _ring_sum(self, action: Action) -> Tensor:
        total = self.tensors[action.reads[0]].view(self.acc)
        for name in action.reads[1:]:
            total.add_(self.tensors[name][: total.numel() * self.wire.itemsize].view(self.wire))
        return total

    def _ordered_sum(self, action: Action) -> Tensor:
        """The buffers are filled again: nothing that is kept may lie in them."""
        size = self.tensors[action.reads[self.how.rank]].numel()  # of this rank's own product
        first, *rest = (self.tensors[name][:size].view(self.wire) for name in action.reads)
        total = first.to(self.acc, copy=True)
        for part in rest:
            total.add_(part)
        return total

    def finish(self) -> dict[tuple[int, int], Tensor]:
        for action in self.actions:
            if action.kind == "compute":
                self._do(action)
        self.choice.done()
        return self.sums


class ScatteredSum:
    """This rank's rows of a sum over ranks: matmul -> reduce-scatter. `matmul_reduce_scatter_schedule` says in which
    order the products come.

    `partial(target, columns)` computes this rank's contribution to the rows that rank `target` keeps, in some columns,
    in the accumulation dtype of `dtype`. `finish` returns (sizes[rank], columns) in `dtype`.
    """

    def __init__(
        self, partial: Callable[[int, slice], Tensor], sizes: Sequence[int], columns: int, like: Tensor, how: How,
        dtype: torch.dtype, item_flops: float,
    ) -> None:  # fmt: skip
        self.shape = (sizes[how.rank], columns)
        item = how.wire(acc_dtype(dtype)).itemsize
        schedule, choice = planned(
            "scatter", sizes, how, like, max(sizes) * columns * item * (how.world - 1),
            PACKED_ROWS * item_flops * sum(sizes), None, columns=columns, reduce=how.reduce, item_bytes=item,
            item_cost=item_flops,
        )  # fmt: skip
        self.widths = split_evenly(columns, choice.chunks)

        def product(target: int, chunk: int) -> Tensor:
            return partial(target, shard_slice(self.widths, chunk))

        self.empty = like.new_empty(self.shape, dtype=dtype)
        self.sum = _Reduction(schedule, choice, product, how, dtype, like.device)

    def finish(self) -> Tensor:
        sums = self.sum.finish()
        if len(sums) == 1 and sum(map(bool, self.widths)) == 1:
            return next(iter(sums.values())).view(self.shape)
        for (_, chunk), values in sums.items():
            here = shard_slice(self.widths, chunk)
            self.empty[:, here] = values.view(self.shape[0], -1)
        return self.empty


class AllReducedSum:
    """A sum over ranks that every rank needs whole: matmul -> all-reduce. The columns of the result are divided among
    the ranks, each adds its own and sends them on (`matmul_all_reduce_schedule`).

    `partial(columns)` computes this rank's contribution to some columns of the (rows, columns) result, in the
    accumulation dtype of `dtype`. `finish` returns the result in `dtype`, with the same bits on every rank.
    """

    def __init__(
        self, partial: Callable[[slice], Tensor], rows: int, columns: int, like: Tensor, how: How,
        dtype: torch.dtype, item_flops: float,
    ) -> None:  # fmt: skip
        self.rows, self.sizes, self.dtype = rows, split_evenly(columns, how.world), dtype
        item, result = how.wire(acc_dtype(dtype)).itemsize, dtype.itemsize
        schedule, choice = planned(
            "all", self.sizes, how, like, rows * self.sizes[0] * (item + result) * (how.world - 1),
            PACKED_ROWS * item_flops * columns, None, rows=rows, reduce=how.reduce, item_bytes=item,
            result_bytes=result, item_cost=item_flops,
        )  # fmt: skip
        self.chunks, self.how = choice.chunks, how
        self.whole = like.new_empty((rows, columns), dtype=dtype)

        def product(target: int, chunk: int) -> Tensor:
            return partial(self._columns(target, chunk))

        self.sum = _Reduction(schedule, choice, product, how, dtype, like.device)

    def _columns(self, target: int, chunk: int) -> slice:
        first = shard_slice(self.sizes, target).start
        part = shard_slice(split_evenly(self.sizes[target], self.chunks), chunk)
        return slice(first + part.start, first + part.stop)

    def finish(self) -> Tensor:
        sums = self.sum.finish()
        tensors = self.sum.tensors
        for target, size in enumerate(self.sizes):
            for chunk, width in enumerate(split_evenly(size, self.chunks)):
                if not (width and self.rows):
                    continue
                values = sums.get((target, chunk))
                if values is None:
                    count = self.rows * width
                    values = tensors[f"res{target}.{chunk}"][: count * self.dtype.itemsize]
                    values = values.view(self.dtype)
                if width == self.whole.shape[1]:
                    return values.view(self.whole.shape)
                self.whole[:, self._columns(target, chunk)] = values.view(self.rows, width)
        return self.whole
