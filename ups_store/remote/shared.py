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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from ups_store.errors import FormatError, RemoteError, SpecError, StoreNotFoundError, check_installed
from ups_store.format.zip_records import ROOT_NAME
from ups_store.read.catalog import read_directory, read_root
from ups_store.read.open import open_any
from ups_store.remote.client import (
    DEADLINE_S,
    RemoteObject,
    list_objects,
    put_file,
    remove_object,
)
from ups_store.remote.fetch import LocalFile, Original, Progress, RemoteFile
from ups_store.system import files
from ups_store.system.paths import partition_of, path_of
from ups_store.system.urls import SCHEMES, Url, instead_of_rclone, shown_url, url_of

SUFFIX = ".zarr.zip"
EXPECTED = "s3://BUCKET/PREFIX, gs://..., az://... , https://... (read only), or a folder"

_KEY = re.compile(rf"(?P<hash>[0-9a-f]{{64}})/(?P<name>[^/]+{re.escape(SUFFIX)})")
_GROWING = re.compile(rf"{_KEY.pattern}\.[0-9a-f]{{16}}")
_COPY_BYTES = 8 << 20  # at a time: what the file system copies by itself, such as an NFS server
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class SharedFile:
    """A file in a shared cache.

    Attributes:
        config_hash: Of the whole store's identity, by its key: what it really is, the file says.
        name: Of the file.
        nbytes: Its length.
        modified_s: When it was written, in seconds since the epoch.
    """

    config_hash: str
    name: str
    nbytes: int
    modified_s: float

    @property
    def key(self) -> str:
        """What it is called in the cache."""
        return f"{self.config_hash}/{self.name}"


@dataclass(frozen=True)
class Stray:
    """What lies in a shared cache and is no store.

    Attributes:
        key: What it is called.
        nbytes: Its length.
        modified_s: When it was last written, in seconds since the epoch.
        is_temporary: Whether a push has left it, or is writing it.
    """

    key: str
    nbytes: int
    modified_s: float
    is_temporary: bool


class SharedCache(Protocol):
    """Holds shared stores. All methods raise `StoreError` and `OSError`.

    Attributes:
        location: What it is called in messages, without secrets.
        is_read_only: Whether nothing can be pushed there.
    """

    location: str
    is_read_only: bool

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """Find the files of a hash; where nothing can be listed, those of these names."""
        ...

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """List all files of stores, and all others."""
        ...

    def original(self, key: str) -> Original:
        """Give what a pull copies."""
        ...

    def fingerprint(self, key: str) -> str:
        """Read the fingerprint of a store's file; see `Store.fingerprint`."""
        ...

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """Copy a file of this machine there in one step; False, and nothing is done, if the key is taken."""
        ...

    def remove(self, key: str) -> None:
        """Remove what is at a key; nothing happens if there is none."""
        ...


class FolderCache:
    """See `SharedCache`: a folder that several machines see, which has to be there."""

    is_read_only = False

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """See `SharedCache`."""
        return _sorted_out(self._files(self._folder / config_hash))[0]

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """See `SharedCache`."""
        return _sorted_out(self._files(self._folder))

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
        try:
            os.makedirs(target.parent, exist_ok=True)
            with _created(temporary) as fd:
                _copy(path, fd, target, progress)
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

    def _files(self, folder: Path) -> Iterator[tuple[str, int, float]]:
        """Key, length and time of regular files."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        self._check_there()
        for at, _, names in os.walk(folder, onerror=fail):
            for name in sorted(names):
                path = Path(at, name)
                with contextlib.suppress(FileNotFoundError):  # removed since
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield path.relative_to(self._folder).as_posix(), status.st_size, status.st_mtime


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    fd = files.create_new(path)
    try:
        yield fd
    finally:
        files.close(fd)


def _copy(path: Path, fd: int, target: Path, progress: Progress) -> None:
    progress.doing("copying")
    with files.opened(path) as source:
        size = files.size(source)
        for offset in range(0, size, _COPY_BYTES):
            num = min(_COPY_BYTES, size - offset)
            with files.disk_full_as_error(target, size - offset):
                files.copy_range(source, offset, fd, offset, num)
            progress.progressed(num)


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


class ObjectCache:
    """See `SharedCache`: a prefix of a bucket; or behind a web server, which lists and takes nothing.

    Args:
        url: Of its root; a query, such as a signature, goes with every request.
        deadline_s: For one request, with all its attempts.
    """

    def __init__(self, url: Url, deadline_s: float) -> None:
        self.location = shown_url(url.text).rstrip("/")
        self.is_read_only = url.is_http
        self._url = url
        self._deadline: dict[str, Any] = {"deadline_s": deadline_s}

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """See `SharedCache`."""
        if not self._url.is_http:
            return self._listed(f"{config_hash}/")[0]
        entries = []
        for name in names:
            url = self._url.below(f"{config_hash}/{name}")
            with contextlib.suppress(StoreNotFoundError):
                version = RemoteObject(url, **self._deadline).version
                entries.append(SharedFile(config_hash, name, version.nbytes, version.modified_s))
        return entries

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """See `SharedCache`."""
        if self._url.is_http:
            hint = "name a store by its hash and name, as `ups-store pull URL HASH/NAME`"
            problem = "a web server lists nothing"
            raise RemoteError(problem, kind="not_listed", path=self.location, hint=hint)
        return self._listed("")

    def original(self, key: str) -> Original:
        """See `SharedCache`."""
        return RemoteFile(self._url.below(key), name=key.rpartition("/")[2], **self._deadline)

    def fingerprint(self, key: str) -> str:
        """See `SharedCache`."""
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

    def _listed(self, prefix: str) -> tuple[list[SharedFile], list[Stray]]:
        objects = list_objects(self._url, prefix, **self._deadline)
        return _sorted_out((key, version.nbytes, version.modified_s) for key, version in objects)

    def _check_writable(self) -> None:
        if self._url.is_http:
            hint = "push to where the server has its files from"
            raise RemoteError("https is read only", kind="read_only", path=self.location, hint=hint)


def _sorted_out(objects: Iterator[tuple[str, int, float]]) -> tuple[list[SharedFile], list[Stray]]:
    """Tell files of stores from others by their keys."""
    entries, strays = [], []
    for key, nbytes, modified_s in objects:
        if match := _KEY.fullmatch(key):
            entries.append(SharedFile(match["hash"], match["name"], nbytes, modified_s))
        else:
            strays.append(Stray(key, nbytes, modified_s, is_temporary=bool(_GROWING.fullmatch(key))))
    return entries, strays


def open_shared(location: str | Path, *, deadline_s: float = DEADLINE_S) -> SharedCache:
    """Give the shared cache at a URL or in a folder; nothing is asked yet.

    Args:
        location: See `EXPECTED`.
        deadline_s: For one request to a server, with all its attempts.
    Raises:
        SpecError: For another kind of URL.
        MissingExtraError: For an object store, where obstore isn't installed.
    """
    url = _url_of(location)
    if url is None:
        return FolderCache(_folder(location))
    check_installed("obstore", extra="s3")
    return ObjectCache(url, deadline_s)


def check_location(location: str) -> str:
    """Check that it can name a shared cache; returns it, a folder absolute.

    Raises:
        SpecError: Kind "url".
    """
    return location if _url_of(location) else str(_folder(location))


def _url_of(location: str | Path) -> Url | None:
    """Give the URL of a location; None for a folder, also for one that is given as file:///..."""
    text = url_of(location)
    if text is None or text.lower().startswith("file:"):
        return None
    url = Url(text)
    if url.scheme not in SCHEMES or not urlsplit(text).netloc:
        raise SpecError("shared cache", kind="url", path=shown_url(location), expected=EXPECTED)
    return url


def _folder(location: str | Path) -> Path:
    text = os.fspath(location)
    if text.lower().startswith("file:"):
        text = unquote(urlsplit(text).path)
    elif hint := instead_of_rclone(text):
        raise SpecError("shared cache", kind="rclone", path=text, expected=EXPECTED, hint=hint)
    return path_of(os.path.expanduser(text))


def files_of_store(entries: Sequence[SharedFile], name: str) -> list[SharedFile]:
    """Choose those of the entries, all of one hash, that together hold a store; empty if it isn't there.

    Args:
        entries: What there is.
        name: The store's file name, `NAME.zarr.zip`; its partitions will do, if they are complete.
    """
    by_count: dict[int, dict[int, SharedFile]] = {}
    for entry in entries:
        if entry.name == name:
            return [entry]
        partition = partition_of(entry.name)
        if partition is not None and partition.whole == name:
            by_count.setdefault(partition.count, {})[partition.number] = entry
    complete = [count for count, numbered in by_count.items() if len(numbered) == count]
    return [entry for _, entry in sorted(by_count[min(complete)].items())] if complete else []
