"""`ups run` killed at random moments, again and again: it ends as if nothing had happened.

The seed fixes which share of an undisturbed run's time each call lives; the machine decides what that is.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import tiny_pipeline
from tiny_pipeline import NAMES

REPO = Path(__file__).resolve().parents[3]
NUM_KILLS = 50
NODE_S = 0.3  # of each node: a third of what a call takes, its imports are the rest
RESULTS = {"first.txt": "afirst", "second.txt": "afirstsecond", "third.txt": "afirstsecondthird"}

pytestmark = [pytest.mark.slow, pytest.mark.multi_process, pytest.mark.timeout(1500)]


def test_run_killed_at_random_moments_ends_as_one_that_is_not_and_runs_nothing_valid_twice(
    tmp_path: Path,
) -> None:
    whole_s = undisturbed(prepared(tmp_path / "whole"))
    moments, found = random.Random(0), Counter[str]()
    for number in count():
        folder = prepared(tmp_path / f"killed-{number}")
        while found["kills"] < NUM_KILLS and is_killed(folder, moments.uniform(0, whole_s), found):
            pass
        undisturbed(folder)
        expect_as_undisturbed(folder)
        found["runs"] += 1
        found["nodes begun"] += len(begun(folder))
        if found["kills"] == NUM_KILLS:
            break
    sys.stdout.write(f"{dict(found)}\n")


def prepared(folder: Path) -> Path:
    folder.mkdir()
    (folder / "input.txt").write_text("a")
    return folder


def started(folder: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(REPO), str(REPO / "tests" / "support")])
    command = [sys.executable, str(tiny_pipeline.__file__), str(NODE_S)]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def undisturbed(folder: Path) -> float:
    """Run to the end, if it isn't there; returns the seconds."""
    before, valid, began = begun(folder), recorded(folder), time.monotonic()
    process = started(folder)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert not valid & {*begun(folder)[len(before) :]}
    return time.monotonic() - began


def is_killed(folder: Path, after_s: float, found: Counter[str]) -> bool:
    """Run, and kill it then; False if it has ended before. What was valid isn't begun again."""
    before, valid = begun(folder), recorded(folder)
    process = started(folder)
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.kill()
    _, said = process.communicate(timeout=300)  # its child has the pipe, too, and ends
    assert process.returncode in (0, -9), said
    new = begun(folder)[len(before) :]
    assert not valid & {*new}, said
    if process.returncode == 0:
        return False
    found["kills"] += 1
    where = "in a node" if {*new} - recorded(folder) else "between nodes" if new else "before any node"
    found[f"kills {where}"] += 1
    return True


def begun(folder: Path) -> list[str]:
    path = folder / "begun.txt"
    return path.read_text().split() if path.exists() else []


def recorded(folder: Path) -> set[str]:
    """Nodes that are valid: nothing that they depend on changes here."""
    return {path.stem for path in (folder / "run" / "nodes").glob("*.json")}


def expect_as_undisturbed(folder: Path) -> None:
    assert {name: (folder / name).read_text() for name in RESULTS} == RESULTS
    nodes = json.loads((folder / "run" / "metadata.json").read_text())["nodes"]
    assert [nodes[name]["is_valid"] for name in NAMES] == [True] * len(NAMES)
    left = {path.name for path in folder.iterdir()} - {*RESULTS}
    assert left == {"input.txt", "begun.txt", "run"}
    assert {path.name for path in (folder / "run").iterdir()} == {
        *("lock", "metadata.json", "nodes", "run.jsonl"),
        *("train.yaml", "small-eval.yaml", "full-eval.yaml"),
    }
