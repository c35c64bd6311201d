"""Point 14: one file that hangs was waited for four times: once for itself, and again for each split."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import run_ups
from hanging_files import hanging
from small_runs import make_small_run

pytestmark = pytest.mark.multi_process
QUICK = ("data.split=[train,val,test]", "reading.open_timeout_s=0.3")


@pytest.mark.parametrize("verb", ["data", "config"])
def test_validation_waits_once_for_a_file_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    make_small_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (source,) = Path("data").glob("*.hdf5")
    with hanging(source):
        done = run_ups("validate", verb, "run.yaml", *QUICK)
    readers = re.findall(r"reader\s+(\d+)\s+was\s+late", done.output)
    assert len(readers) == 1, done.output  # another wait would be that of another process
