"""Writers that are interrupted, killed, or whose disk fails, at random moments on a real file system.

The storms fork writers, which only a process without threads may do: so each gets a process of its own.
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
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "storm.py"
FOUND = ("num_lost", "num_wrong", "num_blocked", "num_left", "num_untyped", "notes")


def storm(trouble: str, num: int, *arguments: Any, timeout: float = 170) -> dict[str, Any]:
    """What the script found, which ends with 0 only if that is nothing; it prints its seed."""
    command = [sys.executable, SCRIPT, "--trouble", trouble, "--num", num, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout)
    print(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = json.loads(done.stdout).values()
    assert outcome["num_troubles"] >= num
    assert [outcome[name] for name in FOUND] == [0, 0, 0, 0, 0, []]
    return dict(outcome)


@pytest.mark.parametrize(
    ("num_committers", "num_kills"), [(1, 10), (3, 5), pytest.param(3, 100, marks=pytest.mark.slow)]
)
def test_killed_builders_lose_no_sample_and_write_no_wrong_byte(
    tmp_path: Path, num_committers: int, num_kills: int
) -> None:
    """Spec 6.5 to 6.9, with SIGKILL, SIGTERM and SIGINT.

    As a job in the background of a shell, which is started with Ctrl-C ignored: no builder must inherit that.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = ["--committers", num_committers, "--seed", num_kills, "--folder", tmp_path]
    try:
        outcome = storm("race", num_kills, *options)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert outcome["num_stores_checked"] >= 1
    by_signal = outcome["kills_by_signal"]
    assert sum(by_signal.values()) == num_kills
    assert min(by_signal[name] for name in ("SIGKILL", "SIGTERM", "SIGINT")) >= num_kills // 5


@pytest.mark.parametrize(
    ("trouble", "ways"),
    [
        ("interrupt", ["of_iterable", "batched", "append", "cached"]),
        ("kill", ["of_list", "of_map", "commits", "append"]),
        ("fail", ["of_dataset", "of_arrays", "of_map", "save"]),
    ],
)
def test_every_way_of_writing_in_trouble_ends_with_each_sample_once_and_nothing_beside(
    tmp_path: Path, trouble: str, ways: list[str]
) -> None:
    """Interrupts are at any line of the package, kills and failures at any call of the system.

    Here each way meets one of the troubles; the next test has them all.
    """
    chosen = [word for way in ways for word in ("--way", way)]
    outcome = storm(trouble, 12, *chosen, "--folder", tmp_path)
    assert outcome["num_samples_checked"] > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("trouble", "num"), [("interrupt", 2000), ("kill", 1500), ("fail", 2000)])
def test_every_way_of_writing_in_trouble_for_long_is_as_right(
    tmp_path: Path, pytestconfig: pytest.Config, trouble: str, num: int
) -> None:
    """Begun again it goes on where it was."""
    assert pytestconfig.cache is not None
    state = pytestconfig.cache.mkdir("storm")
    storm(trouble, num, "--folder", tmp_path, "--state", state, timeout=7200)
    (state / f"{trouble}-{num}.json").unlink()
