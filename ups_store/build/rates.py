"""How fast each stage of a build is, as everything else sees it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable


class StageRates:
    """Counts what was done, and how long was waited for "read", "commit" and so on, since `begin`.

    A stage that others overlap with is waited for less than it works, so its rate is what it could sustain.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._waits_for = ""
        self._since_s = clock()
        self._num_done = 0

    def begin(self) -> None:
        """Count anew: there is another total."""
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
