"""Packed stores: compressed chunks, for shipping and archives (spec 13); `docs/guides/pack.md` says what for.

They are read by decoding, never mapped; `pack` makes one of a store, `unpack` makes the store again.
`ups_store.open` opens them, and loads this package and its codecs only then.
"""
