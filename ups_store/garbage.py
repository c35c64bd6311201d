"""What dead builders left behind in a folder: unfinished stores, and files that nobody saw (spec 6.6)."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ups_store import files
from ups_store.build_tail import BUILDER_LOCK, GATE_LOCK
from ups_store.errors import FormatError, StoreNotFoundError
from ups_store.reader import open_store
from ups_store.recovery import BUILDING_SUFFIX

_TEMPORARY = re.compile(rf".+{re.escape(BUILDING_SUFFIX)}\.[0-9a-f]{{16}}")

Kind = Literal["temporary", "unfinished", "damaged"]


@dataclass(frozen=True)
class Garbage:
    """A file that no process works on.

    Attributes:
        path: The file.
        kind: "temporary": a builder died before anybody could see it, it holds nothing; "unfinished": a store
            that `create` would continue; "damaged": a building file that can't be continued.
        nbytes: Its length.
        num_committed: Committed samples; 0 unless unfinished.
        num_samples: N; 0 unless unfinished.
        age_s: Seconds since it was last written.
    """

    path: Path
    kind: Kind
    nbytes: int
    num_committed: int
    num_samples: int
    age_s: float


def find_garbage(folder: Path) -> list[Garbage]:
    """List what dead builders left in a folder, sorted by name; files of living ones are left out."""
    found = []
    for path in sorted(folder.glob(f"*{BUILDING_SUFFIX}*")):
        with contextlib.suppress(StoreNotFoundError):  # published or removed since it was listed
            found.append(_examine(path))
    return [garbage for garbage in found if garbage]


def remove_garbage(garbage: Garbage) -> bool:
    """Remove one such file, unless a process took it up meanwhile; returns whether it is gone."""
    try:
        fd = files.open_existing(garbage.path, writable=True)
    except StoreNotFoundError:
        return True
    try:
        if not (files.try_lock(fd, BUILDER_LOCK) and files.try_lock(fd, GATE_LOCK)):
            return False
        if files.is_file_at(fd, garbage.path):  # not published or replaced since it was found
            files.remove(garbage.path)
        return True
    finally:
        files.close(fd)


def _examine(path: Path) -> Garbage | None:
    is_temporary = _TEMPORARY.fullmatch(path.name) is not None
    if not is_temporary and not path.name.endswith(BUILDING_SUFFIX):
        return None
    fd = files.open_existing(path)
    try:
        if files.is_locked(fd, BUILDER_LOCK):
            return None
        nbytes = files.size(fd)
    finally:
        files.close(fd)
    kind: Kind = "temporary" if is_temporary else "unfinished"
    num_committed = num_samples = 0
    if not is_temporary:
        try:
            with open_store(path, partial=True) as store:
                num_committed, num_samples = int(store.committed.sum()), len(store)
        except FormatError:
            kind = "damaged"
    age_s = max(0.0, time.time() - files.modified_s(path))
    return Garbage(path, kind, nbytes, num_committed, num_samples, age_s)
