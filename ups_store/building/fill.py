"""Filling a store: missing samples are read, encoded where there is an encoder, and committed.

Latents are committed in a thread of its own: the disk writes one batch while the next is read and encoded.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.building.config import CacheConfig
from ups_store.building.encode import Encoded, EncodeError, Encoder, OverlappingEncoder, begin_batch
from ups_store.building.plan import StorePlan
from ups_store.building.progress import Stopwatch, Watcher, skipped_notes
from ups_store.building.read import BuildDeadlines, batch_size_of, read_batches, split_batches, unread_error
from ups_store.building.readers import Readers
from ups_store.check.statistics import Statistics
from ups_store.errors import BuildInterruptedError
from ups_store.read.gather import Samples
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.sources.readers import ReadBatch, Skipped
from ups_store.write.writer import Committer

BATCHES_OF_REST = 4  # made at a time of what others may make as well


Begun = tuple[Samples, Callable[[], Encoded]]


class Filling:
    """One process's work on a store that is being built.

    Args:
        plan: What the store holds.
        committer: Its writer, or what `join` gave.
        readers: Read the sources; None: this process does.
        watcher: Hears how it goes.
        clock: Counts the time of the stages.
        on_nan: "fail" or "keep" NaN and Inf.
        deadlines: Of encode calls and commits.

    Attributes:
        plan: What the store holds.
        batch_size: Samples that are read, encoded and committed at a time; None: chosen by their size.
        progress: Of every commit when, in seconds of `time.perf_counter`, and how many samples.
    """

    def __init__(
        self,
        plan: StorePlan,
        committer: Committer,
        readers: Readers | None,
        *,
        watcher: Watcher,
        clock: Stopwatch,
        on_nan: str,
        deadlines: CacheConfig | None = None,
    ) -> None:
        self.plan, self.batch_size = plan, plan.batch_size
        self.progress: list[tuple[float, int]] = []
        self._committer, self._readers = committer, readers
        self._watcher, self._clock, self._on_nan = watcher, clock, on_nan
        self._statistics = Statistics()
        self._is_mine = np.zeros(plan.num_samples, bool)
        self._skipped: list[Skipped] = []
        self._is_prepared = False
        self._deadlines = BuildDeadlines(deadlines or CacheConfig(), path=plan.path, encoder=plan.encoder)

    @property
    def num_committed(self) -> int:
        """Samples that this process has committed, or found committed by another meanwhile."""
        return int(self._is_mine.sum())

    def fill(self, samples: Samples, *, for_s: float | None = None) -> None:
        """Commit samples; those that can't be read are left out where the readers skip them.

        Args:
            samples: Numbers in the store, sorted.
            for_s: Ask for no more once so many seconds have passed since the first batch came.
        """
        plan, skipped = replace(self.plan, batch_size=self.batch_size), list[Skipped]()
        batches = read_batches(
            plan, samples, on_nan=self._on_nan, readers=self._readers, skipped=skipped, for_s=for_s
        )
        with closing(batches), self._deadlines:  # whatever happens, no source stays open
            if plan.encoder is None:
                self._commit_fields(batches)
            else:
                self._commit_latents(batches, plan.encoder)
        self._skipped += skipped

    def left_of(self, samples: Samples) -> Samples:
        """Which of the samples are neither committed nor skipped."""
        return np.setdiff1d(np.intersect1d(samples, self._committer.missing()), self._unread())

    def fill_rest(self) -> None:
        """Commit what is still missing, from the end: another process may be on its way there.

        Both may make the samples where they meet; the second commit of a sample changes nothing.
        """
        size = BATCHES_OF_REST * batch_size_of(self.plan)
        while len(missing := np.setdiff1d(self._committer.missing(), self._unread())):
            self.fill(missing[-size:])

    def check_complete(self) -> None:
        """Fail if samples were skipped, and note which.

        Raises:
            UnreadSamplesError: The others are committed.
        """
        for line in skipped_notes(self._skipped):
            self._watcher.note(line)
        if self._skipped:
            raise unread_error(self.plan, self._skipped)

    def interruption(self, *, overwrite: bool = False) -> BuildInterruptedError:
        """The error of a build that is stopped here.

        Args:
            overwrite: Whether it was to build from scratch, which continuing isn't.
        """
        where = building_path(self.plan.path)
        with open_store(where, partial=True) as unfinished:
            num_committed = int(unfinished.committed.sum())
        return BuildInterruptedError(
            f"interrupted: {num_committed} of {self.plan.num_samples} samples are committed",
            path=where,
            hint="run the same command again to continue" + (", without --overwrite" if overwrite else ""),
        )

    def statistics(self) -> Statistics:
        """Statistics of all samples; those that others committed are read back."""
        others = np.flatnonzero(~self._is_mine)
        if len(others):
            with open_store(building_path(self.plan.path), partial=True) as store:
                for batch in split_batches(others, self.plan.sample_nbytes):
                    self._statistics.add(store.gather(batch))
        return self._statistics

    def _unread(self) -> Samples:
        return np.concatenate([np.zeros(0, np.int64), *(item.samples for item in self._skipped)])

    def _commit_fields(self, batches: Iterable[ReadBatch]) -> None:
        """Commit what is read; reader processes read on meanwhile."""
        for batch in self._clock.timed_each("read", batches):
            with self._clock.timed("commit"), self._deadlines.committing():
                self._committer.commit_many(batch.samples, batch.arrays)
            self._statistics.add(batch.arrays, ranges=batch.ranges)
            self._is_mine[batch.samples] = True
            self._count_committed(len(batch.samples))

    def _count_committed(self, num: int) -> None:
        """So many samples are durable; called by the thread that commits."""
        self.progress.append((time.perf_counter(), num))
        self._watcher.advance(num)

    def _commit_latents(self, batches: Iterable[ReadBatch], encoder: Encoder) -> None:
        """Encode what is read, and commit it in another thread, while processes read on.

        A batch is begun before the one in front of it is waited for, so that the encoder never runs dry.
        """
        first, specs = self.plan.selected.start, self.plan.arrays
        begun: Begun | None = None
        commits = CommitThread(
            self._committer, committed=self._count_committed, within=self._deadlines.committing
        )
        with commits as committing:
            for samples, arrays, ranges in self._clock.timed_each("read", batches):
                self._prepare(encoder)
                with self._clock.timed("encode"), self._deadlines.encoding():
                    following = begin_batch(
                        arrays, encoder, samples=samples + first, specs=specs, ranges=ranges
                    )
                self._hand_on(begun, committing)
                begun = samples, following
            self._hand_on(begun, committing)

    def _prepare(self, encoder: Encoder) -> None:
        """Load what encodes, once there is something to encode: readers read on meanwhile."""
        if not self._is_prepared and isinstance(encoder, OverlappingEncoder):
            with self._clock.timed("load"), self._deadlines.encoding():
                encoder.prepare()
        self._is_prepared = True

    def _hand_on(self, begun: Begun | None, committing: CommitThread) -> None:
        """Wait for the latents of a batch, and have them committed."""
        if begun is None:
            return
        samples, finish = begun
        with self._clock.timed("encode"), self._deadlines.encoding():
            try:
                encoded = finish()
            except EncodeError as error:
                error.path = str(self.plan.path)
                raise
        self._deadlines.has_encoded()
        self._statistics.add(encoded.arrays, ranges=encoded.ranges)
        with self._clock.timed("commit"):
            committing.put(samples, encoded.arrays)
        self._is_mine[samples] = True


DEPTH = 2  # batches that wait: enough to overlap, and what they hold in memory stays small

_POLL_S = 0.2  # how soon a full queue notices that the thread has failed

Pending = tuple[npt.NDArray[np.int64], Mapping[str, npt.NDArray[Any]]]


class CommitThread:
    """Commits batches in the order in which they are put, one at a time.

    Used as a context manager: leaving it normally waits for every batch; leaving it by an exception finishes
    the batch at work, drops the others and lets the exception go on.
    """

    def __init__(
        self,
        committer: Committer,
        *,
        committed: Callable[[int], None] | None = None,
        depth: int = DEPTH,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._committer = committer
        self._committed, self._within = committed, within
        self._batches: queue.Queue[Pending | None] = queue.Queue(depth)
        self._failure: BaseException | None = None
        self._is_dropping = False
        self._thread = threading.Thread(target=self._run, name="ups-store-commit", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Batches that wait for the disk."""
        return self._batches.qsize()

    def put(self, samples: npt.NDArray[np.int64], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Hand a batch over, waiting while `depth` others wait; its memory is the thread's from then on."""
        self._put((samples, arrays))

    def _put(self, batch: Pending | None) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_taken(batch):
                return

    def _is_taken(self, batch: Pending | None) -> bool:
        try:
            self._batches.put(batch, timeout=_POLL_S)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            if self._is_dropping:
                continue
            try:
                with self._within():
                    self._committer.commit_many(*batch)
                if self._committed is not None:
                    self._committed(len(batch[0]))
            except BaseException as error:
                self._failure = error
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_dropping = error is not None
        try:
            if self._failure is None:
                self._put(None)
        except BaseException:
            self._is_dropping = True  # interrupted while it waited: the thread still has to hear it
            while self._failure is None and not self._is_taken(None):
                pass
            raise
        finally:
            self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure
