"""The options of the parameter groups as the kernels read them: a table of numbers on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph: its kernels do not run now, but whenever the graph does."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class HyperTable:
    """Made anew only when a number has changed. Tensors on the device are read there, in every step."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] | None = (
            None  # what it was made from, if that has no tensors
        )
        self._numbers: list[list[float]] = []
        self._table: Tensor | None = None
        self._captured: list[Tensor] = []  # a graph reads them for as long as there is this object

    def on(self, device: torch.device, rows: list[tuple[Any, ...]]) -> Tensor:
        """(groups, columns) fp64; a tuple or list among a row's options gives as many columns."""
        kept = self._table if self._table is not None and self._table.device == device else None
        capturing = is_capturing()
        # A comparison with a tensor on the device would wait for it.
        plain = device.type == "cpu" or not _any_tensor(rows)
        if kept is not None and plain and not capturing and self._rows == rows:
            return kept
        numbers: list[list[float]] = []
        tensors: list[tuple[int, int, Tensor]] = []
        for i, row in enumerate(rows):
            cells: list[Any] = []
            for value in row:
                cells.extend(value) if isinstance(value, tuple | list) else cells.append(value)
            there = [isinstance(c, Tensor) and c.device.type != "cpu" for c in cells]
            tensors += [(i, j, c) for j, c in enumerate(cells) if there[j]]
            numbers.append([0.0 if t else float(c) for c, t in zip(cells, there)])
        if kept is not None and numbers == self._numbers:
            table = kept
            self._captured += [kept] * capturing
        elif (
            capturing
        ):  # a copy would read memory that is not there later: kernels write the numbers
            flat = itertools.chain.from_iterable(numbers)
            cells = [torch.full((), x, dtype=torch.float64, device=device) for x in flat]
            table = torch.stack(cells).view(len(numbers), -1)
        else:
            table = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
            self._table, self._numbers = table, numbers
            self._rows = None if _any_tensor(rows) else rows
        if tensors:
            table = table.clone()
            for i, j, value in tensors:
                table[i, j].copy_(value.reshape(()))
        return table


def _any_tensor(rows: Iterable[Any]) -> bool:
    cells = list(itertools.chain.from_iterable(rows))
    types = set(map(type, cells))
    return any(issubclass(t, Tensor) for t in types) or (
        bool(types & {tuple, list}) and _any_tensor(c for c in cells if isinstance(c, tuple | list))
    )
