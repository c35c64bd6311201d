"""Seconds by stage."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Stopwatch:
    """Adds up monotonic time by the name of a stage, and in total since it was made.

    Args:
        begins: Told the name of each stage as it begins.
        started_s: Since when the total counts, on the clock of `time.perf_counter`; by default now.
    """

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
