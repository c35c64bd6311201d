"""One split = one file: a mapped, checked, resumable Zarr v3 store.

`write` makes one of anything iterable, `create` and `join` take commits, `open` reads;
`docs/format/spec.md` says what lies in the file.
"""

from ups_store.lazy import attach

__version__ = "0.1.0"

__getattr__, __all__ = attach(__name__, __file__)


def __dir__() -> list[str]:
    return sorted(__all__)
