"""Saved training states: refused before anything is built or replaced; stopping before the first step."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from on_demand_helpers import checkpoint, configure, make_folder
from operator_runs import change_weights
from rich.console import Console

import ups.train.run
from ups.config import RunConfig
from ups.errors import CheckpointError, InterruptedTrainingError
from ups.train.report_table import show_report
from ups.train.run import run_stage
from ups.train.saved_state import state_path

SHORT = (
    "training.device=cpu",
    "training.preload=auto",
    "stages.operator.epochs=1",
    "stages.operator.steps_per_epoch=2",
    "operator.pdet.hidden_dim=16",
    "operator.pdet.depths=[1]",
    "operator.pdet.num_heads=2",
    "operator.val_trajectories=1",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def short(folder: Path, *overrides: str) -> RunConfig:
    return configure(folder, *SHORT, *overrides)


def train(config: RunConfig, notes: list[str] | None = None, **options: Any) -> dict[str, Any]:
    return run_stage("operator", config, note=(notes if notes is not None else []).append, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_state_of_other_data_is_refused_before_stores_are_replaced(folder: Path) -> None:
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


def test_state_of_another_configuration_is_refused_before_anything_is_opened(folder: Path) -> None:
    train(short(folder))
    checkpoint(folder).unlink()
    with pytest.raises(CheckpointError, match=r"seed was 0 and is 1") as caught:
        train(short(folder, "seed=1"))
    assert (caught.value.kind, caught.value.exit_code) == ("other_config", 2)


def test_notes_of_a_stage_go_where_those_of_the_run_go(folder: Path) -> None:
    notes: list[str] = []
    train(short(folder), notes)
    assert any("encoding on demand" in note for note in notes)
    assert not any("bytes needed" in note for note in notes)


def test_diverged_operator_is_not_exported_in_the_place_of_an_untrained_one(folder: Path) -> None:
    report = train(short(folder, "training.lr=1e10", "training.grad_clip=null"))
    assert report["best_step"] == 0
    assert report["score"] == pytest.approx(report["start_score"], rel=1e-4)
    console = Console(width=120, record=True, file=io.StringIO())
    show_report(report, console)
    assert "warning: no validation was better than before the first step" in console.export_text()


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
