"""torch's own tests of DistributedDataParallel, driven against `DataParallel` in the ranks of rank_pool.py.

The tests come with torch (`torch.testing._internal.distributed.distributed_test`). `Face` gives our wrapper the
constructor that they call, and `OnCpu` lets those that ask for GPUs run without one: what is sent to a GPU stays.
"""

import contextlib
import importlib
import inspect
import os
import tempfile
import weakref
from typing import ClassVar
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from trainwright.parallel import DataParallel

TIMEOUT = 10.0
MODULE = "torch.testing._internal.distributed.distributed_test"


class Face(DataParallel):
    """`DataParallel` as torch's constructor would have it. An option that we have not is a TypeError."""

    _alive: ClassVar = weakref.WeakSet()

    def __init__(
        self,
        module,
        device_ids=None,
        *,
        process_group=None,
        broadcast_buffers=True,
        bucket_cap_mb=None,
        find_unused_parameters=False,
        static_graph=False,
        gradient_as_bucket_view=False,  # of no consequence to values
        output_device=None,
    ):
        if static_graph:
            find_unused_parameters = True
        for other in list(
            self._alive
        ):  # some tests wrap a module again; ours wants the first one closed
            if other.module is module:
                other.close()
        super().__init__(
            module,
            group=process_group,
            bucket_mb=bucket_cap_mb or "auto",
            unused="skip" if find_unused_parameters else "error",
            broadcast_buffers=broadcast_buffers,
            timeout=TIMEOUT,
        )
        self._alive.add(self)

    def _set_static_graph(self):
        """What a step uses is learned anyway."""

    @property
    def process_group(self):
        return torch.distributed.group.WORLD

    @contextlib.contextmanager
    def join(self, enable=True):
        with super().join() if enable else contextlib.nullcontext():
            yield


def _on_cpu(device):
    is_gpu = isinstance(device, int) or (
        isinstance(device, str | torch.device) and str(device).startswith("cuda")
    )
    return torch.device("cpu") if is_gpu and not isinstance(device, bool) else device


class OnCpu(TorchFunctionMode):
    """A GPU in the argument of a torch function is the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(_on_cpu(a) for a in args[1:]))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _without_gpus():
    to = nn.Module.to
    with (
        OnCpu(),
        mock.patch.object(nn.Module, "cuda", lambda self, device=None: self),
        mock.patch.object(nn.Module, "to", lambda self, *a, **k: to(self, *map(_on_cpu, a), **k)),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


def run(rank, world, test_name):
    """One test of torch's, without the decorators that ask what the machine has."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        names = {"BACKEND": "gloo", "WORLD_SIZE": str(world), "TEMP_DIR": folder}
        stack.enter_context(mock.patch.dict(os.environ, names))
        theirs = importlib.import_module(MODULE)
        base = theirs.DistributedTest._DistTestBase

        class Test(base, theirs.TestDistBackend):
            def _barrier(self, *args, **kwargs):
                torch.distributed.barrier()

            def runTest(self):
                pass

        for owner in (nn.parallel, nn.parallel.distributed, theirs):
            stack.enter_context(mock.patch.object(owner, "DistributedDataParallel", Face))
        gpus = {r: [r] for r in range(world)}
        stack.enter_context(mock.patch.object(theirs, "init_multigpu_helper", lambda *_: gpus))
        stack.enter_context(_without_gpus())
        test = Test()
        test.rank = rank
        inspect.unwrap(getattr(base, test_name))(test)
