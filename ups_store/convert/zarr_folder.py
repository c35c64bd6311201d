"""A store as an ordinary Zarr v3 folder, chunked and compressed, for tools that want no archive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ups_store.convert.export import array_attrs, blocks_of, provenance, samples_per_block
from ups_store.errors import needs
from ups_store.format.metadata import dtype_of
from ups_store.read.base import AnyStore
from ups_store.write.target import new_folder, payload_nbytes

with needs("zarr"):
    import zarr
    from zarr.codecs import ZstdCodec
    from zarr.storage import LocalStore

    import ups_store.format.bfloat16  # noqa: F401  # zarr-python before 3.4.1 doesn't load it to write

CHUNK_BYTES = 4 << 20  # a file each: much smaller ones cost more than their bytes


def write(store: AnyStore, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the folder; group attributes are the store's, with identity and config hash under `ups_store`."""
    with new_folder(target, marker="zarr.json", force=force, needed_bytes=payload_nbytes(store)) as folder:
        attrs = {**store.attrs, "ups_store": provenance(store)}
        group = zarr.create_group(LocalStore(folder), zarr_format=3, attributes=attrs)
        for name in store.dims:
            _write_array(group, name, store, progress)


def _write_array(group: zarr.Group, name: str, store: AnyStore, progress: Callable[[int], None]) -> None:
    meta = store.metas[name]
    num = samples_per_block(meta, CHUNK_BYTES) if meta.shape else 1
    chunks = tuple(max(1, n) for n in (num, *meta.shape[1:])) if meta.shape else ()
    array = group.create_array(
        name,
        shape=meta.shape,
        dtype=dtype_of(meta.dtype),
        chunks=chunks,
        compressors=ZstdCodec(level=3),
        fill_value=0,
        dimension_names=store.dims[name],
        attributes=array_attrs(store, name),
        config={
            "write_empty_chunks": True
        },  # else chunks of -0.0 are left out as if they were the fill value
    )
    if not meta.shape:
        array[...] = store[name]
        return
    first = 0
    for block in blocks_of(store, name, num):
        array[first : first + len(block)] = block
        first += len(block)
        progress(block.nbytes)
