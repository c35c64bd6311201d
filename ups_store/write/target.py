"""What a conversion writes appears at once and whole: a temporary name beside the target, then a rename.

Damaged stores are refused: a copy's own checksums would hide the damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ups_store.errors import DiskFullError, SpecError, StoreNotFoundError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.base import AnyStore
from ups_store.read.recovery import BUILDING_SUFFIX
from ups_store.read.store_set import is_manifest
from ups_store.system import files, locks
from ups_store.system.replacement import create_replacement, real_place, take_over_permissions

_PROBE_BYTES = 1 << 20


@contextlib.contextmanager
def new_file(target: Path, *, force: bool = False, needed_bytes: int = 0) -> Iterator[int]:
    """Write a file under a temporary name; it becomes `target`, durably, when the block ends well.

    The temporary file is locked and named like a builder's, so `gc` lists it only when its process is dead.

    Args:
        target: Where it will be.
        force: Whether to replace what is there.
        needed_bytes: Room that it takes at most, for the message of a full disk.
    Yields:
        Its descriptor, open for writing, which is closed at the end.
    Raises:
        SpecError: If the target exists and isn't to be replaced, kind "exists".
        StoreNotFoundError: If it is a symbolic link to nothing, kind "dangling_link".
        DiskFullError: If the file system has no room for it.
    """
    target = check_target(target, force=force)
    temporary = target.with_name(f"{target.name}{BUILDING_SUFFIX}.{files.build_id()[:8].hex()}")
    fd = create_replacement(temporary, target)
    try:
        locks.try_lock(fd, BUILDER_LOCK)
        with _disk_full_as_error(target, needed_bytes):
            yield fd
            files.sync(fd)
        publish_file(fd, temporary, target, force=force)
    finally:
        files.close(fd)
        files.remove(temporary)


def publish_file(fd: int, temporary: Path, target: Path, *, force: bool) -> None:
    """Give a complete file the target's name, durably: replacing what is there, or failing if anything is."""
    if force:
        if take_over_permissions(fd, target):
            files.sync(fd)
        files.rename(temporary, target)
    else:
        try:
            files.link(temporary, target)  # unlike a rename it fails if another process was faster
        except FileExistsError as error:
            raise _exists(target) from error
    files.sync_folder(target.parent)


@contextlib.contextmanager
def new_folder(target: Path, *, marker: str, force: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Write a folder under a temporary name; it becomes `target` when the block ends well.

    Args:
        target: Where it will be.
        marker: File that a folder of this format holds; a folder without it is never replaced.
        force: Whether to replace a folder of this format that is there.
        needed_bytes: Room that it takes at most, for the message of a full disk.
    Raises:
        SpecError: If the target exists and isn't to be replaced, kind "exists".
        StoreNotFoundError: If it is a symbolic link to nothing, kind "dangling_link".
        DiskFullError: If the file system has no room for it.
    """
    target = check_target(target, force=force)
    if files.exists(target) and not (target / marker).is_file():
        hint = "remove it yourself, or choose another name"
        raise SpecError(f"it holds no {marker}, so it isn't replaced", kind="exists", path=target, hint=hint)
    temporary = target.with_name(f".{target.name}.exporting.{files.build_id()[:8].hex()}")
    os.mkdir(temporary, 0o700 if files.exists(target) else 0o777)
    try:
        with _disk_full_as_error(target, needed_bytes):
            yield temporary
            _finish_tree(temporary, target, target / marker)
        _publish_folder(temporary, target)
        files.sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _disk_full_as_error(target: Path, needed_bytes: int) -> Iterator[None]:
    """As `files.disk_full_as_error`, where nothing stays: free bytes are those of before the block."""
    free = files.free_bytes(target.parent)
    try:
        kept = "nothing was written"
        with files.disk_full_as_error(target, needed_bytes, kept=kept), _room_asked_for(target):
            yield
    except DiskFullError as error:
        error.free_bytes = free
        if error.errno != errno.EFBIG:
            error.found = f"{free:,} free when it began"
        raise


@contextlib.contextmanager
def _room_asked_for(target: Path) -> Iterator[None]:
    """Fail as the file system does if a library fails without its reason, as torch and HDF5 may."""
    try:
        yield
    except RuntimeError:
        probe = target.with_name(f".{target.name}.exporting.{files.build_id()[:8].hex()}.room")
        fd = files.create_new(probe)
        try:
            files.allocate(fd, _PROBE_BYTES)
        finally:
            files.close(fd)
            files.remove(probe)
        raise


def _publish_folder(temporary: Path, target: Path) -> None:
    """Two renames where a folder is replaced: no system call replaces a folder that isn't empty."""
    old = temporary.with_name(f"{temporary.name}.old")
    if files.exists(target):
        files.rename(target, old)
    try:
        files.rename(temporary, target)
    except OSError:
        if files.exists(old):
            files.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _finish_tree(folder: Path, replaced: Path, replaced_file: Path) -> None:
    """Make a folder durable, which takes over the permissions of another, its files those of one of that."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with files.opened(Path(parent, name)) as fd:
                take_over_permissions(fd, replaced_file)
                files.sync(fd)
        take_over_permissions(Path(parent), replaced)
        files.sync_folder(Path(parent))


def check_target(target: Path, *, force: bool = False) -> Path:
    """Refuse a target that exists, unless it is to be replaced, or whose folder doesn't exist.

    Returns:
        Where it will be: the target, or behind it where it is a symbolic link.
    Raises:
        StoreNotFoundError: If there is no such folder, or the link points to nothing.
        SpecError: Kind "exists"; kind "path" for the name of a set's manifest.
    """
    if not target.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=target.parent, hint="create it first")
    place = real_place(target)
    if is_manifest(place):
        hint = "choose a name that ends in .zarr.zip"
        raise SpecError("such a name is that of a set's manifest", kind="path", path=target, hint=hint)
    if files.exists(target) and not force:
        raise _exists(target)
    return place


def check_not_source(target: Path, sources: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse a target that is one of the files it is made from, or a folder that holds one; forced or not.

    Raises:
        SpecError: Kind "same_file".
    """
    for source in map(Path, sources):
        if _is_in(source, target):
            found = str(source)
            hint = "choose another name for what is written"
            raise SpecError(
                "it would replace its source", kind="same_file", path=target, found=found, hint=hint
            )


def _is_in(source: Path, target: Path) -> bool:
    if source.resolve().is_relative_to(target.resolve()):
        return True
    try:
        return os.path.samefile(source, target)
    except OSError:  # one of them isn't there
        return False


def _exists(target: Path) -> SpecError:
    return SpecError("it exists", kind="exists", path=target, hint="replace it with --force (force=True)")


def payload_nbytes(store: AnyStore) -> int:
    """Bytes of all arrays and constants, decoded."""
    return sum(meta.nbytes for meta in store.metas.values())


def check_sound(store: AnyStore, *, progress: Callable[[int], None] | None = None) -> None:
    """Check every byte of a finished store; see `Store.verify`.

    Raises:
        CorruptChunkError: Names the first damaged array, sample and byte range.
    """
    store.verify(progress=progress).check("damaged", hint="`ups-store verify` lists all problems")
