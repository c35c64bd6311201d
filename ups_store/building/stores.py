"""All stores of a configuration, one after the other, each from end to end; or what would become of each."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from ups_store.building.build import Build, open_build, remove_dead, wait_for_store
from ups_store.building.config import BuildConfig
from ups_store.building.decide import Explanation, count_files, explain, hash_at
from ups_store.building.fill import Tuning, tune
from ups_store.building.plan import DigestCache, Digests, StorePlan
from ups_store.building.progress import BuildReport, BuildResult, Startup, Stopwatch, Watcher
from ups_store.building.ranks import BuildRank
from ups_store.building.read import UnreadSamplesError, split_batches
from ups_store.building.readers import Readers
from ups_store.building.staging import Sources
from ups_store.check.info import mapped_nbytes
from ups_store.check.statistics import Statistics
from ups_store.console import format_nbytes
from ups_store.errors import (
    BuildInterruptedError,
    CorruptChunkError,
    DiskFullError,
    FormatError,
    IdentityMismatchError,
    SourceError,
    StoreError,
)
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import building_path
from ups_store.read.several import parts_of
from ups_store.remote.shared import SharedFile, open_shared
from ups_store.remote.transfer import compare_there, find_there, pull_from, push_to
from ups_store.sources.reader_pool import Patience, ReaderPool
from ups_store.sources.reader_process import Call
from ups_store.sources.source_files import SPLITS, split_range
from ups_store.system import files
from ups_store.system.paths import partition_counts, partition_path, partitions_pattern
from ups_store.writing.target import payload_nbytes as payload_of

_LOOK_S = 15.0  # the longest that a build waits for an answer whether a store is there
_OF_ONE_STORE = (CorruptChunkError, DiskFullError, FormatError, IdentityMismatchError)
_KINDS_OF_ONE_STORE = ("wrong_length", "source_changed", "not_found", "replaced")
_NOT_WRITABLE = ("not_allowed", "read_only")


def build_all(
    config: BuildConfig,
    *,
    watcher: Watcher,
    overwrite: bool = False,
    rehash: bool = False,
    skip_missing: bool = False,
    clock: Stopwatch | None = None,
    rank: BuildRank | None = None,
    digests: Digests | None = None,
) -> BuildReport:
    """Build every task and split of a configuration.

    A split without samples is skipped with a note when others of its task were asked for too.

    Args:
        config: What to build.
        watcher: Hears how it goes; `Watcher()` shows nothing.
        overwrite: Whether to build from scratch whatever is there.
        rehash: Whether known digests aren't believed.
        skip_missing: Whether a task without any sources is skipped with a note, too.
        clock: Has counted "imports" already, where those belong to the run.
        rank: Place of this process among those that build together; by default as the environment says.
        digests: Known digests of the sources; by default those beside the stores.
    Raises:
        SourceError: If nothing is left to build, a task has no sources, or a source is unusable.
        StoreError: As `Build.begin` and `Build.finish`.
    """
    clock, skipped = clock or Stopwatch(), dict[str, str]()
    sources = Sources(config, watcher=watcher)
    with clock.timed("stage"):
        sources.stage_all()
    with (
        Readers(config.reading, note=watcher.note) as readers,
        SharedStores(config, watcher=watcher) as shared,
    ):
        watcher.watch(readers.pool)
        options: dict[str, Any] = {"readers": readers, "sources": sources, "rank": rank}
        options["digests"] = digests or DigestCache(config.cache.dir, rehash=rehash, readers=readers)
        with clock.timed("plan"):
            builds = list(open_builds(config, skipped, watcher, skip_missing=skip_missing, **options))
        # Before the sources are digested; `create` reserves the room for good.
        plans = [build.plan for build in builds if not overwrite]
        new = [plan for plan in plans if not any(map(files.exists, (plan.path, building_path(plan.path))))]
        needed = sum(plan.num_samples * plan.sample_nbytes for plan in new if plan.codec == "none")
        for folder in {plan.path.parent for plan in new if os.path.isdir(plan.path.parent)}:
            if needed > files.free_bytes(folder):
                with files.disk_full_as_error(folder / new[0].path.name, needed):
                    raise OSError(errno.ENOSPC, "no room for all stores")
        results, unread = list[BuildResult](), list[UnreadSamplesError]()
        options = {"readers": readers, "watcher": watcher, "shared": shared, "overwrite": overwrite}
        for build in builds:
            try:
                result = build_store(build, **options)
            except UnreadSamplesError as error:  # the other stores needn't wait for that one's sources
                if unread:  # the first is the one that is raised
                    watcher.note(str(error))
                unread.append(error)
                continue
            results.append(result)
            _note_losses(result, build.plan, watcher)
        if unread:
            raise unread[0]
    return BuildReport(tuple(results), skipped, readers.choice, Startup.of(results, clock))


def explain_all(
    config: BuildConfig,
    *,
    watcher: Watcher,
    rehash: bool = False,
    overwrite: bool = False,
    skip_missing: bool = False,
) -> list[Explanation]:
    """Explain every store that this machine would build; of its ranks the first one does."""
    if not BuildRank.from_environment().is_builder:
        return []
    with Readers(config.reading, note=watcher.note) as readers:
        watcher.watch(readers.pool)
        options: dict[str, Any] = {"readers": readers, "skip_missing": skip_missing}
        options["sources"] = Sources(config, watcher=watcher, is_dry=True)
        options["digests"] = DigestCache(config.cache.dir, rehash=rehash, save=False, readers=readers)
        return [explain(build, overwrite=overwrite) for build in open_builds(config, {}, watcher, **options)]


def open_builds(
    config: BuildConfig,
    skipped: dict[str, str],
    watcher: Watcher,
    *,
    rank: BuildRank | None = None,
    skip_missing: bool = False,
    **options: Any,
) -> Iterator[Build]:
    """Open the build of every store that has samples; the others go to `skipped` with the reason.

    Other options are those of `open_build`.
    """
    rank = rank or BuildRank.from_environment()
    both = [(task, split) for task in config.data.tasks for split in config.data.split]
    for task, split in both:
        try:
            build = open_build(config, task, split, watcher=watcher, rank=rank, **options)
            if not build.plan.is_empty:
                yield build
                continue
            error = _empty_split(build.plan, config)
        except SourceError as missing:
            if missing.kind != "no_source" or (split == "train" and config.stage_dir is not None):
                raise
            error = missing
        skipped[f"{task} {split}"] = str(error)
        is_without = error.kind == "no_source" and all(
            f"{task} {name}" in skipped for name in config.data.split
        )
        if len(skipped) == len(both) or (is_without and not skip_missing):
            if is_without and len(config.data.tasks) > 1:
                error.hint = f"{error.hint}; --skip-missing builds the other tasks"
            raise error
        watcher.note(f"skipped {task} {split}: {error}")


def _empty_split(plan: StorePlan, config: BuildConfig) -> SourceError:
    """Say what the fractions made of the sources, in samples."""
    data, counts, shares = config.data, [info.num_samples for info in plan.infos], []
    for split in SPLITS:
        options: dict[str, Any] = {"fractions": data.fractions, "test_part": plan.task.test_part}
        share = sum(len(split_range(count, split=split, **options)) for count in counts)
        shares.append(f"{share} to {split}")
    samples = f"{counted(sum(counts), 'sample')} in {counted(len(counts), 'file')}"
    if any(counts):
        fractions = ", ".join(map(str, data.split_fractions))
        samples += f", shared out {fractions}: {', '.join(shares)} (test and val rounded down in each file)"
    file_name = f"{plan.task.name}_{plan.split}.h5"
    return SourceError(
        f"{plan.title} would be empty",
        kind="empty_split",
        path=data.root,
        found=samples,
        hint=f"change data.split_fractions, or give the split a file of its own: {file_name}",
    )


def _note_losses(result: BuildResult, plan: StorePlan, watcher: Watcher) -> None:
    """Note each array that was written with values that aren't finite, or that a cast lost."""
    for name, lost in result.statistics.items():
        array, cast = f"{result.path}: array {name!r}", f"the cast to {plan.arrays[name].dtype}"
        if lost["num_nan"] or lost["num_inf"]:
            made = f", {lost['num_overflow']:,} of them by {cast}" if lost["num_overflow"] else ""
            watcher.note(f"{array} holds {lost['num_nan']:,} NaN and {lost['num_inf']:,} Inf{made}")
        if num := lost["num_underflow"]:
            made = f"{cast} made {counted(num, 'value')} 0"
            watcher.note(f"{array}: {made}; a wider dtype keeps such small ones")
        channels = (plan.arrays[name].attrs or {}).get("channels") or ()
        for number, num in enumerate(lost.get("num_flat", ())):
            if num:
                channel = repr(channels[number]) if number < len(channels) else number
                varying = f"what varies in channel {channel} of samples with {counted(num, 'value')}"
                watcher.note(f"{array}: {cast} loses {varying}; a wider dtype tells them apart")


# --- one store from end to end ------------------------------------------------------------------------


def build_store(
    build: Build,
    *,
    readers: Readers,
    watcher: Watcher,
    overwrite: bool = False,
    shared: SharedStores | None = None,
) -> BuildResult:
    """Build one store, continue it, or find that it is valid; in the end it is packed as configured.

    A valid mapped store is packed, or a packed one unpacked: no sample is read or encoded for that.
    """
    with build:
        maker = _Maker(build, readers, watcher, overwrite=overwrite)
        is_here = build.find(overwrite=overwrite)
        is_pulled = bool(shared and not is_here and not overwrite and shared.pull(build))
        store = maker.packed(build, build.store) if is_here or is_pulled else maker.make()
        with store:
            result = maker.result(store)
            result.pulled = is_pulled
            if shared and not is_pulled:
                result.pushed = shared.push(build, store)
    return result


class _Maker:
    """Makes the files of a store, one after the other."""

    def __init__(self, build: Build, readers: Readers, watcher: Watcher, *, overwrite: bool) -> None:
        self._build, self._readers, self._watcher = build, readers, watcher
        self._overwrite = overwrite
        self._statistics, self._num_committed = Statistics(), 0
        self._tuning: Tuning | None = None

    def make(self) -> AnyStore:
        """Build all files of the store, and open it."""
        build, count = self._build, count_files(self._build)
        if count == 1:
            store = self._make_file(build)
        else:
            unread = []
            for number in range(count):
                try:
                    self._make_file(build.part(number, count)).close()
                except UnreadSamplesError as error:  # the other files needn't wait for this one's sources
                    unread.append(error)
            if unread:
                raise unread[0]
            store = open_any(partitions_pattern(build.path, count))
        if build.rank.is_builder and not build.plan.partition:
            remove_replaced(build, count, self._watcher)
        return store

    def _make_file(self, part: Build) -> AnyStore:
        is_builder, plan = part.rank.is_builder, part.plan
        if is_builder:
            remove_dead(part.path, codec=plan.codec)
        with part:
            part.begin(overwrite=self._overwrite)
            if part.is_reused:  # a file that an earlier run has finished
                for batch in split_batches(np.arange(part.num_samples), plan.sample_nbytes):
                    self._statistics.add(part.store.gather(batch))
            elif not part.is_finished:
                try:
                    self._fill(part)
                    if is_builder:
                        self._statistics.join(part.filling.statistics())
                except KeyboardInterrupt as error:
                    unfinished = building_path(plan.path)
                    with open_store(unfinished, partial=True) as begun:
                        how_far = f"{int(begun.committed.sum())} of {plan.num_samples} samples are committed"
                    without = ", without --overwrite" if self._overwrite else ""  # that isn't to continue
                    raise BuildInterruptedError(
                        f"interrupted: {how_far}",
                        path=unfinished,
                        hint=f"run the same command again to continue{without}",
                    ) from error
            store = part.finish()
            self._num_committed += part.num_committed
        if is_builder:
            return self.packed(part, store)
        store.close()  # waited for, or the next file would seem to have no builder
        return wait_for_store(part.path, part.config_hash, is_packed=plan.codec != "none")

    def _fill(self, build: Build) -> None:
        """Commit this process's share; its machine's builder then also what the others haven't come to."""
        rank, missing, watcher = build.rank, build.missing(), self._watcher
        share = rank.share(missing, build.num_samples)
        if not rank.is_builder:
            watcher.stage(f"{build.title}: samples of rank {rank.local_rank}", len(share), unit="samples")
            build.fill()
            return
        num_there = build.num_samples - len(missing)
        watcher.stage(f"{build.title}: samples", build.num_samples, unit="samples")
        if num_there:
            watcher.note(f"{build.path}: {num_there} of {build.num_samples} samples are there, continuing")
        watcher.advance(num_there)
        filling = build.filling
        if self._tuning:
            filling.batch_size = self._tuning.batch_size
        elif self._readers.is_tuned and len(share):
            options: dict[str, Any] = {"clock": build.clock, "note": watcher.note}
            self._tuning = tune(filling, self._readers, share, is_alone=rank.num_local == 1, **options)
            share = filling.missing(share)
        filling.fill(share)
        filling.fill_rest()
        filling.check_complete()

    def packed(self, build: Build, store: AnyStore) -> AnyStore:
        """Pack or unpack every file of a finished store in its own place, as configured; opens it again.

        What is interrupted goes on with the next file, or the same, when this is called again.
        """
        codec, path = build.plan.codec, store.path
        if not build.rank.is_builder:
            return store
        for part in parts_of(store):
            remove_dead(part.path, codec=codec)
        others = [part for part in parts_of(store) if (part.codec == "none") != (codec == "none")]
        if not others:
            return store
        from ups_store.packed.pack import pack

        doing = "unpacking" if codec == "none" else f"packing by {codec}"
        self._watcher.stage(f"{build.title}: {doing}", sum(map(payload_of, others)), unit="bytes")
        for part in others:
            with build.clock.timed("pack"):
                pack(part.path, part.path, codec, force=self._overwrite, progress=self._watcher.advance)
        store.close()
        return open_any(path)

    def result(self, store: AnyStore) -> BuildResult:
        """Say what became of the store, which is finished."""
        build, plan = self._build, self._build.plan
        paths = [part.path for part in parts_of(store)]
        return BuildResult(
            path=plan.path if store.path == plan.path.absolute() else store.path,  # as it is configured
            task=plan.task.name,
            split=plan.split,
            config_hash=store.config_hash,
            reused=build.is_reused,
            num_samples=len(store),
            num_committed=self._num_committed,
            source_sample_nbytes=plan.source_sample_nbytes,
            nbytes=store.nbytes,
            age_s=round(max(0.0, time.time() - max(map(files.modified_s, paths))), 1),
            codec=store.codec,
            num_files=len(paths),
            mapped_nbytes=mapped_nbytes(store),
            seconds=build.clock.to_json(),
            statistics=self._statistics.to_json(),
            tuning=self._tuning.to_json() if self._tuning else None,
        )


def remove_replaced(build: Build, count: int, watcher: Watcher) -> None:
    """Remove files of an earlier store that is in another number of them: they would be found first."""
    counts = [other for other in partition_counts(build.path) if other != count]
    earlier = [partition_path(build.path, number, other) for other in counts for number in range(other)]
    name = build.path.name if count == 1 else partitions_pattern(build.path, count).name
    for path in earlier if count == 1 else [build.path, *earlier]:
        if hash_at(path) is not None:
            files.remove(path)
            watcher.note(f"{path} is removed: {name} replaces it")


# --- the shared cache -----------------------------------------------------------------------------------


class SharedStores:
    """Pulls stores of other machines from the shared cache, `cache.remote`, and pushes those made here.

    Nothing of it stops a build: what fails or takes too long is a warning, and the store is built here.
    Transfers run in a reader process, which is ended where it doesn't get on; a build never uses a client
    itself, which wouldn't survive a fork. A context manager, which ends their processes.
    """

    def __init__(self, config: BuildConfig, *, watcher: Watcher) -> None:
        self._timeout_s = config.cache.remote_timeout_s
        self._remote = config.cache.remote
        self._cache = None if self._remote is None else open_shared(self._remote)  # asks for nothing yet
        self._look_s = min(_LOOK_S, self._timeout_s)
        self._watcher = watcher
        # By their deadline: an answer has to come sooner than bytes.
        self._pools: dict[float, ReaderPool] = {}
        self._is_given_up = self._is_push_given_up = False

    def pull(self, build: Build) -> bool:
        """Pull a store that a build hasn't found, if it is the builder; say whether it has it now."""
        if self._cache is None or self._is_given_up or not build.rank.is_builder:
            return False
        is_pulled = False
        with self._warning(f"{build.title}: not pulled from"), build.clock.timed("pull"):
            entries = self._find(build.config_hash, build.path.name)
            # Other processes of this machine wait for files in the number that a build would make.
            if entries and (build.rank.num_local == 1 or len(entries) == count_files(build)):
                nbytes = sum(entry.nbytes for entry in entries)
                self._watcher.stage(f"{build.title}: pulling", nbytes, unit="bytes")
                path = self._ask(pull_from, self._timeout_s, entries, build.path.parent, has_bytes=True)
                self._watcher.note(f"{build.title}: pulled {format_nbytes(nbytes)} from {self._name}, {path}")
                is_pulled = True
        return is_pulled and build.find_again()

    def push(self, build: Build, store: AnyStore) -> bool:
        """Push a finished store, and say whether this put it there; one that is there is compared."""
        if self._cache is None or self._is_given_up or not build.rank.is_builder:
            return False
        if self._cache.is_read_only or self._is_push_given_up:
            return False
        title = build.title
        with self._warning(f"{title}: not pushed to"):
            if entries := self._find(store.config_hash, build.path.name):
                self._ask(compare_there, self._look_s, store.path, entries)
                return False
            self._watcher.stage(f"{title}: pushing", store.nbytes, unit="bytes")
            if self._ask(push_to, self._timeout_s, store.path, has_bytes=True):
                self._watcher.note(f"{title}: pushed {format_nbytes(store.nbytes)} to {self._name}")
                return True
        return False

    def _find(self, config_hash: str, name: str) -> Sequence[SharedFile]:
        entries: Sequence[SharedFile]
        entries = self._ask(find_there, self._look_s, config_hash, name)
        return entries

    def _ask(
        self, function: Callable[..., object], deadline_s: float, *arguments: object, has_bytes: bool = False
    ) -> Any:
        """Call it in the process, which gets half as long again; a client's own deadline comes before."""
        self._watcher.waits("shared cache")
        timeout_s = 1.5 * deadline_s
        if timeout_s not in self._pools:
            patience = Patience(timeout_s=timeout_s, open_timeout_s=timeout_s, retries=0)
            self._pools[timeout_s] = ReaderPool(1, slot_nbytes=1, num_slots=1, patience=patience)
        call = Call(function, (self._remote, deadline_s, *arguments), self._name, "a store")
        progress = self._watcher.advance if has_bytes else lambda num: None
        return self._pools[timeout_s].ask(call, progress=progress)

    @property
    def _name(self) -> str:
        return self._cache.location if self._cache else ""

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Note failures in the block; after one that isn't of a single store the place is left alone."""
        try:
            yield
        except (StoreError, OSError) as error:
            kind = getattr(error, "kind", "")
            if isinstance(error, _OF_ONE_STORE) or kind in _KINDS_OF_ONE_STORE:
                consequence = ""
            elif kind in _NOT_WRITABLE:
                self._is_push_given_up, consequence = True, "; nothing more is pushed"
            else:
                self._is_given_up, consequence = True, "; it is left alone from here on"
            self._watcher.note(f"warning: {what} {self._name}: {error}{consequence}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools.values():
            pool.close()
