"""Filling a store: missing samples are read, encoded where there is an encoder, and committed.

Latents are committed in a thread of its own: the disk writes one batch while the next is read and encoded.
`--batch-size auto` tries batch sizes: a few seconds with one, with twice that, and so on while it is faster.
Every trial works on samples that are missing anyway, so nothing of it is lost; how samples are read decides
no byte of a store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.building.config import CacheConfig
from ups_store.building.encode import Encoded, EncodeError, Encoder, OverlappingEncoder, begin_batch
from ups_store.building.plan import StorePlan
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.read import (
    BATCH_BYTES,
    BuildDeadlines,
    batch_size_of,
    read_batches,
    split_batches,
    unread_error,
)
from ups_store.building.readers import Readers, describe_readers
from ups_store.check.statistics import Statistics
from ups_store.read.gather import Samples
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.sources.reader_pool import ReadBatch, Skipped
from ups_store.sources.reader_process import MAX_SAMPLES
from ups_store.writing.writer import Committer

BATCHES_OF_REST = 4  # made at a time of what others may make as well
DEPTH = 2  # batches that wait to be committed: enough to overlap, and what they hold in memory stays small
TRIAL_S = 2.0  # of handing out batches; those that were handed out are finished
MIN_BATCHES = 8  # of the default size, below which there is nothing to tune
LONG = 5  # the rest has to take so many times as long as another trial
BETTER = 1.05  # times as fast as what is simpler; less is chance
_MAX_BATCH_BYTES = 4 * BATCH_BYTES  # each reader has two of them in memory

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


# --- how many samples at a time -------------------------------------------------------------------------


@dataclass
class Tuning:
    """What was chosen, and why."""

    num_workers: int  # reader processes
    batch_size: int  # samples read, encoded and committed at a time
    why: str = ""  # for people
    trials: list[dict[str, Any]] = field(default_factory=list)  # batch size, committed samples, how fast

    def sentence(self) -> str:
        """Say what was chosen automatically, for people."""
        return (
            f"reading {self.batch_size} samples at a time {describe_readers(self.num_workers)}, chosen "
            f"automatically ({self.why}; reading.batch_size and reading.num_workers set it)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the store's `tuning` in the manifest."""
        return asdict(self)


def tune(
    filling: Filling,
    readers: Readers,
    samples: Samples,
    *,
    clock: Stopwatch,
    note: Callable[[str], None],
    is_alone: bool = True,
) -> Tuning:
    """Commit some of the missing samples while trying batch sizes, and choose one for the others."""
    plan, trials = filling.plan, list[dict[str, Any]]()
    size = default = batch_size_of(plan)

    def attempt(size: int, samples: Samples) -> float | None:
        """Build for a while; return samples per second, None where memory may suffice for fewer."""
        started, rate = time.perf_counter(), None
        filling.progress.clear()
        filling.batch_size = size
        try:
            filling.fill(filling.missing(samples), for_s=TRIAL_S)
            rate = max(1e-9, rate_of(filling.progress, time.perf_counter() - started))
        except Exception as error:
            is_of_memory = isinstance(error, MemoryError) or getattr(error, "kind", "") == "no_memory"
            if size <= plan.group_size or not (is_of_memory or "OutOfMemory" in type(error).__name__):
                raise
        clock.add("probe", time.perf_counter() - started)
        num_samples, per_s = sum(num for _, num in filling.progress), rate and round(rate, 3)
        trials.append({"batch_size": size, "num_samples": num_samples, "samples_per_s": per_s})
        return rate

    if not is_alone:
        why = "other processes of this machine build too, so times say little"
    elif len(samples) < MIN_BATCHES * default:
        why = f"{len(samples)} samples are too few to try others on"
    else:
        most = min(MAX_SAMPLES, _MAX_BATCH_BYTES // max(1, plan.source_sample_nbytes))
        while (rate := attempt(size, samples)) is None:  # out of memory
            size = max(plan.group_size, size // 2)
        rest_s = len(others := filling.missing(samples)) / rate
        why = f"the rest takes some {rest_s:.0f} s, too little to try others"
        if rest_s >= LONG * TRIAL_S:
            while 2 * size <= most and len(others) >= 2 * MIN_BATCHES * size:
                twice = attempt(2 * size, others)
                if twice is None or twice <= BETTER * rate:
                    break
                size, rate, others = 2 * size, twice, filling.missing(samples)
            why = f"{rate:,.0f} samples/s, the best of {len(trials)} tries"
    filling.batch_size = size
    tuning = Tuning(readers.pool.num_workers, size, why, trials)
    note(tuning.sentence())
    return tuning


def rate_of(progress: Sequence[tuple[float, int]], seconds: float) -> float:
    """Return samples per second of commits `(when, how many)`: from the first, before which readers started.

    The last isn't counted: with an encoder each waits for the batch behind it, and the last for none.
    """
    if len(progress) < 3:
        return sum(num for _, num in progress) / seconds
    return sum(num for _, num in progress[1:-1]) / max(1e-9, progress[-2][0] - progress[0][0])
