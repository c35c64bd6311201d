"""The public names of the room `building`, and what `python -m ups_store.build` runs."""

from ups_store import building
from ups_store.lazy import attach

__getattr__, __all__ = attach(__name__, building.__file__)


if __name__ == "__main__":
    from ups_store.building.__main__ import main

    main()
