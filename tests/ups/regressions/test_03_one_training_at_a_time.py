"""Two processes never train, search or write a report in one folder; the second one says who does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import run_ups
from field_runs import FIELDS, field_run, prepared_fields, stopping_after, train
from torch.optim.optimizer import register_optimizer_step_post_hook

from ups.locks import TRAINING_LOCK, holder_of

__all__ = ["field_run", "prepared_fields"]
LOCK = Path("checkpoints", TRAINING_LOCK)
HOLD = """
import sys
from pathlib import Path
from ups.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("field_run")


@contextmanager
def held_by_another(path: str) -> Iterator[int]:
    """Inside, another process holds the lock at a path; gives its number."""
    command = [sys.executable, "-c", HOLD, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other.pid
        other.communicate()


@pytest.mark.parametrize("stage", ["operator", "all"])
def test_training_in_a_folder_in_which_another_process_trains_is_refused(stage: str) -> None:
    with stopping_after(1):
        assert train().exit_code == 5
    before = {path: path.read_bytes() for path in Path("checkpoints").glob("operator.*")}
    with held_by_another(str(LOCK)) as pid:
        done = train("seed=1", "--restart", stage=stage)
        assert done.exit_code == 1
        assert f"another run works here: process {pid} of {os.uname().nodename}" in done.stderr
    assert {path: path.read_bytes() for path in Path("checkpoints").glob("operator.*")} == before
    assert train().exit_code == 0  # what ends, leaves no lock


def test_a_training_holds_the_lock_of_its_folder() -> None:
    holders = []
    told = register_optimizer_step_post_hook(lambda *step: holders.append(holder_of(LOCK)))
    try:
        assert train("stages.operator.epochs=1").exit_code == 0
    finally:
        told.remove()
    assert set(holders) == {f"process {os.getpid()} of {os.uname().nodename}"}
    assert holder_of(LOCK) is None


def test_search_where_another_process_searches_is_refused() -> None:
    pytest.importorskip("optuna")
    with held_by_another("checkpoints/tune/.operator.lock") as pid:
        done = run_ups("tune", *FIELDS, "--stage", "operator", "--trials", "1", "--budget-samples", "8")
    assert (done.exit_code, f"process {pid}" in done.stderr) == (1, True)


def test_report_that_another_process_writes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.eval.report._WRITING_S", 0.0)
    assert train("stages.operator.epochs=1").exit_code == 0
    words = [word for word in FIELDS if not word.startswith("stages.autoencoder")]
    with held_by_another("report/.lock"):
        done = run_ups("evaluate", *words, "--out", "report")
    assert (done.exit_code, "another run works here" in done.stderr) == (1, True)
    assert not Path("report/report.json").exists()
