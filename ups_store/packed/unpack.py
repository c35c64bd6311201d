"""`unpack`: the mapped store that a packed one was made of, byte for byte (spec 13.7)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.errors import CorruptChunkError, DiskFullError, FormatError
from ups_store.packed.store import PackedStore
from ups_store.read.catalog import fingerprint_of, read_finished
from ups_store.system import files
from ups_store.write.create import create, identity_of
from ups_store.write.target import check_not_source, check_target, publish_file

BLOCK_BYTES = 32 << 20  # of payload that is committed at a time
UNPACKING_SUFFIX = ".unpacking"

Progress = Callable[[int], None]


def unpack_store(
    packed: PackedStore,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the mapped form of a packed store: byte for byte the file that was packed.

    Every chunk's checksum is checked, and in the end that all bytes are those of before. An interrupted run
    is continued by the next one.

    Args:
        packed: A packed store.
        target: File to write.
        force: Whether to replace what is there: a finished store, and what an interrupted run of another
            packed store left.
        progress: Called with the number of payload bytes that were unpacked since the last call.
    Raises:
        SpecError: If the target exists, or is the packed store (kind "same_file", forced or not).
        CorruptChunkError: If a chunk is damaged, or the result isn't what was packed.
        DiskFullError: If there is no room for the whole store.
    """
    path = Path(target).absolute()
    check_not_source(path, [packed.path])
    check_target(path, force=force)
    unfinished = path.with_name(path.name + UNPACKING_SUFFIX)
    options = _create_options(packed)
    options["on_mismatch"] = "restart" if force else "raise"
    with _named(path), create(unfinished, packed.arrays, attrs=packed.attrs, **options) as writer:
        for block in _blocks(packed, writer.missing().tolist()):
            batch = packed.gather(block)
            writer.commit_many(block, batch)
            if progress:
                progress(sum(value.nbytes for value in batch.values()))
        writer.finish()
    try:
        _check_fingerprint(unfinished, packed)
        publish_file(unfinished, path, force)
        files.sync_folder(path.parent)
    finally:
        files.remove(unfinished)
    return path


@contextlib.contextmanager
def _named(target: Path) -> Iterator[None]:
    """Have a full disk's message name what the user asked for, not the name it is built under."""
    try:
        yield
    except DiskFullError as error:
        error.path = str(target)
        raise


def _create_options(packed: PackedStore) -> dict[str, Any]:
    """What `create` needs besides arrays and attributes, after seeing that it gives the same identity."""
    constants = packed.constants
    options = {
        "constants": constants,
        "dims": {name: packed.dims[name] for name in constants},
        "identity": packed.identity.get("content", {}),
    }
    if identity_of(packed.arrays, **options) != packed.identity:
        raise FormatError(
            "its identity document isn't one of version 1.0, so no store can be made with it",
            path=packed.path,
            kind="identity_arrays",
            clause="8.1",
            hint="`ups-store verify` says what is wrong; `ups_store.packed.open_packed` reads its samples",
        )
    return options


def _check_fingerprint(path: Path, packed: PackedStore) -> None:
    fd = files.open_existing(path)
    try:
        found = fingerprint_of(read_finished(fd, path))
    finally:
        files.close(fd)
    if found != packed.catalog.packing.fingerprint:
        raise CorruptChunkError(
            "unpacking gave other bytes than were packed",
            path=packed.path,
            kind="fingerprint",
            clause="13.7",
            expected=packed.catalog.packing.fingerprint,
            found=found,
            hint="run it again: it starts anew, for the unfinished file, which may have held another store's "
            "samples, is gone; if it says this once more, pack the store again",
        )


def _blocks(packed: PackedStore, samples: list[int]) -> Iterator[list[int]]:
    specs = packed.arrays.values()
    sample_nbytes = sum(math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize for spec in specs)
    num = max(1, BLOCK_BYTES // max(1, sample_nbytes))
    for first in range(0, len(samples), num):
        yield samples[first : first + num]
