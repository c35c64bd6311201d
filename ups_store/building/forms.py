"""In how many files a store is built, and in which form each of them ends: mapped, or packed by a codec.

A packed store is built one file after the other: each is filled mapped, packed in its own place, and only
then the next is begun. So the disk holds at most the packed files and one that is mapped.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
from collections.abc import Callable
from pathlib import Path

from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.store_build import Build
from ups_store.errors import ReadError, StoreError, StoreNotFoundError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import BUILDING_SUFFIX, UNPACKING_SUFFIX, building_path
from ups_store.read.several import parts_of
from ups_store.system import files, locks
from ups_store.system.paths import partition_counts, partition_path, partitions_pattern
from ups_store.system.replacement import real_place
from ups_store.write.target import payload_nbytes

FILE_NBYTES = 1 << 30  # least size, mapped, from which on a store that is packed is built in several files
MOST_FILES = 16  # then the mapped one is at most a sixteenth of the store


def count_files(build: Build) -> int:
    """In how many files a build makes its store: as configured, as it was begun, else by its size."""
    plan = build.plan
    if plan.is_partition:
        return 1
    if plan.num_files is not None:
        return max(1, min(plan.num_files, plan.num_samples))
    unfinished = _hash_at(building_path(plan.path))
    if unfinished is not None and unfinished == build.config_hash:
        return 1
    begun = next((count for count in partition_counts(plan.path) if _is_begun(build, count)), None)
    if begun is not None:
        return begun
    if plan.codec == "none":
        return 1
    nbytes = plan.num_samples * plan.sample_nbytes
    return max(1, min(MOST_FILES, nbytes // FILE_NBYTES, plan.num_samples))


def place_of(build: Build, count: int) -> Path:
    """What opens the store that is built in so many files."""
    return build.path if count == 1 else partitions_pattern(build.path, count)


def num_finished(build: Build, count: int) -> int:
    """How many of so many files are finished, in whichever form."""
    hashes = (
        (_hash_at(partition_path(build.path, number, count)), build.part(number, count).config_hash)
        for number in range(count)
    )
    return sum(found == wanted for found, wanted in hashes)


def _is_begun(build: Build, count: int) -> bool:
    """Whether one of so many files of the store is there, finished or not."""
    for number in range(count):
        path = partition_path(build.path, number, count)
        there = [name for name in (path, building_path(path)) if files.exists(name)]
        if there and build.part(number, count).config_hash in map(_hash_at, there):
            return True
    return False


def _hash_at(path: Path) -> str | None:
    """Hash of the identity of what is there; None if that is no store, or nothing."""
    if not files.exists(path):
        return None
    try:
        opened = open_store(path, partial=True) if path.name.endswith(BUILDING_SUFFIX) else open_any(path)
    except ReadError:
        raise
    except StoreError:
        return None
    with opened:
        return opened.config_hash


def give_form(
    place: Path, codec: str, *, title: str, watcher: Watcher, clock: Stopwatch, force: bool = False
) -> None:
    """Pack or unpack every file of a finished store in its own place; no source is read for it.

    What is interrupted goes on with the next file, or the same, when this is called again.

    Args:
        place: A file, or the pattern of several.
        codec: "blosc", "pcodec", or "none" for mapped files.
        title: Of the store, for people.
        watcher: Hears how it goes.
        clock: Counts the time as "pack".
        force: Whether files that are read-only are replaced, too.
    Raises:
        CorruptChunkError: If a file is damaged; it stays as it is.
        DiskFullError: If there is no room for one more file.
    """
    with open_any(place) as store:
        for part in parts_of(store):
            remove_dead(part.path, codec=codec)
        others = [part for part in parts_of(store) if part.codec != codec]
        if not others:
            return
        from ups_store.packed.pack import pack

        what = "unpacking" if codec == "none" else f"packing by {codec}"
        watcher.stage(f"{title}: {what}", sum(map(payload_nbytes, others)), unit="bytes")
        for part in others:
            with clock.timed("pack"):
                part.close()
                if part.codec != "none":
                    pack(part.path, part.path, "none", force=force, progress=watcher.advance)
                if codec != "none":
                    pack(part.path, part.path, codec, force=force, progress=watcher.advance)


def remove_dead(path: Path, *, codec: str) -> None:
    """Remove what killed processes left of a file under other names: each may be as large as the file.

    Also what is complete but for its name: whatever it was made from is still there. What goes on where it
    was stays: a building file, and one that is being unpacked if that is wanted.
    """
    place = real_place(path)
    name = glob.escape(place.name)
    temporary = f"{BUILDING_SUFFIX}.{'[0-9a-f]' * 16}"  # nothing else is ours
    patterns = [f"{name}{temporary}", f"{name}{UNPACKING_SUFFIX}{temporary}"]
    if codec != "none":
        patterns += [f"{name}{UNPACKING_SUFFIX}", f"{name}{UNPACKING_SUFFIX}{BUILDING_SUFFIX}"]
    for found in itertools.chain.from_iterable(map(place.parent.glob, patterns)):
        with contextlib.suppress(StoreNotFoundError, OSError), files.opened(found, writable=True) as fd:
            if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, found):
                files.remove(found)


def remove_replaced(build: Build, count: int, note: Callable[[str], None]) -> None:
    """Remove files of an earlier store that is in another number of them: they would be found first."""
    counts = [other for other in partition_counts(build.path) if other != count]
    earlier = [partition_path(build.path, number, other) for other in counts for number in range(other)]
    for path in earlier if count == 1 else [build.path, *earlier]:
        if _hash_at(path) is not None:
            files.remove(path)
            note(f"{path} is removed: {place_of(build, count).name} replaces it")
