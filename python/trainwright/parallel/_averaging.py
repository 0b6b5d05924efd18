"""How a bucket is averaged: a generator of collectives, with the work of this rank between them.

    pack gradients into `flat`   ->  all-to-all: rank j gets part j of every rank's bucket
    sum the W parts in rank order -> all-gather of the sums
    unpack into the gradients

A bucket that is one contiguous gradient is exchanged where it lies: nothing is packed or unpacked. Where no order is
asked for and nothing has 16 bits, it is one all-reduce.

Over the int8 wire the parts, and then the sums, travel as codes (see `ops.int8_wire`); what their rounding loses is
kept by `_feedback` and added the next time. Then the averages are the same codes on all ranks, so they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.ops import int8_wire
from trainwright.parallel._job import Job, Pool, Round, run_op


class Collective(NamedTuple):
    operation: str
    sent: Tensor
    start: Callable[[Any], Any]  # given a channel of the wire, issues it there


class Averaging:
    """`steps` averages a bucket. The caller issues each collective that it yields, and resumes it once that is done."""

    def __init__(
        self,
        world: int,
        rank: int,
        device: torch.device,
        *,
        wire_dtype: torch.dtype | None,
        ordered: bool,
    ) -> None:
        self._world, self._rank = world, rank
        self._wire_dtype, self._ordered = wire_dtype, ordered
        self._pool = Pool(device)

    def _dtypes(self, own: torch.dtype, r: Round) -> tuple[torch.dtype, torch.dtype]:
        """Of the gradients and of the averages on the wire."""
        if self._wire_dtype is not None and own in (torch.float32, torch.float64):
            return self._wire_dtype, self._wire_dtype
        if own in (torch.bfloat16, torch.float16) and not r.raw:
            return torch.float32, own
        return own, own

    def steps(self, job: Job, r: Round) -> Iterator[Collective]:
        if job.cuts is not None:
            own_part = self._own_part if job.errors is None else self._int8_own_part
            yield from own_part(job, r, job.cuts)
            return
        bucket = job.bucket
        own = getattr(torch, bucket.dtype)
        send_dtype, back = self._dtypes(own, r)
        n = bucket.numel + bucket.padding
        if job.errors is not None and n and self._world > 1:
            yield from self._int8_sum(job, r, job.errors)
            return
        flat, place = job.sums, None
        if flat is None:
            place = job.in_place(send_dtype)
            flat = self._pool.take(n, send_dtype) if place is None else place
            job.pack(flat, r.scale, nothing=not r.weight)
        if self._world == 1:
            job.unpack(flat, r.inverse)
        elif n == 0:
            pass
        elif self._ordered or 2 in (send_dtype.itemsize, back.itemsize):
            yield from self._ordered_sum(job, r, flat, send_dtype, back)
        else:
            yield Collective("all-reduce", flat, lambda c: c.all_reduce(flat))
            job.unpack(flat, r.inverse)
        if place is None:
            self._pool.give(flat)

    def _ordered_sum(
        self, job: Job, r: Round, flat: Tensor, send_dtype: torch.dtype, back: torch.dtype
    ) -> Iterator[Collective]:
        world, rank, n = self._world, self._rank, flat.numel()
        send = flat
        if flat.dtype != send_dtype:
            send = self._pool.take(n, send_dtype)
            send.copy_(flat)
        part = n // world
        full = send if send_dtype == back else self._pool.take(n, back)
        mine = full[rank * part : (rank + 1) * part]
        theirs = self._pool.take(n, send_dtype)
        yield Collective("all-to-all", send, lambda c: c.all_to_all(theirs, send))
        parts = list(theirs.view(world, part))
        parts[rank] = send[rank * part : (rank + 1) * part]
        run_op("ordered_sum", mine, parts, r.inverse, None)
        yield Collective("all-gather", full, lambda c: c.all_gather(full, mine))
        job.unpack(full, 1.0)
        self._pool.give(
            theirs, *(t for t in {id(send): send, id(full): full}.values() if t is not flat)
        )

    def _own_part(self, job: Job, r: Round, cuts: tuple[int, ...]) -> Iterator[Collective]:
        """Only the first half of the ordered sum: this rank keeps the averages of its own part."""
        world, rank, average = self._world, self._rank, job.average
        assert average is not None
        n, m = cuts[-1], average.numel()
        if n == 0:
            return
        send_dtype, back = self._dtypes(average.dtype, r)
        flat = job.sums
        if flat is None:
            flat = self._pool.take(n, send_dtype)
            job.pack(flat, r.scale, nothing=not r.weight)
        send = flat
        if flat.dtype != send_dtype:
            send = self._pool.take(n, send_dtype)
            send.copy_(flat)
        theirs = self._pool.take(m * world, send_dtype)
        parts = list(theirs.view(world, m))
        sends = [send[cuts[i] : cuts[i + 1]] for i in range(world)]
        total = n * send.itemsize
        yield Collective("all-to-all", send, lambda c: c.exchange(parts, sends, total))
        parts[rank] = sends[rank]
        result = average if back == average.dtype else self._pool.take(m, back)
        if m:
            run_op("ordered_sum", result, parts, r.inverse, None)
        if result is not average:
            average.copy_(result)
            self._pool.give(result)
        self._pool.give(theirs, flat, *([] if send is flat else [send]))

    # ---- int8

    def _packed(self, job: Job, r: Round) -> tuple[Tensor, bool]:
        """The weighted gradients in fp32, and whether they are in the gradient's own memory."""
        flat, place = job.sums, None
        if flat is None:
            place = None if job.cuts is not None else job.in_place(torch.float32)
            n = job.bucket.numel + job.bucket.padding
            flat = self._pool.take(n, torch.float32) if place is None else place
            job.pack(flat, r.scale, nothing=not r.weight)
        return flat if flat.dtype == torch.float32 else flat.float(), place is not None

    def _rows(self, cuts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """A buffer for the rows of bytes of parts [cuts[i], cuts[i + 1]), and the rows."""
        sizes = [int8_wire.row_bytes(end - begin) for begin, end in pairwise(cuts)]
        buffer = self._pool.take(sum(sizes), torch.uint8)
        return buffer, list(buffer.split(sizes))

    def _encode(self, r: Round, flat: Tensor, error: Tensor, cuts: Sequence[int]) -> Any:
        """Rows for all ranks, in units of the average."""
        buffer, rows = self._rows(cuts)
        for row, begin, end in zip(rows, cuts, cuts[1:]):
            int8_wire.encode_(row, error[begin:end], flat[begin:end], r.inverse)
        return buffer, rows

    def _int8_sum(
        self, job: Job, r: Round, errors: tuple[Tensor, Tensor | None]
    ) -> Iterator[Collective]:
        world, rank = self._world, self._rank
        error, own_error = errors
        assert own_error is not None
        flat, in_place = self._packed(job, r)
        part = flat.numel() // world
        send, sends = self._encode(r, flat, error, range(0, flat.numel() + 1, part))
        theirs = self._pool.take(send.numel(), torch.uint8)
        yield Collective("all-to-all", send, lambda c: c.all_to_all(theirs, send))
        rows = list(theirs.view(world, -1))
        rows[rank] = sends[rank]
        mine = flat[rank * part : (rank + 1) * part]
        int8_wire.sum_(mine, rows, 1.0)
        full = send  # has gone out
        fulls = list(full.view(world, -1))
        int8_wire.encode_(fulls[rank], own_error, mine, 1.0)
        yield Collective("all-gather", full, lambda c: c.all_gather(full, fulls[rank]))
        for i, row in enumerate(fulls):
            int8_wire.sum_(flat[i * part : (i + 1) * part], [row], 1.0)
        job.unpack(flat, 1.0)
        self._pool.give(theirs, send, *([] if in_place else [flat]))

    def _int8_own_part(self, job: Job, r: Round, cuts: tuple[int, ...]) -> Iterator[Collective]:
        world, rank, average = self._world, self._rank, job.average
        assert average is not None and job.errors is not None
        if not cuts[-1]:
            return
        flat, _ = self._packed(job, r)
        send, sends = self._encode(r, flat, job.errors[0], cuts)
        n = average.numel()
        theirs, rows = self._rows(range(0, n * world + 1, n) if n else [0] * (world + 1))
        yield Collective("all-to-all", send, lambda c: c.exchange(rows, sends, send.numel()))
        rows[rank] = sends[rank]
        result = average if average.dtype == torch.float32 else self._pool.take(n, torch.float32)
        int8_wire.sum_(result, rows, 1.0)
        if result is not average:
            average.copy_(result)
            self._pool.give(result)
        self._pool.give(theirs, flat, send)
