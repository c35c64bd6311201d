"""Where a source is before it lies on a local disk: a file of another file system, a URL, an rclone remote.

An `Origin` says what is there and gives its bytes from any place on; `download` makes a file of them.
Everything here runs in a reader process, where it may hang; only what looks at names alone doesn't wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from ups_store.errors import ConfigError, SourceError
from ups_store.system import files

RECORDS = ("part.json", "staged.json", ".part")  # ends of the names of what lies beside copies
_MAX_NAME_BYTES = 240  # with what is appended while a copy grows
CHUNK_BYTES = 1 << 20  # stays in the processor's cache between reading, hashing and writing
DIGEST_CHARACTERS = {"sha256": 64, "md5": 32}
_SCHEMES = ("https", "http", "s3")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")
# Two characters at least: "c:/data" is none. `:http:` and `name,option=value:` are what rclone takes, too.
_RCLONE = re.compile(r"(:?[\w.+@-][\w.+@ -]+(,[^:/]+)?):")
EXPECTED = "https://..., http://..., s3://bucket/..., or an rclone remote such as name:folder"


class TransientError(Exception):
    """What may go better next time, such as a server that is busy.

    Attributes:
        pause_s: How long the other side asks to be left alone; 0 if it doesn't say.
    """

    def __init__(self, problem: str, *, pause_s: float = 0.0) -> None:
        super().__init__(problem)
        self.pause_s = pause_s


class ChangedError(Exception):
    """What is there isn't the version that was asked for."""


@dataclass(frozen=True)
class Version:
    """What tells a source from the one that took its place.

    Attributes:
        size: Bytes.
        tag: ETag, time of modification or the like; "" where the other side says nothing, and then nothing
            of an unfinished copy is used again.
        name: What the file is called there, as stores' identities name it.
    """

    size: int
    tag: str
    name: str = field(compare=False)


class Body(NamedTuple):
    """Bytes of a source.

    Attributes:
        start: Place of the first of them: as asked for, or 0 where there is no beginning elsewhere.
        version: What they are of.
        chunks: The bytes, to the end of the source.
    """

    start: int
    version: Version
    chunks: Iterator[bytes] | Iterator[memoryview]


class Listed(NamedTuple):
    """A file below a remote folder; its path is relative to that."""

    path: str
    version: Version


class Origin(Protocol):
    """A place that a source comes from. All methods raise `OSError`, `TransientError` or `SourceError`."""

    @property
    def location(self) -> str:
        """What it is called in messages, without secrets."""
        ...

    @property
    def key(self) -> str:
        """What tells it from other places: the expected digest, if there is one, else the place itself."""
        ...

    @property
    def digest(self) -> str:
        """What it has to be, such as "sha256:9f86..."; "" if nothing says it."""
        ...

    def look(self, *, stall_s: float) -> Version | None:
        """What is there; None if nothing is."""
        ...

    def opened(self, start: int, version: Version, *, stall_s: float) -> AbstractContextManager[Body]:
        """Its bytes from `start` on, if it still is that version; `ChangedError` if it isn't.

        Args:
            start: Place of the first byte that is wanted.
            version: What `look` has found.
            stall_s: How long to wait for the next bytes.
        """
        ...


@dataclass(frozen=True)
class NamedOrigin:
    """What origins have in common whose place alone says where and what they are, such as `s3://bucket/key`.

    Attributes:
        place: Without fragment.
        digest: See `Origin`.
        name: What the file is called.
    """

    place: str
    digest: str
    name: str

    @property
    def location(self) -> str:
        """The place, which has no secrets."""
        return self.place

    @property
    def key(self) -> str:
        """The digest that is expected, or the place."""
        return self.digest or self.place


class Folder(Protocol):
    """A remote folder that can be listed."""

    @property
    def location(self) -> str:
        """As `Origin.location`."""
        ...

    def files(self, *, stall_s: float) -> Sequence[Listed]:
        """All files below it."""
        ...

    def origin(self, path: str) -> Origin:
        """A file below it."""
        ...


def is_remote(text: object, *, folder: Path | str = "") -> bool:
    """Whether it names something that isn't a file of this machine: a URL, or an rclone remote.

    Args:
        text: As it was given.
        folder: What a path would be relative to; a file that is there is meant, whatever its name looks like.
    """
    if not isinstance(text, str):
        return False
    if _URL.match(text):
        return not text.lower().startswith("file://")
    match = _RCLONE.match(text)
    if match is None:
        return False
    return not any(os.path.lexists(os.path.join(folder, each)) for each in (text, text.partition("/")[0]))


def names_remote(lists: Iterable[Iterable[str]], folder: Path | str) -> bool:
    """Whether any name in any of the lists is remote; others are relative to the folder."""
    return any(is_remote(name, folder=folder) for names in lists for name in names)


def joined(root: str, name: str) -> str:
    """A file below a remote folder."""
    if urlsplit(root).query and _URL.match(root):
        parts = urlsplit(root)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))
    return f"{root}{name}" if root.endswith((":", "/")) else f"{root}/{name}"


def path_for_choosing(text: str, name: str, *, below: str) -> Path:
    """A remote file as a path whose folders and name decide of which split it is.

    Args:
        text: Its place, or a path below a remote folder.
        name: Of the file.
        below: A folder of its own, as two places may have equal paths.
    """
    path = unquote(urlsplit(text).path) if _URL.match(text) else text.partition("#")[0].rpartition(":")[2]
    return Path(PurePosixPath("/", below, *PurePosixPath("/", path).parts[1:-1], name))


def checked_name(name: str, *, location: str) -> str:
    """The name, if a copy of this machine may have it: no path, and not that of a record beside copies.

    Raises:
        SourceError: Kind "bad_name".
    """
    is_plain = "/" not in name and name.isprintable() and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    if not name or not is_plain or name.startswith(".") or name.endswith(RECORDS):
        raise SourceError(
            "it has no name that a copy can have",
            kind="bad_name",
            path=location,
            found=repr(name),
            hint="say one: add #name=burgers1d_train.h5",
        )
    return name


@dataclass(frozen=True)
class LocalOrigin:
    """A file of another file system of this machine, such as a network mount."""

    path: Path
    digest: str = ""

    @property
    def location(self) -> str:
        """Its path."""
        return str(self.path)

    @property
    def key(self) -> str:
        """Its path."""
        return os.path.abspath(self.path)

    def look(self, *, stall_s: float) -> Version | None:
        """Size and time of modification."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise self._unreadable(error) from error
        return Version(status.st_size, f"mtime_ns {status.st_mtime_ns}", self.path.name)

    @contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        """Its bytes; that a read doesn't return is noticed by the reader's supervisor."""
        try:
            fd = files.open_existing(self.path)
        except FileNotFoundError:
            raise ChangedError from None
        except PermissionError as error:
            raise self._unreadable(error) from error
        try:
            files.advise_sequential(fd)
            yield Body(start, version, _chunks(fd, start))
        finally:
            files.close(fd)

    def _unreadable(self, error: OSError) -> SourceError:
        problem = f"source can't be read ({error.strerror})"
        return SourceError(problem, kind="unreadable", path=self.path, hint="check its permissions")


def _chunks(fd: int, start: int) -> Iterator[bytes]:
    while chunk := files.read_at(fd, start, CHUNK_BYTES):
        yield chunk
        start += len(chunk)


def scheme_of(place: str) -> str:
    """Scheme of a URL; empty for an rclone remote.

    Raises:
        ConfigError: Kind "unknown_scheme".
    """
    match = _URL.match(place)
    if match is None:
        return ""
    scheme = match["scheme"].lower()
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"sources can't be fetched by {scheme}://",
            kind="unknown_scheme",
            path=place,
            expected=EXPECTED,
            hint="rclone knows many more kinds of storage: `rclone config` makes a remote",
        )
    return scheme


def without_fragment(text: str) -> tuple[str, str, str]:
    """The place, the expected digest, and the name that it says."""
    place, _, fragment = text.partition("#")
    said = dict(parse_qsl(fragment, keep_blank_values=True)) if fragment else {}
    name = said.pop("name", "")
    digests = [f"{kind}:{value.lower()}" for kind, value in said.items() if _is_digest(kind, value)]
    if len(said) > 1 or len(digests) < len(said) or (fragment and not (said or name)):
        raise ConfigError(
            "what follows # in a source's place",
            kind="bad_fragment",
            path=place,
            expected="sha256=64 hexadecimal digits, or md5=32; name=a file's name",
            found=repr(fragment),
        )
    return place, "".join(digests), checked_name(name, location=place) if name else ""


def _is_digest(kind: str, value: str) -> bool:
    return re.fullmatch(rf"[0-9a-fA-F]{{{DIGEST_CHARACTERS.get(kind, 0)}}}", value) is not None and bool(
        value
    )


def name_of(place: str) -> str:
    """What the file at a place is called, by the place alone."""
    path = unquote(urlsplit(place).path) if _URL.match(place) else place.rpartition(":")[2]
    return checked_name(PurePosixPath(path).name, location=place)
