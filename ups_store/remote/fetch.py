"""Copies of sources and of stores: whole or not there, continued where they stopped.

An `Original` is a file of another file system or an object behind a URL. Its copy has a folder of its own,
named by where it comes from: in it are the file, the record `staged.json` of what it is of, and while it
grows `NAME.part`, and `part.json` with how much of it a power cut leaves. All runs use these names, so what a
dead one has left is continued or used again. Everything here may hang, and runs in a reader process.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from ups_store.errors import (
    ConfigError,
    RemoteError,
    SourceError,
    StoreError,
    StoreReplacedError,
)
from ups_store.remote.client import DEADLINE_S, RemoteObject, Version, list_objects
from ups_store.sources.contents import changed
from ups_store.system import files, locks
from ups_store.system.files import replace_text
from ups_store.system.parallel import in_order
from ups_store.system.paths import SCHEMES, Url

EXPECTED = "s3://BUCKET/..., gs://..., az://... or https://HOST/..."
RETRIES = 2  # of what brings no byte

_RECORD, _GROWING_RECORD, _GROWING = "staged.json", "part.json", ".part"
_MAX_RECORD_BYTES = 1 << 20
_MAX_NAME_BYTES = 240  # with what is appended while a copy grows
_CHUNK_BYTES = 1 << 20  # stays in the processor's cache between reading, hashing and writing
_RANGE_BYTES = 4 << 20
_RANGES_IN_FLIGHT = 8  # one connection gives a tenth of what a machine's network takes
_SYNC_BYTES = 256 << 20  # the most that a power cut costs
_FIRST_PAUSE_S = 0.5  # before another attempt; it doubles
_LOCK_POLL_S = 0.05
_LOCK_AT = 1 << 62  # a byte that no copy has, so that the lock is of the file and not of its bytes
_DIGITS = {"": 0, "sha256": 64, "md5": 32}
_SUFFIXES = (".h5", ".hdf5")
_MAX_DEPTH = 5  # names of folders and of the file, as where a folder of this machine is looked through
_MAX_LISTED_BYTES = 150_000  # what an answer of a reader may hold

Body: TypeAlias = tuple[int, Iterable[bytes | memoryview]]  # where it begins, and its bytes to the end


class ChangedError(Exception):
    """What is there isn't the version that was asked for."""


class Progress(Protocol):
    """Hears how it goes, such as a `ups_store.sources.reader_process.Reader`."""

    def doing(self, what: str) -> None:
        """Something else is done from now on, such as "copying"."""

    def progressed(self, num: int = 0) -> None:
        """It gets on, by so many bytes."""


class Original(Protocol):
    """What is copied. Methods raise `OSError` and `StoreError`."""

    location: str  # what it is called in messages, without secrets
    key: str  # what tells it from others: the expected digest, if there is one, else where it is
    digest: str  # what it has to be, such as "sha256:9f86..."; "" if nothing says it

    def look(self) -> Version | None:
        """Find out what is there; None if nothing is."""

    def read(self, start: int, version: Version) -> Body:
        """Give its bytes from there on, or from 0 where there is no other beginning; or `ChangedError`."""
        ...


class LocalFile:
    """A file of another file system of this machine, such as a network mount."""

    digest = ""

    def __init__(self, path: Path) -> None:
        self.path, self.location, self.key = path, str(path), os.path.abspath(path)

    def look(self) -> Version | None:
        """Find out its size and time of modification."""
        try:
            with _told_apart(self.location):
                status = os.stat(self.path)
        except ChangedError:
            return None
        return Version(status.st_size, f"mtime_ns {status.st_mtime_ns}", self.path.name, status.st_mtime)

    def read(self, start: int, version: Version) -> Body:
        """Read on; that a read doesn't return is noticed by the reader's supervisor."""

        def chunks(offset: int) -> Iterator[bytes]:
            with _told_apart(self.location), files.opened(self.path) as fd:
                files.advise_sequential(fd)
                while chunk := files.read_at(fd, offset, _CHUNK_BYTES):
                    yield chunk
                    offset += len(chunk)

        return start, chunks(start)


class RemoteFile:
    """An object behind a URL; its copy is called as is said here, else as the URL or the server says."""

    def __init__(self, url: Url, digest: str = "", name: str = "", *, deadline_s: float = DEADLINE_S) -> None:
        self.url, self.digest, self.name, self.deadline_s = url, digest, name, deadline_s
        self.location = str(url.path)
        self.key = digest or self.location
        if url.is_http and not digest:  # its query tells objects apart, and may hold a secret
            parts = urlsplit(url.text)
            text = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
            self.key = f"url {hashlib.sha256(text.encode()).hexdigest()}"

    def look(self) -> Version | None:
        """Find out its size, ETag and name."""
        try:
            with _told_apart(self.location):
                version = RemoteObject(self.url, deadline_s=self.deadline_s).version
        except ChangedError:
            return None
        ending = PurePosixPath(self.url.key).name
        is_said = self.name or ending.endswith(_SUFFIXES) or not version.name
        name = (self.name or ending) if is_said else version.name
        return replace(version, name=checked_name(name, location=self.location))

    def read(self, start: int, version: Version) -> Body:
        """Read several ranges at a time; all of it where the server knows no ranges."""
        from concurrent.futures import ThreadPoolExecutor

        remote = RemoteObject(self.url, deadline_s=self.deadline_s, version=version)
        end = version.nbytes
        ranges = [(at, min(_RANGE_BYTES, end - at)) for at in range(start, end, _RANGE_BYTES)]

        def stream() -> Iterator[memoryview]:
            with _told_apart(self.location):
                yield from remote.stream()

        def others() -> Iterator[memoryview]:
            with (
                _told_apart(self.location),
                ThreadPoolExecutor(_RANGES_IN_FLIGHT, thread_name_prefix="ups_store fetch") as pool,
            ):
                yield from in_order(
                    pool, lambda each: remote.read(*each), ranges[1:], ahead=_RANGES_IN_FLIGHT
                )

        try:
            with _told_apart(self.location):
                first = remote.read(*ranges[0]) if ranges else memoryview(b"")
        except RemoteError as error:
            if error.kind != "no_ranges":
                raise
            return 0, stream()
        return start, itertools.chain([first], others())


@contextlib.contextmanager
def _told_apart(location: str) -> Iterator[None]:
    """Make an original that went or is another one a `ChangedError`, one that may not be read ours."""
    try:
        yield
    except (StoreReplacedError, FileNotFoundError):
        raise ChangedError from None
    except PermissionError as error:
        problem, hint = f"source can't be read ({error.strerror})", "check its permissions"
        raise SourceError(problem, kind="unreadable", path=location, hint=hint) from error


def original_of(text: str, *, deadline_s: float = DEADLINE_S) -> RemoteFile:
    """Give what a URL names.

    What follows "#" isn't sent: `#sha256=...` or `#md5=...` says what the file has to be, and `#name=...`
    what it is called.
    """
    address, _, fragment = text.partition("#")
    url = checked_url(address)
    words = dict(parse_qsl(fragment, keep_blank_values=True))
    name = words.pop("name", "")
    kind, value = next(iter(words.items()), ("", ""))
    is_digest = kind in _DIGITS and re.fullmatch(rf"[0-9a-fA-F]{{{_DIGITS[kind]}}}", value)
    if len(words) > 1 or not is_digest or (fragment and not (kind or name)):
        raise ConfigError(
            "what follows # in the URL of a source",
            kind="bad_fragment",
            path=address,
            expected="sha256=64 hexadecimal digits, or md5=32; name=a file's name",
            found=repr(fragment),
        )
    if name:
        checked_name(name, location=str(url.path))
    digest = f"{kind}:{value.lower()}" if kind else ""
    return RemoteFile(url, digest, name, deadline_s=deadline_s)


def checked_url(text: str) -> Url:
    """Give a URL of sources; `ConfigError` of kind "unknown_scheme" for one that no client is for."""
    url = Url(text)
    if url.scheme not in SCHEMES:
        problem = f"sources can't be fetched by {url.scheme}://"
        hint = "copy them to one of these, or here"
        raise ConfigError(problem, kind="unknown_scheme", path=text, expected=EXPECTED, hint=hint)
    return url


def checked_name(name: str, *, location: str) -> str:
    """Give the name, unless it is a path, or that of a record beside copies: kind "bad_name"."""
    is_plain = "/" not in name and name.isprintable() and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    taken = (_RECORD, _GROWING_RECORD, _GROWING)
    if not name or not is_plain or name.startswith(".") or name.endswith(taken):
        problem, hint = "it has no name that a copy can have", "say one: add #name=burgers1d_train.h5"
        raise SourceError(problem, kind="bad_name", path=location, found=repr(name), hint=hint)
    return name


def folder_of_copy(folder: Path, original: Original) -> Path:
    """Give the folder of a copy, so that it can have the original's own name, which identities hold."""
    return folder / hashlib.sha256(original.key.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def find_copy(folder: Path, original: Original, version: Version | None = None) -> Path | None:
    """Find the copy in the folder made for it, if it is whole, untouched, and of that version.

    Any version will do where None is given: of an original whose digest is expected.
    """
    record = _read_json(folder / _RECORD)
    try:
        path = folder / checked_name(record["name"], location=original.location)
        of = Version(record["size"], record["tag"], record["name"])
        digests = {"", f"sha256:{record['sha256']}", f"md5:{record['md5']}"}
        is_same = record["key"] == original.key and files.last_write(path) == tuple(record["state"])
    except (TypeError, KeyError, AttributeError, SourceError):
        return None
    if version is not None and (of, of.name) != (version, version.name):
        return None
    return path if is_same and original.digest in digests else None


def num_there(folder: Path, version: Version) -> int:
    """Count bytes of an unfinished copy that needn't be fetched again."""
    written = files.last_write(folder / f"{version.name}{_GROWING}")
    return min(written[0], version.nbytes) if written else 0


def forget_copy(folder: Path) -> None:
    """Remove a copy with all that lies beside it."""
    for name in files.names_in(folder):
        files.remove(folder / name)
    files.remove_folder(folder)


def fetch(
    progress: Progress, original: Original, version: Version, folder: Path, retries: int = RETRIES
) -> int:
    """Have a whole copy in a folder of its own, and count the bytes that this call fetched.

    One that another process makes is waited for. After `retries` more attempts that bring no byte it is a
    `SourceError`, or a `RemoteError`; what changes time and again is a `SourceError`.
    """
    files.make_folder(folder, hint="check data.stage_dir")
    files.check_no_link(folder)
    with _claimed(folder / f"{version.name}{_GROWING}", progress) as (growing, fd):
        if find_copy(folder, original, version) is not None:
            files.remove(growing)
            files.remove(folder / _GROWING_RECORD)
            return 0
        progress.doing("copying")
        return _Fetch(original, version, growing, fd, retries, progress).run()


@contextlib.contextmanager
def _claimed(growing: Path, progress: Progress) -> Iterator[tuple[Path, int]]:
    """Open and lock an unfinished copy; while another process has it, that has to get on."""
    progress.doing("waiting")
    size = -1
    while True:
        fd = files.open_or_create(growing)
        try:
            if locks.try_lock(fd, _LOCK_AT) and files.is_file_at(fd, growing):
                yield growing, fd
                return
            if (now := files.size(fd)) != size:
                size = now
                progress.progressed()
        finally:
            files.close(fd)
        time.sleep(_LOCK_POLL_S)


class _Fetch:
    """One copy in the making, in a file that is locked."""

    def __init__(
        self, original: Original, version: Version, growing: Path, fd: int, retries: int, progress: Progress
    ) -> None:
        self._original, self._version, self._growing, self._fd = original, version, growing, fd
        self._folder, self._retries, self._progress = growing.parent, retries, progress
        self._offset = self._num_fetched = self._synced = 0
        self._hashers: dict[str, Any] = {}

    def run(self) -> int:
        """Fetch what is missing, look at it, and give it its name."""
        kind, _, expected = self._original.digest.partition(":")
        for is_last in (not self._resume(), True):
            self._get_rest()
            digest = self._hashers[kind].hexdigest() if kind else ""
            if digest == expected:
                break
            self._start_again()  # where it was resumed: the beginning was of something else, unnoticed
            if is_last:
                raise SourceError(
                    f"its {kind} isn't the one that was expected",
                    kind="wrong_digest",
                    path=self._original.location,
                    expected=expected,
                    found=digest,
                    hint="check the digest, and that nothing on the way changes what is fetched",
                )
        with files.disk_full_as_error(self._growing, 0):
            files.sync(self._fd)  # else the name could come to stand for a copy with holes
        record = {
            "key": self._original.key,
            "location": self._original.location,
            **self._of(),
            "sha256": self._hashers["sha256"].hexdigest(),
            "md5": self._hashers["md5"].hexdigest() if "md5" in self._hashers else "",
            "state": files.last_write(self._growing),
        }
        replace_text(self._folder / _RECORD, json.dumps(record, indent=1), follow=False)
        files.rename(self._growing, self._folder / self._version.name)
        files.remove(self._folder / _GROWING_RECORD)
        files.sync_folder(self._folder)
        return self._num_fetched

    def _resume(self) -> bool:
        """Go on with what an earlier run has left, if it is of this version."""
        record = _read_json(self._folder / _GROWING_RECORD)
        synced = record.get("synced")
        self._synced = synced if isinstance(synced, int) else 0
        size = files.size(self._fd)
        if record.get("boot_id") != files.boot_id().hex():  # what wasn't synced may be zeros
            size = min(size, self._synced)
        is_same = record.get("key") == self._original.key and record.get("version") == self._of()
        # A record of more bytes than there are is one whose copy went: it must not vouch for those to come.
        if not (is_same and self._is_known and self._synced <= size <= self._version.nbytes):
            self._start_again()
            return False
        self._hashers = self._new_hashers()
        files.truncate(self._fd, size)
        self._record()
        while self._offset < size:
            self._took(files.read_at(self._fd, self._offset, min(_CHUNK_BYTES, size - self._offset)))
        return size > 0

    @property
    def _is_known(self) -> bool:
        """Return whether anything would show that a rest is of another version than the beginning."""
        return bool(self._version.tag or self._original.digest)

    def _of(self) -> dict[str, Any]:
        return {"size": self._version.nbytes, "tag": self._version.tag, "name": self._version.name}

    def _new_hashers(self) -> dict[str, Any]:
        kinds = {"sha256", self._original.digest.partition(":")[0] or "sha256"}
        return {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}

    def _start_again(self) -> None:
        """Begin with nothing; what vouches for bytes that were there goes before they do."""
        files.remove(self._folder / _GROWING_RECORD)
        if self._synced:
            files.sync_folder(self._folder)  # else a power cut could bring it back, with other bytes there
        files.truncate(self._fd, 0)
        self._offset = self._synced = 0
        self._hashers = self._new_hashers()
        self._record()

    def _record(self) -> None:
        """Write what the copy is of, and how many of its bytes are durable."""
        record = {"key": self._original.key, "version": self._of(), "synced": self._synced}
        record["boot_id"] = files.boot_id().hex()
        replace_text(self._folder / _GROWING_RECORD, json.dumps(record), follow=False)

    def _took(self, chunk: bytes | memoryview) -> None:
        for hasher in self._hashers.values():
            hasher.update(chunk)
        self._offset += len(chunk)
        self._progress.progressed(len(chunk))

    def _get_rest(self) -> None:
        """Attempt after attempt, as long as one of a few brings something."""
        num_failed = num_changed = furthest = 0
        while True:
            failure: Exception | None = None
            try:
                if self._offset < self._version.nbytes:
                    self._take(*self._original.read(self._offset, self._version))
                if self._offset == self._version.nbytes:
                    if self._original.look() == self._version:
                        return
                    raise ChangedError  # since the first byte
            except ChangedError:  # begin again with what is there now
                num_changed, furthest = num_changed + 1, 0
                version = self._original.look()
                if num_changed > self._retries or version is None:
                    raise changed(self._original.location) from None
                self._version = replace(version, name=self._version.name)
                self._start_again()
                continue
            except RemoteError as error:
                if error.kind != "unreachable" or self._offset <= furthest:  # it was tried again already
                    raise
            except (OSError, StoreError) as error:
                # What is of the network or a disk may pass, not what is of ours or of where the copy goes to.
                if isinstance(error, StoreError | FileNotFoundError | PermissionError | IsADirectoryError):
                    raise
                failure = error
            num_failed = 0 if self._offset > furthest else num_failed + 1
            furthest = max(furthest, self._offset)
            if num_failed > self._retries:
                raise SourceError(
                    f"it can't be fetched ({failure})" if failure else "the bytes end early, time and again",
                    kind="unreachable" if failure else "cut_short",
                    path=self._original.location,
                    expected=f"{self._version.nbytes:,} bytes",
                    found=f"{self._offset:,}",
                    hint="check the network and the place, and run again to go on from there",
                )
            time.sleep(_FIRST_PAUSE_S * 2 ** max(0, num_failed - 1) * random.uniform(0.5, 1.0))
            if not self._is_known:
                self._start_again()

    def _take(self, start: int, chunks: Iterable[bytes | memoryview]) -> None:
        if start != self._offset:
            self._start_again()
        for chunk in chunks:
            missing = self._version.nbytes - self._offset
            if len(chunk) > missing:
                raise SourceError(
                    "there are more bytes than were announced",
                    kind="wrong_length",
                    path=self._original.location,
                    expected=f"{self._version.nbytes:,} bytes",
                    found="more",
                    hint="wait until no program writes to it, and run again",
                )
            with files.disk_full_as_error(self._growing, missing):
                files.write_at(self._fd, self._offset, chunk)
            self._num_fetched += len(chunk)
            self._took(chunk)
            if self._offset - self._synced >= _SYNC_BYTES:
                with files.disk_full_as_error(self._growing, self._version.nbytes - self._offset):
                    files.sync_data(self._fd)
                self._synced = self._offset
                self._record()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with files.opened(path) as fd:
            values = json.loads(files.read_at(fd, 0, _MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):  # absent or damaged: the copy is made again
        return {}
    return values if isinstance(values, dict) else {}


def look(progress: Progress, original: Original, is_guess: bool) -> Version | None:
    """Find out what is there, in a reader process; some servers say "forbidden" instead of "not found"."""
    progress.doing("asking")
    try:
        return original.look()
    except RemoteError as error:
        if is_guess and error.kind == "not_allowed":
            return None
        raise


def list_sources(progress: Progress, root: Url, deadline_s: float) -> list[tuple[str, Version]]:
    """List the HDF5 files below a remote folder, to four folders deep, in a reader process."""
    progress.doing("listing")
    sources = [
        (path, version)
        for path, version in list_objects(root, deadline_s=deadline_s)
        if path.endswith(_SUFFIXES) and len(PurePosixPath(path).parts) <= _MAX_DEPTH
    ]
    if len(pickle.dumps(sources)) > _MAX_LISTED_BYTES:
        raise SourceError(
            "too many files to look through",
            kind="too_many_files",
            path=root.path,
            found=f"{len(sources):,} files",
            hint="name a folder further below by data.root, or files by data.files",
        )
    return sources
