"""What dead builders left behind in a folder: unfinished stores, and files never made visible (spec 6.6)."""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ups_store.errors import FormatError, StoreNotFoundError, VersionTooNewError
from ups_store.format.build_tail import BUILDER_LOCK, GATE_LOCK
from ups_store.format.zip_records import END_BYTES, END_MAGIC, ROOT_NAME, Entry, may_be_store
from ups_store.read.open import open_store
from ups_store.read.recovery import BUILDING_SUFFIX, UNPACKING_SUFFIX
from ups_store.read.store import SpoolStore
from ups_store.read.store_file import read_at
from ups_store.remote.transfer import PULLS, is_pulling
from ups_store.system import files, locks
from ups_store.writing.spool import NOTES_SUFFIX
from ups_store.writing.target import left_exports

_NAMES = {
    "temporary": re.compile(rf".+{re.escape(BUILDING_SUFFIX)}\.[0-9a-f]{{16}}"),
    "building": re.compile(rf".+\.zarr\.zip({re.escape(UNPACKING_SUFFIX)})?{re.escape(BUILDING_SUFFIX)}"),
    "other": re.compile(rf".*{re.escape(BUILDING_SUFFIX)}"),
    "lock": re.compile(r"\..+\.making"),  # of `cached`
    "notes": re.compile(rf".+{re.escape(BUILDING_SUFFIX + NOTES_SUFFIX)}"),
}
_NOTE_START = re.compile(rb"[0-9a-f]{8} \{")
_HDF5_START = b"\x89HDF\r\n\x1a\n"
_SAFETENSORS_START = b'{"__metadata__"'  # after 8 bytes of its length

Kind: TypeAlias = Literal["temporary", "unfinished", "damaged", "too_new", "pull", "finished", "foreign"]
REMOVABLE: frozenset[Kind] = frozenset(("temporary", "unfinished", "damaged", "pull"))


@dataclass(frozen=True)
class Garbage:
    """A file that no process works on.

    Kinds: "temporary", a builder or an export died before anybody could see it; "unfinished", a store that
    `create` would continue; "damaged", a building file that can't be continued; "too_new", a newer version of
    ups-store continues it; "pull", of a pull that was killed, which would go on with it; "finished", all of a
    store under a name of these; "foreign", not ours by name or content. The last two stay, and "too_new".
    """

    path: Path
    kind: Kind
    nbytes: int  # on the disk
    num_committed: int  # 0 unless unfinished
    num_samples: int  # likewise
    age_s: float  # since it was last written


def find_garbage(folder: Path) -> list[Garbage]:
    """List what dead builders left in a folder, sorted by name; files of living ones are left out."""
    garbage: list[Garbage | None] = []
    for path in sorted((*folder.glob(f"*{BUILDING_SUFFIX}*"), *folder.glob(".*.making"))):
        with contextlib.suppress(StoreNotFoundError):  # published or removed since it was listed
            garbage.append(_garbage_at(path))
    for export in left_exports(folder):
        nbytes = sum(path.stat().st_size for path in export.rglob("*") if path.is_file())
        garbage.append(Garbage(export, "temporary", nbytes, 0, 0, _age_s(export)))
    if not is_pulling(folder):
        pulled = sorted(path for path in (folder / PULLS).rglob("*") if path.is_file())
        garbage += [Garbage(path, "pull", path.stat().st_size, 0, 0, _age_s(path)) for path in pulled]
    return [file for file in garbage if file]


def remove_garbage(garbage: Garbage) -> bool:
    """Remove one such file, unless a process took it up meanwhile; returns whether it is gone.

    What is finished or foreign is never removed.
    """
    path = garbage.path
    if garbage.kind not in REMOVABLE or _are_notes_of_spool(path):
        return False
    if path.is_dir():
        if path in left_exports(path.parent):
            shutil.rmtree(path)
        return not path.exists()
    if garbage.kind == "pull":
        pulls = next(folder for folder in path.parents if folder.name == PULLS)
        if is_pulling(pulls.parent):
            return False
        files.remove(path)
        for folder in dict.fromkeys((path.parent, pulls)):  # the inner one first
            files.remove_folder(folder)
        return True
    with contextlib.suppress(StoreNotFoundError), files.opened(path, writable=True) as fd:
        if not (locks.try_lock(fd, BUILDER_LOCK) and locks.try_lock(fd, GATE_LOCK)):
            return False
        if files.is_file_at(fd, path):  # not published or replaced since it was found
            files.remove(path.with_name(path.name + NOTES_SUFFIX))
            files.remove(path)
    return True


def _garbage_at(path: Path) -> Garbage | None:
    if not any(pattern.fullmatch(path.name) for pattern in _NAMES.values()) or _are_notes_of_spool(path):
        return None
    with files.opened(path) as fd:
        if not stat.S_ISREG(files.mode(fd)) or locks.is_locked(fd, BUILDER_LOCK):
            return None
        nbytes, kind = files.size(fd), _kind_of_garbage(path, fd)
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
    """Tell whether it is the notes of a spool that is there: they go together."""
    is_named = _NAMES["notes"].fullmatch(path.name) is not None
    return is_named and files.exists(path.with_name(path.name.removesuffix(NOTES_SUFFIX)))


def _age_s(path: Path) -> float:
    return max(0.0, time.time() - files.modified_s(path))


def _kind_of_garbage(path: Path, fd: int) -> Kind:
    """Tell what a file is by its name, its first and its last bytes; "unfinished" may be damaged."""
    name = next(kind for kind, pattern in _NAMES.items() if pattern.fullmatch(path.name))
    start = read_at(fd, 0, Entry(ROOT_NAME, 0, 0).header_nbytes)
    end = read_at(fd, max(0, files.size(fd) - END_BYTES), END_BYTES)
    if name == "lock":
        return "temporary" if not start or start.startswith(b"process ") else "foreign"
    if name == "notes":
        return "temporary" if not start or _NOTE_START.match(start) else "foreign"
    is_store = may_be_store(start, end)
    if END_MAGIC in end:  # every finished ZIP file has it near its end, a building file never
        return "finished" if is_store else "foreign"
    if name == "temporary":
        is_blank = not any(start)  # allocated, or a hole before the first header is written
        is_export = start.startswith(_HDF5_START) or start[8:].startswith(_SAFETENSORS_START)
        return "temporary" if is_store or is_blank or is_export else "foreign"
    return "unfinished" if is_store and name == "building" else "foreign"
