"""Opening stores: finished ones, unfinished ones, pickled ones.

`ups_store.open`: one file, or the partitions of a split that several machines made.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

from ups_store.errors import SpecError, StoreNotFoundError, StoreReplacedError
from ups_store.read.catalog import read_finished
from ups_store.read.partitioned import PartitionedStore
from ups_store.read.recovery import BUILDING_SUFFIX, State, building_path, read_building_file
from ups_store.read.store import Store, Verify
from ups_store.read.store_file import Access
from ups_store.system import files
from ups_store.system.memory_file import check_not_reserved, is_in_memory, keeping
from ups_store.system.paths import find_partitions, path_of


def open_store(
    path: str | os.PathLike[str],
    *,
    partial: bool = False,
    access: Access = "auto",
    verify: Verify | None = None,
) -> Store:
    """Open a store: reads its end, its directory and its metadata, and maps the rest.

    Args:
        path: A finished store, usually `<task>_<split>.zarr.zip`; with `partial` also a building file itself;
            of a store in memory what its writer calls `path`.
        partial: Whether to open what has been committed so far if there is no finished store yet.
        access: "map" copies from a mapping, "pread" reads, "auto" reads on network file systems only. A file
            that another program cuts ends the process with SIGBUS if that happens while mapped memory is
            used; with "pread" it is always a `TruncatedError`, except in views (`store[name]`).
        verify: "touch" checks a sample's CRC-32C when `sample` or `gather` use it for the first time; arrays
            without slots and constants are checked whole, also by `store[name]`. The first use of a sample
            takes about twice as long, a later one 3 µs more per array and batch (docs/performance.md).
    Raises:
        StoreNotFoundError: If there is no file; also a FileNotFoundError.
        FormatError: If it isn't a store, is damaged in its structure, or is newer than this program.
        SpecError: For another `access` or `verify`, or what can't be a path (kind "path").
    """
    if access not in ("auto", "map", "pread") or verify not in (None, "touch"):
        found = f"access={access!r}, verify={verify!r}"
        raise SpecError("argument", expected="auto, map or pread; None or touch", found=found)
    target = path_of(path)
    check_not_reserved(path)
    if is_in_memory(target):
        return _open_in_memory(keeping(target), partial, access, verify)
    if partial and target.name.endswith(BUILDING_SUFFIX):
        return _open_building(target.with_name(target.name.removesuffix(BUILDING_SUFFIX)), access, verify)
    try:
        fd = files.open_existing(target)
    except StoreNotFoundError as error:
        if not files.exists(building_path(target)):
            raise
        if partial:
            return _open_building(target, access, verify)
        error.hint = "it is being built: run the build again to finish it, or open it with partial=True"
        raise
    try:
        return Store(target, fd, read_finished(fd, target), access=access, verify=verify)
    finally:
        files.close(fd)


def _open_in_memory(path: Path, partial: bool, access: Access, verify: Verify | None) -> Store:
    """Open a store that has one name, under construction and after (spec 6.12)."""
    try:
        store = _open_building(path, access, verify)
    except StoreNotFoundError as error:
        error.hint = (
            "it was in memory, and went with its writer, the path that `finish` returned, or its process"
        )
        raise
    if store.is_partial and not partial:
        store.close()
        hint = "finish it, or open it with partial=True"
        raise StoreNotFoundError("it is being built", path=path, hint=hint)
    return store


def _open_building(path: Path, access: Access, verify: Verify | None) -> Store:
    where = building_path(path)
    fd = files.open_existing(where)
    try:
        found = read_building_file(fd, where)
        building = None if found.state is State.FINISHED else found
        return Store(path, fd, found.catalog, building=building, access=access, verify=verify)
    finally:
        files.close(fd)


def reopen(
    path: str,
    fingerprint: str | None,
    config_hash: str,
    options: dict[str, Any],
    copy_path: Path | None = None,
) -> Store:
    """What a pickled store becomes.

    Args:
        path: The store's file.
        fingerprint: What it held then; None for one under construction.
        config_hash: Its identity.
        options: Of `open_store`.
        copy_path: The copy in RAM that it gathered from, if it shares that; see `Store.preload`.
    Raises:
        StoreReplacedError: If the file doesn't hold the content that it held then.
    """
    store = None if copy_path is None else _open_copy(Path(path), copy_path, **options)
    if store is None:
        store = open_store(path, **options)
    same = store.config_hash == config_hash and fingerprint in (None, store.fingerprint)
    if not same:
        store.close()
        raise StoreReplacedError(
            "the file was replaced since this object was pickled",
            path=path,
            expected=f"content {fingerprint or config_hash}",
            found=store.fingerprint,
            hint="open it again",
        )
    return store


def _open_copy(
    path: Path, copy_path: Path, *, partial: bool, access: Access, verify: Verify | None
) -> Store | None:
    """Open another process's copy of a store; None, and a warning, if that process is gone."""
    assert not partial  # what is under construction isn't preloaded
    fd = files.open_sealed(copy_path)
    if fd is None:
        warnings.warn(f"{path}: its copy in RAM, {copy_path}, is gone: the file is used", stacklevel=3)
        return None
    try:
        return Store(path, fd, read_finished(fd, path), access=access, verify=verify, is_copy=True)
    finally:
        files.close(fd)


def open_any(
    path: str | os.PathLike[str],
    *,
    partial: bool = False,
    access: Access = "auto",
    verify: Verify | None = None,
) -> Store | PartitionedStore:
    """Open a store, or with a pattern such as `NAME-*-of-00016.zarr.zip` all its partitions as one.

    Arguments and errors are those of `ups_store.read.open.open_store`; `partial` is for single files.

    Raises:
        StoreNotFoundError: Also if partitions are missing.
        FormatError: Also if the partitions were not made from the same.
    """
    pattern = path_of(path)
    if "*" not in pattern.name or files.exists(pattern):
        return open_store(path, partial=partial, access=access, verify=verify)
    with contextlib.ExitStack() as stack:
        partitions = [
            stack.enter_context(open_store(partition, access=access, verify=verify))
            for partition in find_partitions(pattern)
        ]
        store = PartitionedStore(pattern, partitions)
        stack.pop_all()
    return store
