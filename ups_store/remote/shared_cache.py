"""A shared cache: finished stores by what they were made from, in a bucket, a folder, or behind a web server.

A store lies at `<hash of its identity>/<name>`, in one file or in partitions. What is there is never
overwritten, as whoever made the same has made the same store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ups_store.sources.download import Progress
from ups_store.sources.origins import Origin
from ups_store.system.paths import partition_of

SUFFIX = ".zarr.zip"
TEMPORARY = "pushing"  # stands in the names of what isn't whole yet

_KEY = re.compile(rf"(?P<hash>[0-9a-f]{{64}})/(?P<name>[^/]+{re.escape(SUFFIX)})")


@dataclass(frozen=True)
class SharedFile:
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
    def at(cls, key: str, nbytes: int, modified_s: float) -> SharedFile | None:
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

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """The files of a hash; where nothing can be listed, those of these names."""
        ...

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """All files of stores, and all others."""
        ...

    def origin(self, entry: SharedFile) -> Origin:
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


def files_of_store(entries: Sequence[SharedFile], name: str) -> list[SharedFile]:
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
