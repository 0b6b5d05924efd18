"""One module per op, found by name: a new op adds a file here and edits no list."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

__all__: list[str] = []


def _load() -> dict[str, Any]:
    public: dict[str, Any] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"):
        loaded = importlib.import_module(f"trainwright.ops.{module}")
        public.update({name: getattr(loaded, name) for name in loaded.__all__})
    return public


_public = _load()
globals().update(
    _public
)  # so that `from trainwright.ops import rms_norm` gives the function, not the module
__all__ = sorted(_public)
