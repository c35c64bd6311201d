"""What the time until the first step goes to: seconds by phase, as `startup/<phase>_sec`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import psutil

_SECONDS_END = "_sec"
_SECONDS = "startup/{}" + _SECONDS_END
TOTAL = "startup/total_startup_time_min"


class StartupClock:
    """Seconds of the phases before the first step. Phases may nest: each has what its inner ones leave.

    Args:
        began: When the start began, in seconds since 1970; by default now. What passed since is "imports".
        before: Seconds and other metrics of what was measured elsewhere, such as by a build of stores; with
            `began` these seconds passed since then, and aren't those of "imports".
    """

    def __init__(self, *, began: float | None = None, before: Mapping[str, float] | None = None) -> None:
        self._began = time.time() if began is None else began
        self.metrics = dict(before or {})
        if began is not None:
            measured_s = sum(value for name, value in self.metrics.items() if name.endswith(_SECONDS_END))
            self._add("imports", time.time() - began - measured_s)
        self._inner_s: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, the time belongs to a phase."""
        start = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._add(name, seconds - self._inner_s.pop())
            if self._inner_s:
                self._inner_s[-1] += seconds

    def take(self, metrics: Mapping[str, float]) -> None:
        """Add what was measured elsewhere, such as by a build of stores."""
        self.metrics |= metrics

    def end(self) -> dict[str, float]:
        """All metrics, with the minutes from the beginning until now."""
        return {**self.metrics, TOTAL: (time.time() - self._began) / 60}

    def _add(self, name: str, seconds: float) -> None:
        key = _SECONDS.format(name)
        self.metrics[key] = self.metrics.get(key, 0.0) + seconds


def process_began() -> float:
    """When this process was started, in seconds since 1970."""
    return float(psutil.Process().create_time())


_clock: ContextVar[StartupClock | None] = ContextVar("startup_clock", default=None)


@contextmanager
def measuring(clock: StartupClock) -> Iterator[None]:
    """Inside, `startup_phase` adds to this clock."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)


def startup_phase(name: str) -> AbstractContextManager[None]:
    """Inside, the time belongs to a phase of the start, such as "data_opening"; nobody has to measure."""
    clock = _clock.get()
    return clock.phase(name) if clock is not None else nullcontext()
