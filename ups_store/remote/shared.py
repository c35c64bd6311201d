"""Shared caches: finished stores by what they were made from, in a folder, a bucket, or behind a web server.

A store lies at `<hash of its identity>/<name>`, in one file or in partitions. Whoever has made the same has
made the same store, so what is there stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ups_store.errors import (
    FormatError,
    RemoteError,
    SpecError,
    StoreNotFoundError,
    check_installed,
)
from ups_store.format.zip_records import ROOT_NAME
from ups_store.read.catalog import read_directory, read_root
from ups_store.read.open import open_any
from ups_store.remote.client import DEADLINE_S, RemoteObject, list_objects, put_file, remove_object
from ups_store.remote.fetch import (
    LocalFile,
    Original,
    Progress,
    RemoteFile,
)
from ups_store.system import files
from ups_store.system.paths import SCHEMES, Url, instead_of_rclone, partition_of, path_of, shown_url, url_of

SUFFIX = ".zarr.zip"
EXPECTED = "s3://BUCKET/PREFIX, gs://..., az://... , https://... (read only), or a folder"

_KEY = re.compile(rf"[0-9a-f]{{64}}/[^/]+{re.escape(SUFFIX)}")
_GROWING = re.compile(rf"{_KEY.pattern}\.[0-9a-f]{{16}}")
_COPY_BYTES = 8 << 20  # at a time: what the file system copies by itself, such as an NFS server
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class SharedFile:
    """A file in a shared cache: of a store, or whatever else lies there."""

    key: str  # what it is called in the cache
    nbytes: int  # its length
    modified_s: float  # when it was written, in seconds since the epoch

    @property
    def config_hash(self) -> str:
        """Hash of the whole store's identity, by its key: what it really is, the file says."""
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.key.rpartition("/")[2]

    @property
    def is_of_store(self) -> bool:
        """Return whether it is a store's by its key."""
        return bool(_KEY.fullmatch(self.key))

    @property
    def is_temporary(self) -> bool:
        """Return whether a push has left it, or is writing it."""
        return bool(_GROWING.fullmatch(self.key))


class SharedCache(ABC):
    """Holds shared stores. All methods raise `StoreError` and `OSError`.

    Attributes:
        location: What it is called in messages, without secrets.
        is_read_only: Whether nothing can be pushed there.
    """

    location: str
    is_read_only = False

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """Find the files of a hash; where nothing can be listed, those of these names."""
        return [file for file in self._files(f"{config_hash}/") if file.is_of_store]

    def entries(self) -> tuple[list[SharedFile], list[SharedFile]]:
        """List all files of stores, and all others."""
        entries, strays = list[SharedFile](), list[SharedFile]()
        for file in self._files(""):
            (entries if file.is_of_store else strays).append(file)
        return entries, strays

    @abstractmethod
    def _files(self, prefix: str) -> Iterable[SharedFile]:
        """List what has such a key."""

    @abstractmethod
    def original(self, key: str) -> Original:
        """Give what a pull copies."""

    @abstractmethod
    def fingerprint(self, key: str) -> str:
        """Read the fingerprint of a store's file; see `Store.fingerprint`."""

    @abstractmethod
    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """Copy a file of this machine there in one step; False, and nothing is done, if the key is taken."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove what is at a key; nothing happens if there is none."""


class FolderCache(SharedCache):
    """A folder that several machines see, which has to be there."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder

    def original(self, key: str) -> Original:
        """See `SharedCache`."""
        return LocalFile(self._folder / key)

    def fingerprint(self, key: str) -> str:
        """See `SharedCache`."""
        with open_any(self._folder / key) as store:
            return store.fingerprint

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """See `SharedCache`; copied beside it, under a name that nobody can guess, and linked there."""
        self._check_there()
        target = self._folder / key
        if files.exists(target) and not replace:
            return False
        temporary = target.with_name(f"{target.name}.{files.build_id()[:8].hex()}")
        progress.doing("copying")
        try:
            os.makedirs(target.parent, exist_ok=True)
            with contextlib.ExitStack() as stack:
                source, fd = stack.enter_context(files.opened(path)), files.create_new(temporary)
                stack.callback(files.close, fd)
                size = files.size(source)
                for offset in range(0, size, _COPY_BYTES):
                    num = min(_COPY_BYTES, size - offset)
                    with files.disk_full_as_error(target, size - offset):
                        files.copy_range(source, offset, fd, offset, num)
                    progress.progressed(num)
                files.sync(fd)  # else a power cut could leave the name without the content
            is_first = _take_name(temporary, target, replace=replace)
        except PermissionError as error:
            problem, hint = (
                f"can't write there ({error.strerror})",
                "check the mount, and who may write there",
            )
            raise RemoteError(problem, kind="not_allowed", path=target, hint=hint) from error
        finally:
            with contextlib.suppress(OSError):
                files.remove(temporary)
        files.sync_folder(target.parent)
        return is_first

    def remove(self, key: str) -> None:
        """See `SharedCache`; also the folder that this leaves empty."""
        files.remove(self._folder / key)
        if "/" in key:
            files.remove_folder((self._folder / key).parent)

    def _check_there(self) -> None:
        """No push makes it: where a file system isn't mounted, that would hide that it is missing."""
        if not self._folder.is_dir():
            hint = "check the path and the mount, or make it"
            raise StoreNotFoundError("no such folder", path=self._folder, kind="no_cache", hint=hint)

    def _files(self, prefix: str) -> Iterator[SharedFile]:
        """List regular files."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        self._check_there()
        for at, _, names in os.walk(self._folder / prefix, onerror=fail):
            for name in sorted(names):
                path = Path(at, name)
                with contextlib.suppress(FileNotFoundError):  # removed since
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        key = path.relative_to(self._folder).as_posix()
                        yield SharedFile(key, status.st_size, status.st_mtime)


def _take_name(temporary: Path, target: Path, *, replace: bool) -> bool:
    """Give a whole copy its name, without replacing another one unless that is wanted."""
    if replace:
        files.rename(temporary, target)
        return True
    try:
        files.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if files.exists(target):
            return False
        files.rename(temporary, target)  # of two that race the last stays; both are of the same identity
    return True


class ObjectCache(SharedCache):
    """A prefix of a bucket; or behind a web server, which lists and takes nothing.

    A query of its URL, such as a signature, goes with every request.
    """

    def __init__(self, url: Url, deadline_s: float) -> None:
        self.location = shown_url(url.text).rstrip("/")
        self.is_read_only = url.is_http
        self._url = url
        self._deadline: dict[str, Any] = {"deadline_s": deadline_s}

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """See `SharedCache`."""
        if not self._url.is_http:
            return super().look(config_hash, names)
        entries = []
        for key in (f"{config_hash}/{name}" for name in names):
            with contextlib.suppress(StoreNotFoundError):
                version = RemoteObject(self._url.below(key), **self._deadline).version
                entries.append(SharedFile(key, version.nbytes, version.modified_s))
        return entries

    def original(self, key: str) -> Original:
        """See `SharedCache`."""
        return RemoteFile(self._url.below(key), name=key.rpartition("/")[2], **self._deadline)

    def fingerprint(self, key: str) -> str:
        """See `SharedCache`; of a packed store, which isn't opened by URL, as its root says it."""
        url = self._url.below(key)
        try:
            with open_any(url.text, **self._deadline) as store:
                return store.fingerprint
        except FormatError as error:
            if error.kind != "packed":
                raise
        remote = RemoteObject(url, **self._deadline)

        def read(offset: int, nbytes: int) -> bytes:
            return bytes(remote.read(offset, nbytes))

        directory = read_directory(read, remote.version.nbytes, url.path)
        root = read_root(read, url.path, directory.next_claim(ROOT_NAME, 0))
        return str((root.packed or {}).get("fingerprint"))

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """See `SharedCache`."""
        self._check_writable()
        progress.doing("uploading")
        url = self._url.below(key)
        return put_file(path, url, replace=replace, progress=progress.progressed, **self._deadline)

    def remove(self, key: str) -> None:
        """See `SharedCache`."""
        self._check_writable()
        remove_object(self._url.below(key), **self._deadline)

    def _files(self, prefix: str) -> Iterator[SharedFile]:
        if self._url.is_http:
            problem = "a web server lists nothing"
            hint = "name a store by its hash and name, as `ups-store pull URL HASH/NAME`"
            raise RemoteError(problem, kind="not_listed", path=self.location, hint=hint)
        for key, version in list_objects(self._url, prefix, **self._deadline):
            yield SharedFile(key, version.nbytes, version.modified_s)

    def _check_writable(self) -> None:
        if self._url.is_http:
            hint = "push to where the server has its files from"
            raise RemoteError("https is read only", kind="read_only", path=self.location, hint=hint)


def open_shared(location: str | Path, *, deadline_s: float = DEADLINE_S) -> SharedCache:
    """Give the shared cache at a URL or in a folder, see `EXPECTED`; nothing is asked yet."""
    target = _place_of(location)
    if isinstance(target, Path):
        return FolderCache(target)
    check_installed("obstore", extra="s3")
    return ObjectCache(target, deadline_s)


def check_location(location: str) -> str:
    """Check that it can name a shared cache, else `SpecError`; returns it, a folder absolute."""
    target = _place_of(location)
    return str(target) if isinstance(target, Path) else location


def _place_of(location: str | Path) -> Url | Path:
    """Give the URL of a location, or the folder that it is, also where that is given as file:///..."""
    text = os.fspath(location)
    url = url_of(text)
    if url is not None and not url.lower().startswith("file:"):
        parsed = Url(url)
        if parsed.scheme not in SCHEMES or not urlsplit(url).netloc:
            raise SpecError("shared cache", kind="url", path=shown_url(location), expected=EXPECTED)
        return parsed
    if url is not None:
        text = unquote(urlsplit(text).path)
    elif hint := instead_of_rclone(text):
        raise SpecError("shared cache", kind="rclone", path=text, expected=EXPECTED, hint=hint)
    return path_of(os.path.expanduser(text))


def files_of_store(entries: Sequence[SharedFile], name: str) -> list[SharedFile]:
    """Choose those of one hash that together hold a store: its file, or all of its partitions, else none."""
    by_count: dict[int, dict[int, SharedFile]] = {}
    for entry in entries:
        if entry.name == name:
            return [entry]
        partition = partition_of(entry.name)
        if partition is not None and partition.whole == name:
            by_count.setdefault(partition.count, {})[partition.number] = entry
    complete = [count for count, numbered in by_count.items() if len(numbered) == count]
    return [entry for _, entry in sorted(by_count[min(complete)].items())] if complete else []
