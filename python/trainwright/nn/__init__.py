"""Thin `nn.Module` classes around the ops, one file per op, found by name.

State dict keys are those of torch's modules.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__: list[str] = []
for _name in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"):
    _module = importlib.import_module(f"trainwright.nn.{_name}")
    __all__ += _module.__all__
    globals().update({name: getattr(_module, name) for name in _module.__all__})
