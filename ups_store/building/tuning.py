"""Tuning a build: a few seconds with each candidate, on its own samples, and then the fastest for the rest.

Every trial reads, encodes and commits samples that are missing anyway, so nothing of it is lost. How samples
are read decides no byte of a store, so the outcome isn't part of its identity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ups_store.building.fill import Filling
from ups_store.building.progress import Stopwatch
from ups_store.building.read import BATCH_BYTES, batch_size_of
from ups_store.building.readers import MAX_AUTO, Readers, describe_readers
from ups_store.read.gather import Samples
from ups_store.sources.requests import MAX_SAMPLES
from ups_store.system.memory import num_cores

TRIAL_S = 2.0  # of handing out batches; those that were handed out are finished
MIN_BATCHES = 8  # of the default size, below which there is nothing to tune
LONG = 5  # the rest has to take so many times as long as all trials
BETTER = 1.05  # times as fast as what is simpler; less is chance
_MAX_BATCH_BYTES = 4 * BATCH_BYTES  # each reader has two of them in memory


@dataclass(frozen=True)
class Trial:
    """What one candidate did.

    Attributes:
        num_workers: Reader processes.
        batch_size: Samples read, encoded and committed at a time.
        num_samples: Samples that it committed.
        samples_per_s: How fast, from its first commit to its last.
    """

    num_workers: int
    batch_size: int
    num_samples: int
    samples_per_s: float


@dataclass(frozen=True)
class Tuning:
    """What was chosen, and why.

    Attributes:
        num_workers: Reader processes.
        batch_size: Samples read, encoded and committed at a time.
        why: The reason, for people.
        trials: What was tried.
    """

    num_workers: int
    batch_size: int
    why: str
    trials: tuple[Trial, ...] = ()

    def sentence(self) -> str:
        """What was chosen automatically, for people."""
        return (
            f"reading {self.batch_size} samples at a time {describe_readers(self.num_workers)}, chosen "
            f"automatically ({self.why}; reading.batch_size and reading.num_workers set it)"
        )

    def to_json(self) -> dict[str, Any]:
        """The store's `tuning` in the manifest."""
        return {**asdict(self), "trials": [asdict(trial) for trial in self.trials]}


class Tuner:
    """Tries candidates on a store's missing samples.

    Args:
        filling: Commits them; has the chosen batch size afterwards.
        readers: Read them; are as many as was chosen afterwards.
        clock: Given the seconds of the trials, as "probe".
        note: Given the outcome.
    """

    def __init__(
        self, filling: Filling, readers: Readers, *, clock: Stopwatch, note: Callable[[str], None]
    ) -> None:
        self._filling, self._readers = filling, readers
        self._clock, self._note = clock, note
        self._default = batch_size_of(filling.plan)
        self._trials: list[Trial] = []

    def tune(self, samples: Samples, *, is_alone: bool = True) -> Tuning:
        """Commit some of the samples while trying, and choose.

        Args:
            samples: What is missing, sorted.
            is_alone: Whether no other process of this machine builds beside this one.
        """
        tuning = self._tuned(samples, is_alone)
        self._filling.batch_size = tuning.batch_size
        self._note(tuning.sentence())
        return tuning

    def _tuned(self, samples: Samples, is_alone: bool) -> Tuning:
        if not is_alone:
            return self._untried("other processes of this machine build too, so times say little")
        if len(samples) < MIN_BATCHES * self._default:
            return self._untried(f"{len(samples)} samples are too few to try others on")
        best = self._try(None, self._default, samples)
        rest_s = len(self._filling.left_of(samples)) / best.samples_per_s
        num_others = len(self._other_workers(best)) + len(self._other_sizes(best))
        if rest_s < LONG * TRIAL_S * num_others:
            return self._chosen(best, f"the rest takes some {rest_s:.0f} s, too little to try others")
        best = self._best(best, self._other_workers(best), samples)
        best = self._best(best, self._other_sizes(best), samples)
        return self._chosen(
            best, f"{best.samples_per_s:,.0f} samples/s, the best of {len(self._trials)} tries"
        )

    def _other_workers(self, best: Trial) -> list[tuple[int, int]]:
        most = min(num_cores(), MAX_AUTO) if self._readers.is_auto else 0
        return [(num, best.batch_size) for num in (1, 2, 4) if num <= most and num != best.num_workers]

    def _other_sizes(self, best: Trial) -> list[tuple[int, int]]:
        most = max(1, _MAX_BATCH_BYTES // max(1, self._filling.plan.source_sample_nbytes))
        sizes = best.batch_size // 4, min(4 * best.batch_size, most, MAX_SAMPLES)
        return [(best.num_workers, size) for size in sizes if size not in (0, best.batch_size)]

    def _best(self, best: Trial, others: Sequence[tuple[int, int]], samples: Samples) -> Trial:
        """Try others as long as there is enough left for it."""
        for num_workers, batch_size in others:
            left = self._filling.left_of(samples)
            if len(left) >= MIN_BATCHES * batch_size:
                trial = self._try(num_workers, batch_size, left)
                best = trial if trial.samples_per_s > BETTER * best.samples_per_s else best
        return best

    def _try(self, num_workers: int | None, batch_size: int, samples: Samples) -> Trial:
        """Build for a while; None: with the readers that there would be anyway."""
        if num_workers is not None:
            self._readers.use(num_workers, "to be tried")
        started = time.perf_counter()
        self._filling.progress.clear()
        self._filling.batch_size = batch_size
        self._filling.fill(samples, for_s=TRIAL_S)
        seconds = time.perf_counter() - started
        self._clock.add("probe", seconds)
        trial = Trial(
            self._readers.pool.num_workers,
            batch_size,
            sum(num for _, num in self._filling.progress),
            round(max(1e-9, rate_of(self._filling.progress, seconds)), 3),
        )
        self._trials.append(trial)
        return trial

    def _untried(self, why: str) -> Tuning:
        return Tuning(self._readers.pool.num_workers, self._default, why)

    def _chosen(self, best: Trial, why: str) -> Tuning:
        if best.num_workers != self._readers.pool.num_workers:
            self._readers.use(best.num_workers, why)
        return Tuning(best.num_workers, best.batch_size, why, tuple(self._trials))


def rate_of(progress: Sequence[tuple[float, int]], seconds: float) -> float:
    """Samples per second of commits `(when, how many)`: from the first, before which readers started.

    The last isn't counted: with an encoder each waits for the batch behind it, and the last for none.
    """
    if len(progress) < 3:
        return sum(num for _, num in progress) / seconds
    return sum(num for _, num in progress[1:-1]) / max(1e-9, progress[-2][0] - progress[0][0])
