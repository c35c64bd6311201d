"""How long the start took, counted from the launch of a command, which may start processes of its own.

`ups run` hands over when it was launched, and what its stores took, as JSON in UPS_STARTUP. Nothing here
needs torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ups.train.tracking import CACHE_MINUTES, CACHE_REUSED

EARLIER_SECONDS = "startup/earlier_sec"  # from the launch until it was the stage's turn
STARTUP_VARIABLE = "UPS_STARTUP"
_LAUNCHED_AT = "launched_at"


def process_began() -> float:
    """When this process was started, in seconds since 1970; where the system doesn't say (no /proc), now."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return time.time()
    ticks = int(stat.rpartition(")")[2].split()[19])  # since the machine's start (proc_pid_stat(5), field 22)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def launched_at(began: float) -> float:
    """When the command was launched that this process belongs to, seconds since 1970."""
    return _handed_over().get(_LAUNCHED_AT, began)


def before_stage(began: float) -> dict[str, float]:
    """Metrics of what happened between the launch and the start of this process."""
    stores = {name: value for name, value in _handed_over().items() if name != _LAUNCHED_AT}
    return {**stores, EARLIER_SECONDS: began - launched_at(began)}


def hand_over(launched: float, stores: Mapping[str, float]) -> None:
    """Let processes that this one starts know it.

    Args:
        launched: When the command was launched.
        stores: As `of_stores` gives it.
    """
    os.environ[STARTUP_VARIABLE] = json.dumps({_LAUNCHED_AT: launched, **stores})


def of_stores(seconds: float, *, is_reused: bool) -> dict[str, float]:
    """Metrics of stores that a stage reads."""
    return {CACHE_MINUTES: seconds / 60, CACHE_REUSED: float(is_reused)}


def with_stores(before: Mapping[str, float], stores: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a start with those of stores that were built for it, too; the stores' minutes add up."""
    return {
        **before,
        **stores,
        CACHE_MINUTES: before.get(CACHE_MINUTES, 0.0) + stores[CACHE_MINUTES],
        CACHE_REUSED: min(before.get(CACHE_REUSED, 1.0), stores[CACHE_REUSED]),
    }


@contextmanager
def restored(variable: str) -> Iterator[None]:
    """Inside, a variable of the environment may be changed, for processes that are started there."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


def _handed_over() -> dict[str, float]:
    """What an outer process said; nothing where there is none, or it can't be read."""
    try:
        return {str(name): float(value) for name, value in json.loads(os.environ[STARTUP_VARIABLE]).items()}
    except (KeyError, ValueError, AttributeError, TypeError):
        return {}
