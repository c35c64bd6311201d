"""The place of a store: what lies there, which process builds there, and becoming or joining that builder."""

from __future__ import annotations

import contextlib
import glob
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ups_store
from ups_store.building.plan import StorePlan, payload_nbytes
from ups_store.building.progress import Watcher
from ups_store.errors import (
    ConfigError,
    CorruptChunkError,
    FormatError,
    IdentityMismatchError,
    ReadError,
    StoreError,
    StoreNotFoundError,
    StoreReplacedError,
    VersionTooNewError,
    check_installed,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.root import config_hash, describe_differences, differences
from ups_store.read.base import AnyStore
from ups_store.read.file_reads import looks_like_store
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import BUILDING_SUFFIX, building_path
from ups_store.remote.transfer import is_pulling
from ups_store.system import files, locks
from ups_store.system.files import make_folder
from ups_store.system.paths import partition_counts, partition_path, partitions_pattern
from ups_store.system.replacement import check_not_read_only, real_place
from ups_store.write.building import read_owner
from ups_store.write.create import join
from ups_store.write.writer import Committer, StoreWriter

Holds = Literal["fields", "latents"]
OTHER_PLACE = "check cache.dir"
BUILDER_S = 60.0  # for the builder to begin, or to be started again

_POLL_S = 0.1


def prepare_place(path: Path, note: Callable[[str], None]) -> None:
    """Make the store's folder, and refuse now what publishing would stumble over hours later.

    Raises:
        ConfigError: If there can't be a store.
        StoreNotFoundError: If there is a symbolic link to nothing, kind "dangling_link".
    """
    make_folder(path.parent, hint=OTHER_PLACE)
    if path.is_dir():  # a rename replaces anything else
        raise ConfigError("there is a folder in the store's place", path=path, hint=OTHER_PLACE)
    folder = real_place(path).parent
    if files.is_network(folder):
        note(
            f"{folder} lies on a network file system, whose locks, syncs and renames may not hold what "
            "a build relies on (docs/results/reliability.md): build on a local disk and copy the store"
        )


def check_packable(plan: StorePlan) -> None:
    """Refuse now what couldn't be packed hours later.

    Raises:
        MissingExtraError: If the codec's package isn't installed.
        ConfigError: If a sample is larger than codecs take.
    """
    if plan.codec == "none":
        return
    check_installed("numcodecs", *(["pcodec"] if plan.codec == "pcodec" else []), extra="pack")
    from ups_store.packed.chunk_codecs import MAX_CHUNK_BYTES

    largest = max(payload_nbytes({name: spec}) for name, spec in plan.arrays.items())
    if largest > MAX_CHUNK_BYTES:
        expected, found = f"samples of at most {MAX_CHUNK_BYTES:,} bytes", f"{largest:,}"
        raise ConfigError("cache.codec", path=plan.path, expected=expected, found=found, hint="leave it out")


def find_valid(plan: StorePlan, expected: Mapping[str, Any], note: Callable[[str], None]) -> AnyStore | None:
    """The finished store that is there, if it was made from the same; notes what differs otherwise.

    It may be in one file or in several, mapped or packed. What is damaged counts as absent: whoever builds in
    its place sets it aside.

    Raises:
        FormatError: If something that isn't a store is in its place.
        ConfigError: As `check_replaceable`.
        ReadOnlyError: If it would have to be replaced, and has no write bit.
    """
    wanted, problem = config_hash(expected), ""
    try:
        store = open_any(plan.path)
        if store.config_hash == wanted:
            return store
        with store:
            shown = describe_differences(differences(store.identity_document, expected))
        problem = f"was made from something else, rebuilding (found -> wanted):\n{shown}"
    except StoreNotFoundError:
        pass
    except FormatError as error:
        if not is_damaged(plan.path, error):
            error.hint = "move it away, or replace it: `ups-store build --overwrite`"
            raise
    partitions = find_partitions(plan, wanted)
    if partitions is not None:
        return partitions
    check_plan_replaceable(plan)
    check_not_read_only(real_place(plan.path), hint="make it writable with chmod u+w, or say --overwrite")
    if problem:
        note(f"{plan.path} {problem}")
    return None


def is_damaged(path: Path, error: StoreError) -> bool:
    """Whether a file that doesn't open is a store all the same, of this version of the format or before."""
    if isinstance(error, VersionTooNewError) or not isinstance(error, FormatError | CorruptChunkError):
        return False
    with files.opened(path) as fd:
        return looks_like_store(fd)


def set_aside_damaged(path: Path, note: Callable[[str], None]) -> None:
    """Give a finished store that is damaged the name NAME.damaged; this process builds the store already."""
    try:
        open_any(path).close()
    except StoreNotFoundError:
        return
    except StoreError as error:
        if is_damaged(path, error):
            _set_aside(path, error, note)


def _set_aside(path: Path, error: StoreError, note: Callable[[str], None]) -> None:
    place = real_place(path)
    names = (place.with_name(f"{place.name}.damaged{n}") for n in itertools.chain([""], itertools.count(2)))
    aside = next(name for name in names if not files.exists(name))
    files.rename(place, aside)
    note(f"{path} is damaged ({error.problem}): set aside as {aside.name}, and made again")


def find_partitions(plan: StorePlan, wanted: str) -> AnyStore | None:
    """All partitions of the store whose identity has the hash that is wanted, if they are there."""
    for count in [] if plan.is_partition else partition_counts(plan.path):
        try:
            store = open_any(partitions_pattern(plan.path, count))
        except ReadError:  # it may be there: building it again would hide that the disk fails
            raise
        except StoreError:  # some are missing, or of something else
            continue
        if store.config_hash == wanted:
            return store
        store.close()
    return None


def check_replaceable(
    path: Path, *, task: str, split: str, holds: Holds, most: int | None = None, is_partition: bool = False
) -> None:
    """Refuse to replace, unasked, what no build of this task and split has made, and what holds more of it.

    Of files beside the store's own, too, which hold it together by their names.

    Args:
        path: The store's own file.
        task: Its task.
        split: Its split.
        holds: What it would hold.
        most: Samples that it would hold, where `data.limit` says that; None where nothing does.
        is_partition: Whether it is one of several files, and the others aren't looked at.
    Raises:
        ConfigError: Kinds "other_kind" (latents in the place of fields, or the reverse), "not_built",
            "larger_store".
    """
    counts = [] if is_partition else partition_counts(path)
    beside = (partition_path(path, number, count) for count in counts for number in range(count))
    for place in filter(files.exists, (path, *beside)):
        with contextlib.suppress(FormatError), open_any(place) as store:
            content, held = store.identity, "fields" if "fields" in store.arrays else "latents"
            is_built = (content.get("task"), content.get("split")) == (task, split)
            if not (is_built and {"sources", "source_digest"} <= content.keys()):
                kind = "not_built"
                problem = f"a store is there that no build of {task} {split} made, such as an imported one"
            elif held != holds:
                kind, problem = "other_kind", f"a store of {held} is there, and {holds} would replace it"
            elif most is not None and len(store) > most:
                kind, problem = "larger_store", f"data.limit: {most} samples would replace {len(store)}"
            else:
                continue
            hint = "use another folder (cache.dir), or replace it with `ups-store build --overwrite`"
            raise ConfigError(problem, kind=kind, path=place, hint=hint)


def check_plan_replaceable(plan: StorePlan) -> None:
    """As `check_replaceable`, of what is planned."""
    check_replaceable(
        plan.path,
        task=plan.task.name,
        split=plan.split,
        holds="latents" if plan.encoder else "fields",
        most=plan.num_samples if plan.is_limited else None,
        is_partition=plan.is_partition,
    )


def open_writer(
    plan: StorePlan,
    content: Mapping[str, Any],
    *,
    watcher: Watcher,
    overwrite: bool = False,
    check_on_resume: bool = True,
) -> StoreWriter:
    """The store's writer; an unfinished file of another identity is replaced if nothing would be lost.

    Args:
        plan: What is built, and where.
        content: What `ups_store.create` takes as identity.
        watcher: Hears how the check goes, and what it found.
        overwrite: Whether to begin from scratch whatever is there.
        check_on_resume: Whether to check what is committed already.
    Raises:
        IdentityMismatchError: If an unfinished file of another identity holds samples.
        BuildLockedError: If another process builds it.
        StoreError: As `ups_store.create`.
    """
    options: dict[str, Any] = {"check_on_resume": False, "note": watcher.note}
    if overwrite:
        writer = create_file(plan, content, on_mismatch="restart", **options)
        if len(writer.missing()) == plan.num_samples:
            return writer
        with writer:  # its samples aren't trusted; while it is open no other process builds it
            files.remove(building_path(plan.path))
        return create_file(plan, content, on_mismatch="restart")
    try:
        writer = create_file(plan, content, **options)
        if check_on_resume:
            _check_committed(writer, plan, watcher)
        return writer
    except (FormatError, CorruptChunkError) as error:
        unfinished = building_path(plan.path)
        if error.path != str(unfinished) or not is_damaged(unfinished, error):
            raise
        with files.opened(unfinished, writable=True) as fd:
            if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, unfinished):
                _set_aside(unfinished, error, watcher.note)
        return create_file(plan, content, on_mismatch="restart")
    except IdentityMismatchError:
        with open_store(building_path(plan.path), partial=True) as other:
            if other.committed.any():
                raise
        return create_file(plan, content, on_mismatch="restart")


def _check_committed(writer: StoreWriter, plan: StorePlan, watcher: Watcher) -> None:
    """Read back what an earlier run has committed; closes the writer if that fails."""
    with contextlib.ExitStack() as failing:
        failing.push(writer)
        num_committed = plan.num_samples - len(writer.missing())
        if num_committed:
            watcher.stage(f"{plan.title}: check", num_committed * plan.sample_nbytes, unit="bytes")
            writer.check_committed(note=watcher.note, progress=watcher.advance)
        failing.pop_all()


def create_file(
    plan: StorePlan,
    content: Mapping[str, Any],
    path: str | Path | None = None,
    **options: Any,
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
    """Join the file that the builder makes, as soon as it is there; None if the store is finished already.

    Raises:
        StoreError: Kind "no_builder", if no process begins to build.
        IdentityMismatchError: If a store of other content is built there, and goes on being built.
    """
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
        time.sleep(_POLL_S)


def wait_for_store(path: Path, wanted: str, *, codec: str | None = None) -> AnyStore:
    """The finished store, as soon as the builder has published it.

    Args:
        path: Its file.
        wanted: Hash of its identity.
        codec: How it is to be packed by then; None: however it is.
    Raises:
        StoreError: Kind "no_builder", if the builder ended without finishing; what is committed stays.
    """
    gone_since = None
    while not is_finished(path, wanted, codec=codec):
        if _is_being_built(path):
            gone_since = None
        else:
            gone_since = gone_since or time.monotonic()
            if time.monotonic() > gone_since + BUILDER_S:
                raise _no_builder(path)
        time.sleep(_POLL_S)
    return open_any(path)


def is_finished(path: Path, wanted: str, *, codec: str | None = None) -> bool:
    """Whether the store is there whose identity has the hash that is wanted, packed as is wanted."""
    try:
        with open_any(path) as store:
            return store.config_hash == wanted and codec in (None, store.codec)
    except ReadError:
        raise
    except StoreError:  # not there, or a file that the builder replaces
        return False


def builder_at(path: Path) -> str:
    """The process that builds the store now, for people; empty if none does."""
    where = building_path(path)
    with files.opened(where) as fd:
        if not locks.is_locked(fd, BUILDER_LOCK):
            return ""
        owner = read_owner(fd, where)
        return f"pid {owner.pid} on {owner.host}" if owner else "an unknown process"


def _is_being_built(path: Path) -> bool:
    """Whether a process builds, packs or unpacks the store."""
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
