"""The build of one store: what it will hold, whether it is there already, and otherwise filling it.

`python -m ups_store.build` and training's on-demand mode both drive this object: the one from end to end, the
other stretch by stretch while samples are used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import ups_store
from ups_store.building.config import BuildConfig, CacheConfig
from ups_store.building.digests import DigestCache, Digests
from ups_store.building.fill import Filling
from ups_store.building.place import (
    check_packable,
    create_file,
    find_valid,
    is_finished,
    join_builder,
    open_writer,
    prepare_place,
    set_aside_damaged,
    wait_for_store,
)
from ups_store.building.plan import StorePlan, partition_of, plan_store
from ups_store.building.progress import QuietWatcher, Stopwatch, Watcher
from ups_store.building.ranks import ALONE, BuildRank
from ups_store.building.read import read_batches
from ups_store.building.readers import Readers
from ups_store.building.staging import Sources
from ups_store.errors import BuildLockedError, StoreNotFoundError, StoreReplacedError
from ups_store.format.root import config_hash
from ups_store.read.base import AnyStore
from ups_store.read.gather import Samples
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import building_path
from ups_store.sources.readers import ReadBatch
from ups_store.system import files
from ups_store.system.memory_file import IN_MEMORY, is_in_memory
from ups_store.write.writer import Committer, StoreWriter

_POLL_S = 0.1


def open_build(
    config: BuildConfig,
    task: str,
    split: str,
    *,
    readers: Readers | None = None,
    digests: Digests | None = None,
    watcher: Watcher | None = None,
    rank: BuildRank = ALONE,
    groups_per_batch: int | None = None,
    sources: Sources | None = None,
) -> Build:
    """Find the sources of a task and split, and decide what becomes of them; no sample is read or written.

    Args:
        config: What is wanted.
        task: Name of the task.
        split: "train", "val" or "test".
        readers: Read the sources; by default each step starts one of its own.
        digests: Known digests of the sources; by default those beside the stores.
        watcher: Hears how it goes; by default nothing is shown.
        rank: Place of this process among those that build together.
        groups_per_batch: Samples that are committed at a time, where the configuration leaves that open, in
            groups of samples that are encoded together; small batches make the first samples come soon.
        sources: Finds them; by default the configuration's, copied first where it says so.
    Raises:
        SourceError: If sources are missing, unreadable, or don't go together.
        StoreError: As the encoder, if stores hold latents.
    """
    sources = sources or Sources(config, watcher=watcher)
    plan = partition_of(plan_store(config, task, split, readers=readers, sources=sources), rank)
    if groups_per_batch is not None and plan.batch_size is None:
        plan = replace(plan, batch_size=groups_per_batch * plan.group_size)
    return Build(
        plan,
        digests=digests or DigestCache(config.cache.dir, readers=readers),
        on_nan=config.data.on_nan,
        readers=readers,
        watcher=watcher or QuietWatcher(),
        rank=rank,
        check_on_resume=config.reading.check_on_resume,
        deadlines=config.cache,
    )


class Build:
    """The store of one task and split: there already, or to be filled. `open_build` makes it.

    `begin` finds the store or claims its file; then `fill`, as often as you like, and `finish`. If it is
    interrupted, the next build of the same goes on with what is committed. A context manager, which `close`s.

    Args:
        plan: What the store holds, and of what it is made.
        digests: Known digests of the sources.
        on_nan: "fail" or "keep" NaN and Inf.
        readers: Read the sources; None: this process does.
        watcher: Hears how it goes.
        rank: Place of this process among those that build together.
        check_on_resume: Whether to check what an unfinished store holds before it is continued.
        deadlines: Of encode calls and commits.

    Attributes:
        plan: As given.
        rank: As given.
        title: Task and split, for people.
        path: Where the store goes.
        num_samples: N; 0 for a split that would be empty.
        clock: Seconds by stage since `begin`, or `use`.
        is_reused: Whether `begin` found the store there already.
        is_finished: Whether the store is complete.
    """

    def __init__(
        self,
        plan: StorePlan,
        *,
        digests: Digests,
        on_nan: str,
        readers: Readers | None,
        watcher: Watcher,
        rank: BuildRank,
        check_on_resume: bool = True,
        deadlines: CacheConfig | None = None,
    ) -> None:
        self.plan, self.rank, self.clock = plan, rank, Stopwatch(watcher.waits)
        self.title, self.path, self.num_samples = plan.title, plan.path, plan.num_samples
        self.is_reused = self.is_finished = False
        self._digests, self._on_nan = digests, on_nan
        self._readers, self._watcher = readers, watcher
        self._committer: Committer | None = None
        self._content: Mapping[str, Any] | None = None
        self._store: AnyStore | None = None
        self._is_there: npt.NDArray[np.bool_] | None = None
        self._filling: Filling | None = None
        self._helps = self._is_part = self._has_looked = False
        self._check_on_resume, self._deadlines = check_on_resume, deadlines

    def identify(self) -> Mapping[str, Any]:
        """What `ups_store.create` takes as identity; called for the first time, it digests the sources.

        Raises:
            SourceError: If one can't be read, or changes meanwhile.
        """
        if self._content is None:
            self._watcher.stage(f"{self.title}: sources", self.plan.source_nbytes, unit="bytes")
            self._content = self.plan.identity(self._digests, self._watcher.advance)
        return self._content

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The whole identity document; raises as `identify`."""
        return self.plan.document(self.identify())

    @cached_property
    def config_hash(self) -> str:
        """Hash of the identity, as the store will have it; raises as `identify`."""
        return config_hash(self.document)

    @property
    def store(self) -> AnyStore:
        """The finished store, or what is committed of it so far; it is yours to close."""
        if self._store is None:
            assert self._committer is not None, "begin it first"
            try:
                self._store = open_store(building_path(self._committer.path), partial=True)
            except StoreNotFoundError:  # another process has published it this moment
                self._store = open_any(self._committer.path)
        return self._store

    @property
    def filling(self) -> Filling:
        """What reads, encodes and commits its samples."""
        if self._filling is None:
            assert self._committer is not None, "begin it first"
            self._filling = self.filling_into(self._committer)
        return self._filling

    def filling_into(self, committer: Any) -> Filling:
        """What reads and encodes its samples for something else than its file.

        Args:
            committer: Has `commit_many(samples, arrays)`, as a `ups_store.Committer`.
        """
        return Filling(
            self.plan,
            committer,
            self._readers,
            watcher=self._watcher,
            clock=self.clock,
            on_nan=self._on_nan,
            deadlines=self._deadlines,
        )

    def use(self, readers: Readers, watcher: Watcher) -> None:
        """Go on with other readers and another watcher, such as those of another thread."""
        self._readers, self._watcher, self.clock = readers, watcher, Stopwatch(watcher.waits)
        self._filling = None

    def read(self, samples: Samples | None = None) -> Iterator[ReadBatch]:
        """Samples as their sources have them, in the store's dtypes, a batch at a time.

        Args:
            samples: Their numbers, sorted; by default all.
        Yields:
            `samples` (B,), `arrays` by name (B, ...), valid until the next batch is asked for.
        Raises:
            SourceError: If a sample can't be read, or isn't finite where that isn't to be kept.
        """
        if samples is None:
            samples = np.arange(self.num_samples)
        return read_batches(self.plan, samples, on_nan=self._on_nan, readers=self._readers)

    def begin(self, *, overwrite: bool = False, helps: bool = False) -> None:
        """Find the store; or create its file, continue it, or join the process that builds it.

        Args:
            overwrite: Whether to build from scratch whatever is there.
            helps: Whether to join any process that builds it already, and to finish the store should that
                one end before. Otherwise that is an error, and only the ranks of one command join.
        Raises:
            SourceError: As `identify`.
            IdentityMismatchError: If an unfinished file of another identity holds samples.
            BuildLockedError: If another process builds it.
            FormatError: If a file that isn't a store, or a damaged one, is in its place.
            ConfigError: If there can't be a store in its place.
            StoreError: As `ups_store.create`; kind "no_builder" if local rank 0 never begins.
        """
        self._helps = helps
        if self.is_reused or (not self._has_looked and self.find(overwrite=overwrite)):
            return
        with self.clock.timed("open"):
            if self.rank.is_builder and self._become_builder(overwrite=overwrite):
                return
        self._committer = join_builder(self.path, self.identify(), self.config_hash)
        if self._committer is None:
            self._take(open_any(self.path))

    def find(self, *, overwrite: bool = False) -> bool:
        """Whether the store is there already, in one file or in several, mapped or packed; `begin` asks it.

        Args:
            overwrite: Whether to build from scratch whatever is there: then it counts as absent.
        Raises:
            SourceError: As `identify`.
            FormatError: If a file that isn't a store, or a damaged one, is in its place.
            ConfigError: If there can't be a store in its place.
        """
        self._has_looked = True
        if not self._is_part:
            self.clock = Stopwatch(self._watcher.waits)
        prepare_place(self.path, self._watcher.note)
        check_packable(self.plan)
        with self.clock.timed("digest"):
            self.identify()
        return not overwrite and self.find_again()

    def find_again(self) -> bool:
        """Whether the store is there now, such as from another machine; for once `find` hasn't found it."""
        with self.clock.timed("open"):
            found = find_valid(self.plan, self.document, self._watcher.note)
        if found is not None:
            self.is_reused = True
            self._take(found)
        return self.is_reused

    def part(self, number: int, count: int) -> Build:
        """The build of one of several files that hold the store together; its time counts to this one's."""
        place = replace(self.rank, machine=number, num_machines=count)
        plan = replace(partition_of(self.plan, place), batch_size=self.plan.batch_size)
        part = Build(
            plan,
            digests=self._digests,
            on_nan=self._on_nan,
            readers=self._readers,
            watcher=self._watcher,
            rank=self.rank,
            check_on_resume=self._check_on_resume,
            deadlines=self._deadlines,
        )
        part.title = f"{self.title}, file {number + 1} of {count}"
        part._content = self.identify()
        part.clock, part._is_part = self.clock, True
        return part

    def begin_in_memory(self, shared: str | None = None) -> None:
        """The same in memory: nothing is written to a disk, and nothing is left when the process ends.

        Args:
            shared: Text of the `path_in_memory` of the process of this machine that has begun it.
        Raises:
            DiskFullError: Kind "memory_full".
        """
        if shared is not None:
            self._committer = ups_store.join(shared, identity=self.identify())
            return
        self._committer = create_file(self.plan, self.identify(), IN_MEMORY, durability="lazy")

    @property
    def path_in_memory(self) -> Path | None:
        """Where other processes of this machine find what is filled in memory; None if it isn't."""
        path = self._committer.path if self._committer else None
        return path if path is not None and is_in_memory(path) else None

    def missing(self) -> Samples:
        """Numbers of the samples that are neither there nor committed, sorted."""
        try:
            if self._committer is not None and not self.is_finished:
                return self._committer.missing()
        except StoreReplacedError:  # another process has published the store
            pass
        return np.flatnonzero(~self.store.committed)

    def has(self, samples: Samples) -> bool:
        """Whether samples are there, by whichever process."""
        if self._is_there is None or not self._is_there[samples].all():
            self._is_there = self.store.committed
        return bool(self._is_there[samples].all())

    def num_there(self) -> int:
        """How many samples are there."""
        return int(self.store.committed.sum())

    @property
    def num_committed(self) -> int:
        """How many samples this process has committed."""
        return self._filling.num_committed if self._filling else 0

    def fill(self, samples: Samples | None = None) -> None:
        """Read, encode and commit samples; those that are there already are left out.

        Samples that can't be read are skipped where the configuration says so; see `check_complete`.

        Args:
            samples: Their numbers, sorted; by default this process's share of all.
        Raises:
            SourceError: If a sample can't be read, or isn't finite where that isn't to be kept.
            StoreError: As the encoder and `ups_store.StoreWriter.commit_many`.
        """
        if samples is None:
            samples = self.rank.share(self.missing(), self.num_samples)
        else:
            samples = samples[~self.store.committed[samples]]
        try:
            self.filling.fill(samples)
        except StoreReplacedError:  # the builder had made these too, and has published the store
            if not self.store.committed.all():
                raise

    def check_complete(self) -> None:
        """Fail if samples were skipped.

        Raises:
            UnreadSamplesError: The others are committed.
        """
        self.filling.check_complete()

    def finish(self) -> AnyStore:
        """Commit what is still missing and publish the store; where another process builds it, wait for that.

        Raises:
            SourceError: If a source was changed meanwhile.
            UnreadSamplesError: If samples were skipped.
            StoreError: As `fill`; kind "no_builder" if the builder ended without finishing.
        """
        if not self.is_finished:
            with self.clock.timed("finish"):
                self._take(self._finished())
        return self.store

    def close(self) -> None:
        """Let go of the file that is filled, finished or not; what is committed stays, `store` stays open."""
        if self._committer is not None:
            self._committer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, store: AnyStore) -> None:
        self._store, self.is_finished = store, True

    def _become_builder(self, *, overwrite: bool) -> bool:
        """Whether this process builds the store from now on, or has found it finished."""
        try:
            writer = self._open_writer(overwrite=overwrite)
        except BuildLockedError as error:
            if not self._helps:
                raise
            self._watcher.note(f"{self.title}: {error.found} builds it too; helping")
            return False
        if overwrite or not is_finished(self.path, self.config_hash):
            with contextlib.ExitStack() as failing:
                failing.push(writer)
                set_aside_damaged(self.path, self._watcher.note)
                failing.pop_all()
            self._committer = writer
            return True
        with writer:  # it was published just before; while this is open no other process builds in the file
            files.remove(building_path(self.path))
        self._take(open_any(self.path))
        return True

    def _open_writer(self, *, overwrite: bool = False) -> StoreWriter:
        options = {"overwrite": overwrite, "check_on_resume": self._check_on_resume}
        return open_writer(self.plan, self.identify(), watcher=self._watcher, **options)

    def _finished(self) -> AnyStore:
        committer = self._committer
        assert committer is not None, "begin it first"
        if isinstance(committer, StoreWriter):
            return self._publish(committer)
        if is_in_memory(committer.path) or not self._helps:
            return wait_for_store(committer.path, self.config_hash)
        return self._wait_or_take_over()

    def _publish(self, writer: StoreWriter) -> AnyStore:
        self.filling.fill_rest()
        self.filling.check_complete()
        self.plan.check_sources()
        return open_store(writer.finish())

    def _wait_or_take_over(self) -> AnyStore:
        """The store that another process builds; should that end before, this one finishes it."""
        while not is_finished(self.path, self.config_hash):
            self._watcher.waits("builder")
            try:
                writer = self._open_writer()
            except BuildLockedError:
                time.sleep(_POLL_S)
                continue
            with writer:
                if not is_finished(self.path, self.config_hash):
                    return self._publish(writer)
                files.remove(building_path(self.path))
        return open_any(self.path)
