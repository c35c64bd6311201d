"""BuildRank that are killed at random moments on a real file system; the script does it a thousand times.

The storm forks its builders, which only a process without threads may do: so it gets a process of its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multi_process
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "kill_storm.py"


def storm(folder: Path, *, num_kills: int, num_committers: int) -> dict[str, Any]:
    """What the script found, which also ends with 0 only if nothing was lost or wrong."""
    arguments = [
        "--kills",
        num_kills,
        "--committers",
        num_committers,
        "--seed",
        num_kills,
        "--folder",
        folder,
    ]
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = json.loads(done.stdout)
    assert (outcome["num_lost"], outcome["num_wrong"]) == (0, 0)
    return dict(outcome)


@pytest.mark.parametrize(("num_committers", "num_kills"), [(1, 20), (3, 12)])
def test_killed_builders_lose_no_sample_and_write_no_wrong_byte(
    tmp_path: Path, num_committers: int, num_kills: int
) -> None:
    """Spec 6.5 to 6.9, with SIGKILL, SIGTERM and SIGINT."""
    outcome = storm(tmp_path, num_kills=num_kills, num_committers=num_committers)
    assert outcome["num_builds"] >= 1
    by_signal = outcome["kills_by_signal"]
    assert sum(by_signal.values()) == num_kills
    assert min(by_signal[name] for name in ("SIGKILL", "SIGTERM", "SIGINT")) >= num_kills // 5


def test_storm_in_the_background_of_a_shell_counts_interrupts_too(tmp_path: Path) -> None:
    """Such jobs are started with Ctrl-C ignored, which no builder must inherit."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = storm(tmp_path, num_kills=5, num_committers=1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert outcome["kills_by_signal"] == {"SIGKILL": 3, "SIGTERM": 1, "SIGINT": 1}
