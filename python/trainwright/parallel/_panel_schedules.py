"""Products by panels of the inner or outer dimension: every panel is collected from the ranks that hold its pieces, and
multiplied while the next one is on its way. The panels are walked in one order everywhere, so a sum over them does not
depend on the rank.

Contents: ``<piece><owner>:i`` a piece of panel i, ``y:i`` its product, ``p<r>:i`` a partial product of rank r, ``s:i``
the sum of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from trainwright.parallel._sizes import split_evenly
from trainwright.parallel.schedule import Action, Schedule


class Piece(NamedTuple):
    """A part of a panel: rank `owner` packs it and sends it to `readers`."""

    name: str
    owner: int
    readers: tuple[int, ...]
    size: int


class Sum(NamedTuple):
    """The products of `parts`, which `owner` (one of them) adds in that order."""

    owner: int
    parts: tuple[int, ...]
    size: int


class Panel(NamedTuple):
    pieces: tuple[Piece, ...]
    costs: tuple[float, ...]  # of the product, by rank
    sums: tuple[Sum, ...] = ()


def panel_schedule(
    name: str, panels: Sequence[Panel], world: int, *, overlap: bool = True
) -> Schedule:
    """Collect panel i+1 under the product of panel i; with sums, panel i is added under the product of panel i+1."""
    plans = [_PanelPlan(me, panels, world, overlap) for me in range(world)]
    actions = tuple(tuple(plan.actions()) for plan in plans)
    buffers = tuple(plan.buffers for plan in plans)
    return Schedule(name, actions, buffers, ({},) * world, tuple(p.results for p in plans))


def all_gather_panels_schedule(
    sizes: Sequence[int], *, columns: int = 1, chunks: int = 1, overlap: bool = True, item_bytes: int = 1,
    item_cost: float = 1.0,
) -> Schedule:  # fmt: skip
    """Every rank collects the matrix whose rows the ranks hold, some of its columns at a time, and multiplies those.

    Args:
        sizes: rows of every rank's shard.
        columns: of the matrix; chunks: panels that they are cut into.
        overlap: False starts a panel only when the product before it is done.
        item_bytes, item_cost: of one element, on its way and for its product.
    """
    world, total = len(sizes), sum(sizes)
    everyone = tuple(range(world))
    panels = []
    for width in split_evenly(columns, chunks):
        pieces = tuple(
            Piece("x", r, everyone, rows * width * item_bytes) for r, rows in enumerate(sizes)
        )
        panels.append(Panel(pieces, (total * width * item_cost,) * world))
    return panel_schedule("all_gather_panels", panels, world, overlap=overlap)


def summa_schedule(
    mesh: tuple[int, int], panels: Sequence[tuple[int, int, int]], heights: Sequence[int],
    widths: Sequence[int], *, product: str = "ab", overlap: bool = True, item_bytes: int = 1, sum_bytes: int = 1,
    item_cost: float = 1.0,
) -> Schedule:  # fmt: skip
    """The products of SUMMA on rows x cols ranks, rank (i, j) being number i · cols + j.

    "ab": C_ij = Σ A_ik · B_kj, A sent along rows of the mesh and B along columns. "da": dA_ik = Σ_j dC_ij · B_kjᵀ, B
    sent along columns and products added along rows. "db": dB_kj = Σ_i A_ikᵀ · dC_ij, the other way around.

    Args:
        mesh: (rows, cols).
        panels: (column that holds it of A, row that holds it of B, width) of every panel of K.
        heights: M_i by row of the mesh; widths: N_j by column.
        product: "ab", "da" or "db".
        overlap: False starts a panel only when the product before it is done.
        item_bytes, sum_bytes, item_cost: of an element of a panel, of a partial product, and of a multiplication.
    """
    rows, cols = mesh
    world = rows * cols

    def along(i: int | None, j: int | None) -> tuple[int, ...]:
        """Ranks of row i, or of column j."""
        places = [(i, c) for c in range(cols)] if i is not None else [(r, j) for r in range(rows)]
        return tuple(r * cols + c for r, c in places)  # type: ignore[operator]

    made = []
    for column, row, width in panels:
        of_a = [
            Piece("a", i * cols + column, along(i, None), heights[i] * width * item_bytes)
            for i in range(rows)
        ]
        of_b = [
            Piece("b", row * cols + j, along(None, j), width * widths[j] * item_bytes)
            for j in range(cols)
        ]
        to_a = [
            Sum(i * cols + column, along(i, None), heights[i] * width * sum_bytes)
            for i in range(rows)
        ]
        to_b = [
            Sum(row * cols + j, along(None, j), width * widths[j] * sum_bytes) for j in range(cols)
        ]
        costs = tuple(item_cost * heights[i] * width * widths[j] for i in range(rows) for j in range(cols))  # fmt: skip
        pieces, sums = {"ab": (of_a + of_b, []), "da": (of_b, to_a), "db": (of_a, to_b)}[product]
        made.append(Panel(tuple(pieces), costs, tuple(sums)))
    return panel_schedule(f"summa_{product}", made, world, overlap=overlap)


class _PanelPlan:
    """One rank of `panel_schedule`."""

    def __init__(self, me: int, panels: Sequence[Panel], world: int, overlap: bool) -> None:
        self.me, self.panels, self.world, self.overlap = me, panels, world, overlap
        self.kinds = 2 * max((len(p.pieces) + len(p.sums) for p in panels), default=1)
        self.buffers: dict[str, int] = {}
        self.list: list[Action] = []
        self.leaving: dict[int, list[int]] = {}  # panel -> tags of its pieces that this rank sends
        self.sums_leaving: dict[int, int] = {}  # panel -> tag of this rank's product
        sums = any(p.sums for p in panels)
        owns = [i for i, p in enumerate(panels) for s in p.sums if s.owner == me and s.size]
        self.results = frozenset(
            [f"s:{i}" for i in owns] if sums else [f"y:{i}" for i in range(len(panels))]
        )

    def actions(self) -> list[Action]:
        count = len(self.panels)
        if self.overlap and count:
            self._start(0)
        for i in range(count):
            if not self.overlap:
                self._start(i)
            elif i + 1 < count:
                self._start(i + 1)
            self._multiply(i)
            if not self.overlap:
                self._add(i)
            elif i:
                self._add(i - 1)
        if self.overlap and count:
            self._add(count - 1)
        for i in list(self.leaving):
            self._finish_sends(i)
        for tag in self.sums_leaving.values():
            self._wait(tag)
        return self.list

    def _buffer(self, name: str, size: int) -> str:
        self.buffers[name] = max(size, self.buffers.get(name, 0))
        return name

    def _wait(self, tag: int) -> None:
        self.list.append(Action("wait", tag))

    def _tag(self, panel: int, kind: int, sender: int) -> int:
        return (panel * self.kinds + kind) * self.world + sender

    def _slot(self, piece: Piece, panel: int) -> str:
        return f"{piece.name}{piece.owner}.{panel % 2}"

    def _mine(self, panel: int) -> list[tuple[int, Piece]]:
        """What this rank needs of a panel, with its number in it."""
        pieces = enumerate(self.panels[panel].pieces)
        return [(k, p) for k, p in pieces if p.size and self.me in (p.owner, *p.readers)]

    def _finish_sends(self, panel: int) -> None:
        for tag in self.leaving.pop(panel, []):
            self._wait(tag)

    def _start(self, panel: int) -> None:
        """Pack and send this rank's pieces of a panel, and start to receive the others'."""
        self._finish_sends(panel - 2)
        mine = self._mine(panel)
        for _, p in mine:
            if p.owner == self.me:
                into, content = self._buffer(self._slot(p, panel), p.size), f"{p.name}{p.owner}:{panel}"  # fmt: skip
                self.list.append(Action("compute", content=content, writes=into, size=p.size))
        # Rank + k sends to this one as it sends to rank - k: every pair meets at the same place.
        for step in range(1, self.world):
            source, to = (self.me - step) % self.world, (self.me + step) % self.world
            for k, p in mine:
                content, slot = f"{p.name}{p.owner}:{panel}", self._slot(p, panel)
                if p.owner == source:
                    tag, into = self._tag(panel, k, source), self._buffer(slot, p.size)
                    self.list.append(
                        Action("recv", tag, source, writes=into, content=content, size=p.size)
                    )
                elif p.owner == self.me and to in p.readers:
                    tag = self._tag(panel, k, self.me)
                    self.list.append(
                        Action("send", tag, to, reads=(slot,), content=content, size=p.size)
                    )
                    if tag not in self.leaving.setdefault(panel, []):
                        self.leaving[panel].append(tag)

    def _multiply(self, panel: int) -> None:
        mine = self._mine(panel)
        for k, p in mine:
            if p.owner != self.me:
                self._wait(self._tag(panel, k, p.owner))
        reads = tuple(self._slot(p, panel) for _, p in mine)
        needs = tuple(f"{p.name}{p.owner}:{panel}" for _, p in mine)
        cost = self.panels[panel].costs[self.me]
        product = Action("compute", reads=reads, needs=needs, content=f"y:{panel}", cost=cost)
        if not self.panels[panel].sums:
            self.list.append(product)
            return
        s = next((s for s in self.panels[panel].sums if self.me in s.parts and s.size), None)
        if s is None:
            return
        content = f"p{self.me}:{panel}"
        into = f"part{self.me}.{panel % 2}" if s.owner == self.me else f"out{panel % 2}"
        if panel - 2 in self.sums_leaving:
            self._wait(self.sums_leaving.pop(panel - 2))
        self._buffer(into, s.size)
        self.list.append(replace(product, writes=into, content=content, size=s.size))
        self._exchange(panel, s, content, into)

    def _exchange(self, panel: int, s: Sum, content: str, out: str) -> None:
        kind = len(self.panels[panel].pieces)
        if s.owner != self.me:
            tag = self._tag(panel, kind, self.me)
            self.list.append(
                Action("send", tag, s.owner, reads=(out,), content=content, size=s.size)
            )
            self.sums_leaving[panel] = tag
            return
        for r in s.parts:
            if r != self.me:
                into = self._buffer(f"part{r}.{panel % 2}", s.size)
                tag = self._tag(panel, kind, r)
                self.list.append(
                    Action("recv", tag, r, writes=into, content=f"p{r}:{panel}", size=s.size)
                )

    def _add(self, panel: int) -> None:
        s = next((s for s in self.panels[panel].sums if s.owner == self.me and s.size), None)
        if s is None:
            return
        for r in s.parts:
            if r != self.me:
                self._wait(self._tag(panel, len(self.panels[panel].pieces), r))
        reads = tuple(f"part{r}.{panel % 2}" for r in s.parts)
        needs = tuple(f"p{r}:{panel}" for r in s.parts)
        self.list.append(Action("compute", reads=reads, needs=needs, content=f"s:{panel}"))
