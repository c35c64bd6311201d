"""How everything here is measured: ours and a reference in turns, A B A B, in one run.

What else the machine does then slows both alike, and the median of the pairwise ratios doesn't follow it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Timed = Callable[[int], float]  # number of the repetition in, seconds out
Limit = float | Mapping[Any, float]

TIME = "x time"  # ours over the reference: lower is better
RATE = "x rate"  # the reference over ours: higher is better


@dataclass(frozen=True)
class Comparison:
    """Ours beside a reference.

    Attributes:
        time_ratio: Median of the pairwise ratios of ours to the reference, in time.
        quartiles: First and third quartile of these ratios.
        ours_s: Median seconds of ours.
        reference_s: Median seconds of the reference.
        nbytes: Bytes that each of them moves; 0 where that says nothing.
    """

    time_ratio: float
    quartiles: tuple[float, float]
    ours_s: float
    reference_s: float
    nbytes: int

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
    seconds = [(ours(i), reference(i)) for i in range(1, pairs + 1)]
    return Comparison.of(*zip(*seconds, strict=True), nbytes=nbytes)


def timed(function: Callable[[int], object]) -> Timed:
    """The function, returning how long it took."""

    def call(i: int) -> float:
        started = time.perf_counter()
        function(i)
        return time.perf_counter() - started

    return call


def median_s(function: Callable[[int], object], *, repeats: int) -> float:
    """Median duration, after one unmeasured call."""
    call = timed(function)
    call(0)
    return float(np.median([call(i) for i in range(1, repeats + 1)]))


def tracked(
    title: str, unit: str, *, at_most: Limit | None = None, at_least: Limit | None = None
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Name a `track_` method and give it its target: one number, or one per value of the first parameter."""

    def declare(method: Callable[..., float]) -> Callable[..., float]:
        vars(method).update(title=title, unit=unit, at_most=at_most, at_least=at_least)
        return method

    return declare
