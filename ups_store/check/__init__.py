"""What stores hold and whether it is sound: info, doctor, salvage, statistics, preview, garbage."""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from ups_store.check.cells import cell_edges, colours_of
    from ups_store.check.preview import save_preview

__all__ = ["cell_edges", "colours_of", "save_preview"]

_HOMES = {"cell_edges": "cells", "colours_of": "cells", "save_preview": "preview"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ups_store.check' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"ups_store.check.{_HOMES[name]}"), name)
    return value
