"""The torch.library namespace `trainwright`: schema, torch reference and fake of every op are registered from here.

The C++ libraries only add kernels for the CPU and CUDA keys, so an install without them still runs every op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from trainwright import dispatch

LIBRARY = torch.library.Library("trainwright", "DEF")
LIBRARY.define("build_info() -> str")
LIBRARY.define("empty_cache() -> ()")

Op = Callable[..., Any]


def define(schema: str, reference: Op, fake: Op) -> Op:
    """Register one dispatcher op and return its bound overload.

    Args:
        schema: without the namespace, e.g. ``"silu_fwd(Tensor x) -> Tensor"``.
        reference: plain torch; runs wherever no compiled kernel does, and is the specification.
        fake: output shapes, dtypes, devices and strides only.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trainwright::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.trainwright, name).default


def define_backends(kernel_file: str, schema: str, reference: Op, fake: Op) -> dict[str, Op]:
    """`define` an op that also has a Triton kernel, as an op of its own (`x_fwd_triton`; `x_triton_` if in place).

    Args:
        kernel_file: module of `trainwright.kernels`, imported at the first call, with a launcher of the op's name.
        schema, reference, fake: as in `define`.

    Returns:
        What runs the op on each backend; whether a backend can, the op's candidates say.
    """
    name = schema.split("(")[0]
    plain = define(schema, reference, fake)

    def launch(*args: Any) -> Any:
        return getattr(importlib.import_module(f"trainwright.kernels.{kernel_file}"), name)(*args)

    triton_name = name.rstrip("_") + "_triton" + "_" * name.endswith("_")
    LIBRARY.define(triton_name + schema[len(name) :], tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):  # CPU tensors: the interpreter
        LIBRARY.impl(triton_name, launch, key)
    torch.library.register_fake(f"trainwright::{triton_name}", fake, lib=LIBRARY)
    triton = getattr(torch.ops.trainwright, triton_name).default
    return {"cpu": plain, "cuda": plain, "triton": triton, "torch": _traceable(reference)}


def _traceable(reference: Op) -> Op:
    """`reference` for use in an autograd function that is compiled.

    torch 2.11's compiler takes the gradient as zero, without a word, where a forward returns a cast that changes
    nothing (``y.to(y.dtype)``); a view of it is traced rightly.
    """

    @functools.wraps(reference)
    def run(*args: Any) -> Any:
        result = reference(*args)
        if not torch.compiler.is_compiling():
            return result
        if isinstance(result, torch.Tensor):
            return result.view_as(result)
        return None if result is None else tuple(x.view_as(x) for x in result)

    return run


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over elements of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def outputs_and_gradients(
    function: Op, backend: str, device: torch.device, options: dict[str, Any] | None = None, **inputs: torch.Tensor
) -> list[torch.Tensor]:  # fmt: skip
    """A self-check's usual body: the op's outputs and the gradients of its floating inputs, on `device`."""
    leaves = {k: v.to(device).requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    result = function(**leaves, **(options or {}), backend=backend)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    upstream = [torch.randn(o.shape).to(o) for o in outputs]
    wanted = [v for v in leaves.values() if v.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]


dispatch.extension("_C")
if torch.cuda.is_available():
    dispatch.extension("_C_cuda")
