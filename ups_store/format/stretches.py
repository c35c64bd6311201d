"""Runs of consecutive numbers: sources read them, commits write and lock them, reports show them.

Alone, as those share no other room below them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


def stretches(numbers: Sequence[int] | npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut whole numbers, in any order, into runs in which each is one more than the one before.

    Returns:
        First number and length of each run; nothing of no numbers.
    """
    values = np.asarray(numbers, np.int64)
    breaks = np.flatnonzero(values[1:] - values[:-1] != 1) + 1
    starts = [0, *breaks.tolist()] if len(values) else []
    ends = [*starts[1:], len(values)]
    return [(int(values[start]), end - start) for start, end in zip(starts, ends, strict=False)]


def ranges_of(numbers: Sequence[int] | npt.NDArray[np.int64], *, longest: int) -> Iterator[range]:
    """The same as ranges, cut where they are longer than `longest`."""
    for first, num in stretches(numbers):
        for start in range(first, first + num, longest):
            yield range(start, min(start + longest, first + num))
