"""`export_store`: a finished store as a Zarr folder, a safetensors or HDF5 file, or references of Kerchunk.

Arrays are written a block of samples at a time, so that memory stays bounded whatever N is. What they were
made from and their attributes travel with them into every format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError, did_you_mean
from ups_store.format.canonical import canonical_json
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.base import AnyStore
from ups_store.read.ragged import check_not_ragged
from ups_store.read.several import parts_of
from ups_store.read.store import Store
from ups_store.system.paths import path_of
from ups_store.write.target import check_not_source, check_sound, check_target

# Each module writes one format, and is loaded with its library when it is first asked for.
FORMATS = {
    "zarr": "zarr_folder",
    "safetensors": "safetensors_file",
    "hdf5": "hdf5_file",
    "kerchunk": "kerchunk_file",
}
_RETIRED = {  # formats of earlier versions, and what to do instead
    "arrow": "export it to zarr, or make a table: `pyarrow.table({name: list(store[name])})`",
    "pt": "train on the store itself by `ups_store.torch`, or `torch.save` what `store.sample(i)` gives",
}

BLOCK_BYTES = 16 << 20


def export_store(
    store: AnyStore,
    target: str | os.PathLike[str],
    *,
    to: str,
    force: bool = False,
    verify: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a finished store in another format, in bounded memory; the target appears when it is whole.

    Arrays and constants keep names, shapes, dtypes and bits; identity, config hash and attributes travel
    with them. `docs/guides/convert.md` says how each format holds them.

    Args:
        store: A finished store of any kind: mapped, packed, or in partitions.
        target: File, or folder (zarr), to write.
        to: "zarr", "safetensors", "hdf5" or "kerchunk".
        force: Whether to replace what is there; a folder only if it is one of that format.
        verify: Whether to check every byte of the store first.
        progress: Called with the number of payload bytes that were written since the last call.
    Returns:
        Absolute path of the target.
    Raises:
        SpecError: For an unknown format; for a ragged array, except to "kerchunk" (kind "ragged"); if the
            target exists (kind "exists"), or is the store itself or a folder that holds it (kind
            "same_file", forced or not).
        CorruptChunkError: If the store is damaged.
        DiskFullError: If there is no room; nothing is left then.
    """
    if to not in FORMATS:
        expected, hint = f"one of {', '.join(FORMATS)}", _RETIRED.get(to) or did_you_mean(to, FORMATS)
        raise SpecError("format of an export", kind="format", expected=expected, found=to, hint=hint)
    if not store.committed.all():
        hint = "finish its build first"
        raise SpecError("the store is unfinished", kind="unfinished", path=store.path, hint=hint)
    if to != "kerchunk":  # whose readers find rows and offsets, as any Zarr reader does
        hint = "export it to kerchunk, or open it with any Zarr reader: rows and offsets are arrays there"
        check_not_ragged(store.metas.values(), f"export to {to}", hint, path=store.path)
    path = path_of(target)
    check_not_source(path, [part.path for part in parts_of(store)])
    writer = import_module(f"ups_store.convert.{FORMATS[to]}")
    check_target(path, force=force)  # before a long check of the store
    if verify:
        check_sound(store)
    writer.write(store, path, force=force, progress=progress or (lambda nbytes: None))
    return path


def samples_per_block(meta: ArrayMeta, nbytes: int = BLOCK_BYTES) -> int:
    """How many samples make a block of `nbytes`; at least one.

    Args:
        meta: An array of a store, shape (N, ...); of a constant its first axis counts.
        nbytes: Bytes that a block should have at most.
    """
    sample_nbytes = math.prod(meta.shape[1:]) * dtype_of(meta.dtype).itemsize
    return max(1, min(meta.shape[0], nbytes // max(1, sample_nbytes)))


def blocks_of(store: AnyStore, name: str, num: int | None = None) -> Iterator[npt.NDArray[Any]]:
    """Contiguous copies of consecutive samples, shape (M, ...); an array without axes or elements at once.

    Args:
        store: A store of any kind.
        name: Its array, shape (N, ...), or a constant; the first axis is cut, whatever it is.
        num: Samples of a block; as many as `BLOCK_BYTES` hold by default.
    """
    meta = store.metas[name]
    at_once = not meta.shape or not meta.nbytes
    num = 0 if at_once else num or samples_per_block(meta)
    rows = [slice(None)] if at_once else [slice(i, i + num) for i in range(0, meta.shape[0], num)]
    if meta.is_constant or isinstance(store, Store):
        view = store[name]
        yield from (np.array(view[block] if view.ndim else view, order="C") for block in rows)
    else:
        yield from (store.gather(block, [name])[name] for block in rows)


def provenance(store: AnyStore) -> dict[str, Any]:
    """Config hash and identity document of a store, as the exported copies bear them."""
    return {"config_hash": store.config_hash, "identity": dict(store.identity_document)}


def array_attrs(store: AnyStore, name: str) -> dict[str, Any]:
    """Attributes of one array; constants may have some in files of other writers."""
    spec = store.arrays.get(name)
    return dict(spec.attrs or {}) if spec else {}


def json_text(document: Any) -> str:
    """One line of canonical JSON."""
    return canonical_json(document, what="attrs").decode()


def texts_of(store: AnyStore) -> dict[str, str]:
    """All that a store says of itself, as texts: for formats that allow no other values."""
    return {
        "format": "ups_store",
        "config_hash": store.config_hash,
        "identity": json_text(dict(store.identity_document)),
        "attrs": json_text(dict(store.attrs)),
        "dims": json_text(store.dims),
        "array_attrs": json_text({name: array_attrs(store, name) for name in store.dims}),
    }
