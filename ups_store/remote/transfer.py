"""`push_store` and `pull_store`: whole stores to a shared cache and from it.

What is pushed was verified before. What is pulled is believed only by its own content: its bytes by a digest
while they come, or by the checksums in the file, and what it was made from by the identity in the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ups_store.errors import (
    DiskFullError,
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreError,
    StoreNotFoundError,
)
from ups_store.format.zip_records import END_BYTES, parse_end
from ups_store.read.open import open_any
from ups_store.read.partitioned import PartitionedStore, parts_of
from ups_store.remote.shared_cache import SUFFIX, SharedCache, SharedFile, files_of_store
from ups_store.remote.shared_place import DEADLINE_S
from ups_store.sources.attempts import Attempts, persistently
from ups_store.sources.copies import num_there
from ups_store.sources.download import Progress, fetch
from ups_store.sources.origins import CHUNK_BYTES, ChangedError, Origin, Version
from ups_store.sources.staging import folder_of_copy
from ups_store.system import files, locks
from ups_store.system.paths import partition_of, partitions_pattern
from ups_store.system.replacement import check_not_read_only, real_place, take_over_permissions

PULLS = ".pulls"  # folder beside the stores for what isn't whole yet


@dataclass(frozen=True)
class Pushed:
    """What became of one file.

    Attributes:
        path: The file.
        config_hash: Of the whole store.
        key: Its place in the shared cache.
        nbytes: Its length.
        is_new: Whether this push has put it there; else it was there.
    """

    path: Path
    config_hash: str
    key: str
    nbytes: int
    is_new: bool


def push_store(path: Path, cache: SharedCache, *, replace: bool = False, progress: Progress) -> list[Pushed]:
    """Push a store, every file of it that isn't there yet.

    Args:
        path: A finished file, or the pattern of partitions.
        cache: Where.
        replace: Whether to replace what is there, such as a damaged file.
        progress: Hears how it goes; twice the bytes of what is pushed: verified, and sent.
    Raises:
        CorruptChunkError: If the store is damaged.
        SpecError: For another name of a file.
        IdentityMismatchError: If other content of the same identity is there, kind "other_content".
        StoreError: If it can't be opened; as the cache.
    """
    with open_any(path) as store:
        parts = parts_of(store)
        names = [part.path.name for part in parts]
        there = {entry.name: entry for entry in cache.look(store.config_hash, names)}
        pushed = []
        for part in parts:
            name = part.path.name
            if not name.endswith(SUFFIX):
                raise SpecError("name of a file that is pushed", path=part.path, expected=f"NAME{SUFFIX}")
            key, is_new = f"{store.config_hash}/{name}", False
            if replace or name not in there:
                _verify(part.path, progress)
                is_new = cache.create(key, part.path, replace=replace, progress=progress)
            if not is_new and not replace:
                entry = there.get(name, SharedFile(store.config_hash, name, part.nbytes, 0.0))
                _check_same(part.path, cache.origin(entry))
            pushed.append(Pushed(part.path, store.config_hash, key, part.nbytes, is_new))
    return pushed


def _check_same(path: Path, origin: Origin) -> None:
    """Refuse to take other content for a store's own: compares the ends, which hold all checksums."""
    version = origin.look(stall_s=DEADLINE_S)
    with files.opened(path) as fd:
        size = files.size(fd)
        end = files.read_at(fd, max(0, size - CHUNK_BYTES), CHUNK_BYTES)
    if version is not None and version.size == size:
        with origin.opened(size - len(end), version, stall_s=DEADLINE_S) as body:
            if b"".join(body.chunks) == end:
                return
    raise IdentityMismatchError(
        "another store of the same identity is there",
        kind="other_content",
        path=origin.location,
        expected=f"the content of {path}, {size:,} bytes",
        found="nothing" if version is None else f"other content, {version.size:,} bytes",
        hint="have what tells them apart in the identity, or replace it there with --force",
    )


def find_store(cache: SharedCache, config_hash: str, name: str) -> list[SharedFile]:
    """The files of a store that a shared cache holds, in order; empty if it isn't there.

    Args:
        cache: Where to look.
        config_hash: Hash of the store's identity.
        name: The store's file name, `NAME.zarr.zip`; partitions of it will do, too.
    """
    return files_of_store(cache.look(config_hash, [name]), name)


def pull_store(
    cache: SharedCache,
    entries: Sequence[SharedFile],
    folder: Path,
    *,
    attempts: Attempts,
    progress: Progress,
    replace: bool = False,
) -> Path:
    """Pull a store into a folder; what a killed pull has left is used again.

    Args:
        cache: Where it is.
        entries: Its files, as `find_store` gives them.
        folder: Where it goes, which is made.
        attempts: How long and how often.
        progress: Hears how it goes, in bytes.
        replace: Whether a store of another identity in its place is replaced.
    Returns:
        What opens it: its file, or the pattern of its partitions.
    Raises:
        StoreNotFoundError: If an entry isn't there any more.
        IdentityMismatchError: If its identity isn't the one of its place, kind "other_identity"; if a store
            of another one lies in the folder.
        CorruptChunkError: If it is damaged.
        StoreError: As `download.fetch`, and as the cache.
    """
    place = _place_of(folder, entries)
    wanted = entries[0].config_hash
    files.make_folder(folder, hint="check the folder")
    with contextlib.suppress(StoreError), open_any(place) as there:
        if there.config_hash == wanted:
            return place
    with _claimed(place):
        copies = [_fetch(cache, entry, folder, attempts, progress) for entry in entries]
        _check_identity(copies, entries, wanted, cache)
        landing = [(copy, folder / entry.name) for (copy, _), entry in zip(copies, entries, strict=True)]
        if not replace:
            for each in landing:
                _check_may_replace(*each)
        for each in landing:
            _land(*each)
    return place


def is_pulling(folder: Path) -> bool:
    """Whether a process pulls a store into the folder."""
    return any(_is_locked(path) for path in (folder / PULLS).glob("*.lock"))


def _is_locked(path: Path) -> bool:
    try:
        with files.opened(path, writable=True) as fd:
            return locks.is_locked(fd, 0)
    except (StoreNotFoundError, PermissionError):
        return False


@contextlib.contextmanager
def _claimed(place: Path) -> Iterator[None]:
    """Show other processes that the store is being pulled, as far as that can be."""
    path = place.parent / PULLS / f"{place.name.replace('*', 'all')}.lock"
    fd = _opened_lock(path)
    try:
        locks.try_lock(fd, 0)  # if another process has it, that one shows it, and `fetch` waits for its bytes
        yield
    finally:
        files.remove(path)
        files.close(fd)
        files.remove_folder(path.parent)


def _opened_lock(path: Path) -> int:
    while True:
        files.make_folder(path.parent, hint="check the folder")
        files.check_no_link(path.parent)
        with contextlib.suppress(FileNotFoundError):  # another pull has just ended, and removed the folder
            return files.open_or_create(path)


def _place_of(folder: Path, entries: Sequence[SharedFile]) -> Path:
    partition = partition_of(entries[0].name)
    if len(entries) == 1 or partition is None:
        return folder / entries[0].name
    return partitions_pattern(folder / partition.whole, partition.count)


def _fetch(
    cache: SharedCache, entry: SharedFile, folder: Path, attempts: Attempts, progress: Progress
) -> tuple[Path, Path]:
    """Have a copy that is sound, under its own name in a folder of its own; returns both."""
    origin = cache.origin(entry)
    own = folder_of_copy(folder / PULLS, origin)
    version = _look(origin, attempts)
    try:
        with files.disk_full_as_error(own.parent, version.size):
            if version.size - num_there(own, version) > files.free_bytes(folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _check_end(origin, version, attempts)
        fetch(origin, version, own, attempts=attempts, reader=progress)
    except StoreError as error:
        if error.kind == "wrong_digest" or isinstance(error, DiskFullError):  # others need the room
            _forget(own)
        raise
    copy = own / version.name
    if not origin.digest:
        try:
            _verify(copy, progress)
        except StoreError as error:
            _forget(own)
            error.path = origin.location
            error.hint = "replace it there by `ups-store push --overwrite`"
            raise
    return copy, own


def _check_end(origin: Origin, version: Version, attempts: Attempts) -> None:
    """Refuse what doesn't end as a store does, before all of it is fetched; `FormatError`."""

    def look() -> bytes:
        start = max(0, version.size - END_BYTES)
        with origin.opened(start, version, stall_s=attempts.stall_s) as body:
            return b"".join(body.chunks)

    with contextlib.suppress(ChangedError):  # `fetch` follows
        end = persistently(look, origin=origin.location, attempts=attempts)
        parse_end(end, version.size, path=origin.location)


def _look(origin: Origin, attempts: Attempts) -> Version:
    def look() -> Version | None:
        return origin.look(stall_s=attempts.stall_s)

    version = persistently(look, origin=origin.location, attempts=attempts)
    if version is None:
        hint = "look with `ups-store ls-remote`"
        raise StoreNotFoundError("it isn't there any more", path=origin.location, hint=hint)
    return version


def _forget(own: Path) -> None:
    """Remove a copy and all that lies beside it."""
    for name in files.names_in(own):
        files.remove(own / name)
    files.remove_folder(own)


def _verify(path: Path, progress: Progress) -> None:
    """Check every byte of a file: `CorruptChunkError` with the first problem."""
    progress.doing("verifying")
    with open_any(path) as store:
        report = store.verify(progress=lambda nbytes: progress.progressed())
    report.check("it is damaged", hint="`ups-store verify` lists all of it")


def _check_identity(
    copies: Sequence[tuple[Path, Path]], entries: Sequence[SharedFile], wanted: str, cache: SharedCache
) -> None:
    """Refuse what isn't what its place says, and forget it."""
    try:
        found = _hash_of([copy for copy, _ in copies])
    except StoreError:
        for _, own in copies:
            _forget(own)
        raise
    if found == wanted:
        return
    for _, own in copies:
        _forget(own)
    raise IdentityMismatchError(
        "it was made from something else than its place says",
        kind="other_identity",
        path=f"{cache.location}/{entries[0].key}",
        expected=wanted[:12],
        found=found[:12],
        hint="remove it there, and push what belongs there",
    )


def _hash_of(paths: Sequence[Path]) -> str:
    """Hash of the identity of one file, or of partitions together."""
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(open_any(path)) for path in paths]
        return stores[0].config_hash if len(stores) == 1 else PartitionedStore(paths[0], stores).config_hash


def _land(copy: Path, path: Path) -> None:
    """Give a sound copy its place, by a rename; all of it is on the disk already."""
    place = real_place(path)
    if files.exists(place):
        check_not_read_only(place, hint="make it writable with chmod u+w")
        take_over_permissions(copy, place)
    files.rename(copy, place)
    files.sync_folder(place.parent)
    _forget(copy.parent)


def _check_may_replace(copy: Path, path: Path) -> None:
    """Refuse to replace a store of another identity than the copy's, or what is none."""
    if not files.exists(path):
        return
    wanted, found = _hash_of([copy])[:12], "what is no store"
    with contextlib.suppress(FormatError):
        found = _hash_of([path])[:12]
    if found != wanted:
        raise IdentityMismatchError(
            "something else is in its place",
            path=path,
            expected=wanted,
            found=found,
            hint="move it away, or replace it with --overwrite",
        )
