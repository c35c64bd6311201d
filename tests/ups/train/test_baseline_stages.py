"""Stages of baselines: their windows, training, continuation, ranks, and budgets as numbers of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numbered_batches import batch_of
from operator_runs import configure as configure_run
from operator_runs import own_copy, shared_run
from small_simulators import configure
from trained_baselines import small_config, train

from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.data.windows import open_trajectories
from ups.errors import CheckpointError, ConfigError
from ups.eval.baseline_model import load_baseline
from ups.eval.forecasters import Persistence, roll_out
from ups.eval.runs import baseline_path
from ups.eval.training_logs import read_stage_log
from ups.train.baseline import BaselineStage
from ups.train.budget import (
    Costs,
    measure_costs,
    ratio_of,
    step_seconds,
    within_budget,
    without_preparing,
)
from ups.train.flops import count_step
from ups.train.operator import OperatorStage
from ups.train.run import run_stage
from ups.train.stage import Curriculum, make_stage
from ups.train.train_baselines import config_of_baseline, obtain_baseline, train_stage_of_baselines
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint, read_document

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset("advection1d", folder, num_samples=20, points=32, frames=6, beta=1.0)
    make_dataset("burgers1d", folder, num_samples=20, points=32, frames=6, nu=0.1)
    make_dataset("darcy2d", folder, num_samples=20, points=16)
    return folder


def make(
    root: Path, folder: Path, kind: str = "fno", task: str = "burgers1d", **options: Any
) -> BaselineStage:
    stage = make_stage(kind, small_config(root, folder, task, **options), device=CPU)
    assert isinstance(stage, BaselineStage)
    return stage


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    tensors, _ = load_checkpoint(path, kind="baseline")
    return tensors


# --- windows -------------------------------------------------------------------------------------------


def test_window_holds_consecutive_frames_of_one_trajectory(root: Path, tmp_path: Path) -> None:
    stage = make(root, tmp_path, **{"training.stride": 2, "training.horizon": 2})
    states = batch_of(stage, 3).states
    assert states.shape == (16, 3, 32, 1)
    fields = open_fields(configure(root).build, "burgers1d", "train")
    every = np.stack([fields.read("fields", np.arange(16), np.full(16, step)) for step in range(6)], axis=1)
    for window in states.numpy():
        ((sample, start),) = np.argwhere((every == window[0]).all((2, 3)))
        np.testing.assert_array_equal(window, every[sample, [start, start + 2, start + 4]])


def test_pass_has_every_window_once_but_those_that_fill_no_batch(root: Path, tmp_path: Path) -> None:
    stage = make(root, tmp_path, **{"training.batch_size": 9})
    assert len(stage.loader) == 16 * 5 // 9
    frames = torch.cat([batch_of(stage, number).states[:, 0] for number in range(len(stage.loader))])
    assert len(frames.unique(dim=0)) == len(frames) == 72
    small = make(root, tmp_path, **{"training.batch_size": 100})
    assert len(batch_of(small, 0)) == 80  # there are no more


def test_windows_are_those_of_an_operator_on_fields(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_copy(shared_run(tmp_path_factory), tmp_path, monkeypatch)
    overrides = ["data.tasks=[burgers1d]", "operator.state=fields", "training.horizon=2", "training.stride=2"]
    config = configure_run(run, *overrides, "operator.noise=0", "baselines.noise=0")
    operator, fno = (make_stage(name, config, device=CPU) for name in ("operator", "fno"))
    assert isinstance(operator, OperatorStage)
    for number in range(3):
        mine, theirs = batch_of(fno, number), batch_of(operator, number)
        assert torch.equal(mine.states, theirs.states)
        torch.testing.assert_close(mine.dt, theirs.dt)


def test_window_of_a_steady_task_is_input_and_solution(root: Path, tmp_path: Path) -> None:
    states = batch_of(make(root, tmp_path, task="darcy2d", **{"training.horizon": 3}), 0).states
    assert states.shape == (16, 2, 16, 16, 1)
    assert states[:, 0].unique().tolist() == pytest.approx([0.1, 1.0])


def test_curriculum_noise_and_augmentation_are_the_operator_s(root: Path, tmp_path: Path) -> None:
    grown = {"training.horizon": 3, "operator.curriculum": 0.5, "stages.fno.steps": 40}
    stage = make(root, tmp_path, **grown)
    assert [batch_of(stage, n).states.shape[1] - 1 for n in (0, 7, 14, 39)] == [1, 2, 3, 3]
    plain, noisy = make(root, tmp_path), make(root, tmp_path, **{"baselines.noise": 0.1})
    one, two = batch_of(plain, 0).states, batch_of(noisy, 0).states
    assert torch.equal(one[:, 1:], two[:, 1:])
    std = plain.model.spec.statistics["fields"]["std"][0]
    assert ((two - one)[:, 0] / std).std().item() == pytest.approx(0.1, rel=0.2)
    moved = batch_of(make(root, tmp_path, **{"training.augment": "true"}), 0).states
    assert not torch.equal(moved, one)
    torch.testing.assert_close(moved.square().sum((2, 3)), one.square().sum((2, 3)))


def test_trajectories_without_a_second_frame_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doesn't fit into the trajectories"):
        make(root, tmp_path, **{"training.stride": 6})
    with pytest.raises(ConfigError, match=r"training\.horizon = 6"):
        make(root, tmp_path, **{"training.horizon": 6})


# --- training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_trained_baseline_beats_persistence_on_other_trajectories(
    root: Path, tmp_path: Path, kind: Any
) -> None:
    test = open_trajectories(configure(root).build, "burgers1d", "test")
    trained = roll_out(train(root, tmp_path, kind, steps=120), test)
    assert trained.errors["nrmse"].mean() < 0.5 * roll_out(Persistence(), test).errors["nrmse"].mean()


def test_pushforward_trains_one_step_from_the_model_s_own_state(root: Path, tmp_path: Path) -> None:
    options = {"training.horizon": 3, "training.pushforward": "true", "training.rollout_loss": "relative_l2"}
    stage, seen = make(root, tmp_path, **options), list[int]()
    torch.nn.init.normal_(stage.model.network.get_parameter("out.2.weight"), std=0.01)

    def forward(*given: Any, steps: int, **named: Any) -> torch.Tensor:
        seen.append(steps)
        return stage.model(*given, steps=steps, **named)

    numbers = {batch_of(stage, number).pushed for number in range(12)}
    assert numbers == {0, 1, 2}
    batch = next(batch for number in range(12) if (batch := batch_of(stage, number)).pushed == 2)
    losses = stage.losses(forward, batch)
    assert (losses.keys(), seen) == ({"one_step", "relative"}, [2, 1])
    costs = measure_costs(stage, small_config(root, tmp_path, **options), device=CPU)
    without = make(root, tmp_path, **{"training.horizon": 3})
    plain = measure_costs(without, small_config(root, tmp_path), device=CPU)
    # A step without gradients is a third of a trained one, or a little more; on average there is one of them.
    assert plain.flops[0] < costs.flops[2] < 1.5 * plain.flops[0] < plain.flops[2]


def test_losses_are_those_of_normalised_rollouts(root: Path, tmp_path: Path) -> None:
    stage = make(root, tmp_path, **{"training.horizon": 2, "training.lambda_spectral": 0.1})
    batch = batch_of(stage, 0)
    losses = stage.losses(stage.model, batch)
    assert losses.keys() == {"one_step", "rollout", "relative", "spectral"}
    states = stage.model.normalise(batch.states, array="fields")  # untrained, so the first frame stays
    given, truth = states[:, 0].flatten(1), states[:, 1].flatten(1)
    relative_B = (truth - given).square().mean(1) / (truth.square().mean(1) + 0.01)
    torch.testing.assert_close(losses["one_step"], relative_B.sqrt().mean())


@pytest.mark.parametrize(("kind", "task"), [("fno", "burgers1d"), ("unet", "darcy2d")])
def test_resume_equals_a_training_without_a_break(root: Path, tmp_path: Path, kind: str, task: str) -> None:
    options = {f"stages.{kind}.steps": 6, f"stages.{kind}.epochs": 2, "training.ema_decay": 0.9}
    options |= {"training.augment": "true", "training.horizon": 2, "operator.curriculum": 0.5}

    def begin(name: str) -> tuple[Trainer, Any]:
        config = small_config(root, tmp_path / name, task, **options)
        return Trainer(make_stage(kind, config, device=CPU), config, device=CPU), config

    through, _ = begin("through")
    through.fit()
    first, config = begin("parts")
    for _ in range(2):
        first.train_step()
    first.save()
    report = run_stage(kind, config)
    assert (report["resumed_at"], report["steps"]) == (2, 6)
    mine, theirs = (weights_of(tmp_path / name / f"{kind}.safetensors") for name in ("parts", "through"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_continuation_compares_what_the_stage_reads_and_nothing_else(root: Path, tmp_path: Path) -> None:
    train(root, tmp_path, steps=2)
    unread = {"operator.size": "tiny", "operator.noise": 0.1, "baselines.unet.levels": 2, "latent.dim": 2}
    train(root, tmp_path, steps=2, **unread)
    for read in ({"baselines.fno.width": 8}, {"stages.operator.ema_decay": 0.5}, {"baselines.noise": 0.1}):
        with pytest.raises(CheckpointError) as refused:
            train(root, tmp_path, steps=2, **read)
        assert refused.value.kind == "other_config"


def test_every_task_has_a_baseline_of_its_own(root: Path, tmp_path: Path) -> None:
    config = small_config(root, tmp_path, "burgers1d", "darcy2d", **{"stages.unet.steps": 1})
    report = train_stage_of_baselines("unet", config)
    assert list(report["stages"]) == ["burgers1d", "darcy2d"]
    assert report["stages"]["darcy2d"]["persistence_nrmse"] == {}
    for task in report["stages"]:
        path = baseline_path(config, "unet", task, "steps")
        model = load_baseline(path)
        fields = open_fields(config.build, task, "train")
        assert read_document(path, kind="baseline")["data"] == {task: fields.identity}
        assert (model.spec.task, model.name) == (task, "unet_steps")
        assert model.log is not None
    with pytest.raises(ConfigError, match="for one task") as refused:
        make_stage("unet", config, device=CPU)
    assert refused.value.kind == "several_tasks"


# --- budgets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"training.horizon": 3, "operator.curriculum": 0.9}])
def test_budget_of_operations_is_kept_within_one_step(
    root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    allowed = 2e9
    config = small_config(root, tmp_path, **{"stages.fno.budget.flops": allowed, **options})
    train_stage_of_baselines("fno", config)
    model = load_baseline(baseline_path(config, "fno", "burgers1d", "flops"))
    assert model.effort is not None
    stage = make(root, tmp_path, **options)
    longest = count_step(stage, batch_of(stage, 10**4))
    assert model.effort.flops <= allowed < model.effort.flops + longest
    assert model.effort.steps > 5


def test_budget_of_samples_is_kept_and_repeats_to_the_bit(root: Path, tmp_path: Path) -> None:
    trained = []
    for name in ("one", "two"):
        config = small_config(root, tmp_path / name, **{"stages.unet.budget.samples": 100})
        train_stage_of_baselines("unet", config)
        path = baseline_path(config, "unet", "burgers1d", "samples")
        trained.append(weights_of(path))
        effort = load_baseline(path).effort
        assert effort is not None
        assert (effort.samples, effort.steps) == (96, 6)
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_budget_of_seconds_stays_what_it_became(root: Path, tmp_path: Path) -> None:
    options = {"stages.fno.budget.seconds": 0.2}
    own = config_of_baseline(small_config(root, tmp_path, **options), "fno", "burgers1d")
    run_stage("fno", own)
    log = read_stage_log(own.checkpoint.dir / "fno.jsonl", "fno")
    assert log is not None
    assert log.steps >= 1
    again = within_budget("fno", own, device=CPU)
    assert again.stage("fno").steps == log.steps
    assert run_stage("fno", own)["resumed_at"] == log.steps


def test_a_baseline_is_trained_once_for_a_budget(root: Path, tmp_path: Path, notes: list[str]) -> None:
    config = small_config(root, tmp_path)
    budgets = small_config(root, tmp_path, **{"stages.fno.budget.samples": 32}).stages["fno"].budget
    assert budgets is not None
    for changed in ({}, {}, {"seed": 1}):
        other = config.model_copy(update=changed)
        path = obtain_baseline(other, "fno", "burgers1d", budget=budgets)
    assert sum("is there already, trained alike" in note for note in notes) == 1
    assert sum("is trained again" in note for note in notes) == 1
    assert json.loads(json.dumps(load_checkpoint(path, kind="baseline")[1]["config"]["seed"])) == 1


def test_costs_of_a_curriculum_are_summed_over_its_lengths() -> None:
    costs = Costs([1.0, 10.0, 100.0], rows=4, curriculum=Curriculum(3, 0.5, 0), accum_steps=2)
    curriculum = Curriculum(3, 0.5, 60)
    assert costs.total(30) == sum(10.0 ** (curriculum.steps_at(number) - 1) for number in range(60))


def test_steps_are_timed_in_turns(root: Path, tmp_path: Path) -> None:
    """A step of four times the rows takes longer; both are measured in every round."""
    configs = [
        without_preparing(
            small_config(root, tmp_path, **{"training.batch_size": rows, "stages.fno.steps": 9})
        )
        for rows in (2, 80)
    ]
    stages = [(make_stage("fno", config, device=CPU), config) for config in configs]
    short, long = step_seconds(stages, device=CPU, rounds=3)
    assert len(short) == len(long) == 3
    assert ratio_of(long, short) > 1
    assert not list(tmp_path.glob("*.safetensors"))  # nothing is left behind
