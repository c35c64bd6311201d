"""What can go from a shared cache: what dead pushes left, and stores that nothing has written for long."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from ups_store.remote.choice import stores_among
from ups_store.remote.shared_cache import SharedCache

_ALIVE_S = 86_400.0  # a push that is going on writes sooner; there are no locks that all machines see


@dataclass(frozen=True)
class RemoteGarbage:
    """A file, or an upload that was begun.

    Attributes:
        key: Its place.
        kind: "temporary": of a push that was killed, or is going on; "incomplete": some of the partitions of
            a store; "old": of a store, written longer ago than was asked for; "foreign": nothing of ours.
        nbytes: Its length; 0 where that isn't known.
        age_s: Seconds since it was written.
        upload_id: Of an upload in parts that was begun; else "".
    """

    key: str
    kind: Literal["temporary", "incomplete", "old", "foreign"]
    nbytes: int
    age_s: float
    upload_id: str = ""

    @property
    def is_removable(self) -> bool:
        """Whether it isn't of another program, or of a push that may be going on."""
        return self.kind != "foreign" and (self.kind == "old" or self.age_s > _ALIVE_S)


def find_remote_garbage(cache: SharedCache, *, older_than_s: float | None = None) -> list[RemoteGarbage]:
    """What can go, by its place.

    Args:
        cache: Where.
        older_than_s: Age of stores that can go, too; None: none of them.
    """
    entries, strays = cache.entries()
    now_s = time.time()
    found = [
        RemoteGarbage(
            stray.key,
            "temporary" if stray.is_temporary else "foreign",
            stray.nbytes,
            max(0.0, now_s - stray.modified_s),
            stray.upload_id,
        )
        for stray in strays
    ]
    whole = {file.key for store in stores_among(entries) for file in store.files}
    for entry in entries:
        age_s = max(0.0, now_s - entry.modified_s)
        if entry.key not in whole:
            found.append(RemoteGarbage(entry.key, "incomplete", entry.nbytes, age_s))
        elif older_than_s is not None and age_s > older_than_s:
            found.append(RemoteGarbage(entry.key, "old", entry.nbytes, age_s))
    return sorted(found, key=lambda garbage: (garbage.key, garbage.upload_id))
