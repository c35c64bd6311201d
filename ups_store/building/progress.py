"""How a build goes: rates and seconds of its stages, the base of watchers, notes on skipped samples."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ups_store.sources.readers import ReaderPool, Skipped


class StageRates:
    """Counts what was done, and how long was waited for "read", "commit" and so on, since `begin`.

    A stage that others overlap with is waited for less than it works, so its rate is what it could sustain.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._waits_for = ""
        self._since_s = clock()
        self._num_done = 0

    def begin(self) -> None:
        """Count from zero: there is another total."""
        self._waits_for = ""
        self._seconds.clear()
        self._num_done = 0

    def advance(self, num: int) -> None:
        """So much more was done."""
        self._num_done += num

    def waits(self, what: str) -> None:
        """From now on this is waited for."""
        self._count_time()
        self._waits_for = what

    def _count_time(self) -> None:
        now = self._clock()
        if self._waits_for:
            self._seconds[self._waits_for] += now - self._since_s
        self._since_s = now

    def per_second(self) -> dict[str, float]:
        """What was done over the seconds that each stage was waited for, by stage."""
        return {
            stage: self._num_done / seconds
            for stage, seconds in self._seconds.copy().items()
            if seconds > 0 and self._num_done
        }


Item = TypeVar("Item")


class Stopwatch:
    """Adds up monotonic time by the name of a stage, and in total since it was made."""

    def __init__(
        self, begins: Callable[[str], None] = lambda stage: None, *, started_s: float | None = None
    ) -> None:
        self._begins = begins
        self._started = time.perf_counter() if started_s is None else started_s
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, stage: str, seconds: float) -> None:
        """Count time that was measured elsewhere to a stage."""
        self._seconds[stage] += seconds

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count the time of the block to a stage."""
        started = time.perf_counter()
        self._begins(stage)
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - started

    def timed_each(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """Count the time that an iterable takes for its items to a stage."""
        iterator = iter(items)
        while True:
            with self.timed(stage):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # the sentinel is gone

    def to_json(self) -> dict[str, float]:
        """Seconds by stage, and "total"."""
        total = {"total": time.perf_counter() - self._started}
        return {stage: round(value, 4) for stage, value in {**self._seconds, **total}.items()}


_END = object()


class Watcher:
    """Hears how a build goes, and shows none of it; the watchers that do are made of it."""

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


class StageWatcher(Watcher):
    """A watcher that knows the stage, how far it is, what is waited for, and the readers."""

    def __init__(self) -> None:
        self.name, self.done, self.total, self.unit = "start", 0, 0, ""
        self.waits_for = ""
        self.pool: ReaderPool | None = None
        self.rates = StageRates()

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Begin another stage."""
        self.name, self.done, self.total, self.unit = name, 0, total, unit
        self.rates.begin()

    def advance(self, num: int) -> None:
        """Count what is done."""
        self.done += num
        self.rates.advance(num)

    def watch(self, pool: ReaderPool) -> None:
        """Know the readers."""
        self.pool = pool

    def waits(self, what: str) -> None:
        """Know what everything waits for."""
        self.rates.waits(what)
        self.waits_for = what


class QuietWatcher(Watcher):
    """A watcher that shows nothing.

    Args:
        note: Given what the user should know; by default that isn't shown either.
    """

    def __init__(self, note: Callable[[str], None] = lambda message: None) -> None:
        self._note = note

    def note(self, message: str) -> None:
        """See `Watcher.note`."""
        self._note(message)


_SHOWN = 3  # of a file and a kind of fault; the error at the end names samples too


def skipped_notes(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Lines for people; of one kind of fault in one file the first few, and how many samples have it too."""
    by_reason: dict[tuple[str | None, str], list[Skipped]] = {}
    for item in skipped:
        by_reason.setdefault((item.error.path, item.error.kind), []).append(item)
    for (path, kind), items in by_reason.items():
        for item in items[:_SHOWN]:
            yield f"skipped: {item.error}"
        if others := items[_SHOWN:]:
            yield f"skipped: {path}: {sum(len(item.samples) for item in others):,} more samples ({kind})"
