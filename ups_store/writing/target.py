"""What a conversion writes appears at once and whole: a temporary name beside the target, then a rename.

Damaged stores are refused: a copy's own checksums would hide the damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ups_store.errors import CommitError, DiskFullError, SpecError, StoreError, StoreNotFoundError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.base import AnyStore
from ups_store.read.recovery import BUILDING_SUFFIX
from ups_store.system import files, locks
from ups_store.system.files import create_replacement, real_place, take_over_permissions

_EXPORTING = re.compile(r"\.(.+)\.exporting\.([0-9a-f]{16})(\.old)?")


def check_target(target: Path, *, force: bool = False) -> Path:
    """Refuse a target that exists, unless it is to be replaced, or whose folder doesn't exist.

    Returns where it will be: the target, or behind it where it is a symbolic link.
    """
    if not target.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=target.parent, hint="create it first")
    real_path = real_place(target)
    if files.exists(target) and not force:
        raise _exists(target)
    return real_path


def _exists(target: Path) -> SpecError:
    return SpecError("it exists", kind="exists", path=target, hint="replace it with --force (force=True)")


def check_not_source(target: Path, sources: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse a target that is one of the files it is made from, or a folder that holds one, even forced."""
    for source in map(Path, sources):
        is_same = source.resolve().is_relative_to(target.resolve())
        with contextlib.suppress(OSError):  # one of them isn't there
            is_same = is_same or os.path.samefile(source, target)
        if is_same:
            problem, hint = "it would replace its source", "choose another name for what is written"
            raise SpecError(problem, kind="same_file", path=target, found=str(source), hint=hint)


def check_sound(store: AnyStore) -> None:
    """Check every byte of a finished store, or raise `CorruptChunkError`; see `Store.verify`."""
    store.verify().check("damaged", hint="`ups-store verify` lists all problems")


def payload_nbytes(store: AnyStore) -> int:
    """Bytes of all arrays and constants, decoded."""
    return sum(meta.nbytes for meta in store.metas.values())


def create_locked(target: Path) -> tuple[int, Path]:
    """Create the file that will take the target's place, under a temporary name, locked as by a builder.

    Returns its descriptor, which the caller owns, and its name.
    """
    while True:
        temporary = target.with_name(f"{target.name}{BUILDING_SUFFIX}.{files.build_id()[:8].hex()}")
        fd = create_replacement(temporary, target)
        try:
            if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, temporary):
                return fd, temporary
        except BaseException:
            files.close(fd)
            files.remove(temporary)
            raise
        files.close(fd)  # taken for a dead one by `remove_begun`, before it was locked


def remove_begun(target: Path) -> None:
    """Remove what killed processes left of files that `create_locked` made for a target, as far as it can."""
    begun = re.compile(re.escape(f"{target.name}{BUILDING_SUFFIX}.") + "[0-9a-f]{16}")
    for path in map(target.with_name, filter(begun.fullmatch, files.names_in(target.parent))):
        with contextlib.suppress(StoreError, OSError), files.opened(path, writable=True) as fd:
            if locks.try_lock(fd, BUILDER_LOCK):
                files.remove(path)


@contextlib.contextmanager
def new_file(target: Path, *, force: bool = False, needed_bytes: int = 0) -> Iterator[int]:
    """Write a file under a temporary name; it becomes `target`, durably, when the block ends well.

    The temporary file is locked and named like a builder's, so `gc` lists it only when its process is dead.
    `needed_bytes` is the room that it takes at most, for the message of a full disk.
    """
    target = check_target(target, force=force)
    remove_begun(target)
    with _failures_as_errors(target, needed_bytes):
        fd, temporary = create_locked(target)
        try:
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
    """Write a folder under a temporary name, as `new_file`; one without `marker` in it isn't replaced."""
    target = check_target(target, force=force)
    if files.exists(target) and not (target / marker).is_file():
        hint = "remove it yourself, or choose another name"
        raise SpecError(f"it holds no {marker}, so it isn't replaced", kind="exists", path=target, hint=hint)
    exporting = target.with_name(f".{target.name}.exporting")
    remove_begun(exporting)
    with _failures_as_errors(target, needed_bytes):
        fd, lock = create_locked(exporting)  # of a folder nothing says whose it is
        temporary = exporting.with_name(f"{exporting.name}{lock.suffix}")
        old = temporary.with_name(f"{temporary.name}.old")
        try:
            os.mkdir(temporary, 0o700 if files.exists(target) else 0o777)
            yield temporary
            for parent, _, names in os.walk(temporary):  # it takes over permissions, and becomes durable
                for name in names:
                    with files.opened(Path(parent, name)) as file:
                        take_over_permissions(file, target / marker)
                        files.sync(file)
                take_over_permissions(Path(parent), target)
                files.sync_folder(Path(parent))
            if files.exists(target):  # two renames: no system call replaces a folder that isn't empty
                files.rename(target, old)
            try:
                files.rename(temporary, target)
            except OSError:
                if files.exists(old):
                    files.rename(old, target)
                raise
            shutil.rmtree(old, ignore_errors=True)
            files.sync_folder(target.parent)
            for folder in left_exports(target.parent, target.name):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            files.close(fd)
            files.remove(lock)


def left_exports(parent: Path, name: str | None = None) -> list[Path]:
    """Find folders that killed exports left: unfinished ones, and those that a newer one replaced."""
    folders = []
    for match in filter(None, map(_EXPORTING.fullmatch, files.names_in(parent))):
        target, number, old = match.groups()
        lock = parent / f".{target}.exporting{BUILDING_SUFFIX}.{number}"
        is_needed = bool(old) and not files.exists(parent / target)
        if name in (None, target) and not is_needed and not locks.is_held(lock, BUILDER_LOCK):
            folders.append(parent / match[0])
    return folders


@contextlib.contextmanager
def _failures_as_errors(target: Path, needed_bytes: int) -> Iterator[None]:
    """Do as `commit.failures_as_errors`, where nothing stays: free bytes are those of before the block."""
    free = files.free_bytes(target.parent)
    try:
        with files.disk_full_as_error(target, needed_bytes, kept="nothing was written"):
            yield
    except DiskFullError as error:
        error.free_bytes = free
        if error.errno != errno.EFBIG:
            error.found = f"{free:,} free when it began"
        raise
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        problem = f"it was not written ({error.strerror or error})"
        raise CommitError(problem, path=target, hint="check the disk and your permissions") from error
