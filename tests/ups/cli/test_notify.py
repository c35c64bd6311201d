"""`--notify COMMAND`: once, at every end, with what happened; its own failure changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import run_ups

from ups.cli import notify
from ups.errors import DivergedError, GateMissedError, InterruptedTrainingError, StalledError
from ups_store.errors import TruncatedError

NAMES = ("UPS_STATUS", "UPS_EXIT_CODE", "UPS_MESSAGE", "UPS_RUN")


def writing(path: Path) -> str:
    """A command that appends what it is told to a file."""
    shown = ", ".join(f"os.environ[{name!r}]" for name in NAMES)
    return f'{sys.executable} -S -c "import os, json; print(json.dumps([{shown}]))" >> {path}'


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.train.log.show_report", lambda report, console: None)
    return tmp_path / "told"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, "done", 0),
        (DivergedError("step 3: loss 'a' isn't finite"), "failed", 1),
        (InterruptedTrainingError("stopped by SIGTERM"), "interrupted", 5),
        (StalledError("stalled"), "failed", 4),
        (TruncatedError("ends early", path="a.zarr.zip"), "failed", 3),
        (GateMissedError("missed"), "gate_missed", 10),
    ],
)
def test_every_end_is_told_once(
    error: Exception | None, status: str, code: int, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: object, **options: object) -> dict[str, object]:
        if error is not None:
            raise error
        return {}

    monkeypatch.setattr("ups.cli.train._train", work)
    done = run_ups("train", "--config", "demo", "checkpoint.dir=out", "--notify", writing(told))
    (line,) = told.read_text().splitlines()
    said = str(error) if error is not None else "done"
    assert json.loads(line) == [status, str(code), said, str(told.parent / "out")]
    assert done.exit_code == code


def test_mistake_in_the_configuration_is_told_and_a_look_is_not(told: Path) -> None:
    assert run_ups("train", "--config", "demo", "--print-config", "--notify", writing(told)).exit_code == 0
    assert run_ups("run", "demo", "--dry-run", "--notify", writing(told)).exit_code == 0
    assert not told.exists()
    assert run_ups("run", "demo", "training.lrr=1", "--notify", writing(told)).exit_code == 2
    status, code, message, run = json.loads(told.read_text())
    assert (status, code, run) == ("failed", "2", "")
    assert "training.lrr" in message


@pytest.mark.parametrize(
    ("command", "problem"),
    [("exit 7", "failed with exit code 7"), ("sleep 60 & wait", "ended, as it took longer than 0.2 s")],
)
def test_failure_of_the_command_is_a_warning(
    command: str, problem: str, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "TIME_LIMIT_S", 0.2 if "sleep" in command else 60)
    monkeypatch.setattr("ups.cli.train._train", lambda *args, **options: {})
    done = run_ups("train", "--config", "demo", "--notify", command)
    assert done.exit_code == 0
    assert f"warning: --notify: {command}: {problem}" in done.stderr
