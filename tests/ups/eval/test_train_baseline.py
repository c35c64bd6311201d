"""Baselines: trained within a budget, the same twice, kept in a file, and better than nothing."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ups.data.field_batches import FieldWindows
from ups.data.fields import Fields, open_fields
from ups.data.solvers import make_dataset
from ups.data.trajectories import open_trajectories
from ups.errors import CheckpointError, ConfigError, MissingExtraError
from ups.eval.baseline_model import (
    BASELINE,
    Baseline,
    check_kinds,
    load_baseline,
    network_size,
    save_baseline,
)
from ups.eval.forecasters import Persistence, Start
from ups.eval.rollout import roll_out
from ups.eval.train_baseline import Budget, make_spec, train_baseline
from ups.grid import GridSpec
from ups.optim import AveragedWeights
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups_store.build import BuildConfig, CacheConfig, DataConfig

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset("advection1d", folder, num_samples=20, points=32, frames=6, beta=1.0)
    make_dataset("burgers1d", folder, num_samples=20, points=32, frames=6, nu=0.1)
    make_dataset("darcy2d", folder, num_samples=20, points=16)
    return folder


def configure(root: Path, task: str) -> BuildConfig:
    return BuildConfig(data=DataConfig(tasks=(task,), root=root), cache=CacheConfig(dir=root / "none"))


def open_train(root: Path, task: str = "burgers1d") -> Fields:
    return open_fields(configure(root, task), task, "train")


# --- windows -------------------------------------------------------------------------------------------


def test_window_holds_consecutive_frames_of_one_trajectory(root: Path) -> None:
    fields = open_train(root)
    windows = FieldWindows(fields, batch_size=8, stride=2, augmented=False)
    assert windows.longest == 2
    window = windows.batch(3, steps=2)
    assert window.truth.shape == (8, 2, 32, 1)
    every = np.stack([fields.read("fields", np.arange(16), np.full(16, step)) for step in range(6)], axis=1)
    for given, truth in zip(window.given.numpy(), window.truth.numpy(), strict=True):
        ((sample, start),) = np.argwhere((every == given).all((2, 3)))
        np.testing.assert_array_equal(truth, every[sample, [start + 2, start + 4]])


def test_all_starts_are_drawn_and_batches_repeat(root: Path) -> None:
    windows = FieldWindows(open_train(root), batch_size=200, augmented=False)
    twin = FieldWindows(open_train(root), batch_size=200, augmented=False)
    assert torch.equal(windows.batch(1).given, twin.batch(1).given)
    assert not torch.equal(windows.batch(1).given, windows.batch(2).given)
    frames = torch.cat([windows.batch(i).given for i in range(4)]).unique(dim=0)
    assert len(frames) == 16 * 5  # the last frame has no successor


def test_frames_of_a_window_are_moved_alike(root: Path) -> None:
    """Advection of the exact solution: each frame is the one before, shifted; also when augmented."""
    fields = open_train(root, "advection1d")
    plain = FieldWindows(fields, batch_size=16, seed=1, augmented=False).batch(0, steps=2)
    moved = FieldWindows(fields, batch_size=16, seed=1, augmented=True).batch(0, steps=2)
    assert not torch.allclose(plain.given, moved.given)
    for number in range(16):
        shift = next(
            shift
            for shift in range(32)
            if torch.allclose(plain.given[number].roll(shift, 0), moved.given[number])
        )
        torch.testing.assert_close(plain.truth[number].roll(shift, 1), moved.truth[number])


def test_window_of_a_steady_task_is_input_and_solution(root: Path) -> None:
    window = FieldWindows(open_train(root, "darcy2d"), batch_size=3).batch(0, steps=3)
    assert window.given.unique().tolist() == pytest.approx([0.1, 1.0])
    assert window.truth.shape == (3, 1, 16, 16, 1)


def test_trajectories_without_a_second_frame_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="too short"):
        FieldWindows(open_train(root), batch_size=3, stride=6)


# --- training ------------------------------------------------------------------------------------------


def train(root: Path, kind: Any = "fno", task: str = "burgers1d", **options: Any) -> Baseline:
    trajectories = open_trajectories(configure(root, task), task, "train")
    wanted = {"budget": Budget(samples=640), "batch_size": 16, "augmented": False, **options}
    spec = make_spec(kind, trajectories.fields, dt=trajectories.dt, stride=1)
    return train_baseline(spec, trajectories.fields, **wanted)


@pytest.mark.parametrize(("kind", "task"), [("fno", "burgers1d"), ("unet", "burgers1d"), ("fno", "darcy2d")])
def test_budget_of_samples_is_kept_and_repeats_to_the_bit(root: Path, kind: str, task: str) -> None:
    one, two = (train(root, kind, task, budget=Budget(samples=160)) for _ in range(2))
    assert one.effort is not None
    assert one.effort.samples == 160
    for (name, weight), twin in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(weight, twin), name


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_average_of_the_weights_is_the_result(root: Path, kind: str) -> None:
    """With a decay of 0.5 the average is that of our own copies of the weights after every step."""
    seen: list[dict[str, torch.Tensor]] = []
    update = AveragedWeights.update

    def recorded(self: AveragedWeights) -> None:
        seen.append({name: p.detach().clone() for name, p in self._parameters.items()})
        update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AveragedWeights, "update", recorded)
        model = train(root, kind, budget=Budget(samples=80), ema_decay=0.5)
    first = train(root, kind, budget=Budget(samples=80))  # the last weights
    for name, weight in model.named_parameters():
        assert torch.equal(seen[-1][name], dict(first.named_parameters())[name])
        torch.testing.assert_close(weight, _average(name, model, seen))


def _average(name: str, model: Baseline, seen: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    torch.manual_seed(0)
    average = dict(Baseline(model.spec).named_parameters())[name].detach()
    for n, weights in enumerate(seen):
        decay = min(0.5, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weights[name]
    return average


def test_budget_of_seconds_is_kept(root: Path) -> None:
    model = train(root, budget=Budget(seconds=0.5))
    assert model.effort is not None
    assert 0.5 <= model.effort.seconds < 5
    assert model.name == "fno"
    assert "a budget of 0.5 s" in model.note
    assert train(root, budget=Budget(samples=16)).name == "fno_samples"


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_trained_baseline_beats_persistence_on_other_trajectories(root: Path, kind: str) -> None:
    test = open_trajectories(configure(root, "burgers1d"), "burgers1d", "test")
    trained = roll_out(train(root, kind, budget=Budget(samples=16 * 120)), test)
    persistence = roll_out(Persistence(), test)
    assert trained.errors.nrmse.mean() < 0.5 * persistence.errors.nrmse.mean()


def test_untrained_baseline_is_persistence(root: Path) -> None:
    test = open_trajectories(configure(root, "burgers1d"), "burgers1d", "test")
    (batch,) = test.batches()
    untrained = Baseline(train(root, budget=Budget(samples=1)).spec).eval()
    start = Start("burgers1d", batch.given, batch.parameters, test.dt)
    torch.testing.assert_close(untrained.forecast(start, 2)[:, 1], batch.given)


def test_baseline_of_another_time_step_is_refused(root: Path) -> None:
    test = open_trajectories(configure(root, "burgers1d"), "burgers1d", "test", stride=2)
    with pytest.raises(ConfigError, match="time step of FNO"):
        roll_out(train(root, budget=Budget(samples=1)), test)


@pytest.mark.parametrize("wrong", [{}, {"seconds": 1.0, "samples": 1}, {"seconds": 0.0}, {"samples": -1}])
def test_budget_is_one_positive_number(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="seconds or samples"):
        Budget(**wrong)


@pytest.mark.parametrize(
    ("kind", "points", "size"),
    [
        ("fno", (256,), {"modes": 16}),
        ("fno", (16, 64), {"modes": 8}),
        ("unet", (256,), {"levels": 4}),
        ("unet", (6, 4), {"levels": 2}),
        ("unet", (7,), {"levels": 1}),
    ],
)
def test_size_suits_the_grid(kind: Any, points: tuple[int, ...], size: dict[str, int]) -> None:
    assert network_size(kind, GridSpec(points, (True,) * len(points), (("fields", 1),))) == size


def test_steady_baseline_predicts_the_solution_itself(root: Path) -> None:
    """A change would be from the coefficient to the pressure; untrained it is the mean of the pressure."""
    fields = open_train(root, "darcy2d")
    spec = make_spec("unet", fields, dt=None, stride=1)
    test = open_trajectories(configure(root, "darcy2d"), "darcy2d", "test")
    (batch,) = test.batches()
    found = Baseline(spec).eval().forecast(Start("darcy2d", batch.given, batch.parameters, None), 1)
    mean = torch.tensor(spec.statistics["fields"]["mean"])
    torch.testing.assert_close(found, mean.expand_as(found))


# --- the file ------------------------------------------------------------------------------------------


def test_file_gives_the_same_forecast_and_effort(root: Path, tmp_path: Path) -> None:
    model = train(root)
    save_baseline(tmp_path / "fno.safetensors", model, settings={"seed": 0})
    loaded = load_baseline(tmp_path / "fno.safetensors")
    test = open_trajectories(configure(root, "burgers1d"), "burgers1d", "test")
    assert torch.equal(roll_out(loaded, test).errors.nrmse, roll_out(model, test).errors.nrmse)
    assert loaded.effort == model.effort
    assert loaded.spec == model.spec


def test_file_without_a_specification_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "fno.safetensors"
    model = train(root, budget=Budget(samples=1))
    save_baseline(path, model, settings={})
    tensors, document = load_checkpoint(path, kind=BASELINE)
    save_checkpoint(path, tensors, kind=BASELINE, document={"effort": document["effort"]})
    with pytest.raises(CheckpointError, match="specification is incomplete"):
        load_baseline(path)
    tensors.popitem()
    save_checkpoint(path, tensors, kind=BASELINE, document=document)
    with pytest.raises(CheckpointError, match="weights aren't those"):
        load_baseline(path)


def test_baselines_of_a_package_that_is_missing_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "neuralop", None)  # also where it is installed
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'ups-store[neuraloperator]'")):
        check_kinds(["fno", "fno_neuraloperator"])
    with pytest.raises(MissingExtraError):
        train(root, "fno_neuraloperator")
    path = tmp_path / "other.safetensors"
    model = train(root, budget=Budget(samples=1))
    model.spec = replace(model.spec, kind="fno_neuraloperator")
    save_baseline(path, model, settings={})
    with pytest.raises(MissingExtraError) as refused:
        load_baseline(path)
    assert (refused.value.extra, refused.value.path) == ("neuraloperator", str(path))
