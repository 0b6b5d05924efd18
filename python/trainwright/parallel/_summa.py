"""SUMMA: the products of a two-dimensional split, panel by panel of the inner dimension.

A panel is a range of K that one column of the mesh holds of A and one row of the mesh holds of B: the cuts of both,
merged. Every rank walks the panels in the same order, so the broadcasts of a row or column of the mesh never cross.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainwright.errors import value_error
from trainwright.ops._library import acc_dtype
from trainwright.ops.gemm import gemm, gemm_add_
from trainwright.parallel._exchange import Group, gather_sizes


class Panel(NamedTuple):
    """A range of K: who holds it, and where it lies in the holder's block of A (columns) and of B (rows)."""

    column: int  # of the mesh: holds the panel of A
    row: int  # of the mesh: holds the panel of B
    in_a: slice
    in_b: slice

    @property
    def width(self) -> int:
        return self.in_a.stop - self.in_a.start


def panels_of(a_widths: list[int], b_heights: list[int]) -> list[Panel]:
    """The panels of K, cut by the columns of A's blocks and by the rows of B's.

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
        a0, b0 = a_starts[column], b_starts[row]
        panels.append(Panel(column, row, slice(begin - a0, end - a0), slice(begin - b0, end - b0)))
    return panels


class Grid:
    """The mesh around this rank, and the panels of one product; built by every rank together."""

    def __init__(self, mesh: DeviceMesh, a: Tensor, b: Tensor) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.i, self.j = coordinate
        self.column_group, self.row_group = mesh.get_group(0), mesh.get_group(1)
        device = a.device
        heights = gather_sizes(a.shape[0], self.row_group, device)
        a_widths = gather_sizes(a.shape[1], self.row_group, device)
        b_heights = gather_sizes(b.shape[0], self.column_group, device)
        widths = gather_sizes(b.shape[1], self.column_group, device)
        fits = [
            len(set(heights)) == 1, len(set(widths)) == 1, sum(a_widths) == sum(b_heights),
            # The other rows of the mesh must cut A alike, the other columns B.
            len(set(gather_sizes(a.shape[1], self.column_group, device))) == 1,
            len(set(gather_sizes(b.shape[0], self.row_group, device))) == 1,
        ]  # fmt: skip
        # Every rank hears of a fault of any, along the rows and then the columns of the mesh.
        good = min(gather_sizes(int(all(fits)), self.row_group, device))
        if not min(gather_sizes(good, self.column_group, device)):
            expected = "equal heights of a along each row of the mesh, equal widths of b along each column, and one K"
            got = (
                f"a {tuple(a.shape)} and b {tuple(b.shape)} on rank ({self.i}, {self.j}), K {sum(a_widths)} and "
                f"{sum(b_heights)}"
            )
            raise value_error("summa_matmul", "a, b", expected, got)
        self.panels = panels_of(a_widths, b_heights)

    def a_panels(self, a: Tensor, overlap: bool) -> Iterator[Tensor]:
        """(M_i, width) of every panel, from the column of the mesh that holds it."""

        def part(p: Panel) -> tuple[bool, Tensor, int]:
            mine = p.column == self.j
            buffer = a[:, p.in_a].contiguous() if mine else a.new_empty(a.shape[0], p.width)
            return mine, buffer, p.column

        return _broadcasts([part for _ in self.panels], self.panels, self.row_group, overlap)

    def b_panels(self, b: Tensor, overlap: bool) -> Iterator[Tensor]:
        """(width, N_j) of every panel, from the row of the mesh that holds it."""

        def part(p: Panel) -> tuple[bool, Tensor, int]:
            mine = p.row == self.i
            buffer = b[p.in_b].contiguous() if mine else b.new_empty(p.width, b.shape[1])
            return mine, buffer, p.row

        return _broadcasts([part for _ in self.panels], self.panels, self.column_group, overlap)


def _broadcasts(
    parts: list[Any], panels: list[Panel], group: Group, overlap: bool
) -> Iterator[Tensor]:
    """Each panel in turn; with `overlap` the next is on its way while the caller works on this one."""

    def start(index: int) -> tuple[Tensor, dist.Work | None]:
        _, buffer, source = parts[index](panels[index])
        if not buffer.numel() or dist.get_world_size(group) == 1:
            return buffer, None
        source = source if group is None else dist.get_global_rank(group, source)
        return buffer, dist.broadcast(buffer, source, group=group, async_op=True)

    coming = start(0) if overlap and panels else None
    for index in range(len(panels)):
        buffer, work = coming if coming is not None else start(index)
        if work is not None:
            work.wait()
        coming = start(index + 1) if overlap and index + 1 < len(panels) else None
        yield buffer


def _sum_at(part: Tensor, owner: int, group: Group) -> Tensor | None:
    """Σ over the ranks of `group` of `part`, in rank order, on the rank `owner` of it; None elsewhere."""
    world, me = dist.get_world_size(group), dist.get_rank(group)
    if world == 1 or not part.numel():
        return part if me == owner else None
    parts = [torch.empty_like(part) for _ in range(world)] if me == owner else None
    destination = owner if group is None else dist.get_global_rank(group, owner)
    dist.gather(part, parts, destination, group=group)
    if parts is None:
        return None
    total, *rest = parts
    for other in rest:
        total.add_(other)
    return total


class Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grid: Grid, overlap: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.grid, ctx.overlap = grid, overlap
        total = a.new_zeros((a.shape[0], b.shape[1]), dtype=acc_dtype(a.dtype))
        for left, right in zip(grid.a_panels(a, overlap), grid.b_panels(b, overlap), strict=True):
            gemm_add_(total, left, right)
        return total.to(a.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dc: Tensor) -> Any:
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad[:2]
        grid, acc = ctx.grid, acc_dtype(dc.dtype)
        dc = dc.contiguous()
        da = torch.empty_like(a, memory_format=torch.contiguous_format) if need_a else None
        db = torch.empty_like(b, memory_format=torch.contiguous_format) if need_b else None
        if da is not None:
            for panel, right in zip(grid.panels, grid.b_panels(b, ctx.overlap), strict=True):
                part = gemm(dc, right.t(), None, None, 0, acc, False)[0]
                total = _sum_at(part, panel.column, grid.row_group)
                if total is not None:
                    da[:, panel.in_a] = total.to(da.dtype)
        if db is not None:
            for panel, left in zip(grid.panels, grid.a_panels(a, ctx.overlap), strict=True):
                part = gemm(left.t(), dc, None, None, 0, acc, False)[0]
                total = _sum_at(part, panel.row, grid.column_group)
                if total is not None:
                    db[panel.in_b] = total.to(db.dtype)
        return da, db, None, None
