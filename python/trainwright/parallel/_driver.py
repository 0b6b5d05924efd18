"""The thread that moves buckets: pack, send, sum, gather, unpack, in one order on all ranks, beside the backward.

What happens to a bucket is a generator that yields at each collective (see `_averaging`). The driver issues the
collectives, runs what lies between them, and never blocks on one bucket while another could move: a generator is
resumed when its collective is done and no earlier bucket waits in the same phase. So each channel sees its
collectives in bucket order.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainwright.parallel._averaging import Averaging, Collective
from trainwright.parallel._job import Job, Round, Row
from trainwright.parallel._watch import Position, Watch
from trainwright.parallel._wire import Wire
from trainwright.parallel.errors import CollectiveError
from trainwright.parallel.layout import Bucket

DEPTH = 4  # buckets in flight: enough to fill the network while others are packed and summed
TIMEOUT_SHARE = 0.85  # of the timeout is for a collective, the rest to find out who failed


class _Ticket:
    """A collective in flight."""

    def __init__(self, work: Any, position: Position) -> None:
        self.work = work  # kept alive until it is done
        self.position = position
        self.done = False
        self.error: str | None = None
        self.told: Tensor | None = None  # a header or footer of all ranks
        self.world = 1

    def answers(self) -> list[bytes]:
        """By rank."""
        assert self.told is not None
        words = bytes(self.told.tolist())
        size = len(words) // self.world
        return [words[i : i + size] for i in range(0, len(words), size)]


class Driver:
    """See the head of the file. Public methods are called by the thread that runs the backward."""

    def __init__(
        self,
        wire: Wire,
        device: torch.device,
        *,
        wire_dtype: torch.dtype | None,
        ordered: bool,
        timeout: float,
        check_layouts: Callable[[], None],
    ) -> None:
        self.wire = wire
        self._averaging = Averaging(
            wire.world, wire.rank, device, wire_dtype=wire_dtype, ordered=ordered
        )
        self._timeout = timeout
        self._check_layouts = check_layouts
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cond = threading.Condition()
        self._queue: deque[Any] = deque()  # header, jobs, footer, in the order of the backward
        self._phases: tuple[deque[Any], ...] = (deque(), deque())
        self._header: _Ticket | None = None
        self._footer: _Ticket | None = None
        self._round: Round | None = None
        self._unfinished = 0
        self._flying, self._flying_since = 0, 0.0
        self._issued = 0  # collectives of this step ...
        self._sent: tuple[str, ...] = ()  # ... and the names of those of the first phase
        self._idle = threading.Event()
        self._closed = False
        self.error: CollectiveError | None = None
        self.watch: Watch | None = None
        if wire.world > 1:
            self.watch = Watch(wire, timeout, self._fail_with)
            self._thread = threading.Thread(
                target=self._run, name="trainwright-driver", daemon=True
            )
            self._thread.start()

    # ---- called from the backward

    def begin(self, round_: Round) -> None:
        """Open a step: tell the other ranks this rank's weight and layout."""
        self._round = round_
        self._issued, self._sent = 0, ()
        if self.wire.world == 1:
            round_.agree([round_.words()])
            return
        self._reopen()
        with self._cond:
            self._queue.append("header")
            self._cond.notify()

    def reduce(self, job: Job) -> None:
        """Average a bucket. Called in the same order of buckets on all ranks."""
        assert self._round is not None
        self._round.jobs.append(job)
        if self.wire.world == 1:
            for _ in self._averaging.steps(job, self._round):
                raise AssertionError("nothing is sent by a single rank")
            return
        if self._stream is not None:
            job.ready = torch.cuda.current_stream(self._device).record_event()
        with self._cond:
            self._unfinished += 1
            self._queue.append(job)
            self._cond.notify()

    def new_sums(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Zeros for the weighted sums of a bucket's microbatches."""
        return torch.zeros(bucket.numel + bucket.padding, dtype=dtype, device=self._device)

    def add(self, job: Job, weight: float) -> None:
        """Add `weight` times a microbatch's gradients to the job's `sums`; stays on this rank."""
        assert job.sums is not None
        if weight:
            job.pack(job.sums, weight, add=True)

    def finish(self, footer: bytes) -> None:
        """Close a step: what each rank has to say about it, after its last bucket."""
        assert self._round is not None
        if self.wire.world == 1:
            self._round.footer = [footer]
            return
        with self._cond:
            self._queue.append(footer)
            self._cond.notify()

    def again(self, jobs: list[Job]) -> None:
        """Average more buckets in a step whose footers have arrived; then `wait` again."""
        self._reopen()
        for job in jobs:
            self.reduce(job)
        if self.wire.world > 1:
            self._count_down()

    def _reopen(self) -> None:
        with self._cond:
            self._unfinished = 1  # the step itself, until its footers are here
            self._idle.clear()

    def wait(self) -> None:
        """Until the buckets and the footers of the step are here; raises the step's error."""
        if self.wire.world > 1:
            mark, deadline = None, time.monotonic() + self._timeout
            while not self._idle.wait(min(1.0, self._timeout / 4)):
                if mark != (self._issued, self._unfinished):  # slow, but it moves
                    mark = self._issued, self._unfinished
                    deadline = time.monotonic() + self._timeout
                elif time.monotonic() > deadline:
                    self.fail("nothing moved within the timeout")
            self.raise_error()
            if self._stream is not None and self._round is not None:
                stream = torch.cuda.current_stream(self._device)
                for job in self._round.jobs:
                    stream.wait_event(job.finished)

    @property
    def round(self) -> Round:
        assert self._round is not None
        return self._round

    def announce(self, doing: str, bucket: int | None, operation: str) -> None:
        """The caller is about to issue a collective between two steps."""
        if self.watch is not None:
            self._issued += 1
            step = -1 if self._round is None else self._round.step
            self.watch.position = Position(step, self._issued, doing, bucket, operation, self._sent)

    def wait_for(self, work: Any) -> None:
        """Block until a collective issued by the caller is done (on GPU: until the stream may go on)."""
        try:
            work.wait()
        except Exception as error:
            self.fail(str(error))
            self.raise_error()

    def of_all_ranks(self, x: Tensor) -> Tensor:
        """(W, *x.shape): a small CPU tensor of each rank, between two steps. Collective."""
        wire = self.wire
        if wire.world == 1:
            return x.unsqueeze(0)
        every = x.new_empty(wire.world, *x.shape)
        self.announce(f"all-gather of {x.numel()} numbers", None, "all-gather")
        assert wire.control is not None
        self.wait_for(wire.control.all_gather(every.view(-1), x.reshape(-1)))
        return every

    @property
    def last_header(self) -> list[Row]:
        return [] if self._round is None else self._round.header

    @property
    def closed(self) -> bool:
        return self._closed

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error.again()

    def fail(self, cause: str) -> None:
        """Make this rank's failure that of all ranks: they raise too."""
        assert self.watch is not None
        if self.error is None:
            self._fail_with(self.watch.blame(cause))

    def interrupted(self) -> None:
        """This rank's backward ended in an exception, with part of its step already sent: no rank can go on."""
        me, step = self.wire.ranks[self.wire.rank], self.round.step
        error = CollectiveError(
            f"{self.wire.name}: an exception interrupted the backward of rank {me} in the middle of step {step}",
            ranks=(me,), step=step, operation="backward",
        )  # fmt: skip
        assert self.watch is not None
        self.watch.report(error)
        self._fail_with(error)
        raise error

    def close(self) -> None:
        with self._cond:
            self._closed = True
            self._cond.notify()
        if self.watch is not None:
            self.watch.close()
            # A thread that still runs when the interpreter ends would take the process down with it.
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)
        self.wire.close()

    # ---- collectives

    def _issue(self, collective: Collective, bucket: Bucket, phase: int) -> _Ticket:
        assert self._round is not None
        operation, x, start = collective
        share = (self.wire.world - 1) / self.wire.world * (2 if operation == "all-reduce" else 1)
        self._round.sent_bytes += int(x.numel() * x.element_size() * share)
        doing = f"bucket {bucket.index}, {operation} of {x.numel()} elements"
        channel = self.wire.gather if phase else self.wire.scatter
        return self._start(start, channel, doing, bucket.index, operation)

    def _tell(self, words: bytes, doing: str) -> _Ticket:
        """Start to exchange some bytes, as many on each rank: `answers` of the ticket."""
        world, rank = self.wire.world, self.wire.rank
        told = torch.frombuffer(bytearray(words * world), dtype=torch.uint8)
        mine = told[rank * len(words) : (rank + 1) * len(words)]
        ticket = self._start(
            lambda c: c.all_gather(told, mine), self.wire.control, doing, None, "all-gather"
        )
        ticket.told, ticket.world = told, world
        return ticket

    def _start(
        self,
        start: Callable[[Any], Any],
        channel: Any,
        doing: str,
        bucket: int | None,
        operation: str,
    ) -> _Ticket:
        """Issue one collective; its completion wakes the driver."""
        assert self._round is not None and self.watch is not None
        self._issued += 1
        if channel is self.wire.scatter or channel is self.wire.control:
            self._sent += (doing.partition(",")[0],)
        position = Position(self._round.step, self._issued, doing, bucket, operation, self._sent)
        self.watch.position = position
        ticket = _Ticket(start(channel), position)
        if self._stream is not None and channel is not self.wire.control:
            ticket.work.wait()  # orders the stream; the host goes on
            ticket.done = True
            return ticket
        with self._cond:
            if self._flying == 0:
                self._flying_since = time.perf_counter()
            self._flying += 1

        def done(error: str | None) -> None:
            ticket.error = error
            with self._cond:
                self._flying -= 1
                if self._flying == 0 and self._round is not None:
                    self._round.busy_ms += 1e3 * (time.perf_counter() - self._flying_since)
                ticket.done = True
                self._cond.notify()

        channel.when_done(ticket.work, done)
        return ticket

    # ---- the thread

    def _run(self) -> None:
        _one_thread()
        while True:
            with self._cond:
                while (action := self._next()) is None:
                    if self._closed:
                        return
                    self._cond.wait()
            try:
                with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                    action()
            except CollectiveError as error:
                self._fail_with(error)
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")
            if self.error is not None:
                return

    def _next(self) -> Callable[[], None] | None:
        """What to do now; None to wait. First what other ranks wait for, last what only this rank needs."""
        if self._header is not None and self._header.done:
            return self._take_header
        first, second = self._phases
        if first and first[0][1].done:
            return lambda: self._resume(0)
        if self._queue and self._header is None:
            item = self._queue[0]
            if not isinstance(item, Job) or len(first) + len(second) < DEPTH:
                self._queue.popleft()
                return lambda: self._take(item)
        if second and second[0][1].done:
            return lambda: self._resume(1)
        if self._footer is not None and self._footer.done:
            return self._take_footer
        return None

    def _take(self, item: Any) -> None:
        r = self._round
        assert r is not None
        if isinstance(item, Job):
            if self._stream is not None:
                self._stream.wait_event(item.ready)
            self._advance(self._averaging.steps(item, r), item, 0)
        elif item == "header":
            self._header = self._tell(r.words(), "header")
        else:
            self._footer = self._tell(item, "footer")

    def _take_header(self) -> None:
        ticket, self._header = self._header, None
        assert ticket is not None and self._round is not None
        self._check(ticket)
        self._round.agree(ticket.answers())
        if len({row.layout for row in self._round.header}) > 1:
            self._check_layouts()

    def _take_footer(self) -> None:
        ticket, self._footer = self._footer, None
        assert ticket is not None and self._round is not None
        self._check(ticket)
        self._round.footer = ticket.answers()
        self._count_down()

    def _resume(self, phase: int) -> None:
        steps, ticket, job = self._phases[phase].popleft()
        self._check(ticket)
        self._advance(steps, job, phase + 1)

    def _advance(self, steps: Iterator[Collective], job: Job, phase: int) -> None:
        for collective in steps:
            ticket = self._issue(collective, job.bucket, phase)
            if not ticket.done or self._stream is None:
                self._phases[phase].append((steps, ticket, job))
                return
            phase += 1
        if self._stream is not None:
            job.finished = self._stream.record_event()
        job.complete = True
        self._count_down()

    def _count_down(self) -> None:
        with self._cond:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._idle.set()

    def _check(self, ticket: _Ticket) -> None:
        if ticket.error is not None:
            assert self.watch is not None
            self.watch.position = ticket.position
            self.fail(ticket.error)
            self.raise_error()

    def _fail_with(self, error: CollectiveError) -> None:
        with self._cond:
            if self.error is None:
                self.error = error.again()
            self._idle.set()
            self._cond.notify()
        self.wire.abort()


def _one_thread() -> None:
    """Let this thread's kernels run on this thread alone: the backward has the others."""
    torch.get_num_threads()  # torch sets a thread up at its first use; ours must come after
    with contextlib.suppress(OSError, AttributeError, StopIteration), open("/proc/self/maps") as f:
        path = next(line.split()[-1] for line in f if "libgomp" in line)
        ctypes.CDLL(path).omp_set_num_threads(1)
