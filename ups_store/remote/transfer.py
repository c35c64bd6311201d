"""Stores on their way to a shared cache and from it: `push_store`, `pull_store`, and which ones are meant.

What is pushed was verified before. What is pulled is believed only by its own content: its bytes by the
checksums in the file, and what it was made from by the identity in the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from ups_store.read.several import PartitionedStore, parts_of
from ups_store.remote.fetch import ChangedError, Progress, fetch, folder_of_copy, forget_copy, num_there
from ups_store.remote.shared import SUFFIX, SharedCache, SharedFile, files_of_store, open_shared
from ups_store.system import files, locks
from ups_store.system.files import check_not_read_only, real_place, take_over_permissions
from ups_store.system.paths import partition_of, partitions_pattern

PULLS = ".pulls"  # folder beside the stores for what isn't whole yet

_FULL = re.compile(r"(?P<hash>[0-9a-f]{64})/(?P<name>[^/]+)")
_HASH = re.compile(r"[0-9a-f]{6,64}")  # of fewer digits it may be a name
_SHOWN = 8
_LEAST_BYTES = 4 << 20  # within a deadline; what brings less isn't worth waiting for
_ALIVE_S = 86_400.0  # a push that is going on writes sooner; there are no locks that all machines see


@dataclass(frozen=True)
class Pushed:
    """What became of one file."""

    path: Path  # the file
    config_hash: str  # of the whole store
    key: str  # what it is called in the shared cache
    nbytes: int  # its length
    is_new: bool  # whether this push has put it there; else it was there


def push_store(path: Path, cache: SharedCache, *, replace: bool = False, progress: Progress) -> list[Pushed]:
    """Push a store, every file of it that isn't there yet, or that is to be replaced, once it is verified.

    What is there has to be the same, else `IdentityMismatchError` of kind "other_content".
    """
    with open_any(path) as store:
        parts = parts_of(store)
        for part in parts:
            if not part.path.name.endswith(SUFFIX):
                raise SpecError("name of a file that is pushed", path=part.path, expected=f"NAME{SUFFIX}")
        there = {entry.name for entry in cache.look(store.config_hash, [part.path.name for part in parts])}
        pushed = []
        for part in parts:
            key, is_new = f"{store.config_hash}/{part.path.name}", False
            if replace or part.path.name not in there:
                _check_copy(part.path, progress)
                is_new = cache.create(key, part.path, replace=replace, progress=progress)
            if not is_new:
                _check_same(part.fingerprint, cache, key)
            pushed.append(Pushed(part.path, store.config_hash, key, part.nbytes, is_new))
    return pushed


def _check_copy(path: Path, progress: Progress) -> None:
    """Check every byte of a file: `CorruptChunkError` with the first problem."""
    progress.doing("verifying")
    with open_any(path) as store:
        report = store.verify(progress=lambda nbytes: progress.progressed())
    report.check("it is damaged", hint="`ups-store verify` lists all of it")


def _check_same(fingerprint: str, cache: SharedCache, key: str) -> None:
    there = cache.fingerprint(key)
    if there != fingerprint:
        raise IdentityMismatchError(
            "another store of the same identity is there",
            kind="other_content",
            path=f"{cache.location}/{key}",
            expected=f"fingerprint {fingerprint[:12]}",
            found=there[:12],
            hint="have what tells them apart in the identity, or replace it there with --force",
        )


# --- pulling ------------------------------------------------------------------------------------------


def find_store(cache: SharedCache, config_hash: str, name: str) -> list[SharedFile]:
    """Find the files of a store, `NAME.zarr.zip` or partitions of it, in order; empty if it isn't there."""
    return files_of_store(cache.look(config_hash, [name]), name)


def pull_store(
    cache: SharedCache,
    entries: Sequence[SharedFile],
    folder: Path,
    *,
    progress: Progress,
    replace: bool = False,
) -> Path:
    """Pull a store into a folder, and give what opens it; what a killed pull has left is used again.

    `IdentityMismatchError` if its identity isn't the one of its key, kind "other_identity", or if a store of
    another one is in its place and isn't to be replaced.
    """
    partition = partition_of(entries[0].name)
    target = folder / entries[0].name
    if partition is not None and len(entries) > 1:
        target = partitions_pattern(folder / partition.whole, partition.count)
    files.make_folder(folder, hint="check the folder")
    for is_last in (False, True):
        with contextlib.suppress(StoreError), open_any(target) as there:
            if there.config_hash == entries[0].config_hash:
                break
        try:
            with _shown_as_pulled(target):
                copies = [_fetch(cache, entry, folder, progress) for entry in entries]
                _check_hash(copies, cache, entries)
                pairs = [(copy, folder / entry.name) for copy, entry in zip(copies, entries, strict=True)]
                for copy, path in pairs if not replace else ():
                    _check_may_replace(copy, path)
                for copy, path in pairs:
                    _land(copy, path)
            break
        except FileNotFoundError:  # another pull that was waited for has landed, and removed what it shared
            if is_last:
                raise
    return target


def is_pulling(folder: Path) -> bool:
    """Say whether a process pulls a store into the folder."""
    for path in (folder / PULLS).glob("*.lock"):
        with (
            contextlib.suppress(StoreNotFoundError, PermissionError),
            files.opened(path, writable=True) as fd,
        ):
            if locks.is_locked(fd, 0):
                return True
    return False


@contextlib.contextmanager
def _shown_as_pulled(target: Path) -> Iterator[None]:
    """Show other processes that the store is being pulled, as far as that can be."""
    path = target.parent / PULLS / f"{target.name.replace('*', 'all')}.lock"
    fd = -1
    while fd < 0:
        files.make_folder(path.parent, hint="check the folder")
        files.check_no_link(path.parent)
        with contextlib.suppress(FileNotFoundError):  # another pull has just ended, and removed the folder
            fd = files.open_or_create(path)
    try:
        locks.try_lock(fd, 0)  # if another process has it, that one shows it, and `fetch` waits for its bytes
        yield
    finally:
        if locks.try_lock(fd, 0) and files.is_file_at(fd, path):  # else it shows another pull
            files.remove(path)
        files.close(fd)
        files.remove_folder(path.parent)


def _fetch(cache: SharedCache, entry: SharedFile, folder: Path, progress: Progress) -> Path:
    """Have a copy that is sound, under its own name in a folder of its own."""
    original = cache.original(entry.key)
    copy_folder = folder_of_copy(folder / PULLS, original)
    version = original.look()
    if version is None:
        hint = "look with `ups-store ls-remote`"
        raise StoreNotFoundError("it isn't there any more", path=original.location, hint=hint)
    try:
        with files.disk_full_as_error(copy_folder.parent, version.nbytes):
            if version.nbytes - num_there(copy_folder, version) > files.free_bytes(folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with contextlib.suppress(ChangedError):  # `fetch` follows; what is no store is refused before that
            start, chunks = original.read(max(0, version.nbytes - END_BYTES), version)
            if start or version.nbytes <= END_BYTES:  # else the server gives no ranges
                parse_end(b"".join(chunks), version.nbytes, path=original.location)
        fetch(progress, original, version, copy_folder)
    except DiskFullError:  # others need the room
        forget_copy(copy_folder)
        raise
    copy = copy_folder / version.name
    try:
        _check_copy(copy, progress)
    except StoreError as error:
        forget_copy(copy_folder)
        error.path = original.location
        error.hint = "replace it there by `ups-store push --force`"
        raise
    return copy


def _check_hash(copies: Sequence[Path], cache: SharedCache, entries: Sequence[SharedFile]) -> None:
    """Refuse what isn't what its key says, and forget it."""
    try:
        config_hash, expected = _hash_of(copies), entries[0].config_hash
        if config_hash != expected:
            raise IdentityMismatchError(
                "it was made from something else than its name there says",
                kind="other_identity",
                path=f"{cache.location}/{entries[0].key}",
                expected=expected[:12],
                found=config_hash[:12],
                hint="remove it there, and push what belongs there",
            )
    except StoreError:
        for copy in copies:
            forget_copy(copy.parent)
        raise


def _hash_of(paths: Sequence[Path]) -> str:
    """Hash of the identity of one file, or of partitions together."""
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(open_any(path)) for path in paths]
        return stores[0].config_hash if len(stores) == 1 else PartitionedStore(paths[0], stores).config_hash


def _check_may_replace(copy: Path, path: Path) -> None:
    """Refuse to replace a store of another identity than the copy's, or what is none."""
    if not files.exists(path):
        return
    expected, there = _hash_of([copy])[:12], "what is no store"
    with contextlib.suppress(FormatError):
        there = _hash_of([path])[:12]
    if there != expected:
        problem, hint = "something else is in its place", "move it away, or replace it with --force"
        raise IdentityMismatchError(problem, path=path, expected=expected, found=there, hint=hint)


def _land(copy: Path, path: Path) -> None:
    """Give a sound copy its place, by a rename; all of it is on the disk already."""
    target = real_place(path)
    if files.exists(target):
        check_not_read_only(target, hint="make it writable with chmod u+w")
        take_over_permissions(copy, target)
    files.rename(copy, target)
    files.sync_folder(target.parent)
    forget_copy(copy.parent)


# --- the same for a build, in a reader process ---------------------------------------------------------


def find_there(
    progress: Progress, location: str, deadline_s: float, config_hash: str, name: str
) -> list[SharedFile]:
    """Find a store's files; see `find_store`."""
    progress.doing("asking")
    return find_store(open_shared(location, deadline_s=deadline_s), config_hash, name)


def compare_there(
    progress: Progress, location: str, deadline_s: float, path: Path, entries: Sequence[SharedFile]
) -> None:
    """Compare a store with what is there, where it has the same files; raises as `push_store`."""
    progress.doing("asking")
    cache, names = open_shared(location, deadline_s=deadline_s), {entry.name for entry in entries}
    with open_any(path) as store:
        for part in parts_of(store):
            if part.path.name in names:
                _check_same(part.fingerprint, cache, f"{store.config_hash}/{part.path.name}")


def pull_from(
    progress: Progress, location: str, deadline_s: float, entries: Sequence[SharedFile], folder: Path
) -> str:
    """Pull a store; see `pull_store`. One of another identity is replaced, as a build does."""
    cache = open_shared(location, deadline_s=deadline_s)
    return str(pull_store(cache, entries, folder, progress=_Paced(progress), replace=True))


def push_to(progress: Progress, location: str, deadline_s: float, path: Path) -> bool:
    """Push a store; see `push_store`."""
    cache = open_shared(location, deadline_s=deadline_s)
    return any(file.is_new for file in push_store(path, cache, progress=_Paced(progress)))


class _Paced:
    """Has a transfer get on only as fast as is worth it: by `_LEAST_BYTES` within a deadline."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num = 0

    def doing(self, what: str) -> None:
        """See `Progress`."""
        self._progress.progressed(self._num)
        self._num = 0
        self._progress.doing(what)

    def progressed(self, num: int = 0) -> None:
        """See `Progress`; no bytes are work on this machine, which has no least speed."""
        self._num += num
        if not num or self._num >= _LEAST_BYTES:
            self._progress.progressed(self._num)
            self._num = 0


# --- which stores there are, and what can go ----------------------------------------------------------


@dataclass(frozen=True)
class SharedStore:
    """A store in a shared cache."""

    config_hash: str  # of its identity, by its key
    name: str  # of the whole, `NAME.zarr.zip`
    files: tuple[SharedFile, ...]  # its file, or all of its partitions, in order

    @property
    def nbytes(self) -> int:
        """Length of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def modified_s(self) -> float:
        """When the last file was written, in seconds since the epoch."""
        return max(file.modified_s for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "config_hash": self.config_hash,
            "name": self.name,
            "nbytes": self.nbytes,
            "modified_s": self.modified_s,
            "files": [file.key for file in self.files],
        }


def list_stores(cache: SharedCache) -> list[SharedStore]:
    """List all whole stores, by name and then by hash."""
    return _stores_among(cache.entries()[0])


def _stores_among(entries: Sequence[SharedFile]) -> list[SharedStore]:
    groups: dict[tuple[str, str], list[SharedFile]] = {}
    for entry in entries:
        partition = partition_of(entry.name)
        name = entry.name if partition is None else partition.whole
        groups.setdefault((name, entry.config_hash), []).append(entry)
    stores = []
    for (name, config_hash), group in sorted(groups.items()):
        whole = files_of_store(group, name)
        if not whole and len(group) == 1:  # a partition that was pushed alone, by the machine that made it
            whole = group
        if whole:
            stores.append(SharedStore(config_hash, name if len(whole) > 1 else whole[0].name, tuple(whole)))
    return stores


def choose_stores(cache: SharedCache, words: Sequence[str]) -> list[SharedStore]:
    """Find the stores that words name: NAME, HASH or its beginning, or HASH/NAME; all if there are none."""
    exact = [match for match in map(_FULL.fullmatch, words) if match]
    chosen: dict[tuple[str, str], SharedStore] = {}
    if words and len(exact) == len(words):  # then nothing has to be listed
        for match in exact:
            config_hash, name = match["hash"], _with_suffix(match["name"])
            entries = find_store(cache, config_hash, name)
            if not entries:
                raise _not_there(cache, f"{config_hash}/{name}", [])
            chosen[config_hash, name] = SharedStore(config_hash, name, tuple(entries))
        return list(chosen.values())
    stores = list_stores(cache)
    if not words:
        return stores
    for word in words:
        first, slash, name = word.rpartition("/")
        named = [entry for entry in stores if entry.name == _with_suffix(name)]
        if slash:
            meant = [entry for entry in named if entry.config_hash.startswith(first)]
        else:
            is_hash = _HASH.fullmatch(word)
            meant = named or [entry for entry in stores if is_hash and entry.config_hash.startswith(word)]
        if not meant:
            raise _not_there(cache, word, stores)
        hashes = sorted({entry.config_hash for entry in meant})
        if len(hashes) > 1:
            raise SpecError(
                f"{word} is the name of {len(hashes)} stores",
                kind="ambiguous",
                path=cache.location,
                expected="one",
                found=", ".join(entry[:12] for entry in hashes[:_SHOWN]),
                hint="say which one, as HASH/NAME",
            )
        chosen |= {(entry.config_hash, entry.name): entry for entry in meant}
    return list(chosen.values())


def _with_suffix(name: str) -> str:
    return name if name.endswith(SUFFIX) else f"{name}{SUFFIX}"


def _not_there(cache: SharedCache, word: str, stores: Sequence[SharedStore]) -> StoreNotFoundError:
    names = sorted({store.name.removesuffix(SUFFIX) for store in stores})
    listed, hint = ", ".join(names[:_SHOWN]) or None, "`ups-store ls-remote` lists what there is"
    return StoreNotFoundError(f"no store {word}", path=cache.location, found=listed, hint=hint)


@dataclass(frozen=True)
class RemoteGarbage:
    """A file that may go from a shared cache."""

    key: str  # what it is called
    # "temporary": of a push that was killed, or is going on; "incomplete": some of the partitions of a store;
    # "old": of a store, written longer ago than was asked for; "foreign": nothing of ours.
    kind: Literal["temporary", "incomplete", "old", "foreign"]
    nbytes: int  # its length
    age_s: float  # seconds since it was written

    @property
    def is_removable(self) -> bool:
        """Return whether it isn't of another program, or of a push that may be going on."""
        return self.kind != "foreign" and (self.kind == "old" or self.age_s > _ALIVE_S)


def find_remote_garbage(cache: SharedCache, *, older_than_s: float | None = None) -> list[RemoteGarbage]:
    """Find what can go: what dead pushes left, and, where an age is given, stores that are older."""
    entries, strays = cache.entries()
    whole = {file.key for store in _stores_among(entries) for file in store.files}
    now_s, garbage = time.time(), []
    for file in sorted([*entries, *strays], key=lambda each: each.key):
        age_s = max(0.0, now_s - file.modified_s)
        kind: Literal["temporary", "incomplete", "old", "foreign"]
        if not file.is_of_store:
            kind = "temporary" if file.is_temporary else "foreign"
        elif file.key not in whole:
            kind = "incomplete"
        elif older_than_s is not None and age_s > older_than_s:
            kind = "old"
        else:
            continue
        garbage.append(RemoteGarbage(file.key, kind, file.nbytes, age_s))
    return garbage
