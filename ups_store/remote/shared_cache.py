"""A shared cache: finished stores by what they were made from, in a bucket, a folder, or behind a web server.

A store lies at `<hash of its identity>/<name>`, in one file or in partitions. What is there is never
overwritten, as whoever made the same has made the same store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from ups_store.errors import SpecError, check_installed
from ups_store.sources.download import Progress
from ups_store.sources.origins import Origin
from ups_store.system.paths import partition_of, path_of, shown_url, url_of

SUFFIX = ".zarr.zip"
TEMPORARY = "pushing"  # stands in the names of what isn't whole yet
DEADLINE_S = 60.0  # without progress
EXPECTED = "s3://BUCKET/PREFIX, gs://..., az://..., https://... (read only), or a folder"

_KEY = re.compile(rf"(?P<hash>[0-9a-f]{{64}})/(?P<name>[^/]+{re.escape(SUFFIX)})")


@dataclass(frozen=True)
class Entry:
    """A file in a shared cache.

    Attributes:
        config_hash: Of the whole store's identity, by its place: what it really is, the file says.
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
        """Its place in the cache."""
        return f"{self.config_hash}/{self.name}"

    @classmethod
    def at(cls, key: str, nbytes: int, modified_s: float) -> Entry | None:
        """The entry of a key; None for the key of something else."""
        match = _KEY.fullmatch(key)
        return cls(match["hash"], match["name"], nbytes, modified_s) if match else None


@dataclass(frozen=True)
class Stray:
    """What lies in a shared cache and is no store.

    Attributes:
        key: Its place.
        nbytes: Its length.
        modified_s: When it was last written, in seconds since the epoch.
        is_temporary: Whether a push has left it, or is writing it.
        upload_id: Of an upload in parts that was begun; else "".
    """

    key: str
    nbytes: int
    modified_s: float
    is_temporary: bool
    upload_id: str = ""


class SharedCache(Protocol):
    """A place of shared stores. All methods raise `StoreError` and `OSError`.

    Attributes:
        location: What it is called in messages, without secrets.
        is_read_only: Whether nothing can be pushed there.
    """

    location: str
    is_read_only: bool

    def look(self, config_hash: str, names: Sequence[str]) -> list[Entry]:
        """The files of a hash; where nothing can be listed, those of these names."""
        ...

    def entries(self) -> tuple[list[Entry], list[Stray]]:
        """All files of stores, and all others."""
        ...

    def origin(self, entry: Entry) -> Origin:
        """Where the bytes of an entry come from, with their digest where the cache has it."""
        ...

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """Copy a file of this machine there in one step; False, and nothing is done, if the key is taken.

        Args:
            key: Where.
            path: The file, which was verified.
            replace: Whether to replace what is there.
            progress: Hears of the bytes.
        """
        ...

    def remove(self, key: str, upload_id: str = "") -> None:
        """Remove what is at a key, or end an upload that was begun; nothing happens if there is none."""
        ...


def open_shared(place: str | Path, *, deadline_s: float = DEADLINE_S) -> SharedCache:
    """The shared cache at a URL or in a folder; nothing is asked yet.

    Args:
        place: See `EXPECTED`.
        deadline_s: For one request to a server, with all its attempts.
    Raises:
        SpecError: For another kind of URL.
        MissingExtraError: For an object store, where obstore isn't installed.
    """
    scheme = _scheme(place)
    if not scheme:
        from ups_store.remote.shared_folder import FolderCache

        return FolderCache(_folder(place))
    check_installed("obstore", extra="s3")
    url = str(url_of(place))  # of a `Path`, too, which has made one slash of two
    if scheme in ("https", "http"):
        from ups_store.remote.shared_web import WebCache

        return WebCache(url, deadline_s)
    from ups_store.remote.shared_bucket import BucketCache

    return BucketCache(url, deadline_s)


def check_place(place: str) -> str:
    """Check that it can name a shared cache, without importing what reads it; returns it, a folder absolute.

    Raises:
        SpecError: Kind "url".
    """
    return place if _scheme(place) else str(_folder(place))


def name_of_place(place: str) -> str:
    """What a shared cache is called in messages, without secrets."""
    return shown_url(place) if _scheme(place) else str(_folder(place))


def is_read_only(place: str) -> bool:
    """Whether nothing can be pushed there: to a web server."""
    return _scheme(place) in ("https", "http")


def needs_client(place: str) -> bool:
    """Whether it takes `obstore`: anything but a folder."""
    return bool(_scheme(place))


def _scheme(place: str | Path) -> str:
    """The scheme of a URL; "" of a folder, also of one that is given as file:///..."""
    url = url_of(place)
    scheme = urlsplit(url).scheme.lower() if url else ""
    is_known = scheme in ("", "file", "s3", "gs", "az", "https", "http")
    if not is_known or (url and scheme != "file" and not urlsplit(url).netloc):
        raise SpecError("shared cache", kind="url", path=shown_url(place), expected=EXPECTED)
    return "" if scheme == "file" else scheme


def _folder(place: str | Path) -> Path:
    text = os.fspath(place)
    if text.lower().startswith("file:"):
        text = unquote(urlsplit(text).path)
    return path_of(os.path.expanduser(text))


def files_of_store(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Those of the entries, all of one hash, that together hold a store; empty if it isn't there.

    Args:
        entries: What there is.
        name: The store's file name, `NAME.zarr.zip`; its partitions will do, if they are complete.
    """
    by_name = {entry.name: entry for entry in entries}
    if name in by_name:
        return [by_name[name]]
    counts: dict[int, int] = {}
    for each in by_name:
        partition = partition_of(each)
        if partition is not None and partition.whole == name:
            counts[partition.count] = counts.get(partition.count, 0) + 1
    complete = [count for count, num in counts.items() if num == count]
    if not complete:
        return []
    wanted = min(complete)
    found = {
        p.number: e for e in entries if (p := partition_of(e.name)) and (p.whole, p.count) == (name, wanted)
    }
    return [found[number] for number in sorted(found)]
