"""Builders that are killed at random moments on a real file system; the script does it a thousand times."""

from __future__ import annotations

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
