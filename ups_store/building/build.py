"""The build of one store: finding or claiming its file, filling it, publishing it; alone or with others.

`build_store` drives `Build` from end to end.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

import ups_store
from ups_store.building.config import BuildConfig
from ups_store.building.decide import (
    OTHER_FOLDER,
    Decision,
    PlannedStore,
    check_no_folder,
    decide_published,
    decide_unfinished,
    is_damaged,
    is_finished,
)
from ups_store.building.fill import Filling
from ups_store.building.plan import DigestCache, Digests, StorePlan, plan_store, sample_nbytes_of
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.ranks import ALONE, BuildRank
from ups_store.building.read import read_batches
from ups_store.building.readers import Readers
from ups_store.building.staging import Sources
from ups_store.errors import (
    ConfigError,
    CorruptChunkError,
    FormatError,
    IdentityMismatchError,
    ReadError,
    StoreError,
    StoreNotFoundError,
    StoreReplacedError,
    check_installed,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.root import describe_differences
from ups_store.read.base import AnyStore
from ups_store.read.gather import Samples
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import BUILDING_SUFFIX, UNPACKING_SUFFIX, building_path
from ups_store.remote.transfer import is_pulling
from ups_store.sources.reader_pool import ReadBatch
from ups_store.system import files, locks
from ups_store.system.files import is_in_memory, make_folder, real_place
from ups_store.system.memory import IN_MEMORY
from ups_store.writing.create import join
from ups_store.writing.writer import Committer, StoreWriter

BUILDER_S = 60.0  # for the builder to begin, or to be started again
POLL_S = 0.1


def open_build(
    config: BuildConfig,
    task: str,
    split: str,
    *,
    readers: Readers | None = None,
    digests: Digests | None = None,
    watcher: Watcher | None = None,
    rank: BuildRank = ALONE,
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
        sources: Finds them; by default the configuration's, copied first where it says so.
    Raises:
        SourceError: If sources are missing, unreadable, or don't go together.
        StoreError: As the encoder, if stores hold latents.
    """
    sources = sources or Sources(config, watcher=watcher)
    plan = plan_store(config, task, split, readers=readers, sources=sources).partition_of(rank)
    digests = digests or DigestCache(config.cache.dir, readers=readers)
    return Build(plan, config, digests=digests, readers=readers, watcher=watcher or Watcher(), rank=rank)


class Build(PlannedStore):
    """The store of one task and split: there already, or to be filled. `open_build` makes it.

    `begin` finds the store or claims its file; then `fill`, as often as you like, and `finish`. If it is
    interrupted, the next build of the same goes on with what is committed. A context manager, which `close`s.

    Attributes:
        plan: What the store holds, and of what it is made.
        rank: Place of this process among those that build together.
        title: Task and split, for people.
        path: Where the store goes.
        num_samples: N; 0 for a split that would be empty.
        clock: Seconds by stage since `begin`.
        is_reused: Whether `begin` found the store there already.
        is_finished: Whether the store is complete.
    """

    is_reused = False
    is_finished = False
    _committer: Committer | None = None
    _store: AnyStore | None = None
    _filling: Filling | None = None
    _has_looked = False

    # --- finding and beginning it ------------------------------------------------------------------------

    def find(self, *, overwrite: bool = False) -> bool:
        """Return whether the store is there, in one file or in several, mapped or packed; `begin` asks it.

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
        make_folder(self.path.parent, hint=OTHER_FOLDER)
        check_no_folder(self.path)  # now, and not hours later
        folder = real_place(self.path).parent
        if files.is_network(folder):
            self._watcher.note(
                f"{folder} lies on a network file system, whose locks, syncs and renames may not hold what a "
                "build relies on (docs/results/reliability.md): build on a local disk and copy the store"
            )
        if (codec := self.plan.codec) != "none":
            check_installed("numcodecs", *(["pcodec"] if codec == "pcodec" else []), extra="pack")
            from ups_store.packed.codecs import MAX_CHUNK_BYTES

            largest = max(sample_nbytes_of({name: spec}) for name, spec in self.plan.arrays.items())
            if largest > MAX_CHUNK_BYTES:
                limits: dict[str, Any] = {"expected": f"samples of at most {MAX_CHUNK_BYTES:,} bytes"}
                limits["found"] = f"{largest:,}"
                raise ConfigError("cache.codec", path=self.path, hint="leave it out", **limits)
        with self.clock.timed("digest"):
            self.identify()
        return not overwrite and self.find_again()

    def find_again(self) -> bool:
        """Return whether the store is there now, such as from another machine; `find` hadn't found it."""
        with self.clock.timed("open"):
            decision = decide_published(self)
        if decision.error is not None:
            raise decision.error
        if decision.differences:
            text = describe_differences(decision.differences)
            self._watcher.note(f"{self.path} was {decision.reason}, rebuilding (found -> wanted):\n{text}")
        if decision.store is not None:
            if decision.action == "reuse" and decision.store.codec != self.plan.codec:
                self._watcher.note(f"{decision.store.path}: {decision.reason}")
            self.is_reused = True
            self._take(decision.store)
        return self.is_reused

    def begin(self, *, overwrite: bool = False) -> None:
        """Find the store; or create its file, continue it, or join the first of the ranks that build it.

        Args:
            overwrite: Whether to build from scratch whatever is there.
        Raises:
            SourceError: As `identify`.
            IdentityMismatchError: If an unfinished file of another identity holds samples.
            BuildLockedError: If another process builds it.
            FormatError: If a file that isn't a store, or a damaged one, is in its place.
            ConfigError: If there can't be a store in its place.
            StoreError: As `ups_store.create`; kind "no_builder" if local rank 0 never begins.
        """
        if self.is_reused or (not self._has_looked and self.find(overwrite=overwrite)):
            return
        with self.clock.timed("open"):
            if self.rank.is_builder:
                self._become_builder(overwrite=overwrite)
                return
        self._committer = _join(self.path, self.identify(), self.config_hash)
        if self._committer is None:
            self._take(open_any(self.path))

    def begin_in_memory(self, shared: str | None = None) -> None:
        """Begin it in memory: nothing is written to a disk, and nothing is left when the process ends.

        Args:
            shared: Text of the `path_in_memory` of the process of this machine that has begun it.
        Raises:
            DiskFullError: Kind "memory_full".
        """
        if shared is not None:
            self._committer = ups_store.join(shared, identity=self.identify())
        else:
            self._committer = create_file(self.plan, self.identify(), IN_MEMORY, durability="lazy")

    @property
    def path_in_memory(self) -> Path | None:
        """Where other processes of this machine find what is filled in memory; None if it isn't."""
        path = self._committer.path if self._committer else None
        return path if path is not None and is_in_memory(path) else None

    def _become_builder(self, *, overwrite: bool) -> None:
        """Build the store from now on, or find it finished."""
        writer = self._open_writer(overwrite=overwrite)
        with contextlib.ExitStack() as failing:
            failing.push(writer)
            published = self._published_meanwhile(overwrite=overwrite)
            if published is None:
                failing.pop_all()
                self._committer = writer
                return
            files.remove(building_path(self.path))  # while the writer is open no other process builds in it
        self._take(published)

    def _published_meanwhile(self, *, overwrite: bool) -> AnyStore | None:
        """Open the store if another process has just published it; set a damaged file aside."""
        try:
            store = open_any(self.path)
        except StoreNotFoundError:
            return None
        except ReadError:
            raise
        except StoreError as error:
            if is_damaged(self.path, error):
                _set_aside(self.path, error.problem, self._watcher.note)
            return None
        if not overwrite and store.config_hash == self.config_hash:
            return store
        store.close()
        return None

    def _open_writer(self, *, overwrite: bool = False) -> StoreWriter:
        """Create or continue the file; one of another identity is replaced if nothing would be lost."""
        content, note, unfinished = self.identify(), self._watcher.note, building_path(self.path)
        options: dict[str, Any] = {"check_on_resume": False, "note": note}
        if overwrite:
            writer = create_file(self.plan, content, on_mismatch="restart", **options)
            if len(writer.missing()) == self.num_samples:
                return writer
            with writer:  # its samples aren't trusted; while it is open no other process builds it
                files.remove(unfinished)
            return create_file(self.plan, content, on_mismatch="restart")
        try:
            writer = create_file(self.plan, content, **options)
            num_committed = self.num_samples - len(writer.missing())
            if num_committed and self._config.reading.check_on_resume:  # what an earlier run has committed
                with contextlib.ExitStack() as failing:
                    failing.push(writer)
                    nbytes = num_committed * self.plan.sample_nbytes
                    self._watcher.stage(f"{self.title}: check", nbytes, unit="bytes")
                    writer.check_committed(note=note, progress=self._watcher.advance)
                    failing.pop_all()
            return writer
        except (FormatError, CorruptChunkError) as error:
            if error.path != str(unfinished) or not is_damaged(unfinished, error):
                raise
            with contextlib.suppress(StoreNotFoundError), files.opened(unfinished, writable=True) as fd:
                # Not while a process builds in it.
                if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, unfinished):
                    _set_aside(unfinished, error.problem, note)
        except IdentityMismatchError:
            if not decide_unfinished(self, Decision("build", "")).restarts:
                raise
        return create_file(self.plan, content, on_mismatch="restart", **options)

    # --- filling it --------------------------------------------------------------------------------------

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
        """Return what reads and encodes its samples for something else than its file.

        Args:
            committer: Has `commit_many(samples, arrays)`, as a `ups_store.Committer`.
        """
        options: dict[str, Any] = {"watcher": self._watcher, "clock": self.clock}
        options |= {"on_nan": self._config.data.on_nan, "deadlines": self._config.cache}
        return Filling(self.plan, committer, self._readers, **options)

    def read(self, samples: Samples | None = None) -> Iterator[ReadBatch]:
        """Give samples as their sources have them, in the store's dtypes, a batch at a time.

        Args:
            samples: Their numbers, sorted; by default all.
        Yields:
            `samples` (B,), `arrays` by name (B, ...), valid until the next batch is asked for.
        Raises:
            SourceError: If a sample can't be read, or isn't finite where that isn't to be kept.
        """
        samples = np.arange(self.num_samples) if samples is None else samples
        return read_batches(self.plan, samples, on_nan=self._config.data.on_nan, readers=self._readers)

    def missing(self) -> Samples:
        """Return the numbers of the samples that are neither there nor committed, sorted."""
        try:
            if self._committer is not None and not self.is_finished:
                return self._committer.missing()
        except StoreReplacedError:  # another process has published the store
            pass
        return np.flatnonzero(~self.store.committed)

    @property
    def num_committed(self) -> int:
        """How many samples this process has committed."""
        return self._filling.num_committed if self._filling else 0

    def fill(self, samples: Samples | None = None) -> None:
        """Read, encode and commit samples; those that are there already are left out.

        Samples that can't be read are skipped where the configuration says so; `finish` fails then.

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

    # --- finishing it ------------------------------------------------------------------------------------

    def finish(self) -> AnyStore:
        """Commit what is still missing and publish the store; where another process builds it, wait for that.

        Raises:
            SourceError: If a source was changed meanwhile.
            UnreadSamplesError: If samples were skipped.
            StoreError: As `fill`; kind "no_builder" if the builder ended without finishing.
        """
        if self.is_finished:
            return self.store
        committer = self._committer
        assert committer is not None, "begin it first"
        with self.clock.timed("finish"):
            if isinstance(committer, StoreWriter):
                self._take(self._publish(committer))
            else:
                self._take(wait_for_store(committer.path, self.config_hash))
        return self.store

    def _publish(self, writer: StoreWriter) -> AnyStore:
        self.filling.fill_rest()
        self.filling.check_complete()
        self.plan.check_sources()
        return open_store(writer.finish())

    def _take(self, store: AnyStore) -> None:
        self._store, self.is_finished = store, True

    def close(self) -> None:
        """Let go of the file that is filled, finished or not; what is committed stays, `store` stays open."""
        if self._committer is not None:
            self._committer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# --- the file, and others that build in it ------------------------------------------------------------


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


def _join(path: Path, content: Mapping[str, Any], config_hash: str) -> Committer | None:
    """Join the file that the builder makes, as soon as it is there; None if the store is finished already."""
    deadline = time.monotonic() + BUILDER_S
    while True:
        try:
            return join(path, identity=content)
        except (StoreNotFoundError, StoreReplacedError):  # not begun yet, or finished
            if is_finished(path, config_hash):
                return None
            if is_pulling(path.parent):
                deadline = time.monotonic() + BUILDER_S
            if time.monotonic() > deadline:
                raise _no_builder(path) from None
        except FormatError:  # the builder is finishing it this moment
            if not _is_being_built(path) and not is_finished(path, config_hash):
                raise
        except IdentityMismatchError:  # an old file, which the builder may be about to replace
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def wait_for_store(path: Path, config_hash: str, *, is_packed: bool | None = None) -> AnyStore:
    """Open the finished store, as soon as the builder has published it."""
    gone_s: float | None = None  # first seen without a builder; before that, looking may have taken long
    while not is_finished(path, config_hash, is_packed=is_packed):
        now = time.monotonic()
        gone_s = None if _is_being_built(path) else now if gone_s is None else gone_s
        if gone_s is not None and now > gone_s + BUILDER_S:
            raise _no_builder(path)
        time.sleep(POLL_S)
    return open_any(path)


def _is_being_built(path: Path) -> bool:
    """Return whether a process builds, packs or unpacks the store."""
    file = real_place(path)
    others = file.parent.glob(f"{glob.escape(file.name)}*{BUILDING_SUFFIX}*")
    return any(locks.is_held(other, BUILDER_LOCK) for other in others)


def _no_builder(path: Path) -> StoreError:
    return StoreError(
        f"no process has been building it for {BUILDER_S:.0f} s",
        kind="no_builder",
        path=path,
        hint="look at the output of local rank 0, and run all ranks again: what is committed stays",
    )


def _set_aside(path: Path, problem: str, note: Callable[[str], None]) -> None:
    """Give a damaged file the name NAME.damaged, or that with a number."""
    file = real_place(path)
    names = (file.with_name(f"{file.name}.damaged{n}") for n in itertools.chain([""], itertools.count(2)))
    aside = next(name for name in names if not files.exists(name))
    files.rename(file, aside)
    note(f"{path} is damaged ({problem}): set aside as {aside.name}, and made again")


def remove_dead(path: Path, *, codec: str) -> None:
    """Remove what killed processes left of a file under other names: each may be as large as the file.

    Also what is complete but for its name: whatever it was made from is still there. What goes on where it
    was stays: a building file, and one that is being unpacked if that is wanted.
    """
    file = real_place(path)
    name = glob.escape(file.name)
    temporary = f"{BUILDING_SUFFIX}.{'[0-9a-f]' * 16}"  # nothing else is ours
    patterns = [f"{name}{temporary}", f"{name}{UNPACKING_SUFFIX}{temporary}"]
    if codec != "none":
        patterns += [f"{name}{UNPACKING_SUFFIX}", f"{name}{UNPACKING_SUFFIX}{BUILDING_SUFFIX}"]
    for dead in itertools.chain.from_iterable(map(file.parent.glob, patterns)):
        with contextlib.suppress(StoreNotFoundError, OSError), files.opened(dead, writable=True) as fd:
            if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, dead):
                files.remove(dead)
