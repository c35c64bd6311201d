"""`--batch-size auto`: a few seconds with a batch size, with twice that, and so on while that is faster.

Every trial reads, encodes and commits samples that are missing anyway, so nothing of it is lost. How samples
are read decides no byte of a store, so the outcome isn't part of its identity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ups_store.building.fill import Filling
from ups_store.building.progress import Stopwatch
from ups_store.building.read import BATCH_BYTES, batch_size_of
from ups_store.building.readers import Readers, describe_readers
from ups_store.read.gather import Samples
from ups_store.sources.reader import MAX_SAMPLES

TRIAL_S = 2.0  # of handing out batches; those that were handed out are finished
MIN_BATCHES = 8  # of the default size, below which there is nothing to tune
LONG = 5  # the rest has to take so many times as long as another trial
BETTER = 1.05  # times as fast as what is simpler; less is chance
_MAX_BATCH_BYTES = 4 * BATCH_BYTES  # each reader has two of them in memory


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
        rest_s = len(rest := filling.missing(samples)) / rate
        why = f"the rest takes some {rest_s:.0f} s, too little to try others"
        if rest_s >= LONG * TRIAL_S:
            while 2 * size <= most and len(rest) >= 2 * MIN_BATCHES * size:
                twice = attempt(2 * size, rest)
                if twice is None or twice <= BETTER * rate:
                    break
                size, rate, rest = 2 * size, twice, filling.missing(samples)
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
