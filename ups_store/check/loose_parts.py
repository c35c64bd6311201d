"""Parts that no manifest names: what an interrupted `write_parts` or `append` left (spec 15.4)."""

from __future__ import annotations

from pathlib import Path

from ups_store.errors import BuildLockedError, FormatError, StoreNotFoundError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.manifest import number_of_part
from ups_store.read.store_set import PARTS_SUFFIX, manifest_path, read_manifest
from ups_store.system import files, locks
from ups_store.write.part_files import LOCK_NAME, locked, unlock


def folders_of_parts(folder: Path) -> list[Path]:
    """The folders of parts in a folder, sorted."""
    return sorted(path for path in folder.glob(f"*{PARTS_SUFFIX}") if path.is_dir())


def loose_parts(parts_folder: Path) -> list[Path]:
    """Finished parts that the set's manifest doesn't name; none while a process writes there.

    A manifest that can't be read may name any of them.
    """
    return [] if locks.is_held(parts_folder / LOCK_NAME, BUILDER_LOCK) else _loose(parts_folder)


def left_lock(parts_folder: Path) -> Path | None:
    """The lock that a killed writer left; None while a process writes there."""
    lock = parts_folder / LOCK_NAME
    return lock if files.exists(lock) and not locks.is_held(lock, BUILDER_LOCK) else None


def remove_part(part: Path) -> bool:
    """Remove a part that is still named by no manifest, or a lock; returns whether it is gone."""
    try:
        fd = locked(part.parent)  # so no process takes it up meanwhile
    except BuildLockedError:
        return False
    try:
        if part in _loose(part.parent):
            files.remove(part)
    finally:
        unlock(fd, part.parent)
    return not files.exists(part)


def _loose(parts_folder: Path) -> list[Path]:
    try:
        named = {part.name for part in read_manifest(manifest_path(parts_folder))}
    except StoreNotFoundError:
        named = set()
    except FormatError:
        return []
    names = files.names_in(parts_folder)
    return [parts_folder / name for name in names if number_of_part(name) is not None and name not in named]
