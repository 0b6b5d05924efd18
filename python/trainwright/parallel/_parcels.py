"""Python objects between the first rank and the others, in chunks: for state dicts, where size matters, not time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.parallel._driver import Driver

CHUNK_BYTES = 16 << 20


def _packed(value: Any) -> Tensor:
    data = io.BytesIO()
    torch.save(value, data)
    return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=False)


def collect(driver: Driver, value: Any) -> list[Any]:
    """The value of each rank, on the first rank; nothing elsewhere. Collective."""
    world, rank = driver.wire.world, driver.wire.rank
    if world == 1:
        return [value]
    mine = _packed(value) if rank else torch.empty(0, dtype=torch.uint8)
    sizes = [int(n) for n in driver.of_all_ranks(torch.tensor([mine.numel()])).flatten()]
    nothing = mine[:0]
    every = [torch.empty(n if rank == 0 else 0, dtype=torch.uint8) for n in sizes]
    for begin in range(0, max(sizes), CHUNK_BYTES):
        end = begin + CHUNK_BYTES
        sends = [mine[begin:end], *[nothing] * (world - 1)]
        _exchange(driver, [data[begin:end] for data in every], sends, max(sizes))
    return [value, *map(_unpacked, every[1:])] if rank == 0 else []


def hand_out(driver: Driver, values: Sequence[Any]) -> Any:
    """`values[r]` of the first rank, on rank r. Collective."""
    world, rank = driver.wire.world, driver.wire.rank
    if world == 1:
        return values[0]
    empty = torch.empty(0, dtype=torch.uint8)
    every = [empty, *(_packed(value) for value in values[1:])] if rank == 0 else [empty] * world
    sizes = driver.of_all_ranks(torch.tensor([data.numel() for data in every]))[0].tolist()
    mine = torch.empty(sizes[rank], dtype=torch.uint8)
    for begin in range(0, max(sizes), CHUNK_BYTES):
        end = begin + CHUNK_BYTES
        outs = [mine[begin:end], *[empty] * (world - 1)]
        _exchange(driver, outs, [data[begin:end] for data in every], max(sizes))
    return values[0] if rank == 0 else _unpacked(mine)


def _exchange(driver: Driver, outs: list[Tensor], sends: list[Tensor], total: int) -> None:
    driver.announce("state dict", None, "exchange")
    assert driver.wire.control is not None
    driver.wait_for(driver.wire.control.exchange(outs, sends, total))
