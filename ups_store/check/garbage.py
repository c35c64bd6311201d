"""What dead builders left behind in a folder: unfinished stores, and files never made visible (spec 6.6)."""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ups_store.errors import FormatError, StoreNotFoundError, VersionTooNewError
from ups_store.format.build_tail import BUILDER_LOCK, GATE_LOCK
from ups_store.format.zip_records import END_BYTES, ROOT_NAME, Entry, may_be_store
from ups_store.read.open import open_store
from ups_store.read.recovery import BUILDING_SUFFIX, UNPACKING_SUFFIX
from ups_store.read.store import SpoolStore
from ups_store.read.store_file import read_at
from ups_store.remote.transfer import PULLS, is_pulling
from ups_store.system import files, locks
from ups_store.write.spool import NOTES_SUFFIX
from ups_store.write.target import left_exports

_TEMPORARY = re.compile(rf".+{re.escape(BUILDING_SUFFIX)}\.[0-9a-f]{{16}}")
_BUILT = re.compile(rf".*{re.escape(BUILDING_SUFFIX)}")
_BUILDING = re.compile(rf".+\.zarr\.zip({re.escape(UNPACKING_SUFFIX)})?{re.escape(BUILDING_SUFFIX)}")
_MAKING = re.compile(r"\..+\.making")  # the lock of `cached`
_NOTES = re.compile(rf".+{re.escape(BUILDING_SUFFIX + NOTES_SUFFIX)}")
_NOTE_START = re.compile(rb"[0-9a-f]{8} \{")
_HDF5_START = b"\x89HDF\r\n\x1a\n"
_SAFETENSORS_START = b'{"__metadata__"'  # after 8 bytes of its length
_END_RECORD_START = b"PK\5\6"  # every finished ZIP file has it near its end, a building file never

Kind = Literal[
    "temporary",
    "unfinished",
    "damaged",
    "too_new",
    "pull",
    "finished",
    "foreign",
]
REMOVABLE: frozenset[Kind] = frozenset(("temporary", "unfinished", "damaged", "pull"))


@dataclass(frozen=True)
class Garbage:
    """A file that no process works on.

    Attributes:
        path: The file.
        kind: "temporary": a builder or an export died before anybody could see it; "unfinished": a store
            that `create` would continue; "damaged": a building file that can't be continued; "too_new": a
            newer version of ups-store continues it; "pull": of a pull that was killed, which would go on
            with it; "finished": all of a store under a name of these, "foreign": not ours by name or
            content. The last two stay, and so does what is too new.
        nbytes: What it takes on the disk.
        num_committed: Committed samples; 0 unless unfinished.
        num_samples: N; likewise.
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
    for path in sorted((*folder.glob(f"*{BUILDING_SUFFIX}*"), *folder.glob(".*.making"))):
        with contextlib.suppress(StoreNotFoundError):  # published or removed since it was listed
            found.append(_examine(path))
    for export in left_exports(folder):
        nbytes = sum(path.stat().st_size for path in export.rglob("*") if path.is_file())
        found.append(Garbage(export, "temporary", nbytes, 0, 0, _age_s(export)))
    if not is_pulling(folder):
        left = [path for path in sorted((folder / PULLS).rglob("*")) if path.is_file()]
        found += [Garbage(path, "pull", path.stat().st_size, 0, 0, _age_s(path)) for path in left]
    return [garbage for garbage in found if garbage]


def remove_garbage(garbage: Garbage) -> bool:
    """Remove one such file, unless a process took it up meanwhile; returns whether it is gone.

    What is finished or foreign is never removed.
    """
    if garbage.kind not in REMOVABLE:
        return False
    if garbage.path.is_dir():
        if garbage.path in left_exports(garbage.path.parent):
            shutil.rmtree(garbage.path)
        return not garbage.path.exists()
    if _are_notes_of_spool(garbage.path):
        return False
    if garbage.kind == "pull":
        return _remove_pulled(garbage.path)
    try:
        with files.opened(garbage.path, writable=True) as fd:
            if not (locks.try_lock(fd, BUILDER_LOCK) and locks.try_lock(fd, GATE_LOCK)):
                return False
            if files.is_file_at(fd, garbage.path):  # not published or replaced since it was found
                files.remove(garbage.path.with_name(garbage.path.name + NOTES_SUFFIX))
                files.remove(garbage.path)
    except StoreNotFoundError:
        pass
    return True


def _remove_pulled(path: Path) -> bool:
    pulls = next(folder for folder in path.parents if folder.name == PULLS)
    if is_pulling(pulls.parent):
        return False
    files.remove(path)
    for folder in {path.parent: None, pulls: None}:  # the inner one first
        files.remove_folder(folder)
    return True


def _examine(path: Path) -> Garbage | None:
    if not any(pattern.fullmatch(path.name) for pattern in (_TEMPORARY, _BUILT, _MAKING, _NOTES)):
        return None
    if _are_notes_of_spool(path):
        return None
    with files.opened(path) as fd:
        if not stat.S_ISREG(files.mode(fd)) or locks.is_locked(fd, BUILDER_LOCK):
            return None
        nbytes, kind = files.size(fd), _kind_of(path, fd)
    num_committed = num_samples = 0
    if kind == "unfinished":
        try:
            with open_store(path, partial=True) as store:
                num_committed, num_samples = int(store.committed.sum()), len(store)
                nbytes = store.nbytes if isinstance(store, SpoolStore) else nbytes
        except VersionTooNewError:
            kind = "too_new"
        except FormatError:
            kind = "damaged"
    return Garbage(path, kind, nbytes, num_committed, num_samples, _age_s(path))


def _are_notes_of_spool(path: Path) -> bool:
    """Whether it is the notes of a spool that is there: they go together."""
    is_named = bool(_NOTES.fullmatch(path.name))
    return is_named and files.exists(path.with_name(path.name.removesuffix(NOTES_SUFFIX)))


def _age_s(path: Path) -> float:
    return max(0.0, time.time() - files.modified_s(path))


def _kind_of(path: Path, fd: int) -> Kind:
    """What a file is by its name, its first and its last bytes; "unfinished" may be damaged."""
    start = read_at(fd, 0, Entry(ROOT_NAME, 0, 0).header_nbytes)
    end = read_at(fd, max(0, files.size(fd) - END_BYTES), END_BYTES)
    if _MAKING.fullmatch(path.name):
        return "temporary" if not start or start.startswith(b"process ") else "foreign"
    if _NOTES.fullmatch(path.name):
        return "temporary" if not start or _NOTE_START.match(start) else "foreign"
    if _END_RECORD_START in end:
        return "finished" if may_be_store(start, end) else "foreign"
    is_begun = may_be_store(start, end)
    if _TEMPORARY.fullmatch(path.name):
        return "temporary" if is_begun or _is_begun_export(start) else "foreign"
    return "unfinished" if is_begun and _BUILDING.fullmatch(path.name) else "foreign"


def _is_begun_export(start: bytes) -> bool:
    """Whether a temporary file starts as ours do: with nothing yet, or as one of the formats."""
    is_blank = not any(start)  # allocated, or a hole before the first header is written
    return is_blank or start.startswith(_HDF5_START) or start[8:].startswith(_SAFETENSORS_START)
