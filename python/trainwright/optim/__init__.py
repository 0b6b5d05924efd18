"""Optimizers over multi-tensor kernels, drop-in for those of `torch.optim`; one file each, found by name."""

from __future__ import annotations

import importlib
import pkgutil

__all__: list[str] = []
for _name in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"):
    _module = importlib.import_module(f"trainwright.optim.{_name}")
    __all__ += _module.__all__
    globals().update({name: getattr(_module, name) for name in _module.__all__})
