"""Packed stores: compressed chunks, for shipping and archives (spec 13); `docs/packing.md` says what for.

They are read by decoding, never mapped; `pack` makes one of a store, `unpack` makes the store again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups_store.packed.store import PackedStore, open_packed

__all__ = ["PackedStore", "open_packed"]


def __getattr__(name: str) -> Any:
    # `info` of a mapped store asks this package for a class of its own only, and needn't load any codec.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ups_store.packed import store

    return getattr(store, name)
