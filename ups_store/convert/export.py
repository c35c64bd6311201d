"""`export_store`: a finished store as a Zarr folder, safetensors, HDF5, or a folder of `.pt` files.

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

from ups_store.errors import SpecError
from ups_store.format.canonical import canonical_json
from ups_store.read.store import Store
from ups_store.write.target import check_not_source, check_sound, check_target

# Each module writes one format, and is loaded with its library when it is first asked for.
FORMATS = {
    "zarr": "ups_store.convert.zarr_folder",
    "safetensors": "ups_store.convert.safetensors_file",
    "hdf5": "ups_store.convert.hdf5_file",
    "pt": "ups_store.torch.pt_folder",
}

BLOCK_BYTES = 16 << 20


def export_store(
    store: Store,
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
        store: A finished store.
        target: File (safetensors, hdf5) or folder (zarr, pt) to write.
        to: "zarr", "safetensors", "hdf5" or "pt".
        force: Whether to replace what is there; a folder only if it is one of that format.
        verify: Whether to check every byte of the store first.
        progress: Called with the number of payload bytes that were written since the last call.
    Returns:
        Absolute path of the target.
    Raises:
        SpecError: For an unknown format; if the target exists (kind "exists"), or is the store itself or a
            folder that holds it (kind "same_file", forced or not).
        CorruptChunkError: If the store is damaged.
        DiskFullError: If there is no room; nothing is left then.
    """
    if to not in FORMATS:
        raise SpecError("unknown format", kind="format", expected=f"one of {', '.join(FORMATS)}", found=to)
    if not store.committed.all():
        hint = "finish its build first"
        raise SpecError("the store is unfinished", kind="unfinished", path=store.path, hint=hint)
    path = Path(target).absolute()
    check_not_source(path, [store.path])
    writer = import_module(FORMATS[to])
    check_target(path, force=force)  # before a long check of the store
    if verify:
        check_sound(store)
    writer.write(store, path, force=force, progress=progress or (lambda nbytes: None))
    return path


def samples_per_block(view: npt.NDArray[Any], nbytes: int = BLOCK_BYTES) -> int:
    """How many samples make a block of `nbytes`; at least one.

    Args:
        view: An array of a store, shape (N, ...).
        nbytes: Bytes that a block should have at most.
    """
    sample_nbytes = math.prod(view.shape[1:]) * view.itemsize
    return max(1, min(len(view), nbytes // max(1, sample_nbytes)))


def blocks_of(view: npt.NDArray[Any], num: int | None = None) -> Iterator[npt.NDArray[Any]]:
    """Contiguous copies of consecutive samples, shape (M, ...); an array without axes or elements at once.

    Args:
        view: An array of a store, shape (N, ...); its first axis is cut, whatever it is.
        num: Samples of a block; as many as `BLOCK_BYTES` hold by default.
    """
    if not view.ndim or not view.size:
        yield np.array(view, order="C")
        return
    num = num or samples_per_block(view)
    for first in range(0, len(view), num):
        yield np.array(view[first : first + num], order="C")


def provenance(store: Store) -> dict[str, Any]:
    """Config hash and identity document of a store, as the exported copies bear them."""
    return {"config_hash": store.config_hash, "identity": dict(store.identity_document)}


def array_attrs(store: Store, name: str) -> dict[str, Any]:
    """Attributes of one array; constants may have some in files of other writers."""
    spec = store.arrays.get(name)
    return dict(spec.attrs or {}) if spec else {}


def json_text(document: Any) -> str:
    """One line of canonical JSON."""
    return canonical_json(document, what="attrs").decode()
