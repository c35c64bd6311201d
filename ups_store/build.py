"""The public names of the room `building`, and what `python -m ups_store.build` runs."""

from __future__ import annotations

from ups_store import building
from ups_store.building import __all__ as __all__

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from ups_store.building import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ups_store.build' has no attribute {name!r}")
    return getattr(building, name)


if __name__ == "__main__":
    from ups_store.building.__main__ import main

    main()
