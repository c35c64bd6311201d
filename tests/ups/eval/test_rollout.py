"""Rollouts: what is given, what is predicted, and what trivial forecasters score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_fields import fields_of
from torch import Tensor
from typer.testing import CliRunner

from ups.data.fields import Fields, times_of
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.data.statistics import measure_statistics
from ups.data.windows import Trajectories, open_trajectories, parameter_table
from ups.errors import ConfigError, ShapeError
from ups.eval.forecasters import (
    AutoencoderFloor,
    OperatorForecaster,
    Persistence,
    Start,
    TrainingMean,
    roll_out,
)
from ups.models.operator_size import OperatorSize
from ups.trained.autoencoder import Autoencoder
from ups.trained.simulator import Simulator
from ups.trained.specs import AutoencoderSpec, SimulatedTask, SimulatorSpec, TaskSpec
from ups_store.build import BuildConfig, CacheConfig, DataConfig
from ups_store.building.command import app as build

torch.set_num_threads(1)
OPERATOR = OperatorSize(width=8, depths=(1,), modes=4).to_json()
SIZES = {"width": 8, "depth": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset("burgers1d", folder, num_samples=20, points=32, frames=6, nu=0.1)
    make_dataset("darcy2d", folder, num_samples=10, points=16)
    return folder


def configure(root: Path, task: str = "burgers1d", **options: Any) -> BuildConfig:
    cache = CacheConfig(dir=options.pop("cache", root / "none"))
    return BuildConfig(data=DataConfig(tasks=(task,), root=root, **options), cache=cache)


def open_split(root: Path, task: str = "burgers1d", split: str = "test", **options: Any) -> Trajectories:
    wanted = {name: options.pop(name) for name in ("stride", "horizon") if name in options}
    return open_trajectories(configure(root, task, **options), task, split, **wanted)


# --- what is given and what is predicted ---------------------------------------------------------------


def test_first_frame_is_given_and_the_others_are_predicted(root: Path) -> None:
    trajectories = open_split(root)
    whole = open_fields(configure(root), "burgers1d", "test")
    (batch,) = trajectories.batches()
    assert batch.given.shape == (2, 32, 1)
    assert batch.truth.shape == (2, 5, 32, 1)
    expected = whole.read("fields", np.array([1]), np.array([3]))
    np.testing.assert_array_equal(batch.truth[1, 2], expected[0])
    assert batch.parameters["nu"].tolist() == [0.1, 0.1]


def test_stride_skips_stored_time_steps_and_stretches_dt(root: Path) -> None:
    every, second = open_split(root), open_split(root, stride=2)
    assert second.horizon == 2
    assert second.dt == pytest.approx(2 * every.dt)
    np.testing.assert_allclose(second.t, every.t[1::2][:2])
    (batch,), (all_frames,) = second.batches(), every.batches()
    assert torch.equal(batch.truth, all_frames.truth[:, 1::2][:, :2])


def test_steady_task_gives_its_input_and_predicts_the_solution(root: Path) -> None:
    trajectories = open_split(root, "darcy2d")
    (batch,) = trajectories.batches()
    assert trajectories.horizon == 1
    assert trajectories.dt is None
    assert set(batch.given.unique().tolist()) <= {np.float32(0.1).item(), 1.0}
    assert batch.truth.shape == (1, 1, 16, 16, 1)


def test_store_and_hdf5_give_the_same_trajectories(root: Path, tmp_path: Path) -> None:
    flags = ["--tasks", "burgers1d", "--root", str(root), "--cache-dir", str(tmp_path), "--no-parallel"]
    assert CliRunner().invoke(build, flags).exit_code == 0
    stored, direct = open_split(root, cache=tmp_path), open_split(root)
    assert stored.origin.endswith(".zarr.zip")
    assert stored.dt == direct.dt
    (batch,), (twin,) = stored.batches(), direct.batches()
    assert torch.equal(batch.truth, twin.truth)


def test_batches_go_through_all_trajectories_in_order(root: Path) -> None:
    trajectories = open_split(root, split="train")
    numbers = [batch.samples.tolist() for batch in trajectories.batches(5)]
    assert [number for part in numbers for number in part] == list(range(16))


@pytest.mark.parametrize(
    ("horizon", "stride", "says"), [(6, 1, "1 to 5 steps"), (3, 2, "1 to 2 steps"), (0, 1, "1 to 5 steps")]
)
def test_horizon_longer_than_the_trajectory_is_refused(
    root: Path, horizon: int, stride: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_split(root, horizon=horizon, stride=stride)
    assert caught.value.kind == "horizon"


def test_stride_longer_than_the_trajectory_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"smaller training\.stride"):
        open_split(root, stride=6)


def test_split_without_samples_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="would be empty") as caught:
        open_split(root, split="val", split_fractions=(0.9, 0.0, 0.1))
    assert caught.value.kind == "empty_split"


def test_uneven_times_are_refused(root: Path) -> None:
    fields = open_fields(configure(root), "burgers1d", "test")
    with pytest.raises(ConfigError, match="not of one length"):
        Trajectories(fields, stored_t=np.array([0.0, 1.0, 2.0, 4.0, 5.0, 6.0]))


def with_own_times(root: Path, times: np.ndarray, **more: np.ndarray) -> Fields:
    """16 trajectories of 6 time steps with times (16, 6)."""
    train = open_fields(configure(root), "burgers1d", "train")
    steps = np.arange(6)
    values = [train.read("fields", np.full(6, sample), steps) for sample in range(16)]
    arrays = {"fields": np.stack(values), "nu": train.parameters(np.arange(16))["nu"], **more}
    return fields_of(train.info, arrays, times=times)


def test_times_of_every_sample_may_begin_anywhere(root: Path) -> None:
    starts, steps = np.arange(16.0)[:, None], 0.5 * np.arange(6)
    fields = with_own_times(root, starts + steps)
    np.testing.assert_allclose(Trajectories(fields, stored_t=times_of(fields)).t, steps[1:])


def test_times_behind_the_end_of_a_shorter_trajectory_do_not_count(root: Path) -> None:
    times = np.tile(0.5 * np.arange(6), (16, 1))
    times[3, 4:] = np.nan
    num_steps = np.full(16, 6)
    num_steps[3] = 4
    fields = with_own_times(root, times, num_steps=num_steps)
    assert Trajectories(fields, stored_t=times_of(fields)).t.tolist() == [0.5, 1.0, 1.5]


def test_trajectories_of_several_step_lengths_are_refused_saying_what_to_do(root: Path) -> None:
    fields = with_own_times(root, np.linspace(0.1, 0.2, 16)[:, None] * np.arange(6))
    with pytest.raises(ConfigError, match=r"steps of 0\.1 to 0\.2; .* data\.files") as caught:
        times_of(fields)
    assert (caught.value.kind, caught.value.path) == ("uneven_times", "memory")


def test_times_are_counted_where_the_source_has_none(root: Path) -> None:
    fields = open_fields(configure(root), "burgers1d", "test")
    assert Trajectories(fields, stored_t=None, stride=2).t.tolist() == [2.0, 4.0]


# --- who predicts --------------------------------------------------------------------------------------


def test_persistence_repeats_what_was_given(root: Path) -> None:
    (batch,) = open_split(root).batches()
    forecast = Persistence().forecast(Start("burgers1d", batch.given, {}, 0.1), 3)
    assert torch.equal(forecast[:, 2], batch.given)


def test_mean_is_that_of_the_training_frames_only(root: Path) -> None:
    train = open_fields(configure(root), "burgers1d", "train")
    frames = np.concatenate([train.read("fields", np.arange(16), np.full(16, step)) for step in range(6)])
    forecast = TrainingMean(train).forecast(Start("burgers1d", torch.zeros(2, 32, 1), {}, 0.1), 4)
    assert forecast.shape == (2, 4, 32, 1)
    np.testing.assert_allclose(forecast[1, 3], frames.mean(0), atol=1e-6)


def make_autoencoder(root: Path) -> Autoencoder:
    train = open_fields(configure(root), "burgers1d", "train")
    statistics = {name: values.to_json() for name, values in measure_statistics(train).items()}
    spec = AutoencoderSpec(
        tasks={"burgers1d": TaskSpec(train.info.grid, train.info.channels, False, statistics)},
        parameters=("nu",),
        latent_dim=4,
        num_tokens=8,
        patch_size=4,
        encoder=SIZES,
        decoder={**SIZES, "radius": 1},
    )
    return Autoencoder(spec).eval()


def make_simulator(root: Path, autoencoder: Autoencoder | None = None) -> Simulator:
    """An untrained operator: its output is zero, so it changes nothing."""
    train = open_fields(configure(root), "burgers1d", "train")
    statistics = {"mean": [0.0] * 4, "std": [1.0] * 4} if autoencoder else {"mean": [0.1], "std": [0.5]}
    task = SimulatedTask(
        grid=train.info.grid,
        boundary=("periodic",),
        tokens=(8,),
        channels=train.info.channels,
        steady=False,
        dt=0.4,
        parameters={"nu": (0.1, 0.1)},
        statistics={"fields": statistics},
    )
    return Simulator(
        SimulatorSpec(
            states="latent" if autoencoder else "fields",
            tasks={"burgers1d": task},
            parameters=("nu",),
            state_dim=4,
            patch_size=None if autoencoder else 4,
            stride=1,
            operator=OPERATOR,
            autoencoder_sha256="0" * 64 if autoencoder else None,
        ),
        autoencoder,
    ).eval()


def test_untrained_operator_on_fields_scores_as_persistence(root: Path) -> None:
    trajectories = open_split(root)
    operator = roll_out(OperatorForecaster(make_simulator(root)), trajectories, batch_size=1)
    persistence = roll_out(Persistence(), trajectories)
    torch.testing.assert_close(operator.errors["nrmse"], persistence.errors["nrmse"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(operator.energy, persistence.energy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(operator.true_energy, persistence.true_energy)
    assert operator.seconds > 0


def test_untrained_latent_operator_decodes_what_the_floor_does_of_the_given_frame(root: Path) -> None:
    autoencoder = make_autoencoder(root)
    forecaster = OperatorForecaster(make_simulator(root, autoencoder))
    (batch,) = open_split(root).batches()
    start = Start("burgers1d", batch.given, batch.parameters, 0.4)
    restored = AutoencoderFloor(autoencoder).restore(batch.given[:, None], start)
    forecast = forecaster.forecast(start, 2)
    torch.testing.assert_close(forecast[:, 1], restored[:, 0], rtol=1e-4, atol=1e-5)
    assert forecaster.label == "latent operator"


def test_floor_sees_the_truth_of_every_frame(root: Path) -> None:
    autoencoder = make_autoencoder(root)
    trajectories = open_split(root)
    exact = roll_out(AutoencoderFloor(autoencoder), trajectories)
    rounded = roll_out(AutoencoderFloor(autoencoder, latent_dtype=torch.bfloat16), trajectories)
    assert exact.errors["nrmse"].shape == (2, 5, 1)
    assert not torch.equal(exact.errors["nrmse"], rounded.errors["nrmse"])
    torch.testing.assert_close(exact.errors["nrmse"], rounded.errors["nrmse"], rtol=0.05, atol=0.05)


def test_forecaster_of_another_shape_is_named(root: Path) -> None:
    class Short:
        name, label, note = "short", "short", ""

        def forecast(self, start: Start, steps: int) -> Tensor:
            return start.given[:, None]

    with pytest.raises(ShapeError, match="forecast of short"):
        roll_out(Short(), open_split(root))


def test_parameters_are_in_the_model_s_order_and_unknown_ones_nan() -> None:
    table = parameter_table({"nu": torch.tensor([1.0, 2.0]).double()}, ("beta", "nu"), 2)
    assert table[:, 1].tolist() == [1.0, 2.0]
    assert table[:, 0].isnan().all()
    assert parameter_table({}, (), 3).shape == (3, 0)
