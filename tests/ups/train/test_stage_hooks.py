"""What a stage may do besides its losses: groups, steps, tensors in its state; states by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import CPU, Regression, make_config, train
from torch import Tensor, nn

from ups.config import OptimizerConfig
from ups.errors import CheckpointError, OtherTensorsError
from ups.optim import ParameterGroup
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint, save_checkpoint

torch.set_num_threads(1)
AMP = ("training.amp=true", "training.amp_dtype=bfloat16")


class Following(Regression):
    """Has a target that follows the last layer, and says at which steps it did; biases learn slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.zeros(1, 8)
        self.steps: list[int] = []

    def parameter_groups(self, settings: OptimizerConfig) -> list[ParameterGroup]:
        named = dict(self.model.named_parameters())
        biases = {name: p for name, p in named.items() if name.endswith("bias")}
        weights = {name: p for name, p in named.items() if name not in biases}
        return [ParameterGroup(biases, 0.0, lr_factor=0.0), ParameterGroup(weights, settings.weight_decay)]

    def after_step(self, step: int) -> None:
        self.steps.append(step)
        self.target.lerp_(self.model[3].weight.detach(), 0.5)

    def state(self) -> Mapping[str, Any]:
        return {"target": self.target, "steps": self.steps}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.target, self.steps = values["target"], list(values["steps"])


def test_stage_goes_on_with_its_own_tensors_and_groups(tmp_path: Path) -> None:
    untrained = Following()
    through = train(Following(), make_config(tmp_path / "through"))
    config = make_config(tmp_path / "parts")
    first = Trainer(Following(), config, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    second = train(Following(), config)
    assert isinstance(through.stage, Following)
    assert isinstance(second.stage, Following)
    assert second.stage.steps == through.stage.steps == list(range(1, 11))
    assert torch.equal(second.stage.target, through.stage.target)
    for name, parameter in second.stage.model.named_parameters():
        is_as_it_was = torch.equal(parameter, untrained.model.get_parameter(name))
        assert is_as_it_was == name.endswith("bias")  # whose rate is 0 times that of the others


def test_stage_without_the_tensors_of_its_state_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(Following(), config)
    with pytest.raises(OtherTensorsError, match="stage with other tensors: unexpected target") as caught:
        Trainer(Regression(), config, device=CPU)
    assert caught.value.unexpected == ("target",)


def test_stage_may_have_an_optimizer_of_its_own(tmp_path: Path) -> None:
    class Own(Regression):
        def configure_optimizer(self, settings: OptimizerConfig) -> torch.optim.Optimizer:
            return torch.optim.Adagrad(self.model.parameters(), lr=settings.lr)

    trainer = train(Own(), make_config(tmp_path))
    assert isinstance(trainer.optimizer, torch.optim.Adagrad)
    saved, _ = load_checkpoint(trainer.state_path, kind="training")
    assert saved["optimizer.0.weight.sum"].shape == (8, 1)


class Ordered(Regression):
    """The same network; its layers are registered from the last to the first if `backwards`."""

    def __init__(self, *, backwards: bool = False, extra: bool = False) -> None:
        super().__init__()
        layers = list(self.model.named_children())
        model = Network(dict(reversed(layers) if backwards else layers))
        if extra:
            model.extra = nn.Linear(1, 1)
        self.model = model


class Network(nn.Module):
    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.layer):
            x = self.layer[name](x)
        return x


def test_state_of_the_optimizer_is_found_by_name_and_not_by_number(tmp_path: Path) -> None:
    through = train(Ordered(), make_config(tmp_path / "through"))
    config = make_config(tmp_path / "parts")
    first = Trainer(Ordered(), config, device=CPU)
    for _ in range(5):
        first.train_step()
    first.save()
    second = train(Ordered(backwards=True), config)
    torch.testing.assert_close(
        dict(second.stage.model.named_parameters()),
        dict(through.stage.model.named_parameters()),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("has_more_now", [True, False])
def test_state_of_other_parameters_is_refused_with_their_names(tmp_path: Path, has_more_now: bool) -> None:
    config = make_config(tmp_path)
    train(Ordered(extra=not has_more_now), config)
    how = "missing" if has_more_now else "unexpected"
    with pytest.raises(
        OtherTensorsError, match=f"other parameters: {how} extra.bias, extra.weight"
    ) as caught:
        Trainer(Ordered(extra=has_more_now), config, device=CPU)
    assert getattr(caught.value, how) == ("extra.bias", "extra.weight")
    assert "--restart" in str(caught.value.hint)


def test_state_of_an_optimizer_with_another_parameter_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = train(Regression(), config).state_path
    tensors, document = load_checkpoint(path, kind="training")
    tensors["optimizer.gone.weight.exp_avg"] = torch.zeros(2)
    save_checkpoint(path, tensors, kind="training", document=document)
    with pytest.raises(OtherTensorsError) as caught:
        Trainer(Regression(), config, device=CPU)
    assert caught.value.unexpected == ("gone.weight",)


def test_state_by_number_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = train(Regression(), config).state_path
    tensors, document = load_checkpoint(path, kind="training")
    del document["named_by"]
    save_checkpoint(path, tensors, kind="training", document=document)
    with pytest.raises(CheckpointError, match="written by an earlier version: found no named_by") as caught:
        Trainer(Regression(), config, device=CPU)
    assert caught.value.kind == "too_old"


@pytest.mark.parametrize("overrides", [(), AMP])
def test_validation_has_the_precision_of_training(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watched(Regression):
        def validate(self) -> dict[str, float]:
            weight = self.model[0].weight
            in_autocast = nn.functional.linear(torch.ones(1, 1), weight)
            seen.append((torch.is_autocast_enabled("cpu"), in_autocast.dtype == torch.bfloat16))
            cast = in_autocast.float().flatten() - self.model[0].weight.detach().flatten()
            assert cast.abs().max() < 0.01  # of these weights, not of those that were in their place before
            return super().validate()

        def finish(self) -> dict[str, Any]:
            seen.append((torch.is_autocast_enabled("cpu"), False))
            return {}

    train(Watched(), make_config(tmp_path, *overrides))
    is_on = bool(overrides)
    assert seen == [(is_on, is_on)] * 3 + [(False, False)]


def test_validation_calls_the_model_as_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    class Watched(Regression):
        def validate(self) -> dict[str, float]:
            called.append(self.called)
            return super().validate()

    stage = Watched()
    assert stage.called is stage.model
    compiled = copy.copy(stage.model)
    monkeypatch.setattr("ups.train.trainer.forward_of", lambda *args, **options: compiled)
    train(stage, make_config(tmp_path))
    assert [some is compiled for some in called] == [True] * 3
