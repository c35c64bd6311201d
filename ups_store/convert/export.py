"""`export_store`: a finished store as a Zarr folder, safetensors, HDF5, or a folder of `.pt` files."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ups_store.errors import SpecError
from ups_store.read.store import Store
from ups_store.write.target import check_not_source, require_sound

# Each module writes one format, and is loaded with its library when it is first asked for.
FORMATS = {
    "zarr": "ups_store.convert.zarr_folder",
    "safetensors": "ups_store.convert.safetensors_file",
    "hdf5": "ups_store.convert.hdf5_file",
    "pt": "ups_store.torch.pt_folder",
}


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
    with them. `docs/convert.md` says how each format holds them.

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
    writer.check_target(path, force=force)  # before a long check of the store
    if verify:
        require_sound(store)
    writer.write(store, path, force=force, progress=progress or (lambda nbytes: None))
    return path
