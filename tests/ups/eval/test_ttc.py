"""Test-time conditioning: candidates, corrections, projection; in evaluation and prediction."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_simulators
import torch
from torch import Tensor

import ups_store
from ups.config import RunConfig
from ups.data.windows import TrajectoryBatch, open_trajectories
from ups.errors import ConfigError
from ups.eval.evaluate import evaluate
from ups.eval.forecasters import Start
from ups.eval.predict import PredictionRequest, predict_store
from ups.eval.runs import Run
from ups.eval.ttc import ConditionedForecaster, conditioned, corrected
from ups.laws import Laws
from ups.physics.priors import Step, TaskPhysics
from ups.trained.simulator import Simulator, save_simulator

TASK = "burgers1d"
PHYSICS = TaskPhysics(Laws(equation=TASK), ("u",), ("periodic",), (1.0,), ("nu",))
STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_simulators.make_data(tmp_path_factory.mktemp("data"))


def configure(data: Path, **ttc: Any) -> RunConfig:
    settings = {f"ttc.{name}": value for name, value in ttc.items()}
    return small_simulators.configure(data, **{"ttc.enabled": True, **settings})


@pytest.fixture
def simulator(data: Path) -> Simulator:
    """An operator of random weights, which drifts."""
    made = small_simulators.make_simulator(configure(data))
    torch.manual_seed(3)
    for parameter in made.operator.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return made


@pytest.fixture
def batch(data: Path) -> TrajectoryBatch:
    return open_trajectories(configure(data).build, TASK, "train").read(np.arange(3))


def forecast(config: RunConfig, simulator: Simulator, batch: TrajectoryBatch) -> Tensor:
    forecaster = ConditionedForecaster(simulator, config, lengths={TASK: {"x": 1.0}})
    start = Start(TASK, batch.given, batch.parameters, simulator.spec.tasks[TASK].dt)
    return forecaster.forecast(start, STEPS)


def residual(before: Tensor, after: Tensor, *, nu: float, dt: float) -> Tensor:
    """Mean square by sample."""
    num = len(before)
    step = Step(before, after, before, {"nu": torch.full((num,), nu)}, torch.full((num,), dt))
    return PHYSICS.residual(step).square().mean(1)


def test_projection_puts_back_the_mean_and_without_it_the_rollout_is_the_plain_one(
    data: Path, simulator: Simulator, batch: TrajectoryBatch
) -> None:
    plain = simulator.rollout(batch.given, STEPS, task=TASK)
    nothing = configure(data, corrections=0, candidates=2, noise_std=0.0, project="false")
    torch.testing.assert_close(forecast(nothing, simulator, batch), plain, rtol=1e-4, atol=1e-5)
    projected = forecast(configure(data, corrections=0), simulator, batch)
    mean_BK = projected.mean((2, 3))
    torch.testing.assert_close(mean_BK, batch.given.mean((1, 2))[:, None].expand_as(mean_BK))
    assert float((plain.mean((2, 3)) - mean_BK).abs().max()) > 1e-3


def test_corrections_bring_a_bad_operator_near_the_truth(
    data: Path, simulator: Simulator, batch: TrajectoryBatch
) -> None:
    errors = [
        (forecast(configure(data, corrections=num), simulator, batch) - batch.truth[:, :STEPS])
        .square()
        .mean()
        for num in (0, 1, 6)
    ]
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.01 * errors[0]


def test_best_candidate_is_taken_by_its_residual(
    data: Path, simulator: Simulator, batch: TrajectoryBatch
) -> None:
    config = configure(data, corrections=0, candidates=6, noise_std=0.3, project="false")
    chosen, plain = forecast(config, simulator, batch), simulator.rollout(batch.given, STEPS, task=TASK)
    known = {"nu": 0.1, "dt": simulator.spec.tasks[TASK].dt}
    best, first = (residual(batch.given, frames[:, 0], **known) for frames in (chosen, plain))
    assert (best <= first * (1 + 1e-4)).all()
    assert (best < 0.99 * first).any()


def test_samples_do_not_depend_on_their_batch(
    data: Path, simulator: Simulator, batch: TrajectoryBatch
) -> None:
    config = configure(data, candidates=4, noise_std=0.3)
    one = {name: values[1:2] for name, values in batch.parameters.items()}
    alone = dataclasses.replace(batch, given=batch.given[1:2], parameters=one)
    together = forecast(config, simulator, batch)
    torch.testing.assert_close(forecast(config, simulator, alone), together[1:2], rtol=1e-4, atol=1e-5)


def test_correction_that_makes_the_residual_worse_is_not_kept() -> None:
    """Ten times too long a step: the iteration doesn't converge."""
    x = torch.arange(64) / 64 * 2 * torch.pi
    rough = torch.stack([torch.sin(x), torch.sin(9 * x)])[..., None]
    step = Step(rough, rough, rough, {"nu": torch.full((2,), 1e-4)}, torch.ones(2))
    after = corrected(PHYSICS, step, 5)
    assert after.isfinite().all()
    assert (residual(rough, after, nu=1e-4, dt=1.0) <= residual(rough, rough, nu=1e-4, dt=1.0)).all()


def test_task_without_laws_is_refused(data: Path, simulator: Simulator) -> None:
    lawless = small_simulators.configure(data, **{"laws.burgers1d.conserved": "[]"})
    with pytest.raises(ConfigError) as caught:
        ConditionedForecaster(simulator, lawless, lengths={TASK: {"x": 1.0}})
    assert caught.value.kind == "no_law"
    several = small_simulators.configure(data, TASK, "darcy2d", **{"ttc.enabled": True})
    both = small_simulators.make_simulator(several)
    rows = {
        task: conditioned(both, several, task, lengths={"x": 1.0, "y": 1.0}) for task in several.data.tasks
    }
    assert [len(row) for row in rows.values()] == [1, 0]  # Darcy flow has nothing to correct or to project


def test_steady_task_takes_the_best_candidate(data: Path) -> None:
    config = small_simulators.configure(data, "darcy2d", **{"ttc.enabled": True, "ttc.candidates": 5})
    simulator = small_simulators.make_simulator(config)
    batch = open_trajectories(config.build, "darcy2d", "train").read(np.arange(2))
    forecaster = ConditionedForecaster(simulator, config, lengths={"darcy2d": {"x": 1.0, "y": 1.0}})
    found = forecaster.forecast(Start("darcy2d", batch.given, batch.parameters, None), 1)
    assert found.shape == batch.truth.shape
    assert found.isfinite().all()


def test_latents_are_encoded_again_once_their_fields_are_corrected(
    data: Path, batch: TrajectoryBatch
) -> None:
    config = configure(data, corrections=1)
    simulator = small_simulators.make_simulator(config, small_simulators.make_autoencoder(config))
    plain, found = simulator.rollout(batch.given, STEPS, task=TASK), forecast(config, simulator, batch)
    assert found.shape == plain.shape
    mean_BK = found.mean((2, 3))
    torch.testing.assert_close(mean_BK, batch.given.mean((1, 2))[:, None].expand_as(mean_BK))
    # The operator changes nothing, so a frame is what comes of encoding the one before.
    projected = forecast(configure(data, corrections=0), simulator, batch)
    again = simulator.rollout(projected[:, 0], 1, task=TASK)[:, 0]
    torch.testing.assert_close(projected[:, 1].diff(dim=1), again.diff(dim=1), rtol=1e-3, atol=1e-5)
    untouched = forecast(
        configure(data, corrections=0, project="false", candidates=2, noise_std=0.0), simulator, batch
    )
    torch.testing.assert_close(untouched, plain, rtol=1e-4, atol=1e-5)


def test_evaluation_has_a_row_of_it(data: Path, simulator: Simulator) -> None:
    report = evaluate(configure(data, corrections=4), [Run(simulator)], split="val")
    rows = {row.name: row for row in report.tasks[0].rows}
    assert list(rows)[:2] == ["operator", "operator_ttc"]
    plain, conditioned = (rows[name].scores.metrics["nrmse"].mean for name in ("operator", "operator_ttc"))
    assert conditioned < 0.5 * plain
    assert "4 corrections" in rows["operator_ttc"].note


def test_predictions_are_conditioned_where_asked_for(
    data: Path, simulator: Simulator, tmp_path: Path, notes: list[str]
) -> None:
    path = tmp_path / "operator.safetensors"
    save_simulator(path, simulator, config=configure(data).model_dump(mode="json"), report={})
    source = next(data.glob("1D_Burgers*"))
    for ttc in (None, False):
        out = tmp_path / f"{ttc}.zarr.zip"
        request = PredictionRequest(source, path, out, steps=2, split="all", limit=2, device="cpu", ttc=ttc)
        predict_store(request)
    with (
        ups_store.open(tmp_path / "None.zarr.zip") as one,
        ups_store.open(tmp_path / "False.zarr.zip") as two,
    ):
        conditioned, plain = one["fields"][...].copy(), two["fields"][...].copy()
    means = conditioned.mean((2, 3))
    assert abs(means - means[:, :1]).max() < 1e-5
    assert abs(conditioned - plain).max() > 1e-3
    assert sum("test-time conditioning" in note for note in notes) == 1
