"""A store as an ordinary Zarr v3 folder, chunked and compressed, for tools that want no archive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ups_store.convert.export import array_attrs, blocks_of, provenance, samples_per_block
from ups_store.errors import needs
from ups_store.read.store import Store
from ups_store.write.target import new_folder

with needs("zarr"):
    import zarr
    from zarr.codecs import ZstdCodec
    from zarr.storage import LocalStore

    import ups_store.format.bfloat16  # noqa: F401  # zarr-python before 3.4.1 loads no data type by itself

CHUNK_BYTES = 4 << 20  # a file each: much smaller ones cost more than their bytes


def write(store: Store, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the folder; group attributes are the store's, with identity and config hash under `ups_store`."""
    with new_folder(target, marker="zarr.json", force=force, needed_bytes=store.nbytes) as folder:
        attrs = {**store.attrs, "ups_store": provenance(store)}
        group = zarr.create_group(LocalStore(folder), zarr_format=3, attributes=attrs)
        for name in store.dims:
            _write_array(group, name, store[name], store, progress)


def _write_array(
    group: zarr.Group, name: str, view: npt.NDArray[Any], store: Store, progress: Callable[[int], None]
) -> None:
    num = samples_per_block(view, CHUNK_BYTES) if view.ndim else 1
    chunks = tuple(max(1, n) for n in (num, *view.shape[1:])) if view.ndim else ()
    array = group.create_array(
        name,
        shape=view.shape,
        dtype=view.dtype,
        chunks=chunks,
        compressors=ZstdCodec(level=3),
        fill_value=0,
        dimension_names=store.dims[name],
        attributes=array_attrs(store, name),
        config={
            "write_empty_chunks": True
        },  # else chunks of -0.0 are left out as if they were the fill value
    )
    if not view.ndim:
        array[...] = view
        return
    first = 0
    for block in blocks_of(view, num):
        array[first : first + len(block)] = block
        first += len(block)
        progress(block.nbytes)
