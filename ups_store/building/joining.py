"""The file that a store is built in: who builds there, joining and waiting for them, what is left over."""

from __future__ import annotations

import contextlib
import glob
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ups_store
from ups_store.building.plan import StorePlan
from ups_store.errors import (
    CorruptChunkError,
    FormatError,
    IdentityMismatchError,
    ReadError,
    StoreError,
    StoreNotFoundError,
    StoreReplacedError,
    VersionTooNewError,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.recovery import BUILDING_SUFFIX, UNPACKING_SUFFIX, building_path
from ups_store.read.store_file import looks_like_store
from ups_store.remote.transfer import is_pulling
from ups_store.system import files, locks
from ups_store.system.files import real_place
from ups_store.write.building import read_owner
from ups_store.write.create import join
from ups_store.write.writer import Committer, StoreWriter

BUILDER_S = 60.0  # for the builder to begin, or to be started again
POLL_S = 0.1


def create_file(
    plan: StorePlan, content: Mapping[str, Any], path: str | Path | None = None, **options: Any
) -> StoreWriter:
    """`ups_store.create` what a plan says, by default at its own path."""
    return ups_store.create(
        path or plan.path,
        plan.arrays,
        constants=plan.constants,
        dims=plan.dims,
        identity=content,
        attrs=plan.attrs,
        partition=plan.partition,
        **options,
    )


def join_builder(path: Path, content: Mapping[str, Any], wanted: str) -> Committer | None:
    """Join the file that the builder makes, as soon as it is there; None if the store is finished already."""
    deadline = time.monotonic() + BUILDER_S
    while True:
        try:
            return join(path, identity=content)
        except (StoreNotFoundError, StoreReplacedError):  # not begun yet, or finished
            if is_finished(path, wanted):
                return None
            if is_pulling(path.parent):
                deadline = time.monotonic() + BUILDER_S
            if time.monotonic() > deadline:
                raise _no_builder(path) from None
        except FormatError:  # the builder is finishing it this moment
            if not _is_being_built(path) and not is_finished(path, wanted):
                raise
        except IdentityMismatchError:  # an old file, which the builder may be about to replace
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def wait_for_store(path: Path, wanted: str, *, is_packed: bool | None = None) -> AnyStore:
    """Open the finished store, as soon as the builder has published it."""
    gone_since = None
    while not is_finished(path, wanted, is_packed=is_packed):
        if _is_being_built(path):
            gone_since = None
        else:
            gone_since = gone_since or time.monotonic()
            if time.monotonic() > gone_since + BUILDER_S:
                raise _no_builder(path)
        time.sleep(POLL_S)
    return open_any(path)


def is_finished(path: Path, wanted: str, *, is_packed: bool | None = None) -> bool:
    """Return whether the store is there whose identity has this hash, packed as is wanted."""
    try:
        with open_any(path) as store:
            return store.config_hash == wanted and is_packed in (None, store.codec != "none")
    except ReadError:
        raise
    except StoreError:  # not there, or a file that the builder replaces
        return False


def builder_at(path: Path) -> str:
    """Name the process that builds the store now, for people; empty if none does."""
    where = building_path(path)
    with files.opened(where) as fd:
        if not locks.is_locked(fd, BUILDER_LOCK):
            return ""
        owner = read_owner(fd, where)
        return f"pid {owner.pid} on {owner.host}" if owner else "an unknown process"


def _is_being_built(path: Path) -> bool:
    """Return whether a process builds, packs or unpacks the store."""
    place = real_place(path)
    others = place.parent.glob(f"{glob.escape(place.name)}*{BUILDING_SUFFIX}*")
    return any(locks.is_held(other, BUILDER_LOCK) for other in others)


def _no_builder(path: Path) -> StoreError:
    return StoreError(
        f"no process has been building it for {BUILDER_S:.0f} s",
        kind="no_builder",
        path=path,
        hint="look at the output of local rank 0, and run all ranks again: what is committed stays",
    )


# --- what is damaged, and what killed processes left -------------------------------------------------


def is_damaged(path: Path, error: StoreError) -> bool:
    """Return whether a file that doesn't open is a store all the same, of this version of the format."""
    if isinstance(error, VersionTooNewError) or not isinstance(error, FormatError | CorruptChunkError):
        return False
    with files.opened(path) as fd:
        return looks_like_store(fd)


def look_again(path: Path, wanted: str, note: Callable[[str], None]) -> AnyStore | None:
    """Open the store if another process has just published it; a damaged file gets the name NAME.damaged."""
    try:
        store = open_any(path)
    except StoreNotFoundError:
        return None
    except ReadError:
        raise
    except StoreError as error:
        if is_damaged(path, error):
            _set_aside(path, error.problem, note)
        return None
    if store.config_hash == wanted:
        return store
    store.close()
    return None


def set_aside_unfinished(path: Path, problem: str, note: Callable[[str], None]) -> None:
    """Give a damaged unfinished file the name NAME.building.damaged, unless a process builds in it."""
    where = building_path(path)
    with contextlib.suppress(StoreNotFoundError), files.opened(where, writable=True) as fd:
        if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, where):
            _set_aside(where, problem, note)


def _set_aside(path: Path, problem: str, note: Callable[[str], None]) -> None:
    place = real_place(path)
    names = (place.with_name(f"{place.name}.damaged{n}") for n in itertools.chain([""], itertools.count(2)))
    aside = next(name for name in names if not files.exists(name))
    files.rename(place, aside)
    note(f"{path} is damaged ({problem}): set aside as {aside.name}, and made again")


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
    for left in itertools.chain.from_iterable(map(place.parent.glob, patterns)):
        with contextlib.suppress(StoreNotFoundError, OSError), files.opened(left, writable=True) as fd:
            if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, left):
                files.remove(left)
