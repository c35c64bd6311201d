"""Opening stores: `open_any`, which is `ups_store.open`, takes every kind, `open_store` mapped files only."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ups_store import module_above
from ups_store.errors import (
    FormatError,
    SpecError,
    StoreNotFoundError,
    StoreReplacedError,
    TruncatedError,
)
from ups_store.printable import printable
from ups_store.read.base import AnyStore
from ups_store.read.catalog import read_finished
from ups_store.read.recovery import (
    BUILDING_SUFFIX,
    State,
    building_path,
    read_building_file,
    read_is_spool,
)
from ups_store.read.several import PartitionedStore, files_of
from ups_store.read.store import SpoolStore, Store, Verify
from ups_store.read.store_file import Access
from ups_store.system import files
from ups_store.system.files import is_in_memory
from ups_store.system.memory import check_not_reserved, keeping
from ups_store.system.paths import check_one_file, is_pattern, is_remote, path_of, shown_url


def open_any(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    partial: bool = False,
    access: Access = "auto",
    verify: Verify | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: float | None = None,
    deadline_s: float | None = None,
) -> AnyStore:
    """Open a store of any kind, here or at a URL.

    One file is a `Store`, mapped; a packed file a `PackedStore`, which decodes. Several files are one
    `PartitionedStore`: the partitions that `NAME-*-of-00016.zarr.zip` names, the stores that another pattern,
    such as `NAME-*.zarr.zip`, matches, in the order of their names, and those of a list, in its order. At
    `s3://`, `gs://`, `az://` or `https://` one file is a `RemoteStore`, which fetches what is asked for and
    checks it; partitions and a list are as here.

    Args:
        path: A file, or a pattern; the URL of one; or a list of files and URLs.
        partial: See `ups_store.read.open.open_store`; for single files.
        access: Likewise; a packed file can't be opened with "map".
        verify: Likewise; of a packed file and at a URL every chunk is checked whatever this says.
        cache_dir: At a URL the folder that keeps what was fetched, for all stores and processes of this
            machine; by default that of UPS_STORE_CACHE_DIR, without it nothing is kept.
        cache_bytes: What that folder may take on its disk; by default what UPS_STORE_CACHE_BYTES says, else
            half of what is free.
        deadline_s: Seconds until a request, with all attempts at it, is an error; by default
            UPS_STORE_DEADLINE_S, else 60.
    Raises:
        StoreNotFoundError: If there is no file, or partitions are missing; also a FileNotFoundError.
        RemoteError: If an object store refuses, or doesn't answer before the deadline.
        FormatError: If it isn't a store, is damaged in its structure, or is newer than this program; if
            partitions were not made from the same.
        SpecError: For arguments that have no meaning.
    """
    remote_options = {"cache_dir": cache_dir, "cache_bytes": cache_bytes, "deadline_s": deadline_s}
    if isinstance(path, list | tuple):
        options: dict[str, Any] = {"access": access, "verify": verify, **remote_options}
        return _open_several(None, [functools.partial(open_any, location, **options) for location in path])
    where = cast("str | os.PathLike[str]", path)  # or what isn't one, which `path_of` says
    if is_remote(where):
        if access != "auto" or verify not in (None, "touch"):
            actual, expected = f"access={access!r}, verify={verify!r}", "auto; None or touch"
            raise SpecError("argument", path=shown_url(where), expected=expected, found=actual)
        remote = module_above("remote")
        opened: AnyStore = remote.open_url(where, remote.RemoteOptions.of(**remote_options))
        return opened
    if names := " and ".join(name for name, value in remote_options.items() if value is not None):
        problem, hint = f"{names} without effect", f"leave out {names}"
        raise SpecError(problem, kind="no_effect", path=where, expected="a URL", found=where, hint=hint)
    pattern = path_of(where)
    if not is_pattern(pattern):
        return _open_file(where, partial, access, verify, is_packed_taken=True)
    openings = [
        functools.partial(_open_file, location, False, access, verify, is_packed_taken=True)
        for location in files_of(pattern)
    ]
    return _open_several(pattern, openings)


# What users call it, in the errors of Python, in `help` and in pickles.
open_any.__module__, open_any.__name__, open_any.__qualname__ = "ups_store", "open", "open"


def _open_several(pattern: Path | None, openings: Sequence[functools.partial[AnyStore]]) -> PartitionedStore:
    """Open several stores as one; of a list, which has no pattern, the first one's path stands for it."""
    if not openings:
        hint = "give at least one path"
        raise SpecError("no stores", kind="partitions", expected="a path, or a list of them", hint=hint)
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(opening()) for opening in openings]
        joined = PartitionedStore(stores[0].path if pattern is None else pattern, stores)
        stack.pop_all()
    return joined


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
            takes about twice as long, a later one 3 µs more per array and batch.
    Raises:
        StoreNotFoundError: If there is no file; also a FileNotFoundError.
        FormatError: If it isn't a store, is damaged in its structure, or is newer than this program; if it is
            packed, kind "packed".
        SpecError: For another `access` or `verify`, what can't be a path (kind "path"), or a pattern of
            several files (kind "partitions").
    """
    store = _open_file(path, partial, access, verify, is_packed_taken=False)
    assert isinstance(store, Store)
    return store


def _open_file(
    path: str | os.PathLike[str],
    partial: bool,
    access: Access,
    verify: Verify | None,
    *,
    is_packed_taken: bool,
) -> AnyStore:
    """Open one file, by one look at the path: another process may replace what is there at any moment."""
    if access not in ("auto", "map", "pread") or verify not in (None, "touch"):
        actual = f"access={access!r}, verify={verify!r}"
        raise SpecError("argument", expected="auto, map or pread; None or touch", found=actual)
    target = path_of(path)
    check_not_reserved(path)
    check_one_file(target)
    if is_in_memory(target):
        return _open_in_memory(keeping(target), partial, access, verify)
    if partial and target.name.endswith(BUILDING_SUFFIX):
        return _open_building(target.with_name(target.name.removesuffix(BUILDING_SUFFIX)), access, verify)
    try:
        fd = files.open_existing(target)
    except StoreNotFoundError as error:
        if not files.exists(building_path(target)):
            if error.kind == StoreNotFoundError.kind and files.exists(target):  # published this moment
                return _open_file(path, partial, access, verify, is_packed_taken=is_packed_taken)
            raise
        if partial:
            return _open_building(target, access, verify)
        error.hint = "it is being built: run the build again to finish it, or open it with partial=True"
        raise
    try:
        return Store(target, fd, read_finished(fd, target), access=access, verify=verify)
    except TruncatedError as error:
        if target.name.endswith(BUILDING_SUFFIX):
            error.hint = "it is being built: run the same again to finish it, or open it with partial=True"
        raise
    except FormatError as error:
        if error.kind != "packed" or not is_packed_taken:
            raise
        if access == "map":
            error.hint = "leave out `access`, or unpack it with `ups-store unpack`"
            raise
        packed: AnyStore = module_above("packed").open_descriptor(target, fd)
        return packed
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
    with files.opened(where) as fd:
        building = read_building_file(fd, where)
        catalog, is_finished = building.catalog, building.state is State.FINISHED
        kind = Store if is_finished or not read_is_spool(fd, catalog.layout) else SpoolStore
        unfinished = None if is_finished else building
        return kind(path, fd, catalog, building=unfinished, access=access, verify=verify)


def reopen(path: str, fingerprint: str | None, config_hash: str, options: dict[str, Any]) -> AnyStore:
    """Open again what was pickled; a copy in RAM of another process if that is still there."""
    copy_path = options.pop("copy_path", None)
    store: AnyStore
    fd = None if copy_path is None else files.open_sealed(copy_path)
    if fd is not None:
        try:
            del options["partial"]  # what is under construction isn't preloaded
            store = Store(Path(path), fd, read_finished(fd, Path(path)), **options, is_copy=True)
        finally:
            files.close(fd)
    else:
        if copy_path is not None:
            gone = f"{path}: its copy in RAM, {copy_path}, is gone: the file is used"
            warnings.warn(printable(gone), stacklevel=2)
        store = open_any(path, **options)
    content = store.config_hash if fingerprint is None else store.fingerprint
    if content != (fingerprint or config_hash):
        store.close()
        raise StoreReplacedError(
            "it was replaced since this object was pickled",
            path=store.path,
            expected=f"content {fingerprint or config_hash}",
            found=content,
            hint="open it again",
        )
    return store
