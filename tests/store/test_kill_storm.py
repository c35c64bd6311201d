"""Builders that are killed at random moments on a real file system; the script does it a thousand times."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scripts.kill_storm import storm


@pytest.mark.multi_process
@pytest.mark.parametrize(("num_committers", "num_kills"), [(1, 20), (3, 12)])
# Forking is what makes a kill cost milliseconds; the children never use other threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_builders_lose_no_sample_and_write_no_wrong_byte(
    tmp_path: Path, num_committers: int, num_kills: int
) -> None:
    """Spec 6.5 to 6.9, with SIGKILL, SIGTERM and SIGINT."""
    outcome = storm(tmp_path, num_kills=num_kills, num_committers=num_committers, seed=num_committers)
    assert (outcome.num_lost, outcome.num_wrong) == (0, 0)
    assert outcome.num_builds >= 1
    by_signal = outcome.kills_by_signal or {}
    assert sum(by_signal.values()) == num_kills
    assert min(by_signal[name] for name in ("SIGKILL", "SIGTERM", "SIGINT")) >= num_kills // 5


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_storm_in_the_background_of_a_shell_counts_interrupts_too(tmp_path: Path) -> None:
    """Such jobs are started with Ctrl-C ignored, which no builder must inherit."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = storm(tmp_path, num_kills=5, num_committers=1, seed=5)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert outcome.kills_by_signal == {"SIGKILL": 3, "SIGTERM": 1, "SIGINT": 1}
