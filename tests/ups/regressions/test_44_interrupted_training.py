"""An interrupted training is continued, perhaps for longer, or refused; nothing begins it again unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_ups
from field_runs import FIELDS, field_run, prepared_fields, stopping_after, train
from operator_runs import build_here

from ups.cli.train import ALL

__all__ = ["field_run", "prepared_fields"]
STATE = Path("checkpoints/operator.training.safetensors")

pytestmark = pytest.mark.usefixtures("field_run")


@pytest.fixture(autouse=True)
def _builds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)


def interrupt(*words: str) -> bytes:
    """Train two epochs of two steps, stopped after the third step; the state that is left."""
    with stopping_after(3):
        assert train("stages.operator.epochs=2", *words).exit_code == 5
    return STATE.read_bytes()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--stage", ALL], "training.lr=0.002"),
        (["--stage", ALL], "stages.operator.epochs=1"),
        (["--unless-valid"], "training.lr=0.002"),  # a node of `ups run`
        ([], "stages.operator.epochs=1"),
    ],
)
def test_interrupted_training_with_another_key_is_refused_and_stays(words: list[str], key: str) -> None:
    state = interrupt()
    done = train("stages.operator.epochs=2", key, *words)
    assert done.exit_code == 2, done.output
    assert ("stages.operator.optimizer.lr" if "lr" in key else "stages.operator") in done.stderr
    assert "ups train --stage operator --restart" in done.stderr
    assert STATE.read_bytes() == state
    assert train("stages.operator.epochs=2", "--json").exit_code == 0  # it goes on as if nothing had been


@pytest.mark.parametrize("stage", ["operator", ALL])
@pytest.mark.parametrize("key", ["stages.operator.epochs=3", "stages.operator.steps=6"])
def test_interrupted_training_continues_for_longer(stage: str, key: str) -> None:
    interrupt()
    done = train("stages.operator.epochs=2", key, "--json", stage=stage)
    assert done.exit_code == 0, done.output
    assert "training goes on" in done.stderr
    report = json.loads(done.stdout)
    report = report if stage != ALL else report["stages"]["operator"]
    assert (report["resumed_at"], report["steps"]) == (3, 6)


def test_validation_finds_the_interrupted_training_that_would_be_refused() -> None:
    interrupt()
    words = [*FIELDS, "stages.operator.epochs=2"]
    assert run_ups("validate", "config", *words).exit_code == 0
    done = run_ups("validate", "config", *words, "training.lr=0.002")
    assert done.exit_code == 2
    assert "stages.operator.optimizer.lr was 0.01 and is 0.002" in done.output


def test_finished_training_with_another_key_is_trained_again_by_all_stages() -> None:
    words = ("stages.operator.epochs=1",)
    assert train(*words).exit_code == 0
    assert train(*words, "training.lr=0.002").exit_code == 2
    done = train(*words, "training.lr=0.002", stage=ALL)
    assert (done.exit_code, "stage operator is trained again" in done.stderr) == (0, True)
