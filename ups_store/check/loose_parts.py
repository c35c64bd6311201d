"""Parts that no manifest names: what an interrupted `write_parts` or `append` left (spec 15.4)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ups_store.errors import FormatError, StoreNotFoundError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.manifest import number_of_part
from ups_store.read.store_set import PARTS_SUFFIX, manifest_path, read_manifest
from ups_store.system import files, locks
from ups_store.write.part_files import LOCK_NAME


def folders_of_parts(folder: Path) -> list[Path]:
    """The folders of parts in a folder, sorted."""
    return sorted(path for path in folder.glob(f"*{PARTS_SUFFIX}") if path.is_dir())


def loose_parts(parts_folder: Path) -> list[Path]:
    """Finished parts that the set's manifest doesn't name; none while a process writes there.

    A manifest that can't be read may name any of them.
    """
    with _unused(parts_folder) as is_unused:
        return _loose(parts_folder) if is_unused else []


def remove_part(part: Path) -> bool:
    """Remove a part that is still named by no manifest; returns whether it is gone."""
    with _unused(part.parent) as is_unused:
        if not is_unused or part not in _loose(part.parent):
            return not files.exists(part)
        files.remove(part)
        if not any(number_of_part(name) is not None for name in files.names_in(part.parent)):
            files.remove(part.parent / LOCK_NAME)
            files.remove_folder(part.parent)
    return True


def _loose(parts_folder: Path) -> list[Path]:
    try:
        named = {part.name for part in read_manifest(manifest_path(parts_folder))}
    except StoreNotFoundError:
        named = set()
    except FormatError:
        return []
    names = files.names_in(parts_folder)
    return [parts_folder / name for name in names if number_of_part(name) is not None and name not in named]


@contextlib.contextmanager
def _unused(parts_folder: Path) -> Iterator[bool]:
    """Whether no process writes these parts; none begins in the block."""
    try:
        fd = files.open_existing(parts_folder / LOCK_NAME, writable=True)
    except StoreNotFoundError:  # copied from elsewhere
        yield True
        return
    try:
        yield locks.try_lock(fd, BUILDER_LOCK)
    finally:
        files.close(fd)
