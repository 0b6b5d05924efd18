"""All-gather -> matmul by rows: every rank multiplies the shards of all ranks as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.parallel._sizes import check_split, split_evenly
from trainwright.parallel.schedule import Action, Schedule


def all_gather_matmul_schedule(
    sizes: Sequence[int],
    *,
    chunks: int = 1,
    overlap: bool = True,
    row_bytes: int = 1,
    row_cost: float = 1.0,
) -> Schedule:
    """Every rank multiplies the shards of all ranks: its own first, then those of rank - 1, rank - 2, ... .

    In step k a rank sends its own shard to rank + k and receives that of rank - k, in `chunks` parts of rows. With
    `overlap` two parts are on their way or being multiplied at a time, and the parts of the own shard are spread among
    them. With equal shards, t_c for the product of one and t_x for its message, this takes
    ``t_c + (W - 1) max(t_c, t_x)`` at chunks = 1, the least that messages of whole shards allow; on two ranks with s
    chunks and a message overhead of α ``max(2 t_c, s α + t_x + t_c / s)``.

    Args:
        sizes: rows of every rank's shard.
        chunks: parts of a shard, at least 1.
        overlap: False starts a message only when the products before it are done.
        row_bytes, row_cost: size of a row on its way, and cost of its product.
    """
    check_split("all_gather_matmul_schedule", sizes, chunks)
    world = len(sizes)
    parts = [[n for n in split_evenly(size, chunks) if n] for size in sizes]
    capacity = row_bytes * max((n for p in parts for n in p), default=0)
    plans = [_GatherPlan(me, parts, chunks, row_bytes, row_cost) for me in range(world)]
    return Schedule(
        "all_gather_matmul",
        tuple(tuple(plan.overlapped() if overlap else plan.serial()) for plan in plans),
        tuple({**plan.own, "in0": capacity, "in1": capacity} for plan in plans),
        tuple({name: f"x{me}.{j}" for j, name in enumerate(plans[me].own)} for me in range(world)),
        (frozenset(f"y{r}.{j}" for r in range(world) for j in range(len(parts[r]))),) * world,
    )


class _GatherPlan:
    """One rank of `all_gather_matmul_schedule`: the moves (step, part) in order, and the actions around each."""

    def __init__(
        self, me: int, parts: list[list[int]], chunks: int, row_bytes: int, row_cost: float
    ) -> None:
        self.me, self.parts, self.chunks, world = me, parts, chunks, len(parts)
        self.row_bytes, self.row_cost = row_bytes, row_cost
        mine = parts[me]
        names = ["x"] if len(mine) == 1 else [f"x.{j}" for j in range(len(mine))]
        self.own = {name: rows * row_bytes for name, rows in zip(names, mine, strict=True)}
        self.moves = [
            (step, j)
            for step in range(1, world)
            for j in range(max(len(parts[(me - step) % world]), len(mine)))
        ]

    def _product(self, buffer: str, shard: int, part: int) -> Action:
        """Multiply part `part` of the shard of rank `shard`, which lies in `buffer`."""
        cost = self.parts[shard][part] * self.row_cost
        needs = (f"x{shard}.{part}",)
        return Action(
            "compute", reads=(buffer,), needs=needs, content=f"y{shard}.{part}", cost=cost
        )

    def _own_product(self, j: int) -> Action:
        return self._product(list(self.own)[j], self.me, j)

    def _start(self, index: int) -> list[Action]:
        if index >= len(self.moves):
            return []
        step, j = self.moves[index]
        world, tag = len(self.parts), self._tag(index)
        source, to = (self.me - step) % world, (self.me + step) % world
        started = []
        if j < len(self.parts[source]):
            size, content = self.parts[source][j] * self.row_bytes, f"x{source}.{j}"
            started.append(
                Action("recv", tag, source, writes=f"in{index % 2}", content=content, size=size)
            )
        if j < len(self.own):
            name, size = list(self.own.items())[j]
            content = f"x{self.me}.{j}"
            started.append(Action("send", tag, to, reads=(name,), content=content, size=size))
        return started

    def _tag(self, index: int) -> int:
        step, j = self.moves[index]
        return (step - 1) * self.chunks + j

    def _finish(self, index: int) -> list[Action]:
        step, j = self.moves[index]
        source = (self.me - step) % len(self.parts)
        finished = [Action("wait", self._tag(index))]
        if j < len(self.parts[source]):
            finished.append(self._product(f"in{index % 2}", source, j))
        return finished

    def overlapped(self) -> list[Action]:
        moves, own = len(self.moves), len(self.own)
        actions = [*self._start(0), *self._start(1)]
        placed = 0
        for index in range(moves):
            while placed < own and placed * moves <= index * own:
                actions.append(self._own_product(placed))
                placed += 1
            actions += [*self._finish(index), *self._start(index + 2)]
        return actions + [self._own_product(j) for j in range(placed, own)]

    def serial(self) -> list[Action]:
        actions = [self._own_product(j) for j in range(len(self.own))]
        for index in range(len(self.moves)):
            actions += [*self._start(index), *self._finish(index)]
        return actions
