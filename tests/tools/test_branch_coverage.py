"""`make test` ends with the share of branches that tests took, lines not counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_branches.py"


@pytest.mark.parametrize(
    ("taken", "code", "line"),
    [
        (950, 0, "branches: 950 of 1,000 covered, 95.00 %"),
        (949, 1, "branches: 949 of 1,000 covered, 94.90 %: expected at least 95 %"),
    ],
)
def test_branches_are_counted_without_lines(tmp_path: Path, taken: int, code: int, line: str) -> None:
    report = tmp_path / "totals.json"
    totals = {"covered_branches": taken, "num_branches": 1000, "percent_covered": 99.9}
    report.write_text(json.dumps({"totals": totals}))
    command = [sys.executable, SCRIPT, report, "--at-least", "95"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (code, line)
