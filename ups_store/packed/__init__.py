"""Packed stores: compressed chunks, for shipping and archives (spec 13); `docs/packing.md` says what for.

They are read by decoding, never mapped; `pack` makes one of a store, `unpack` makes the store again.
"""

from ups_store.packed.store import PackedStore, open_packed

__all__ = ["PackedStore", "open_packed"]
