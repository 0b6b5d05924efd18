"""The backend "vgpu" of the op tests: the CUDA kernels, compiled by nvcc, run on the virtual GPU on CPU tensors.

csrc/cuda is compiled once into build/vgpu (PTX only) and loaded under the names trainwright_vgpu::<op>; every table of
an op that has a "cuda" entry gets a "vgpu" one. The rest of the op, from its checks to its autograd function, is the
same code that a GPU would run.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import trainwright.ops
from trainwright import dispatch

ROOT = pathlib.Path(__file__).parents[1]
BUILD = ROOT / "build/vgpu"
# Few: kernels that spread over the whole device get several rounds of work from small tensors.
MULTIPROCESSORS = 4


@functools.cache
def reason() -> str:
    """Why the CUDA kernels cannot run on the virtual GPU here, or "ok"."""
    if shutil.which("nvcc") is None:
        return "needs nvcc"
    if importlib.util.find_spec("trainwright._vgpu") is None:
        return "needs the compiled module trainwright._vgpu"
    return "ok"


def compile_with(command: list[Any]) -> None:
    """Runs a compiler, without what `make sanitize` preloads for this process: nvcc crashes under it."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        text = " ".join(map(str, command))
        raise RuntimeError(f"{text}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


@functools.cache
def compiled() -> pathlib.Path:
    """The folder with libtw_cudart.so and libtw_cuda_ops.so, up to date; one test process compiles at a time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_with([sys.executable, "setup.py", "-q", "build_cuda_on_vgpu"])
    return BUILD


def properties() -> Any:
    from trainwright.vgpu.cudart import Properties

    return Properties(multiprocessors=MULTIPROCESSORS)


@functools.cache
def runtime() -> Any:
    """The CUDA runtime of this process, on a virtual GPU of architecture sm_80."""
    from trainwright.vgpu import Device
    from trainwright.vgpu.cudart import Runtime

    return Runtime(compiled() / "libtw_cudart.so", Device("sm_80"), properties=properties())


def _op_modules() -> list[Any]:
    prefix = trainwright.ops.__name__ + "."
    return [m for name, m in sorted(sys.modules.items()) if name.startswith(prefix)]


def _cuda_tables(module: Any) -> list[dict[str, Any]]:
    return [v for v in vars(module).values() if isinstance(v, dict) and "cuda" in v]


def _cuda_ops(table: dict[str, Any]) -> dict[str, Any]:
    """Those of "cuda", and the optimizers' "cuda table"."""
    return {key: op for key, op in table.items() if key.startswith("cuda")}


def _raising(op: Callable[..., Any]) -> Callable[..., Any]:
    """Raises what a kernel did wrong as the virtual GPU's own exception."""

    def call(*args: Any) -> Any:
        try:
            return op(*args)
        except RuntimeError as error:
            if runtime().fault is not None:
                raise runtime().fault from error
            raise

    return call


def op(name: str) -> Callable[..., Any]:
    """trainwright::<name>, its CUDA kernels on the virtual GPU."""
    install()
    return _raising(getattr(torch.ops.trainwright_vgpu, name).default)


@functools.cache
def ops_with_cuda() -> frozenset[str]:
    return frozenset(
        op for op in dispatch.ops() if any(c.backend == "cuda" for c in dispatch._ops[op])
    )


@functools.cache
def install() -> None:
    """Compile, load, and make "vgpu" a backend of every op that has CUDA kernels."""
    from trainwright.vgpu.cudart import load_program

    runtime()
    library = torch.library.Library("trainwright_vgpu", "DEF")
    install.library = library  # type: ignore[attr-defined]  # lives as long as the process
    overloads = {
        f.name(): f for m in _op_modules() for t in _cuda_tables(m) for f in _cuda_ops(t).values()
    } | {"trainwright::cross_entropy_fwd_bwd": torch.ops.trainwright.cross_entropy_fwd_bwd.default}  # fmt: skip
    for overload in overloads.values():
        library.define(str(overload._schema).removeprefix("trainwright::"))
    load_program(compiled() / "libtw_cuda_ops.so")
    for module in _op_modules():
        for table in _cuda_tables(module):
            for key, overload in _cuda_ops(table).items():
                name = overload.name().removeprefix("trainwright::")
                ours = _raising(getattr(torch.ops.trainwright_vgpu, name).default)
                table[key.replace("cuda", "vgpu")] = ours
    dispatch.BACKENDS = (*dispatch.BACKENDS, "vgpu")
    for op in ops_with_cuda():
        copies = [replace(c, backend="vgpu") for c in dispatch._ops[op] if c.backend == "cuda"]
        dispatch._ops[op] = (*dispatch._ops[op], *copies)
    dispatch._choose.cache_clear()
