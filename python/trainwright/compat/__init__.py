"""Faces that other libraries' code knows: `compat.flash_attn`, `compat.transformers`, each imported at first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["flash_attn", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"trainwright.compat.{name}")
    raise AttributeError(f"module 'trainwright.compat' has no attribute {name!r}")
