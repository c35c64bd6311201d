"""Startup metrics of a build in Weights & Biases, as the earlier script asks for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb_runs import Standin

from ups.cli.precompute import begin
from ups_store.building.progress import PHASES, Startup
from ups_store.errors import ConfigError

REPORT = SimpleNamespace(startup=Startup(dict.fromkeys(PHASES, 1.5), False, 20.0, 3.0))


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    return Standin.installed(tmp_path, monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {task: burgers1d}\n"
        f"checkpoint: {{dir: {tmp_path / 'checkpoints'}}}\n"
        "logging: {wandb: {enabled: true, project: waves}}\n"
    )
    return path


def test_startup_metrics_go_to_the_run_that_the_configuration_names(config: Path, wandb: Standin) -> None:
    tell = begin(config, ["data.limit=3"])
    assert tell is not None
    assert wandb.calls("init") == []  # only once there is something to tell
    tell(REPORT)
    (begun,) = wandb.calls("init")
    assert (begun["project"], begun["job_type"]) == ("waves", "precompute")
    assert begun["config"]["data"] == {"tasks": "burgers1d", "limit": 3, "root": "data"}
    (row,) = wandb.rows
    assert row["precompute/startup/read_sec"] == 1.5
    assert row["precompute/startup/samples_per_s"] == 20.0
    assert (row["startup/cache_precompute_time_min"], row["startup/cache_reused"]) == (1.5 / 60, 0.0)
    assert wandb.calls("finish") == [{"exit_code": 0}]


@pytest.mark.parametrize("override", ["logging.wandb.enabled=false", "logging=null"])
def test_nobody_is_told_unless_it_is_switched_on(config: Path, override: str) -> None:
    assert begin(config, [override]) is None
    assert begin(None, []) is None


def test_build_does_not_ask_for_wandb(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.train.tracking.find_spec", lambda name: None)
    tell = begin(config, [])
    assert tell is not None
    tell(REPORT)
    assert not (config.parent / "checkpoints").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("logging.wandb.projekt=waves", "logging.wandb.projekt"),
        ("logging.wandb.tags=3", "logging.wandb.tags"),
        ("logging.wandb.enabled=perhaps", "logging.wandb.enabled"),
        ("logging.wandb=on", "logging.wandb"),
        ("logging=3", "logging"),
    ],
)
def test_wrong_settings_are_told_before_the_build(config: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        begin(config, [override])


def test_settings_left_empty_switch_it_off(config: Path) -> None:
    assert begin(config, ["logging.wandb=null"]) is None
