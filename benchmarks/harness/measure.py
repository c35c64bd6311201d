"""How everything here is measured: ours and a reference in turns, A B A B, in one run.

What else the machine does then slows both alike, and the median of the pairwise ratios doesn't follow it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Timed = Callable[[int], float]  # number of the repetition in, seconds out
Limit = float | Mapping[Any, float]

TIME = "x time"  # ours over the reference: lower is better
RATE = "x rate"  # the reference over ours: higher is better
_LEAST_S = 2e-5  # of processor time, below which its clock says little


class UnavailableError(Exception):
    """What a benchmark needs isn't on this machine; its row says what."""


def last_line(text: str) -> str:
    """The last line that says something, which of a traceback is the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


@dataclass(frozen=True)
class Comparison:
    """Ours beside a reference."""

    time_ratio: float  # median of the pairwise ratios of ours to the reference, in time
    quartiles: tuple[float, float]  # first and third quartile of these ratios
    ours_s: float  # median seconds of ours
    reference_s: float  # median seconds of the reference
    nbytes: int  # bytes that each of them moves; 0 where that says nothing
    # As `time_ratio`, of the processor time of this process and its threads; None where one of the two takes
    # next to none, or works in other processes.
    processor_ratio: float | None = None

    @classmethod
    def of(cls, ours: Sequence[float], reference: Sequence[float], *, nbytes: int = 0) -> Comparison:
        """From the seconds of every pair."""
        low, middle, high = np.percentile(np.divide(ours, reference), (25, 50, 75)).tolist()
        return cls(middle, (low, high), float(np.median(ours)), float(np.median(reference)), nbytes)

    @property
    def rate_ratio(self) -> float:
        """How many times as fast as the reference."""
        return 1 / self.time_ratio


def compare(
    ours: Timed, reference: Timed, *, pairs: int, nbytes: int = 0, num_unmeasured: int = 1
) -> Comparison:
    """Measure both in turns, after some unmeasured pairs: what both read is then in the same caches."""
    for i in range(num_unmeasured):
        ours(i), reference(i)
    seconds, processor = [], []
    for i in range(1, pairs + 1):
        seconds.append((ours(i), reference(i)))
        processor.append((_processor_s(ours), _processor_s(reference)))
    found = Comparison.of(*zip(*seconds, strict=True), nbytes=nbytes)
    if np.max(processor, initial=0) <= 0 or np.median(processor, axis=0).min() < _LEAST_S:
        return found
    return replace(found, processor_ratio=float(np.median(np.divide(*np.transpose(processor)))))


def _processor_s(timed: Timed) -> float:
    return timed.processor_s if isinstance(timed, Stopwatch) else 0.0


class Stopwatch:
    """A function that returns how long it took, in wall time.

    Attributes:
        processor_s: Processor time of its last call, of all threads of this process.
    """

    def __init__(self, function: Callable[[int], object]) -> None:
        self._function = function
        self.processor_s = 0.0

    def __call__(self, i: int) -> float:
        processor, began = time.process_time(), time.perf_counter()
        self._function(i)
        seconds = time.perf_counter() - began
        self.processor_s = time.process_time() - processor
        return seconds


def timed(function: Callable[[int], object]) -> Stopwatch:
    """The function, returning how long it took."""
    return Stopwatch(function)


def processor_timed(function: Callable[[int], object]) -> Timed:
    """The function, returning its processor time: what else runs on the machine isn't in it."""

    def call(i: int) -> float:
        started = time.process_time()
        function(i)
        return time.process_time() - started

    return call


def median_s(function: Callable[[int], object], *, repeats: int) -> float:
    """Median duration, after one unmeasured call."""
    call = timed(function)
    call(0)
    return float(np.median([call(i) for i in range(1, repeats + 1)]))


def tracked(
    title: str, unit: str, *, at_most: Limit | None = None, at_least: Limit | None = None
) -> Callable[[Callable[..., float | Comparison]], Callable[..., float]]:
    """Name a `track_` method and give it its target: one number, or one per value of the first parameter.

    A comparison that it returns is kept for its row, which has the ratio or the seconds that its unit says.
    """

    def declare(method: Callable[..., float | Comparison]) -> Callable[..., float]:
        @functools.wraps(method)
        def track(self: Any, *values: Any) -> float:
            found = method(self, *values)
            if not isinstance(found, Comparison):
                return found
            self.comparison = found
            return {TIME: found.time_ratio, RATE: found.rate_ratio}.get(unit, found.ours_s)

        vars(track).update(title=title, unit=unit, at_most=at_most, at_least=at_least)
        return track

    return declare
