"""Trainwright: hand-written kernels for PyTorch training, as drop-in ops.

`import trainwright as tw`; then `tw.rms_norm`, `tw.flash_attention`, `tw.optim.AdamW`, `tw.parallel.DataParallel`, ...
Which backend runs a call: `tw.explain`. What works on this machine: ``python -m trainwright.info``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from trainwright._version import __version__ as __version__

_LAZY = ("nn", "optim", "parallel", "patch", "train", "vgpu", "info", "compat")

try:
    from trainwright import ops as ops
    from trainwright.dispatch import available_backends, explain, use_backend
    from trainwright.errors import BackendError
    from trainwright.memory import empty_cache
    from trainwright.ops._packed_weights import packed_weights

    __all__ = [
        "BackendError", "available_backends", "empty_cache", "explain", "packed_weights", "use_backend",
        *ops.__all__,
    ]  # fmt: skip
    globals().update({name: getattr(ops, name) for name in ops.__all__})
except Exception:
    # `python -m trainwright.info` reports what is wrong; everybody else gets the error.
    if "trainwright.info" not in sys.orig_argv:
        raise


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"trainwright.{name}")
    if name == "LossScaler":
        return importlib.import_module("trainwright.optim").LossScaler
    raise AttributeError(f"module 'trainwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "LossScaler"])
