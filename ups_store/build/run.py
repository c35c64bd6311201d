"""Running a plan: compare with what is there, read, commit, finish."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

import ups_store
from ups_store import files
from ups_store.array_statistics import Statistics
from ups_store.build.committing import CommitThread
from ups_store.build.digests import DigestCache, FileSignature
from ups_store.build.encode import encode_batch
from ups_store.build.outputs import make_folder
from ups_store.build.plan import StorePlan
from ups_store.build.read import read_batches, split_batches, unread_error
from ups_store.build.readers import Readers
from ups_store.build.skipped_notes import skipped_notes
from ups_store.build.stopwatch import Stopwatch
from ups_store.console import format_age, format_nbytes
from ups_store.creation import identity_of
from ups_store.encoder import Encoder
from ups_store.errors import (
    BuildInterruptedError,
    ConfigError,
    FormatError,
    IdentityMismatchError,
    StoreNotFoundError,
)
from ups_store.identity import config_hash, describe_differences, differences
from ups_store.ingest.pool import Batch, ReaderPool, Skipped
from ups_store.ingest.reader_process import changed
from ups_store.reader import open_store
from ups_store.recovery import building_path
from ups_store.writer import StoreWriter


class Watcher(Protocol):
    """Who is told how a build goes; the console's progress bar, or nobody."""

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """A stage begins, which has so many "bytes" or "samples"."""

    def advance(self, num: int) -> None:
        """So much more of the stage is done."""

    def note(self, message: str) -> None:
        """Something that the user should know."""

    def watch(self, pool: ReaderPool) -> None:
        """Readers whose state may be of interest."""

    def waits(self, what: str) -> None:
        """What everything waits for from now on, such as "read" or "commit"."""


@dataclass
class BuildResult:
    """What became of one store.

    Attributes:
        path: The store.
        task: Its task.
        split: Its split.
        config_hash: Hash of its identity.
        reused: Whether it was valid already.
        num_samples: N.
        num_committed: Samples committed by this run.
        nbytes: Length of the file.
        age_s: Seconds since it was written.
        seconds: Time by stage: digest, read, commit, finish, total.
        statistics: Range and non-finite counts of what was written, by array; empty where reused.
    """

    path: Path
    task: str
    split: str
    config_hash: str
    reused: bool
    num_samples: int
    num_committed: int
    nbytes: int
    age_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for people."""
        what = f"{self.task} {self.split}: {self.num_samples} samples, {format_nbytes(self.nbytes)}"
        took = f"built in {self.seconds['total']:.1f} s"
        done = f"valid, made {format_age(self.age_s)}" if self.reused else took
        return f"{what}, {done}, {self.config_hash[:12]}, {self.path}"

    def to_json(self) -> dict[str, Any]:
        """The store's part of the manifest."""
        return {**vars(self), "path": str(self.path)}


def build_store(
    plan: StorePlan,
    *,
    digests: DigestCache,
    readers: Readers,
    watcher: Watcher,
    overwrite: bool = False,
    on_nan: str = "fail",
) -> BuildResult:
    """Build one store, continue it, or find that it is valid.

    Args:
        plan: What to build; at least one sample.
        digests: Known digests of the sources.
        readers: Who reads the sources.
        watcher: Told about progress.
        overwrite: Whether to build anew whatever is there.
        on_nan: "fail" or "keep" NaN and Inf.
    Raises:
        SourceError: If a source is unreadable, changed, or holds NaN or Inf that aren't to be kept.
        UnreadSamplesError: If samples were skipped; the others are committed.
        IdentityMismatchError: If an unfinished file of another identity holds samples.
        FormatError: If a file that isn't a store, or a damaged one, is in its place.
        ConfigError: If there can't be a store in its place.
        StoreError: As `ups_store.create` and the writer say.
    """
    clock = Stopwatch(watcher.waits)
    _prepare_place(plan.path, watcher)
    watcher.stage(f"{plan.title}: sources", plan.source_nbytes, unit="bytes")
    with clock.timed("digest"):
        content = plan.identity(digests, watcher.advance)
    expected = identity_of(plan.arrays, constants=plan.constants, dims=plan.dims, identity=content)
    valid = None if overwrite else _reusable(plan, expected, watcher)
    if valid is not None:
        with valid:
            return _result(plan, valid, clock)
    with _writer(plan, content, overwrite=overwrite) as writer:
        try:
            statistics, num_committed = _commit_missing(plan, writer, readers, watcher, clock, on_nan)
        except KeyboardInterrupt as error:
            raise _interrupted(plan, overwrite) from error
        check_sources(plan)
        with clock.timed("finish"):
            writer.finish()
    with open_store(plan.path) as store:
        return _result(plan, store, clock, num_committed=num_committed, statistics=statistics)


def _reusable(plan: StorePlan, expected: Mapping[str, Any], watcher: Watcher) -> ups_store.Store | None:
    """The store that is there, if it was made from the same; tells what differs otherwise."""
    try:
        store = open_store(plan.path)
    except StoreNotFoundError:
        return None
    except FormatError as error:
        error.hint = "move it away, or replace it with --overwrite"
        raise
    if store.config_hash == config_hash(expected):
        return store
    with store:
        differing = describe_differences(differences(store.identity, expected))
    watcher.note(f"{plan.path} was made from something else, rebuilding (found -> wanted):\n{differing}")
    return None


def _prepare_place(path: Path, watcher: Watcher) -> None:
    """Make the store's folder, and refuse now what publishing would stumble over hours later."""
    hint = "check cache.dir or --cache-dir"
    make_folder(path.parent, hint=hint)
    if path.is_dir():  # a rename replaces anything else
        raise ConfigError("there is a folder in the store's place", path=path, hint=hint)
    if files.is_network(path.parent):
        watcher.note(
            f"{path.parent} lies on a network file system, whose locks, syncs and renames may not hold what "
            "a build relies on (docs/reliability.md): build on a local disk and copy the store"
        )


def _interrupted(plan: StorePlan, overwrite: bool) -> BuildInterruptedError:
    with open_store(building_path(plan.path), partial=True) as unfinished:
        num_committed = int(unfinished.committed.sum())
    return BuildInterruptedError(
        f"interrupted: {num_committed} of {plan.num_samples} samples are committed",
        path=building_path(plan.path),
        hint="run the same command again to continue" + (", without --overwrite" if overwrite else ""),
    )


def check_sources(plan: StorePlan) -> None:
    """Fail with `SourceError` if a source isn't the file that it was when the plan was made."""
    for part, signature in zip(plan.parts, plan.signatures, strict=True):
        if FileSignature.of(part.path) != signature:
            raise changed(part.path)


def _result(
    plan: StorePlan,
    store: ups_store.Store,
    clock: Stopwatch,
    *,
    num_committed: int | None = None,
    statistics: Statistics | None = None,
) -> BuildResult:
    return BuildResult(
        path=plan.path,
        task=plan.task.name,
        split=plan.split,
        config_hash=store.config_hash,
        reused=statistics is None,
        num_samples=len(store),
        num_committed=num_committed or 0,
        nbytes=store.nbytes,
        age_s=round(max(0.0, time.time() - files.modified_s(plan.path)), 1),
        seconds=clock.to_json(),
        statistics=statistics.to_json() if statistics else {},
    )


def _writer(plan: StorePlan, content: Mapping[str, Any], *, overwrite: bool) -> StoreWriter:
    """The store's writer; an unfinished file of another identity is replaced if nothing would be lost."""

    def create(on_mismatch: Literal["raise", "restart"]) -> StoreWriter:
        return ups_store.create(
            plan.path,
            plan.arrays,
            constants=plan.constants,
            dims=plan.dims,
            identity=content,
            attrs=plan.attrs,
            on_mismatch=on_mismatch,
        )

    if overwrite:
        writer = create("restart")
        if len(writer.missing()) == plan.num_samples:
            return writer
        with writer:  # its samples aren't trusted; while it is open nobody else builds it
            files.remove(building_path(plan.path))
        return create("raise")
    try:
        return create("raise")
    except IdentityMismatchError:
        with open_store(building_path(plan.path), partial=True) as unfinished:
            if unfinished.committed.any():
                raise
        return create("restart")


def _commit_missing(
    plan: StorePlan, writer: StoreWriter, readers: Readers, watcher: Watcher, clock: Stopwatch, on_nan: str
) -> tuple[Statistics, int]:
    missing = writer.missing()
    watcher.stage(f"{plan.title}: samples", plan.num_samples, unit="samples")
    statistics, num_there = Statistics(), plan.num_samples - len(missing)
    if num_there:
        watcher.note(f"{plan.path}: {num_there} of {plan.num_samples} samples are there, continuing")
        _add_committed(plan, statistics, np.setdiff1d(np.arange(plan.num_samples), missing))
    watcher.advance(num_there)
    skipped: list[Skipped] = []
    batches = read_batches(plan, missing, on_nan=on_nan, readers=readers, skipped=skipped)
    with closing(batches):  # whatever happens, no source stays open
        if plan.encoder is None:
            _commit_fields(batches, writer, watcher, clock, statistics)
        else:
            _commit_latents(plan, plan.encoder, batches, writer, watcher, clock, statistics)
    for line in skipped_notes(skipped):
        watcher.note(line)
    if skipped:
        raise unread_error(plan, skipped)
    return statistics, len(missing)


def _commit_fields(
    batches: Iterable[Batch], writer: StoreWriter, watcher: Watcher, clock: Stopwatch, statistics: Statistics
) -> None:
    """Commit what is read; reader processes read on meanwhile."""
    for batch in clock.timed_each("read", batches):
        with clock.timed("commit"):
            writer.commit_many(batch.samples, batch.arrays)
        statistics.add(batch.arrays, ranges=batch.ranges)
        watcher.advance(len(batch.samples))


def _commit_latents(
    plan: StorePlan,
    encoder: Encoder,
    batches: Iterable[Batch],
    writer: StoreWriter,
    watcher: Watcher,
    clock: Stopwatch,
    statistics: Statistics,
) -> None:
    """Encode what is read in this thread, and commit it in another one, while processes read on."""
    with CommitThread(writer, committed=watcher.advance) as committing:
        for samples, arrays, _ in clock.timed_each("read", batches):
            with clock.timed("encode"):
                encoded = encode_batch(arrays, encoder, samples=samples, specs=plan.arrays)
                statistics.add(encoded)
            with clock.timed("commit"):
                committing.put(samples, encoded)


def _add_committed(plan: StorePlan, statistics: Statistics, samples: npt.NDArray[np.int64]) -> None:
    with open_store(building_path(plan.path), partial=True) as store:
        for batch in split_batches(samples, plan.sample_nbytes):
            statistics.add(store.gather(batch))
