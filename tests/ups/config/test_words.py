"""Earlier keys parse, and overrides of `training` win over what a file says of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ups.config import RunConfig, load_config
from ups.errors import ConfigError
from ups_store.building.config import load_config as load_build
from ups_store.old_names import KEYS, with_present_names

OLD = "data: {task: burgers1d}\ntraining: {time_stride: 2, rollout_horizon: 3}\n"
STAGES = {
    "autoencoder": {"batch_size": 8, "optimizer": {"lr": 0.1}},
    "operator": {"grad_clip": 2.0, "ema_decay": 0.5, "patience": 4, "optimizer": {"lr": 0.2}},
}


def words_of(config: RunConfig) -> tuple[Any, ...]:
    return config.data.tasks, config.training.stride, config.training.horizon


def test_earlier_words_mean_today_s_in_files_overrides_and_mappings(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    expected = (("burgers1d",), 2, 3)
    assert words_of(load_config(tmp_path / "old.yaml")) == expected
    assert words_of(load_config(yaml.safe_load(OLD))) == expected
    overrides = ["data.task=burgers1d", "training.time_stride=2", "training.rollout_horizon=3"]
    assert words_of(load_config(overrides=overrides)) == expected
    assert load_build(tmp_path / "old.yaml").data.tasks == ("burgers1d",)


def test_present_word_on_the_command_line_wins_over_an_earlier_one_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    assert words_of(load_config(tmp_path / "old.yaml", overrides=["training.stride=5"]))[1] == 5
    (tmp_path / "new.yaml").write_text("include: old.yaml\ntraining: {stride: 4}\n")
    new = tmp_path / "new.yaml"
    assert words_of(load_config(new))[1] == 4
    assert words_of(load_config(new, overrides=["training.time_stride=6"]))[1] == 6


def test_references_follow_the_words() -> None:
    values = {**yaml.safe_load(OLD), "logging": {"wandb": {"group": "s${training.time_stride}"}}}
    assert load_config(values).logging.wandb.group == "s2"


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_both_words_in_one_source_are_refused(old: str, new: str) -> None:
    section, old_name = old.split(".")
    values = {section: {old_name: 1, new.split(".")[1]: 2}}
    with pytest.raises(ValueError, match=f"{old} is the earlier name of {new}: give one of them"):
        with_present_names(values)
    with pytest.raises(ConfigError, match="give one of them"):
        load_config(values)
    with pytest.raises(ConfigError, match="give one of them"):
        load_config(overrides=["data.task=burgers1d", f"{old}=1", f"{new}=2", "data.tasks=cfd1d"])


# --- the command line and the stages' own values ---------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "stage", "place", "was"),
    [
        ("lr=0.5", "autoencoder", "optimizer.lr", 0.1),
        ("lr=0.5", "operator", "optimizer.lr", 0.2),
        ("batch_size=4", "autoencoder", "batch_size", 8),
        ("grad_clip=7.0", "operator", "grad_clip", 2.0),
        ("ema_decay=0.25", "operator", "ema_decay", 0.5),
        ("patience=9", "operator", "patience", 4),
    ],
)
def test_override_of_training_wins_over_the_stages_of_a_file_and_warns(
    override: str, stage: str, place: str, was: float, notes: list[str]
) -> None:
    values = {"data": {"tasks": "burgers1d"}, "stages": STAGES}
    config = load_config(values, overrides=[f"training.{override}"])
    key, _, text = override.partition("=")
    found: Any = config.stage(stage)
    for name in place.split("."):
        found = getattr(found, name)
    assert found == float(text)
    says = f"warning: training.{key} = {text} takes the place of stages.{stage}.{place} = {was}"
    assert says in notes


def test_override_of_training_that_no_stage_has_says_nothing() -> None:
    values = {"data": {"tasks": "burgers1d"}, "stages": {"operator": {"epochs": 3}}}
    config = load_config(values, overrides=["training.lr=0.5", "training.patience=null"])
    assert config.stage("operator").optimizer.lr == 0.5


def test_override_of_the_stage_wins_over_that_of_training(notes: list[str]) -> None:
    values = {"data": {"tasks": "burgers1d"}, "stages": STAGES}
    overrides = ["training.lr=0.5", "stages.operator.optimizer.lr=0.7"]
    config = load_config(values, overrides=overrides)
    assert "stages.autoencoder.optimizer.lr" in notes[0]
    assert config.stage("operator").optimizer.lr == 0.7
    assert config.stage("autoencoder").optimizer.lr == 0.5


def test_null_on_the_command_line_wins_too(notes: list[str]) -> None:
    values = {"data": {"tasks": "burgers1d"}, "stages": STAGES}
    config = load_config(values, overrides=["training.grad_clip=null"])
    assert any("training.grad_clip = None takes the place" in note for note in notes)
    assert config.stage("operator").grad_clip is None
