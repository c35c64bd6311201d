"""Startup metrics of a build in Weights & Biases, as the earlier script asks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ups.cli.precompute import begin
from ups_store.build.result import PHASES, Startup
from ups_store.errors import ConfigError, MissingExtraError

REPORT = SimpleNamespace(startup=Startup(dict.fromkeys(PHASES, 1.5), False, 20.0, 3.0))


class FakeWandb(ModuleType):
    """Remembers what a run was given."""

    Error = RuntimeError

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.id, self.exit_codes = "abc", list[int]()

    def init(self, **settings: Any) -> FakeWandb:
        self.begun.append(settings)
        return self

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {task: burgers1d}\n"
        f"checkpoint: {{dir: {tmp_path / 'checkpoints'}}}\n"
        "logging: {wandb: {enabled: true, project: waves}}\n"
    )
    return path


def test_startup_metrics_go_to_the_run_that_the_configuration_names(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tell = begin(config, ["data.limit=3"])
    assert wandb.begun == []  # only once there is something to tell
    tell(REPORT)
    (begun,) = wandb.begun
    assert (begun["project"], begun["job_type"]) == ("waves", "build")
    assert begun["config"]["data"] == {"tasks": "burgers1d", "limit": 3, "root": "data"}
    (logged,) = wandb.logged
    assert logged["startup/read_sec"] == 1.5
    assert logged["startup/samples_per_s"] == 20.0
    assert wandb.exit_codes == [0]


@pytest.mark.parametrize("override", ["logging.wandb.enabled=false", "logging=null"])
def test_nobody_is_told_unless_it_is_switched_on(config: Path, override: str) -> None:
    assert begin(config, [override]) is None
    assert begin(None, []) is None


def test_missing_wandb_is_told_before_the_work(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match="wandb isn't installed"):
        begin(config, [])


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
def test_wrong_settings_are_told_before_the_build(
    config: Path, monkeypatch: pytest.MonkeyPatch, override: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(ConfigError, match=says):
        begin(config, [override])


def test_settings_left_empty_switch_it_off(config: Path) -> None:
    assert begin(config, ["logging.wandb=null"]) is None
