"""Ranks for distributed tests: processes that are started once and run many cases, each with a hard time limit.

A case is a function ``case(rank, world)`` in a module of this folder, named by string. It fails if any rank raises,
dies or does not answer in time; then the processes are replaced, since their collectives may no longer line up.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

HERE = str(Path(__file__).parent)
_context = multiprocessing.get_context("forkserver")
# Imported once; torch._dynamo, because the first optimizer step of a process imports it.
_context.set_forkserver_preload(["pytest", "torch._dynamo", "trainwright.parallel"])


def _serve(rank, world, store_args, connection):
    torch.set_num_threads(1)
    sys.path[:0] = [HERE]
    kind, where = store_args
    if kind == "file":
        store = dist.FileStore(where, world)
    else:
        store = dist.TCPStore("127.0.0.1", where, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        module, name, arguments = task
        try:
            torch.manual_seed(0)
            result = getattr(importlib.import_module(module), name)(rank, world, **arguments)
            connection.send(("ok", result))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`world` processes with an initialised Gloo group."""

    def __init__(self, world, store="file"):
        self.world = world
        if store == "file":
            self._folder = tempfile.TemporaryDirectory()
            where = os.path.join(self._folder.name, "store")
        else:
            probe = dist.TCPStore("127.0.0.1", 0, 1, True)
            where = probe.port
            del probe
        pairs = [_context.Pipe() for _ in range(world)]
        self._pipes = [here for here, _ in pairs]
        self.processes = [
            _context.Process(
                target=_serve, args=(r, world, (store, where), pairs[r][1]), daemon=True
            )
            for r in range(world)
        ]
        for process in self.processes:
            process.start()
        for _, there in pairs:
            there.close()
        self._collect(range(world), 60)

    def _collect(self, ranks, timeout):
        deadline = time.monotonic() + timeout
        answers = {}
        for r in ranks:
            if not self._pipes[r].poll(max(0.0, deadline - time.monotonic())):
                answers[r] = ("error", f"no answer within {timeout} s")
                continue
            try:
                answers[r] = self._pipes[r].recv()
            except (EOFError, ConnectionError):
                self.processes[r].join(5)
                answers[r] = ("error", f"the process ended with {self.processes[r].exitcode}")
        return answers

    def start(self, module, name, **arguments):
        for pipe in self._pipes:
            pipe.send((module, name, arguments))

    def answers(self, ranks, timeout):
        """(kind, result or traceback) by rank, for some ranks of a `start`ed case."""
        return self._collect(ranks, timeout)

    def run(self, module, name, timeout=30, **arguments):
        """Results by rank; raises AssertionError with the tracebacks if a rank failed."""
        self.start(module, name, **arguments)
        answers = self._collect(range(self.world), timeout)
        failed = {r: text for r, (kind, text) in answers.items() if kind != "ok"}
        assert not failed, "\n".join(f"--- rank {r}\n{text}" for r, text in failed.items())
        return [answers[r][1] for r in range(self.world)]

    def leave(self, ranks):
        """Ask some ranks to end, and check that they do."""
        for r in ranks:
            self._pipes[r].send(None)
        for r in ranks:
            self.processes[r].join(30)
            assert self.processes[r].exitcode == 0, f"rank {r}: {self.processes[r].exitcode}"

    def close(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)


class RankPools:
    """Keeps one `Ranks` per world size; a failed case gets its ranks replaced."""

    def __init__(self):
        self._pools = {}

    def run(self, world, module, name, **arguments):
        if world not in self._pools:
            self._pools[world] = Ranks(world)
        try:
            return self._pools[world].run(module, name, **arguments)
        except BaseException:
            self._pools.pop(world).close()
            raise

    def close(self):
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
