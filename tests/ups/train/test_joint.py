"""Stage `joint`: inverse losses by hand, whom they reach, what the stage leaves, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from numbered_batches import batch_of
from operator_runs import SETTINGS, build, configure, made_once
from torch import Tensor

import ups
import ups.train.joint
import ups_store
from ups.config import RunConfig
from ups.data.solvers import make_dataset
from ups.data.statistics import Statistics
from ups.data.stores import open_latents
from ups.errors import ConfigError
from ups.losses import inverse_losses, reconstruction_error
from ups.train.joint import JointStage, make_joint_stage
from ups.train.run import run_stage
from ups.train.stage import forward_of
from ups.train.trainer import Trainer
from ups.trained.autoencoder import load_autoencoder
from ups.trained.checkpoint import hash_tensors
from ups.trained.simulator import save_simulator

CPU = torch.device("cpu")
JOINT = ["training.use_inverse_losses=true", "stages.joint.epochs=2", "stages.joint.steps_per_epoch=10"]
ONE = "data.tasks=[burgers1d]"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Field stores of a transient and a steady task."""
    return made_once(tmp_path_factory, make_fields)


def make_fields(folder: Path) -> None:
    make_dataset("burgers1d", Path("data"), num_samples=20, points=32, frames=9, nu=0.1)
    make_dataset("darcy2d", Path("data"), num_samples=20, points=16)
    settings = {**SETTINGS, "data": {"task": ["burgers1d", "darcy2d"], "root": "data"}}
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    build(folder, "latent.encoder=none")


def joint(folder: Path, *overrides: str) -> RunConfig:
    return configure(folder, *JOINT, *overrides)


def make_stage(folder: Path, *overrides: str) -> JointStage:
    return make_joint_stage(joint(folder, *overrides), device=CPU)


def batch_with(stage: JointStage, task: str) -> object:
    return next(batch for batch in (batch_of(stage, i) for i in range(100)) if batch.task == task)


def test_losses_agree_with_their_formulas(run: Path) -> None:
    stage = make_stage(run, ONE, "training.horizon=2")
    model, autoencoder = stage.model, stage.autoencoder
    torch.nn.init.normal_(model.operator.out.weight, std=0.1)  # untrained it is the identity
    batch = batch_of(stage, 0)
    frames, parameters, points = batch.states, batch.parameters, torch.tensor([3, 0, 17])

    def error(values: Tensor, truth: Tensor) -> Tensor:
        flat = truth.flatten(1, -2)
        std = autoencoder.normalizer_of("burgers1d", "fields").std
        chosen = (values.flatten(1, -2)[:, points], flat[:, points])
        return reconstruction_error(*chosen, power_BC=flat.square().mean(1), std_C=std)

    with torch.no_grad():
        losses = inverse_losses(
            model,
            frames,
            parameters,
            task="burgers1d",
            dt_B=batch.dt,
            points_P=points,
            forward=model,
            is_inverse=True,
            lambda_alignment=0.5,
        )
        state = model.encode(frames[:, 0], parameters, task="burgers1d")
        restored = model.decode(state, parameters, task="burgers1d")
        errors, predictions = [], []
        for step in (1, 2):
            state = model.step(state, parameters, task="burgers1d", dt_B=batch.dt)
            predictions.append((state, model.decode(state, parameters, task="burgers1d")))
            errors.append(error(predictions[-1][1], frames[:, step]))
        again = model.encode(predictions[0][1], parameters, task="burgers1d")
    torch.testing.assert_close(losses["prediction"], torch.stack(errors).mean())
    torch.testing.assert_close(losses["decoder_inverse"], error(restored, frames[:, 0]))
    torch.testing.assert_close(losses["encoder_inverse"], (again - predictions[0][0]).square().mean())
    with torch.no_grad():
        true_states = [model.encode(frames[:, step], parameters, task="burgers1d") for step in (1, 2)]
    apart = [predicted[0] - true for predicted, true in zip(predictions, true_states, strict=True)]
    torch.testing.assert_close(losses["alignment"], 0.5 * torch.stack(apart).square().mean())
    assert losses.keys() == {"prediction", "alignment", "decoder_inverse", "encoder_inverse"}


@pytest.mark.parametrize("task", ["burgers1d", "darcy2d"])
def test_gradients_reach_encoder_operator_and_decoder(run: Path, task: str) -> None:
    stage = make_stage(run, "training.lambda_alignment=1")
    torch.nn.init.normal_(stage.model.operator.out.weight, std=0.1)
    for grid in stage.autoencoder.decoder.values():  # nor does a network reach its encoder while it is zero
        torch.nn.init.normal_(grid.out["fields"].weight, std=0.1)
    reached = {
        name: {
            part
            for part, module in (
                ("E", stage.autoencoder.encoder),
                ("A", stage.model.operator),
                ("D", stage.autoencoder.decoder),
            )
            if is_reached(module, loss)
        }
        for name, loss in stage.losses(stage.model, batch_with(stage, task)).items()  # type: ignore[arg-type]
    }
    assert reached == {
        "prediction": {"E", "A", "D"},
        "alignment": {"E", "A"},
        "decoder_inverse": {"E", "D"},
        "encoder_inverse": {"E", "A", "D"},
    }


def is_reached(module: torch.nn.Module, loss: Tensor) -> bool:
    gradients = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler's own imports
@pytest.mark.slow
def test_joint_compiles_encoder_step_and_decoder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def watched(function: Any, **options: Any) -> Any:
        compiled.append(function.__name__)
        return plain(function, backend="aot_eager")

    plain = torch.compile
    monkeypatch.setattr("torch.compile", watched)
    overrides = ["training.lambda_alignment=1", "training.compile=true", "training.horizon=2"]
    stage = make_stage(run, *overrides)
    torch.nn.init.normal_(stage.model.operator.out.weight, std=0.1)
    forward = forward_of(stage, joint(run, *overrides))
    batch = batch_with(stage, "burgers1d")
    found, expected = (stage.losses(m, batch) for m in (forward, stage.model))  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    weights = [weight for weight in stage.model.parameters() if weight.requires_grad]
    gradients = [
        torch.autograd.grad(torch.stack(list(losses.values())).sum(), weights, allow_unused=True)
        for losses in (found, expected)
    ]
    for mine, plain_one in zip(*gradients, strict=True):
        if plain_one is not None:
            torch.testing.assert_close(mine, plain_one, rtol=1e-3, atol=1e-5)
    assert sorted(compiled) == ["advance", "conditions", "decode_at", "encode"]


def test_inverse_losses_come_every_few_optimiser_steps(run: Path) -> None:
    stage = make_stage(run, ONE, "training.inverse_loss_frequency=3", "training.accum_steps=2")
    flags = [bool(batch_of(stage, number).weights) for number in range(14)]
    assert flags == [True, True, *[False] * 4, True, True, *[False] * 4, True, True]
    without = stage.losses(stage.model, batch_of(stage, 2))
    assert without.keys() == {"prediction"}


def test_stage_leaves_an_autoencoder_and_an_operator_that_goes_with_it(run: Path) -> None:
    longer = ["training.lr=3e-3", "stages.joint.steps_per_epoch=90"]
    report = run_stage("joint", joint(run, ONE, *longer))
    # A few seconds of training, validated on one trajectory, whose floor is about 0.53.
    assert report["nrmse"]["burgers1d"] < 0.9 * report["persistence_nrmse"]["burgers1d"]
    assert report["floor_nrmse"]["burgers1d"] < 0.7
    assert report["compression"] == {"burgers1d": 2.0}
    simulator = ups.load("checkpoints/operator.safetensors")
    path = Path("checkpoints/autoencoder.safetensors")
    assert simulator.spec.autoencoder_sha256 == hash_tensors(path)
    for name, tensor in load_autoencoder(path).state_dict().items():
        torch.testing.assert_close(simulator.autoencoder.state_dict()[name], tensor, rtol=0, atol=0)


def test_transient_and_steady_task_train_together(run: Path) -> None:
    report = run_stage("joint", joint(run, "stages.joint.steps_per_epoch=5"))
    assert report["floor_nrmse"].keys() == report["nrmse"].keys() == {"burgers1d", "darcy2d"}
    assert report["persistence_nrmse"].keys() == {"burgers1d"}


def test_stores_of_latents_are_rebuilt_after_it(run: Path) -> None:
    few = "stages.joint.steps_per_epoch=2"
    run_stage("joint", joint(run, ONE, few))
    assert build(run, ONE, "data.split=train") == [False]
    assert build(run, ONE, "data.split=train") == [True]
    shutil.rmtree("checkpoints")
    config, path = joint(run, ONE, few, "seed=1"), Path("checkpoints/autoencoder.safetensors")
    run_stage("joint", config)
    with pytest.raises(ConfigError, match="latents are those of another encoder"):
        open_latents(config, "burgers1d", "train", autoencoder_path=path)
    assert build(run, ONE, "data.split=train") == [False]
    with open_latents(config, "burgers1d", "train", autoencoder_path=path) as store:
        assert isinstance(store, ups_store.Store)


def test_run_continues_to_the_bit_after_it_has_exported(run: Path) -> None:
    through = Trainer(make_stage(run, ONE), joint(run, ONE), device=CPU)
    through.fit()
    shutil.rmtree("checkpoints")
    first = Trainer(make_stage(run, ONE), joint(run, ONE), device=CPU)
    for _ in range(10):
        first.train_step()
    first._validate()
    first.save()
    second = Trainer(make_stage(run, ONE), joint(run, ONE), device=CPU)
    assert (second.step, second.best_weights.score) == (10, first.best_weights.score)
    second.fit()
    torch.testing.assert_close(
        second.stage.model.state_dict(), through.stage.model.state_dict(), rtol=0, atol=0
    )


def test_run_continues_with_the_statistics_that_it_began_with(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Trainer(make_stage(run, ONE), joint(run, ONE), device=CPU)
    first.save()
    exact = ups.train.joint._latent_statistics

    def otherwise_rounded(*arguments: Any) -> dict[str, Statistics]:
        return {
            name: Statistics(*(tuple(1.001 * value for value in some) for some in (found.mean, found.std)))
            for name, found in exact(*arguments).items()
        }

    monkeypatch.setattr("ups.train.joint._latent_statistics", otherwise_rounded)
    stage = make_stage(run, ONE)
    assert stage.model.spec != first.stage.model.spec
    second = Trainer(stage, joint(run, ONE), device=CPU)
    assert second.stage.model.spec == first.stage.model.spec
    for before, now in zip(first.stage.model.buffers(), stage.model.buffers(), strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0)
    hashes = {name: some.store.config_hash for name, some in stage.loader.dataset.tasks.items()}
    assert stage.data_identity() == hashes


def test_report_is_of_what_joint_training_left_also_after_an_operator_s(run: Path) -> None:
    config = joint(run, ONE, "stages.joint.steps_per_epoch=5")
    report = run_stage("joint", config)
    path = Path("checkpoints/operator.safetensors")
    simulator = ups.load(str(path))
    torch.nn.init.normal_(simulator.operator.out.weight, std=1.0)
    save_simulator(path, simulator, config={}, report={})
    again = run_stage("joint", config)
    assert again["nrmse"] == report["nrmse"]
    assert again["checkpoint"] == "checkpoints/joint.safetensors"


def test_report_counts_frames_that_have_no_relative_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage(run, ONE)
    stage.export({}, stage.model.state_dict())
    fields = stage._validation.trajectories["burgers1d"].fields
    stored = fields.read

    def zero_at_step_3(array: str, samples: Any, steps: Any) -> Any:
        return stored(array, samples, steps) * (steps != 3)[:, None, None]

    monkeypatch.setattr(fields, "read", zero_at_step_3)
    assert stage.finish()["nrmse_left_out"] == {"burgers1d": 1}


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("training.use_inverse_losses=false", "no_inverse_losses"),
        ("operator.state=fields", "no_latents"),
        ("cache.dir=nowhere", "no_store"),
    ],
)
def test_stage_that_would_train_something_else_is_refused(run: Path, override: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_stage(run, override)
    assert caught.value.kind == kind
