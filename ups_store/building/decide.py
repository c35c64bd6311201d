"""What becomes of one store: reused, repacked, built, continued, rebuilt or refused, and why.

`decide` says it without writing anything. The dry run prints that (`explain`), and a build executes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from ups_store.building.config import BuildConfig
from ups_store.building.plan import Digests, StorePlan
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.ranks import BuildRank
from ups_store.building.readers import Readers
from ups_store.console import format_nbytes
from ups_store.errors import (
    ConfigError,
    CorruptChunkError,
    FormatError,
    ReadError,
    StoreError,
    StoreNotFoundError,
    VersionTooNewError,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.root import config_hash, describe_differences, differences
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import BUILDING_SUFFIX, building_path
from ups_store.read.store_file import looks_like_store
from ups_store.system import files, locks
from ups_store.system.files import check_not_read_only, real_place
from ups_store.system.paths import partition_counts, partition_path, partitions_pattern
from ups_store.writing.commit import read_owner
from ups_store.writing.plan import identity_of

Action = Literal["reuse", "repack", "build", "continue", "rebuild", "refuse"]
Differences = dict[str, tuple[Any, Any]]  # keys of the identity, with what is there and what is wanted

OTHER_FOLDER = "check cache.dir"
FILE_NBYTES = 1 << 30  # least size, mapped, from which on a store that is packed is built in several files
MOST_FILES = 16  # then the mapped one is at most a sixteenth of the store


class PlannedStore:
    """A store before it is there: its plan, its path, and the identity that its file will have."""

    def __init__(
        self,
        plan: StorePlan,
        config: BuildConfig,
        *,
        digests: Digests,
        readers: Readers | None,
        watcher: Watcher,
        rank: BuildRank,
    ) -> None:
        self.plan, self.rank, self.clock = plan, rank, Stopwatch(watcher.waits)
        self.title, self.path, self.num_samples = plan.title, plan.path, plan.num_samples
        self._config, self._digests, self._readers, self._watcher = config, digests, readers, watcher
        self._content: Mapping[str, Any] | None = None
        self._is_part = False

    def identify(self) -> Mapping[str, Any]:
        """Return what `ups_store.create` takes as identity; the first call digests the sources."""
        if self._content is None:
            self._watcher.stage(f"{self.title}: sources", self.plan.source_nbytes, unit="bytes")
            self._content = self.plan.identity(self._digests, self._watcher.advance)
        return self._content

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The whole identity document; raises as `identify`."""
        plan, content = self.plan, self.identify()
        options: dict[str, Any] = {"constants": plan.constants, "dims": plan.dims}
        return identity_of(plan.arrays, identity=content, partition=plan.partition, **options)

    @cached_property
    def config_hash(self) -> str:
        """Hash of the identity, as the store will have it; raises as `identify`."""
        return config_hash(self.document)

    def part(self, number: int, count: int) -> Self:
        """Return the build of one of several files that hold the store together, on this one's clock."""
        plan = self.plan.partition_of(replace(self.rank, machine=number, num_machines=count))
        options: dict[str, Any] = {"digests": self._digests, "readers": self._readers, "rank": self.rank}
        part = type(self)(plan, self._config, watcher=self._watcher, **options)
        part.title = f"{self.title}, file {number + 1} of {count}"
        part._content, part.clock, part._is_part = self.identify(), self.clock, True
        return part


@dataclass(frozen=True)
class Decision:
    """What a build does with its store."""

    action: Action
    reason: str  # for people
    differences: Differences = field(default_factory=dict)  # of the identity from what is there
    store: AnyStore | None = None  # the valid store, open: yours to close
    error: StoreError | None = None  # what refuses the build; None where taking the file meets it
    restarts: bool = False  # an unfinished file of something else is begun again, as nothing would be lost


def decide(build: PlannedStore, *, overwrite: bool = False) -> Decision:
    """Decide what becomes of a store; nothing is written.

    Where something is there to compare with, sources whose digests aren't known are read.
    """
    plan, is_begun = build.plan, files.exists(building_path(build.path))
    if overwrite:
        others = [] if plan.partition else partition_counts(plan.path)
        if not (is_begun or others or files.exists(plan.path)):
            return Decision("build", "there is none yet")
        owner = builder_at(plan.path) if is_begun else ""
        return Decision("refuse", f"being built by {owner}") if owner else Decision("rebuild", "--overwrite")
    decision = decide_published(build)
    if is_begun and decision.action in ("build", "rebuild"):
        return decide_unfinished(build, decision)
    if decision.action != "build":
        return decision
    count, num_finished = count_files(build), 0
    if count > 1 and count in partition_counts(build.path):
        paths = [partition_path(build.path, number, count) for number in range(count)]
        num_finished = sum(_is_of(path, build.part(number, count)) for number, path in enumerate(paths))
    if num_finished:
        return Decision("continue", f"{num_finished} of {count} files are finished")
    number = f", to be built in {counted(count, 'file')}" if count > 1 else ""
    packed = "" if plan.codec == "none" else f", to be packed by {plan.codec}"
    return Decision("build", f"{decision.reason}{number}{packed}")


def decide_published(build: PlannedStore) -> Decision:
    """Decide by the finished store that is there, in one file or in several, mapped or packed."""
    plan, decision = build.plan, Decision("build", "there is none yet")
    try:
        check_no_folder(plan.path)
        store = open_any(plan.path)
        if store.config_hash == build.config_hash:
            return _valid(plan, store)
        with store:
            differing = differences(store.identity_document, build.document)
        decision = Decision("rebuild", "made from something else", differing)
    except StoreNotFoundError:
        pass
    except ReadError:
        raise
    except ConfigError as error:
        return _refusal(error)
    except StoreError as error:
        if not is_damaged(plan.path, error):
            error.hint = "move it away, or replace it: `ups-store build --overwrite`"
            return _refusal(error, f"no store ({error.problem}), --overwrite replaces it")
        decision = Decision("rebuild", f"damaged ({error.problem}), it is set aside")
    if (partitions := open_partitions(build)) is not None:
        return _valid(plan, partitions)
    try:
        holds: Literal["fields", "latents"] = "latents" if plan.encoder else "fields"
        check_replaceable(
            plan.path,
            task=plan.task.name,
            split=plan.split,
            holds=holds,
            most=plan.num_samples if plan.is_limited else None,
            is_partition=plan.partition is not None,
        )
        hint = "make it writable with chmod u+w, or say --overwrite"
        check_not_read_only(real_place(plan.path), hint=hint)
    except StoreError as error:
        return _refusal(error)
    return decision


def decide_unfinished(build: PlannedStore, otherwise: Decision) -> Decision:
    """Decide by the unfinished file that is there; what else would be done is given."""
    unfinished = building_path(build.path)
    try:
        with open_store(unfinished, partial=True) as store:
            differing = differences(store.identity_document, build.document)
            num_committed = int(store.committed.sum())
    except StoreNotFoundError:
        return otherwise
    except StoreError as error:
        if isinstance(error, ReadError) or not is_damaged(unfinished, error):
            return Decision("refuse", f"no unfinished store ({error.problem}), --overwrite replaces it")
        reason = f"what is unfinished there is damaged ({error.problem}), it is set aside"
        return Decision(otherwise.action, reason)
    how_far = f"unfinished, {num_committed} of {build.num_samples} samples committed"
    if owner := builder_at(build.path):
        return Decision("refuse", f"{how_far}, being built by {owner}")
    if not differing:
        return Decision("continue", how_far)
    if num_committed:
        reason = "unfinished and made from something else, with samples; --overwrite replaces it"
        return Decision("refuse", reason, differing)
    reason = "an unfinished store of something else holds no samples"
    return Decision(otherwise.action, reason, differing, restarts=True)


def _valid(plan: StorePlan, store: AnyStore) -> Decision:
    if store.codec == plan.codec:
        return Decision("reuse", "valid, made from the same sources and configuration", store=store)
    codecs = (store.codec, plan.codec)
    current, configured = ("mapped" if codec == "none" else f"packed by {codec}" for codec in codecs)
    if "none" not in codecs:
        advice = f"`ups-store unpack` and then a build make it {configured}"
        return Decision("reuse", f"valid, {current} and not {configured}: {advice}", store=store)
    return Decision("repack", f"valid, but {current} instead of {configured}: no source is read", store=store)


def _refusal(error: StoreError, reason: str = "") -> Decision:
    return Decision("refuse", reason or f"{error.problem}; {error.hint}", error=error)


def check_replaceable(
    path: Path,
    *,
    task: str,
    split: str,
    holds: Literal["fields", "latents"],
    most: int | None = None,
    is_partition: bool = False,
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
    for file in filter(files.exists, (path, *beside)):
        with contextlib.suppress(FormatError), open_any(file) as store:
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
            raise ConfigError(problem, kind=kind, path=file, hint=hint)


def count_files(build: PlannedStore) -> int:
    """Return in how many files a store is built: as configured, as it was begun, else by its size.

    A packed store is built one file after the other: each is filled mapped, packed, and only then the next is
    begun. So the disk holds at most the packed files and one that is mapped.
    """
    plan = build.plan
    if plan.partition:
        return 1
    if plan.num_files is not None:
        return max(1, min(plan.num_files, plan.num_samples))
    if _is_of(building_path(plan.path), build):
        return 1
    for count in partition_counts(plan.path):
        for number in range(count):
            path = partition_path(plan.path, number, count)
            there = [name for name in (path, building_path(path)) if files.exists(name)]
            if there and any(_is_of(name, build.part(number, count)) for name in there):
                return count
    nbytes = 0 if plan.codec == "none" else plan.num_samples * plan.sample_nbytes
    return max(1, min(MOST_FILES, nbytes // FILE_NBYTES, plan.num_samples))


# --- what is there ------------------------------------------------------------------------------------


def check_no_folder(path: Path) -> None:
    """Refuse a folder in the store's place: a rename replaces anything else."""
    if path.is_dir():
        raise ConfigError("there is a folder in the store's place", path=path, hint=OTHER_FOLDER)


def is_finished(path: Path, config_hash: str, *, is_packed: bool | None = None) -> bool:
    """Return whether the store is there whose identity has this hash, packed as is wanted."""
    try:
        with open_any(path) as store:
            return store.config_hash == config_hash and is_packed in (None, store.codec != "none")
    except ReadError:
        raise
    except StoreError:  # not there, or a file that the builder replaces
        return False


def open_partitions(build: PlannedStore) -> AnyStore | None:
    """Open all partitions of the store together, if they are there and of the identity that is wanted."""
    for count in [] if build.plan.partition else partition_counts(build.path):
        try:
            store = open_any(partitions_pattern(build.path, count))
        except ReadError:  # it may be there: building it again would hide that the disk fails
            raise
        except StoreError:  # some are missing, or of something else
            continue
        if store.config_hash == build.config_hash:
            return store
        store.close()
    return None


def hash_at(path: Path) -> str | None:
    """Return the hash of the identity of what is there, finished or not; None if that is no store."""
    try:
        with (
            open_store(path, partial=True) if path.name.endswith(BUILDING_SUFFIX) else open_any(path) as store
        ):
            return store.config_hash
    except ReadError:
        raise
    except StoreError:
        return None


def _is_of(path: Path, build: PlannedStore) -> bool:
    return files.exists(path) and hash_at(path) == build.config_hash


def builder_at(path: Path) -> str:
    """Name the process that builds the store now, for people; empty if none does."""
    unfinished = building_path(path)
    with files.opened(unfinished) as fd:
        if not locks.is_locked(fd, BUILDER_LOCK):
            return ""
        owner = read_owner(fd, unfinished)
        return f"pid {owner.pid} on {owner.host}" if owner else "an unknown process"


def is_damaged(path: Path, error: StoreError) -> bool:
    """Return whether a file that doesn't open is a store all the same, of this version of the format."""
    if isinstance(error, VersionTooNewError) or not isinstance(error, FormatError | CorruptChunkError):
        return False
    with files.opened(path) as fd:
        return looks_like_store(fd)


# --- the dry run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """What would become of one store.

    Attributes:
        task: Its task.
        split: Its split.
        action: "reuse", "repack" (or unpack, which reads no source), "build", "continue", "rebuild", or
            "refuse": the build would stop with an error.
        reason: Why, for people.
        plan: The store as JSON values: path, num_samples, nbytes (length of the file, mapped), codec, arrays,
            constants, sources.
        differences: Keys of the identity that differ from what is there, with `(found, wanted)`.
    """

    task: str
    split: str
    action: Action
    reason: str
    plan: dict[str, Any]
    differences: Differences = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{counted(self.plan['num_samples'], 'sample')}, {format_nbytes(self.plan['nbytes'])}"
        text = f"{self.task} {self.split}: {self.action}: {self.reason}, {size}, {self.plan['path']}"
        if not self.differences:
            return text
        return f"{text}\nfound -> wanted:\n{describe_differences(self.differences)}"

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values, those of the plan beside the others."""
        values = dict(vars(self))
        return {**values, **values.pop("plan")}


def explain(build: PlannedStore, *, overwrite: bool = False) -> Explanation:
    """Say what a build would do with its store, and why; nothing is written.

    Where something is there to compare with, sources whose digests aren't known are read.

    Args:
        build: The build, which wasn't begun.
        overwrite: Whether it would build from scratch whatever is there.
    Raises:
        SourceError: If sources can't be read.
    """
    decision, plan = decide(build, overwrite=overwrite), build.plan
    action, reason = decision.action, decision.reason
    if decision.store is not None:
        decision.store.close()
    if action not in ("reuse", "refuse"):  # can a file be made or replaced there?
        try:
            check_no_folder(plan.path)
            folder = next(folder for folder in real_place(plan.path).parents if files.exists(folder))
            if not folder.is_dir():
                action, reason = "refuse", f"{folder} is no folder; {OTHER_FOLDER}"
            elif not files.may_write_into(folder):
                action, reason = "refuse", f"can't write into {folder}; {OTHER_FOLDER}"
        except StoreError as error:
            action, reason = "refuse", f"{error.problem}; {error.hint}"
    return Explanation(plan.task.name, plan.split, action, reason, plan.to_json(), decision.differences)
