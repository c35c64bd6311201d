"""Saved training states: refused before anything is built or replaced; stopping before the first step."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cache_runs import build, checkpoint, configure, make_folder
from command_line import run_ups
from operator_runs import change_weights
from rich.console import Console

import ups.train.run
from ups.config import RunConfig
from ups.errors import CheckpointError, InterruptedTrainingError, UpsError
from ups.pipeline.training import run_all
from ups.train.log import report_json, show_report
from ups.train.operator import OperatorStage
from ups.train.run import run_stage
from ups.train.saved_state import TRAINING, state_path
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups.trained.specs import AUTOENCODER

inside = partial(run_ups, "train")  # torch is there already
SHORT = (
    "training.device=cpu",
    "training.preload=auto",
    "stages.operator.epochs=1",
    "stages.operator.steps_per_epoch=2",
    "operator.width=16",
    "operator.depths=[1]",
    "operator.val_trajectories=1",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def short(folder: Path, *overrides: str) -> RunConfig:
    return configure(folder, *SHORT, *overrides)


def train(config: RunConfig, **options: Any) -> dict[str, Any]:
    return run_stage("operator", config, **options)


def shown(report: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    show_report(report, console)
    return str(console.export_text())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_state_of_other_data_is_refused_before_stores_are_replaced(folder: Path) -> None:
    build(folder)  # by training, it may be over before the store is whole
    config = short(folder)
    train(config)
    stores = content(folder / "latents")
    assert "burgers1d_train.zarr.zip" in stores
    change_weights(checkpoint(folder))
    with pytest.raises(CheckpointError, match="of another data: burgers1d was") as caught:
        train(config)
    assert (caught.value.kind, caught.value.exit_code) == ("other_data", 2)
    assert content(folder / "latents") == stores
    train(config, restart=True)
    assert content(folder / "latents") != stores


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=1", r"seed was 0 and is 1"),
        ("training.batch_size=3", r"had \d+ rows and has 3; training.batch_size=\d+ keeps it"),
    ],
)
def test_state_of_another_configuration_is_refused_before_anything_is_opened(
    folder: Path, override: str, says: str
) -> None:
    train(short(folder))
    checkpoint(folder).unlink()
    with pytest.raises(CheckpointError, match=says) as caught:
        train(short(folder, override))
    assert (caught.value.kind, caught.value.exit_code) == ("other_config", 2)


def forget(path: Path, *names: str) -> None:
    """The state as a version that had no such names left it."""
    tensors, document = load_checkpoint(path, kind=TRAINING)
    document["position"] = {key: value for key, value in document["position"].items() if key not in names}
    save_checkpoint(path, tensors, kind=TRAINING, document=document)


def test_state_of_an_earlier_version_is_refused_before_anything_is_opened(folder: Path) -> None:
    config = short(folder)
    train(config)
    path = state_path(config, "operator")
    forget(path, "best_step", "start_score")
    checkpoint(folder).unlink()
    with pytest.raises(CheckpointError) as caught:
        train(config)
    assert (caught.value.kind, caught.value.path) == ("too_old", str(path))
    says = "was written by an earlier version: found no best_step, start_score; begin again with --restart"
    assert says in str(caught.value)


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_training_on_latents_of_another_encoder_is_not_continued(folder: Path, mode: str) -> None:
    config = short(folder, f"training.cache_mode={mode}")
    train(config)
    tensors, document = load_checkpoint(checkpoint(folder), kind=AUTOENCODER)
    others = {
        name: values + 0.01 if values.is_floating_point() else values for name, values in tensors.items()
    }
    save_checkpoint(checkpoint(folder), others, kind=AUTOENCODER, document=document)
    with pytest.raises(CheckpointError) as caught:
        train(config)
    assert caught.value.kind == "other_data"


def test_all_stages_train_anew_what_an_earlier_version_left(folder: Path, notes: list[str]) -> None:
    config = short(folder, "training.cache_mode=none", "stages.autoencoder.epochs=0")
    for _ in range(2):
        report = run_all(config, config_path=None, overrides=[])
    assert report["stages"]["operator"]["resumed_at"] == 2
    forget(state_path(config, "operator"), "best_step")
    report = run_all(config, config_path=None, overrides=[])
    assert report["stages"]["operator"]["resumed_at"] == 0
    (anew,) = (note for note in notes if "trained again" in note)
    assert anew == "stage operator is trained again: the training state was written by an earlier version"


def test_notes_of_a_stage_go_where_those_of_the_run_go(folder: Path, notes: list[str]) -> None:
    train(short(folder))
    assert any("burgers1d train: samples: " in note or ": latents " in note for note in notes)
    assert not any("bytes needed" in note for note in notes)


def test_diverged_operator_is_not_exported_in_the_place_of_an_untrained_one(folder: Path) -> None:
    report = train(short(folder, "training.lr=100", "training.grad_clip=null"))  # worse, and finite
    assert report["best_step"] == 0
    assert report["score"] == pytest.approx(report["start_score"], rel=1e-4)
    assert "warning: no validation was better than before the first step" in shown(report)


@pytest.mark.parametrize("is_trained", [False, True])
def test_stop_before_the_first_step_says_what_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_trained: bool
) -> None:
    config = short(folder)
    path = state_path(config, "operator")
    if is_trained:
        train(config)

    def stopped(*args: Any, **options: Any) -> Callable[..., Any]:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(ups.train.run, "make_stage", stopped)
    says = f"{path} is as it was; the same command continues" if is_trained else "begins again"
    with pytest.raises(InterruptedTrainingError) as caught:
        train(config)
    assert says in str(caught.value)
    assert "stage operator was stopped before its first step" in str(caught.value)
    assert (caught.value.exit_code, caught.value.kind) == (5, "interrupted_at_start")


def test_command_with_restart_does_not_say_that_it_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command = ("--config", "run.yaml", "--stage", "operator", "--restart", *SHORT)
    train_step = Trainer.train_step

    def step(trainer: Trainer, **options: Any) -> None:
        train_step(trainer, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        stopped = inside(*command)
    assert stopped.exit_code == 5
    assert "after step 1 of 2" in stopped.stderr
    assert stopped.stderr.endswith("; the same command without --restart continues\n")
    with monkeypatch.context() as patch:
        patch.setattr("ups.train.run.make_stage", interrupted)
        early = inside(*command)
    assert early.stderr.endswith(".safetensors is as it was; the same command begins again\n")
    monkeypatch.setattr("ups.train.run.run_stage", interrupted)
    at_once = inside(*command).stderr
    assert at_once.endswith("is kept; the same command without --restart continues from there\n")


def test_build_that_fails_after_a_restart_does_not_say_that_the_same_command_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr("ups.pipeline.nodes._command", lambda *args, **options: fails)
    config = short(folder, "stages.autoencoder.epochs=0")
    with pytest.raises(UpsError, match="exit code 3; fix what its own message above says; the") as caught:
        run_all(config, config_path=None, overrides=[])

    def failed(*args: Any, **options: Any) -> None:
        raise caught.value

    monkeypatch.setattr("ups.pipeline.training.run_all", failed)
    command = ("--config", "run.yaml", "--stage", "all")
    for flags, how in (((), "continues"), (("--restart",), "without --restart continues")):
        done = inside(*command, *flags)
        assert done.exit_code == 3
        assert done.stderr.endswith(f"message above says; the same command {how}\n")


def test_hint_with_the_same_words_stays_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*args: Any, **options: Any) -> None:
        raise UpsError("stopped", hint="if the same command continues, wait")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("ups.pipeline.training.run_all", failed)
    assert inside("--config", "run.yaml", "--restart").stderr.endswith(
        "; if the same command continues, wait\n"
    )


def test_report_tells_steps_of_before_from_the_seconds_of_now(folder: Path) -> None:
    config = short(folder)
    first = train(config)
    assert (first["steps"], first["resumed_at"]) == (2, 0)
    assert f"2 steps in {first['seconds']:.1f} s" in shown(first)
    again = train(config)
    assert (again["steps"], again["resumed_at"]) == (2, 2)
    assert f"2 steps, of which 2 were made before; {again['seconds']:.1f} s now" in shown(again)


def test_untrained_weights_without_a_finite_error_are_null_in_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([1.0, math.nan])  # the second is that before the first step
    monkeypatch.setattr(OperatorStage, "validate", lambda stage: {"score": next(scores)})
    report = train(short(folder))
    assert (report["best_step"], report["start_score"]) == (2, None)
    assert json.loads(report_json(report))["start_score"] is None


def test_report_for_machines_has_no_numbers_that_json_has_not() -> None:
    report = {"score": math.nan, "all": [math.inf, 1.5], "by": {"task": -math.inf}, "name": "operator"}
    read = json.loads(report_json(report), parse_constant=pytest.fail)
    assert read == {"score": None, "all": [None, 1.5], "by": {"task": None}, "name": "operator"}


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("training.num_gpus=2", "num_gpus"),
        ("training.device=gpu", "config"),
    ],
)
def test_what_can_not_be_trained_is_refused_before_latents_are_built(
    folder: Path, override: str, kind: str
) -> None:
    with pytest.raises(UpsError) as caught:
        train(short(folder, override))
    assert caught.value.kind == kind
    assert not list(folder.glob("latents/*"))
