"""A stage of one's own: registered in a module that `code` names, trained and a node as the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from numbered_batches import numbered_loader
from run_nodes import training_nodes
from torch import Tensor, nn

from ups import stages
from ups.config import RunConfig, load_config
from ups.config.stage_keys import stage_keys
from ups.data.augment import Draws
from ups.data.batches import TaskBatch
from ups.errors import ConfigError
from ups.pipeline.scratch import Scratch
from ups.train.run import run_stage
from ups.train.stage import Losses, Stage
from ups.trained.checkpoint import save_checkpoint

TASK = "data.tasks=burgers1d"


@pytest.fixture(autouse=True)
def _registers_for_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {**stages.STAGES}
    yield
    stages.STAGES.clear()
    stages.STAGES.update(before)


class Slope(Stage):
    """Learns the slope of y = 2 x."""

    def __init__(self, config: RunConfig, *, device: torch.device, start: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False).to(device)
        self.path = config.path_of(self.facts.makes[0])
        self.loader = numbered_loader(
            lambda number: TaskBatch("line", draws=Draws.of_batch(4, seed=number)), 4
        )

    def losses(self, forward: Callable[..., Tensor], batch: TaskBatch) -> Losses:
        return {"error": (forward(torch.ones(4, 1)) - 2).square().mean()}

    def validate(self) -> dict[str, float]:
        return {"score": abs(self.model.weight.item() - 2)}

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        save_checkpoint(self.path, dict(weights), kind=self.facts.makes[0].kind, document={"report": metrics})
        return self.path

    def finish(self) -> dict[str, Any]:
        return self.validate()


def test_stage_of_ones_own_is_trained_and_is_a_node(tmp_path: Path) -> None:
    stages.stage("slope", needs=(stages.OPERATOR_MODEL,))(Slope)
    words = [TASK, f"checkpoint.dir={tmp_path}", "stages.slope.epochs=8", "stages.slope.optimizer.lr=0.2"]
    config = load_config(overrides=words)
    report = run_stage("slope", config)
    assert report["score"] < 0.5
    assert math.isfinite(report["seconds"])
    assert run_stage("slope", config)["resumed_at"] == report["steps"]
    nodes = {node.name: node for node in training_nodes(config)}
    assert list(nodes)[-2:] == ["operator", "slope"]
    assert nodes["slope"].outputs()[str(tmp_path / "slope.safetensors")] is not None
    before = nodes["slope"].key()
    longer = load_config(overrides=[*words, "stages.slope.epochs=9"])
    assert {node.name: node for node in training_nodes(longer)}["slope"].key() != before


def test_keys_that_affect_a_stage_are_those_of_one_like_it() -> None:
    stages.stage("like", like="operator")(Slope)
    stages.stage("free")(Slope)
    config, other = (load_config(overrides=[TASK, f"prior.observed_points={n}"]) for n in (1, 2))
    changed = {name for name in ("like", "free") if stage_keys(config, name) != stage_keys(other, name)}
    assert changed == {"free"}


def test_module_that_registers_is_imported_by_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_slope.py").write_text("from ups.stages import stage\nstage('own')(print)\n")
    (tmp_path / "run.yaml").write_text(
        json.dumps({"code": ["own_slope"], "data": {"tasks": "burgers1d"}, "stages": {"own": {"epochs": 1}}})
    )
    assert "own" in load_config("run.yaml").trained_stages
    with pytest.raises(ConfigError, match="code: nowhere") as caught:
        load_config(overrides=[TASK, "code=[nowhere]"])
    assert caught.value.kind == "no_code"


def test_configuration_in_a_checkpoint_may_have_stages_whose_code_isnt_imported() -> None:
    gates = {"throughput": {"own": 1.0}}
    values = {"stages": {"own": {"epochs": 1}}, "pipeline": {"full": {"gates": gates}}}
    config = load_config({"data": {"tasks": ["burgers1d"]}, "code": ["nowhere"], **values})
    assert "own" not in config.trained_stages
    with pytest.raises(ConfigError, match="own is no stage"):
        load_config({"data": {"tasks": ["burgers1d"]}, **values})
    with pytest.raises(ConfigError, match="is no stage"):
        load_config(overrides=[TASK, "stages.own.epochs=1"])


@pytest.mark.parametrize("module", ["''", ".own", "own.py:f"])
def test_code_that_is_no_module_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="code: ") as caught:
        load_config(overrides=[TASK, f"code=[{module}]"])
    assert caught.value.kind == "no_code"


@pytest.mark.parametrize("is_kept", [False, True])
def test_dry_run_has_models_of_ones_own_for_later_stages(tmp_path: Path, is_kept: bool) -> None:
    model = stages.Model("slope", "slope.safetensors")
    stages.stage("slope", makes=(model,))(Slope)
    stages.stage("steeper", needs=(model,))(Slope)
    words = [TASK, f"checkpoint.dir={tmp_path}"]
    (tmp_path / model.file).write_bytes(b"trained")
    given: dict[str, Any] = {"config_path": None, "overrides": words, "tasks": {}}
    given["trained"] = () if is_kept else ("slope",)
    scratch = Scratch(load_config(overrides=words), folder=tmp_path / "scratch", **given)
    there = scratch.config.path_of(model)
    assert there.is_relative_to(tmp_path / "scratch")
    assert there.exists() == is_kept
