"""Filling a store: missing samples are read, encoded where there is an encoder, and committed.

Latents are committed in a thread of its own: the disk writes one batch while the next is read and encoded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.building.config import CacheConfig
from ups_store.building.encode import Encoded, EncodeError, Encoder, OverlappingEncoder, begin_batch
from ups_store.building.plan import StorePlan
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.read import BuildDeadlines, batch_size_of, read_batches, split_batches, unread_error
from ups_store.building.readers import Readers
from ups_store.check.statistics import Statistics
from ups_store.read.gather import Samples
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.sources.readers import ReadBatch, Skipped
from ups_store.write.writer import Committer

BATCHES_OF_REST = 4  # made at a time of what others may make as well
DEPTH = 2  # batches that wait to be committed: enough to overlap, and what they hold in memory stays small
_SHOWN = 3  # skips noted of a file and a kind of fault; the error at the end names samples too


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
            if plan.encoder is not None:
                self._commit_latents(batches, plan.encoder)
            else:
                for batch in self._clock.timed_each("read", batches):  # reader processes read on meanwhile
                    with self._clock.timed("commit"):
                        self._commit(batch.samples, batch.arrays)
                    self._statistics.add(batch.arrays, ranges=batch.ranges)
                    self._is_mine[batch.samples] = True
        self._skipped += skipped

    def missing(self, samples: Samples | None = None) -> Samples:
        """Return which samples are neither committed nor skipped, of all or of some."""
        missing = self._committer.missing()
        if samples is not None:
            missing = np.intersect1d(samples, missing)
        return np.setdiff1d(missing, np.concatenate([missing[:0], *(item.samples for item in self._skipped)]))

    def fill_rest(self) -> None:
        """Commit what is still missing, from the end: another process may be on its way there.

        Both may make the samples where they meet; the second commit of a sample changes nothing.
        """
        size = BATCHES_OF_REST * batch_size_of(self.plan)
        while len(missing := self.missing()):
            self.fill(missing[-size:])

    def check_complete(self) -> None:
        """Fail if samples were skipped, and note the first of each kind of fault in each file.

        Raises:
            UnreadSamplesError: The others are committed.
        """
        by_fault: dict[tuple[str | None, str], list[Skipped]] = {}
        for item in self._skipped:
            by_fault.setdefault((item.error.path, item.error.kind), []).append(item)
        for (path, kind), items in by_fault.items():
            for item in items[:_SHOWN]:
                self._watcher.note(f"skipped: {item.error}")
            if num_more := sum(len(item.samples) for item in items[_SHOWN:]):
                self._watcher.note(f"skipped: {path}: {num_more:,} more samples ({kind})")
        if self._skipped:
            raise unread_error(self.plan, self._skipped)

    def statistics(self) -> Statistics:
        """Return the statistics of all samples; those that others committed are read back."""
        others = np.flatnonzero(~self._is_mine)
        if len(others):
            with open_store(building_path(self.plan.path), partial=True) as store:
                for batch in split_batches(others, self.plan.sample_nbytes):
                    self._statistics.add(store.gather(batch))
        return self._statistics

    def _commit(self, samples: Samples, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        with self._deadlines.committing():
            self._committer.commit_many(samples, arrays)
        self.progress.append((time.perf_counter(), len(samples)))
        self._watcher.advance(len(samples))

    def _commit_latents(self, batches: Iterable[ReadBatch], encoder: Encoder) -> None:
        """Encode what is read, and commit it in another thread, while processes read on.

        A batch is begun before the one in front of it is waited for, so that the encoder never runs dry.
        """
        thread, commits = ThreadPoolExecutor(1, "ups-store-commit"), deque[Future[None]]()

        def commit(previous: Future[None] | None, samples: Samples, arrays: Mapping[str, Any]) -> None:
            if previous is not None:
                previous.result()  # nothing is committed behind a commit that failed
            self._commit(samples, arrays)

        def hand_on(samples: Samples, finish: Callable[[], Encoded]) -> None:
            with self._clock.timed("encode"), self._deadlines.encoding():
                try:
                    encoded = finish()
                except EncodeError as error:
                    error.path = str(self.plan.path)
                    raise
            self._deadlines.has_encoded()
            self._statistics.add(encoded.arrays, ranges=encoded.ranges)
            with self._clock.timed("commit"):
                while commits and (len(commits) > DEPTH or commits[0].done()):
                    commits.popleft().result()
            previous = commits[-1] if commits else None
            commits.append(thread.submit(commit, previous, samples, encoded.arrays))
            self._is_mine[samples] = True

        begun: tuple[Samples, Callable[[], Encoded]] | None = None
        # Started before there is a batch: an interrupt amid that leaves a thread that nobody waits for.
        thread.submit(int).result()
        try:
            for samples, arrays, ranges in self._clock.timed_each("read", batches):
                if not self._is_prepared and isinstance(encoder, OverlappingEncoder):
                    # Once there is something to encode: readers read on meanwhile.
                    with self._clock.timed("load"), self._deadlines.encoding():
                        encoder.prepare()
                self._is_prepared = True
                with self._clock.timed("encode"), self._deadlines.encoding():
                    numbers = samples + self.plan.selected.start
                    specs = self.plan.arrays
                    following = begin_batch(arrays, encoder, samples=numbers, specs=specs, ranges=ranges)
                if begun is not None:
                    hand_on(*begun)
                begun = samples, following
            if begun is not None:
                hand_on(*begun)
            while commits:
                commits.popleft().result()
        finally:  # after a failure the commit at work is finished, and those that wait are dropped
            thread.shutdown(cancel_futures=True)
