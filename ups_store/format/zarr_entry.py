"""Where zarr-python loads our data type `bfloat16`: entry point group `zarr.buffer` (spec 4.7).

zarr-python before 3.4.1, the last for CPython 3.11, collects the entry points of `zarr.data_type` but never
loads them; those of `zarr.buffer` it loads before it reads the first byte. So this module registers the data
type, and what the entry point names is zarr-python's own `Buffer`: to register it once more changes nothing.
Where something is missing the data type is, too, and zarr-python reads everything else.
"""

from __future__ import annotations

import contextlib

from ups_store.errors import needs

with needs("zarr"):
    from zarr.core.buffer.cpu import Buffer

with contextlib.suppress(ImportError):  # `MissingExtraError` is one: zarr-python before 3.1 has no data types
    import ups_store.format.bfloat16  # noqa: F401

__all__ = ["Buffer"]
