"""What stores hold and whether it is sound: info, doctor, salvage, statistics, preview, garbage."""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from ups_store.check.preview import save_preview

__all__ = ["save_preview"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ups_store.check' has no attribute {name!r}")
    from ups_store.check.preview import save_preview

    return save_preview
