"""Filling a store: missing samples are read, encoded where there is an encoder, and committed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import numpy as np
import numpy.typing as npt

from ups_store.array_statistics import Statistics
from ups_store.build.committing import CommitThread
from ups_store.build.encode import encode_batch
from ups_store.build.plan import StorePlan
from ups_store.build.read import read_batches, split_batches, unread_error
from ups_store.build.readers import Readers
from ups_store.build.skipped_notes import skipped_notes
from ups_store.build.stopwatch import Stopwatch
from ups_store.build.watcher import Watcher
from ups_store.encoder import Encoder
from ups_store.ingest.pool import Batch, Skipped
from ups_store.reader import open_store
from ups_store.recovery import building_path
from ups_store.writer import Committer

Samples = npt.NDArray[np.int64]


class Filling:
    """One process's work on a store that is being built.

    Args:
        plan: What the store holds.
        committer: Its writer, or what `join` gave.
        readers: Who reads the sources.
        watcher: Told about progress.
        clock: Counts the time of the stages.
        on_nan: "fail" or "keep" NaN and Inf.

    Attributes:
        num_committed: Samples that this process has committed, or found committed by another meanwhile.
    """

    def __init__(
        self,
        plan: StorePlan,
        committer: Committer,
        readers: Readers,
        *,
        watcher: Watcher,
        clock: Stopwatch,
        on_nan: str,
    ) -> None:
        self._plan, self._committer, self._readers = plan, committer, readers
        self._watcher, self._clock, self._on_nan = watcher, clock, on_nan
        self._statistics = Statistics()
        self._is_mine = np.zeros(plan.num_samples, bool)
        self._skipped: list[Skipped] = []

    @property
    def num_committed(self) -> int:
        """Samples that this process has committed, or found committed by another meanwhile."""
        return int(self._is_mine.sum())

    def fill(self, samples: Samples) -> None:
        """Commit samples; those that can't be read are left out where the readers skip them."""
        plan, skipped = self._plan, list[Skipped]()
        batches = read_batches(plan, samples, on_nan=self._on_nan, readers=self._readers, skipped=skipped)
        with closing(batches):  # whatever happens, no source stays open
            if plan.encoder is None:
                self._commit_fields(batches)
            else:
                self._commit_latents(batches, plan.encoder)
        self._skipped += skipped

    def fill_rest(self) -> None:
        """Commit what is still missing, from the end: another process may be on its way there.

        Both may make the samples where they meet; the second commit of a sample changes nothing.
        """
        while len(missing := np.setdiff1d(self._committer.missing(), self._unread())):
            self.fill(split_batches(missing, self._plan.source_sample_nbytes)[-1])

    def check_complete(self) -> None:
        """Tell which samples were skipped, and fail if there are any.

        Raises:
            UnreadSamplesError: The others are committed.
        """
        for line in skipped_notes(self._skipped):
            self._watcher.note(line)
        if self._skipped:
            raise unread_error(self._plan, self._skipped)

    def statistics(self) -> Statistics:
        """Statistics of all samples; those that others committed are read back."""
        others = np.flatnonzero(~self._is_mine)
        if len(others):
            with open_store(building_path(self._plan.path), partial=True) as store:
                for batch in split_batches(others, self._plan.sample_nbytes):
                    self._statistics.add(store.gather(batch))
        return self._statistics

    def _unread(self) -> Samples:
        return np.concatenate([np.zeros(0, np.int64), *(item.samples for item in self._skipped)])

    def _commit_fields(self, batches: Iterable[Batch]) -> None:
        """Commit what is read; reader processes read on meanwhile."""
        for batch in self._clock.timed_each("read", batches):
            with self._clock.timed("commit"):
                self._committer.commit_many(batch.samples, batch.arrays)
            self._statistics.add(batch.arrays, ranges=batch.ranges)
            self._is_mine[batch.samples] = True
            self._watcher.advance(len(batch.samples))

    def _commit_latents(self, batches: Iterable[Batch], encoder: Encoder) -> None:
        """Encode what is read in this thread, and commit it in another one, while processes read on."""
        first = self._plan.selected.start
        with CommitThread(self._committer, committed=self._watcher.advance) as committing:
            for samples, arrays, _ in self._clock.timed_each("read", batches):
                with self._clock.timed("encode"):
                    encoded = encode_batch(arrays, encoder, samples=samples + first, specs=self._plan.arrays)
                    self._statistics.add(encoded)
                with self._clock.timed("commit"):
                    committing.put(samples, encoded)
                self._is_mine[samples] = True
