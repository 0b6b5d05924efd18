"""Training on several processes: strategies over `torch.distributed`, one file per strategy, found by name.

The public names are those that the files list in ``__all__``: `DataParallel`, `FlatLayout`, `CollectiveError`, ...
"""

from __future__ import annotations

import importlib
import pkgutil

__all__: list[str] = []
for _name in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"):
    _module = importlib.import_module(f"trainwright.parallel.{_name}")
    __all__ += _module.__all__
    globals().update({name: getattr(_module, name) for name in _module.__all__})
