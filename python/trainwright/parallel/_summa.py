"""SUMMA: the products of a two-dimensional split, panel by panel of the inner dimension.

A panel is a range of K that one column of the mesh holds of A and one row of the mesh holds of B: the cuts of both,
merged, and wide ones cut again. Their number depends on the shapes alone, so the sums over them do too.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainwright.errors import value_error
from trainwright.ops._library import acc_dtype
from trainwright.ops.gemm import gemm, gemm_add_
from trainwright.parallel._exchange import How, gather_shapes
from trainwright.parallel._panel_schedules import summa_schedule
from trainwright.parallel._schedule_runtime import as_bytes, perform
from trainwright.parallel._sizes import split_evenly
from trainwright.parallel.cost_model import Choice, CostModel, agree, calibrate, choose
from trainwright.parallel.schedule import Action, Schedule

PARTS, PART_COLUMNS = 4, 64  # most parts that a panel is cut into, least columns of each

_summa_schedule = functools.lru_cache(maxsize=256)(summa_schedule)
_models: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.dtype, CostModel]]
_models = weakref.WeakKeyDictionary()


class Panel(NamedTuple):
    """A range of K: who holds it, and where it lies in the holder's block of A (columns) and of B (rows)."""

    column: int  # of the mesh: holds the panel of A
    row: int  # of the mesh: holds the panel of B
    in_a: slice
    in_b: slice

    @property
    def width(self) -> int:
        return self.in_a.stop - self.in_a.start


def panels_of(a_widths: Sequence[int], b_heights: Sequence[int]) -> list[Panel]:
    """The panels of K, cut by the columns of A's blocks and by the rows of B's, and each evenly into PARTS.

    >>> [(p.column, p.row, p.width) for p in panels_of([3, 2], [5])]
    [(0, 0, 3), (1, 0, 2)]
    """
    a_starts = list(itertools.accumulate(a_widths, initial=0))
    b_starts = list(itertools.accumulate(b_heights, initial=0))
    cuts = sorted(set(a_starts) | set(b_starts))
    panels = []
    for begin, end in itertools.pairwise(cuts):
        column = max(j for j, s in enumerate(a_starts[:-1]) if s <= begin and a_widths[j])
        row = max(i for i, s in enumerate(b_starts[:-1]) if s <= begin and b_heights[i])
        parts = max(1, min(PARTS, (end - begin) // PART_COLUMNS))
        edges = itertools.accumulate(split_evenly(end - begin, parts), initial=begin)
        for first, last in itertools.pairwise(edges):
            a0, b0 = a_starts[column], b_starts[row]
            in_a, in_b = slice(first - a0, last - a0), slice(first - b0, last - b0)
            panels.append(Panel(column, row, in_a, in_b))
    return panels


class Grid:
    """The mesh around this rank, and the panels of one product; built by every rank together."""

    def __init__(self, mesh: DeviceMesh, a: Tensor, b: Tensor, how: How) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.i, self.j = coordinate
        self.mesh, self.how = mesh, how
        self.column_group, self.row_group = mesh.get_group(0), mesh.get_group(1)
        self.rank, self.size = self.i * mesh.size(1) + self.j, (mesh.size(0), mesh.size(1))
        shape = (*a.shape, *b.shape)
        rows = gather_shapes(shape, self.row_group, a.device)
        columns = gather_shapes(shape, self.column_group, a.device)
        self.heights, a_widths, b_heights, self.widths = columns[0], rows[1], columns[2], rows[3]
        # Along a row of the mesh the heights of A and the cuts of B agree, along a column the widths of B and the cuts
        # of A.
        same = [rows[0], rows[2], columns[3], columns[1]]
        fits = all(len(set(s)) == 1 for s in same) and sum(a_widths) == sum(b_heights)
        # Every rank hears of a fault of any, along the rows and then the columns of the mesh.
        good = min(gather_shapes([int(fits)], self.row_group, a.device)[0])
        if not min(gather_shapes([good], self.column_group, a.device)[0]):
            expected = "equal heights of a along each row of the mesh, equal widths of b along each column, and one K"
            got = (
                f"a {tuple(a.shape)} and b {tuple(b.shape)} on rank ({self.i}, {self.j}), K {sum(a_widths)} and "
                f"{sum(b_heights)}"
            )
            raise value_error("summa_matmul", "a, b", expected, got)
        self.panels = panels_of(a_widths, b_heights)

    def groups(self) -> list[dist.ProcessGroup]:
        return [self.row_group, self.column_group]

    def route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        i, j = divmod(peer, self.size[1])
        group = self.row_group if i == self.i else self.column_group
        return group, int(self.mesh.mesh[i, j])

    def model(self, dtype: torch.dtype, device: torch.device) -> CostModel:
        """The worst of all rows and columns of the mesh, known to every rank."""
        known = _models.setdefault(self.row_group, {})
        if dtype not in known:
            group = self.row_group if self.size[1] > 1 else self.column_group
            model = agree(calibrate(group, dtype=dtype, device=device), self.row_group, device)
            known[dtype] = agree(model, self.column_group, device)
        return known[dtype]

    def schedule(self, product: str, like: Tensor) -> tuple[Schedule, Choice]:
        wire, acc = self.how.wire(like.dtype), acc_dtype(like.dtype)
        panels = tuple((p.column, p.row, p.width) for p in self.panels)
        heights, widths = tuple(self.heights), tuple(self.widths)

        def build(_: int, overlap: bool) -> Schedule:
            return _summa_schedule(
                self.size, panels, heights, widths, product=product, overlap=overlap, item_bytes=wire.itemsize,
                sum_bytes=self.how.wire(acc).itemsize, item_cost=2.0,
            )  # fmt: skip

        if not self.how.overlap:
            return build(1, False), Choice(None, False, 1, False)
        rows, cols = self.size
        K = sum(p.width for p in self.panels)
        sent = K * max(max(heights) * (cols - 1), max(widths) * (rows - 1)) * wire.itemsize
        name = str(like.dtype).removeprefix("torch.")
        call = (
            f"summa_matmul {product} {[*heights]}x{K}x{[*widths]} {name} over {rows}x{cols} ranks"
        )
        model = functools.partial(self.model, like.dtype, like.device)
        peers = rows + cols - 2
        choice = choose(call, sent, peers, like.device, model, build, candidates=(1,))
        return build(1, choice.overlap), choice


def _walk(
    grid: Grid, product: str, a: Tensor, b: Tensor, like: Tensor
) -> Iterator[tuple[Action, Panel, dict[str, Tensor], dict[str, Tensor]]]:
    """(action, panel, pieces of it by name "a" and "b", buffers) of every product and sum, in order."""
    how = grid.how
    wire = how.wire(like.dtype)
    schedule, choice = grid.schedule(product, like)
    tensors: dict[str, Tensor] = {}
    for action in perform(schedule, tensors, like.device, grid):
        panel = grid.panels[int(action.content.split(":")[1])]
        if action.content[0] in "ab":
            part = a[:, panel.in_a] if action.content[0] == "a" else b[panel.in_b]
            tensors[action.writes] = as_bytes(part.to(wire).contiguous())
            continue
        shapes = {"a": (a.shape[0], panel.width), "b": (panel.width, b.shape[1])}
        pieces = {}
        for name, shape in shapes.items():
            held = next((r for r in action.reads if r[0] == name), None)
            piece = like.new_empty(0, dtype=wire)
            if held is not None:
                piece = tensors[held][: math.prod(shape) * wire.itemsize].view(wire)
            if piece.numel() == math.prod(shape):
                piece = piece.view(shape)
                pieces[name] = piece.to(like.dtype) if like.dtype == torch.float64 else piece
        yield action, panel, pieces, tensors
    choice.done()


def _gradient(
    grid: Grid, product: str, a: Tensor, b: Tensor, dc: Tensor
) -> Tensor:  # product: "da" or "db"
    of_a = product == "da"
    total = torch.zeros_like(a if of_a else b, memory_format=torch.contiguous_format)
    acc = acc_dtype(dc.dtype)
    wire = grid.how.wire(acc)
    for action, panel, pieces, tensors in _walk(grid, product, a, b, dc):
        shape = (a.shape[0], panel.width) if of_a else (panel.width, b.shape[1])
        if action.content[0] == "p":
            left, right = (dc, pieces["b"].t()) if of_a and "b" in pieces else (None, None)
            if not of_a and "a" in pieces:
                left, right = pieces["a"].t(), dc
            if left is None or right is None:
                part = dc.new_zeros(shape, dtype=acc)
            else:
                part = gemm(left, right, None, None, 0, acc, False)[0]
            tensors[action.writes] = as_bytes(part.to(wire).contiguous())
            continue
        count = math.prod(shape) * wire.itemsize
        first, *rest = (tensors[name][:count].view(wire).view(shape) for name in action.reads)
        sums = first.to(acc, copy=True)
        for part in rest:
            sums.add_(part)
        if of_a:
            total[:, panel.in_a] = sums.to(total.dtype)
        else:
            total[panel.in_b] = sums.to(total.dtype)
    return total


class Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.grid = grid
        total = a.new_zeros((a.shape[0], b.shape[1]), dtype=acc_dtype(a.dtype))
        for _, _, pieces, _ in _walk(grid, "ab", a, b, a):
            if len(pieces) == 2:
                gemm_add_(total, pieces["a"], pieces["b"])
        return total.to(a.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dc: Tensor) -> Any:
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad[:2]
        dc = dc.contiguous()
        da = _gradient(ctx.grid, "da", a, b, dc) if need_a else None
        db = _gradient(ctx.grid, "db", a, b, dc) if need_b else None
        return da, db, None
