"""A loss of one's own: the guide as it stands, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from numbered_batches import batch_of
from operator_runs import configure
from trained_baselines import small_config

import ups
from ups.config import load_config
from ups.data.solvers import make_dataset
from ups.errors import ConfigError
from ups.losses import LossContext, loss_weights
from ups.pipeline.config_checks import check_config
from ups.train.baseline import BaselineStage
from ups.train.operator import make_operator_stage
from ups.train.run import run_stage
from ups.train.stage import make_stage

GUIDE = Path(__file__).parents[3] / "docs/guides/losses.md"
CPU = torch.device("cpu")
BURGERS = ("data.tasks=[burgers1d]", "operator.state=fields")


def block(kind: str) -> str:
    """The only block of a kind in the guide."""
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.fixture
def mylab(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's module in the present folder."""
    (run / "mylab").mkdir()
    (run / "mylab" / "losses.py").write_text(block("python"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mylab", "mylab.losses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return run


def test_loss_of_the_guide_trains_an_operator_whose_file_needs_no_code_of_ones_own(
    mylab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"include": str(mylab / "run.yaml"), **yaml.safe_load(block("yaml"))}
    Path("mine.yaml").write_text(yaml.safe_dump(mine))
    short = ("stages.operator.epochs=1", "stages.operator.steps_per_epoch=10", "training.horizon=2")
    config = load_config(Path("mine.yaml"), overrides=(*BURGERS, *short, "training.log_every=5"))
    run_stage("operator", config)
    lines = map(json.loads, Path("checkpoints/operator.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["event"] == "step"]
    named = {name for name in steps[0] if name.startswith("loss/")}
    assert named == {"loss/one_step", "loss/rollout", "loss/mylab.losses:h1"}
    assert steps[-1]["loss/mylab.losses:h1"] > 0
    monkeypatch.delitem(sys.modules, "mylab.losses")
    ups.load("checkpoints/operator.safetensors")
    assert "mylab.losses" not in sys.modules


def test_fields_of_a_loss_are_those_of_the_data_and_carry_gradients(run: Path) -> None:
    """Of patches, of latents and of a baseline, whose states differ."""
    seen: list[tuple[torch.Tensor, LossContext]] = []

    @ups.register_loss("watching")
    def watching(predicted: torch.Tensor, truth: torch.Tensor, context: LossContext) -> torch.Tensor:
        seen.append((context.fields(truth), context))
        return context.fields(predicted).square().mean()

    config = configure(run, *BURGERS, "training.losses={watching: 1}", "training.augment=false")
    stage = make_operator_stage(config, device=CPU)
    batch = batch_of(stage, 0)
    (loss,) = stage.losses(stage.model, batch).values()
    loss.backward()
    assert stage.model.operator.out.weight.grad is not None
    fields, context = seen[0]
    torch.testing.assert_close(fields, batch.states[:, 1:], rtol=1e-5, atol=1e-6)
    assert (context.task, context.tokens, context.dt_B.shape) == ("burgers1d", (8,), (8,))


def test_fields_of_a_baseline_s_loss_are_those_of_the_data(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    @ups.register_loss("of_fields")
    def of_fields(predicted: torch.Tensor, truth: torch.Tensor, context: LossContext) -> torch.Tensor:
        seen.append(context.fields(truth))
        return (predicted - truth).square().mean(dim=(2, 3))

    make_dataset("burgers1d", tmp_path / "data", num_samples=20, points=32, frames=5, nu=0.1)
    own = {"training.losses": "{of_fields: 2}", "training.lambda_relative": 0}
    stage = make_stage("fno", small_config(tmp_path / "data", tmp_path, "burgers1d", **own), device=CPU)
    assert isinstance(stage, BaselineStage)
    batch = batch_of(stage, 0)
    losses = stage.losses(stage.model, batch)
    torch.testing.assert_close(seen[0], batch.states[:, 1:], rtol=1e-5, atol=1e-6)
    states = stage.model.normalise(batch.states, array="fields")  # untrained, so the first frame stays
    expected = 2 * (states[:, 1] - states[:, 0]).square().mean()
    torch.testing.assert_close(losses, {"of_fields": expected})


def test_losses_by_name_are_those_of_the_older_keys_to_the_bit(run: Path) -> None:
    older = ("training.rollout_loss=mse", "training.lambda_relative=0.5", "training.lambda_spectral=0.1")
    named = ("training.losses={mse: 1, relative: 0.5, spectral: 0.1}",)
    losses: list[dict[str, torch.Tensor]] = []
    for overrides in (older, named):
        config = configure(run, *BURGERS, *overrides, "training.horizon=2")
        stage = make_operator_stage(config, device=CPU)
        losses.append(stage.losses(stage.model, batch_of(stage, 0)))
    assert list(losses[0]) == list(losses[1]) == ["one_step", "rollout", "relative", "spectral"]
    assert all(torch.equal(losses[0][name], losses[1][name]) for name in losses[0])


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ("{sobolev: 1}", "unknown_loss"),
        ("{no_such_module:f: 1}", "no_code"),
        ("{ups.losses:f: 1}", "no_code"),
        ("{ups.losses:_TINY: 1}", "no_code"),
    ],
)
def test_unknown_loss_is_refused_before_data_is_opened(run: Path, losses: str, kind: str) -> None:
    overrides = (*BURGERS, f"training.losses={losses}", "data.root=nowhere", "cache.dir=nowhere")
    with pytest.raises(ConfigError, match=r"training\.losses") as caught:
        make_operator_stage(configure(run, *overrides), device=CPU)
    assert caught.value.kind == kind
    assert kind in {problem.kind for problem in check_config(run / "run.yaml", overrides[:3]).problems}


def test_loss_of_another_shape_is_refused(run: Path) -> None:
    @ups.register_loss("of_tokens")
    def of_tokens(predicted: torch.Tensor, truth: torch.Tensor, context: Any) -> torch.Tensor:
        return (predicted - truth).square().mean(dim=3)

    stage = make_operator_stage(configure(run, *BURGERS, "training.losses={of_tokens: 1}"), device=CPU)
    with pytest.raises(ConfigError, match=r"loss of_tokens: .*found shape \(8, 1, 8\)") as caught:
        stage.losses(stage.model, batch_of(stage, 0))
    assert caught.value.kind == "loss_shape"


@pytest.mark.parametrize("beside", ["training.lambda_relative=0.5", "training.lambda_spectral=0.5"])
def test_older_weights_beside_losses_are_refused(run: Path, beside: str) -> None:
    with pytest.raises(ConfigError, match=r"beside training\.losses: say it there"):
        configure(run, "training.losses={mse: 1}", beside)
    assert loss_weights(configure(run, beside).training)["relative_l2"] == 1.0
