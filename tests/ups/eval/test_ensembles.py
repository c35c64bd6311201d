"""Ensembles measured time step by time step: what is accumulated, scored, and refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from small_simulators import configure, make_data
from torch import Tensor

from ups.data.windows import Trajectories, TrajectoryBatch, open_trajectories
from ups.distributed.ranks import Ranks
from ups.errors import ConfigError, ShapeError
from ups.eval.ensembles import (
    Climate,
    EnsembleErrors,
    ensemble_numbers,
    measure_ensemble,
    roll_out_members,
    score_ensemble,
    seed_of,
)
from ups.eval.forecasters import Persistence, Start, has_members, roll_out
from ups.eval.intervals import Resamples

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def open_train(root: Path, task: str = "burgers1d", **options: int) -> Trajectories:
    return open_trajectories(configure(root, task).build, task, "train", **options)


class Noisy:
    """Persistence with noise that grows; every member by itself."""

    name, label, note = "noisy", "noisy persistence", ""
    is_on_time = True

    def forecast(self, start: Start, steps: int) -> Tensor:
        return Persistence().forecast(start, steps)

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        state = start.given.unsqueeze(1).repeat(1, members, *(1,) * (start.given.ndim - 1))
        for _ in range(steps):
            state = state + 0.1 * torch.randn(state.shape, generator=generator)
            yield state


def draw_batch(num: int, steps: int, points: int, channels: int, *, seed: int = 0) -> TrajectoryBatch:
    """White noise around 0, without physics."""
    truth = torch.randn(num, steps, points, channels, generator=torch.Generator().manual_seed(seed))
    return TrajectoryBatch(np.arange(num), torch.zeros(num, points, channels), truth, {})


def draw_members(batch: TrajectoryBatch, members: int, *, seed: int = 1, scale: float = 1.0) -> list[Tensor]:
    num, steps, *frame = batch.truth.shape
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(num, members, *frame, generator=generator) for _ in range(steps)]


THRESHOLDS = torch.tensor([[0.0], [0.7], [1.4]], dtype=torch.float64).expand(3, 2)
PLAIN = Climate(torch.ones(2, dtype=torch.float64), THRESHOLDS)


def measure(members: list[Tensor], batch: TrajectoryBatch, climate: Climate = PLAIN) -> EnsembleErrors:
    return measure_ensemble(iter(members), batch, climate, seed=0)


# --- the truth's scale ---------------------------------------------------------------------------------


def test_climate_is_that_of_all_predicted_frames(root: Path) -> None:
    trajectories = open_train(root)
    truth = torch.cat([batch.truth for batch in trajectories.batches(3)]).double().numpy()
    climate = Climate.of(trajectories)
    scale = np.sqrt(np.square(truth).mean((0, 1, 2)))
    np.testing.assert_allclose(climate.scale_C, scale)
    expected = np.quantile(truth, (0.5, 0.9, 0.99), axis=(0, 1, 2)) / scale
    np.testing.assert_allclose(climate.thresholds_QC, expected)


def test_quantiles_are_of_evenly_spread_values_where_there_are_many(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectories = open_train(root)
    exact = Climate.of(trajectories)
    monkeypatch.setattr("ups.eval.ensembles._POINTS_OF_QUANTILES", 400)
    some = Climate.of(trajectories)
    assert torch.equal(some.scale_C, exact.scale_C)
    torch.testing.assert_close(some.thresholds_QC, exact.thresholds_QC, rtol=0.2, atol=0.2)


# --- what is accumulated -------------------------------------------------------------------------------


def test_units_of_a_channel_do_not_matter() -> None:
    batch = draw_batch(3, 2, 16, 2)
    members = draw_members(batch, 5)
    unit = torch.tensor([1.0, 1000.0])
    scaled = TrajectoryBatch(batch.samples, batch.given, batch.truth * unit, {})
    climate = Climate(unit.double(), PLAIN.thresholds_QC)
    found = measure([each * unit for each in members], scaled, climate).tensors()
    for name, value in measure(members, batch).tensors().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_members_of_a_time_step_are_let_go_before_the_next_is_made() -> None:
    batch = draw_batch(2, 4, 16, 2)
    alive: list[weakref.ref[Tensor]] = []

    def steps() -> Iterator[Tensor]:
        for _ in range(4):
            assert sum(reference() is not None for reference in alive) <= 1  # the loop's own variable
            members = torch.randn(2, 8, 16, 2)
            alive.append(weakref.ref(members))
            yield members
            del members

    assert len(measure_ensemble(steps(), batch, PLAIN, seed=0)) == 2


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(2, 4, 8, 2)] * 2, "time steps of members: expected 3, found 2"),
        ([(2, 4, 8, 2)] * 4, "members of time step 4"),
        ([(2, 4, 7, 2)] * 3, r"time step 1: expected \(2, 4, 8, 2\), found \(2, 4, 7, 2\)"),
        ([(2, 8, 2)] * 3, r"expected \(2, 'M', 8, 2\)"),
    ],
)
def test_members_of_another_shape_are_refused(shapes: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        measure([torch.zeros(shape) for shape in shapes], draw_batch(2, 3, 8, 2))


def test_one_member_is_no_ensemble(root: Path) -> None:
    trajectories = open_train(root)
    with pytest.raises(ConfigError, match="members: expected at least 2, found 1") as caught:
        roll_out_members(Noisy(), trajectories, Climate.of(trajectories), members=1, seed=0)
    assert caught.value.kind == "members"


def test_members_of_a_trajectory_do_not_depend_on_those_beside_it(root: Path) -> None:
    few, many = open_train(root, max_trajectories=2), open_train(root)
    climate = Climate.of(many)
    of_few, of_many = (
        roll_out_members(Noisy(), some, climate, members=4, seed=3).errors for some in (few, many)
    )
    for name, value in of_few.tensors().items():  # the first and the last
        assert torch.equal(value, of_many.tensors()[name][[0, -1]]), name
    assert len({seed_of(seed, sample) for seed in range(4) for sample in range(4)}) == 16


def test_ranks_that_share_the_trajectories_find_the_same(root: Path) -> None:
    trajectories = open_train(root, max_trajectories=3)  # one rank repeats its last
    climate = Climate.of(trajectories)
    alone = roll_out_members(Noisy(), trajectories, climate, members=3, seed=0).errors
    first: list[Tensor] = []

    class Recording(Ranks):
        def gather(self, values: Tensor) -> Tensor:
            first.append(values)
            return torch.stack([values, values])

    class Answering(Ranks):
        def gather(self, values: Tensor) -> Tensor:
            return torch.stack([first.pop(0), values])

    for ranks in (Recording(0, 2), Answering(1, 2)):
        found = roll_out_members(Noisy(), trajectories, climate, members=3, seed=0, ranks=ranks).errors
    assert not first
    for name, value in alone.tensors().items():
        assert torch.equal(value, found.tensors()[name]), name


def test_point_forecast_is_measured_by_its_errors(root: Path) -> None:
    trajectories = open_train(root)
    climate = Climate.of(trajectories)
    found = roll_out_members(Persistence(), trajectories, climate, members=None)
    errors = roll_out(Persistence(), trajectories).errors
    scale = climate.scale_C.item()
    torch.testing.assert_close(found.errors.nrmse, errors["nrmse"])
    torch.testing.assert_close(found.errors.energy_score, errors["rmse"][..., 0] / scale)
    torch.testing.assert_close(found.errors.squared_error.sqrt(), errors["rmse"] / scale)
    assert (found.errors.num_members, found.errors.seed) == (1, None)
    assert found.seconds > 0
    assert not has_members(Persistence())
    assert has_members(Noisy())


def test_planes_are_measured_too(root: Path) -> None:
    trajectories = open_train(root, "darcy2d", max_trajectories=3)
    found = roll_out_members(Noisy(), trajectories, Climate.of(trajectories), members=3, seed=0).errors
    assert found.bands.shape == (3, 1, 3, 1)
    assert all(value.isfinite().all() for value in found.tensors().values())


# --- scores --------------------------------------------------------------------------------------------


def test_exchangeable_ensemble_has_the_scores_of_a_perfect_one() -> None:
    batch = draw_batch(40, 3, 32, 2)
    errors = measure(draw_members(batch, 16), batch)
    numbers = ensemble_numbers(errors)
    assert numbers["spread_skill"] == pytest.approx(1.0, abs=0.03)
    assert numbers["crps"] == pytest.approx(1 / np.sqrt(np.pi), rel=0.03)  # E|X - X'| / 2
    assert numbers["skill"] == pytest.approx(np.sqrt(1 + 1 / 16), rel=0.03)
    assert numbers["mean_nrmse"] == pytest.approx(numbers["skill"], rel=0.03)
    for name in ("band_low", "band_mid", "band_high"):
        assert numbers[name] == pytest.approx(1.0, abs=0.05)
    assert numbers["rank_unevenness"] < 0.05
    assert numbers["reliability_gap"] < 0.02  # a probability of 16 members is off by chance
    narrow = ensemble_numbers(measure(draw_members(batch, 16, scale=0.5), batch))
    assert narrow["spread_skill"] < 0.6
    assert narrow["crps"] > numbers["crps"]
    assert narrow["rank_unevenness"] > 10 * numbers["rank_unevenness"]
    assert narrow["reliability_gap"] > 1.5 * numbers["reliability_gap"]


def test_scores_have_intervals_by_time_step_and_seed() -> None:
    batch = draw_batch(25, 3, 16, 2)
    errors = [measure(draw_members(batch, 8, seed=seed), batch) for seed in (1, 2)]
    found = score_ensemble(errors, resamples=Resamples(25, num_resamples=200), row="a", seconds=1.5)
    for name, value in found.scores.metrics.items():
        assert value.low < value.mean < value.high, name
        assert len(found.scores.by_step[name]) == 3
        assert np.mean(found.scores.by_seed[name]) == pytest.approx(value.mean)
    assert [len(found.ranks), len(found.reliability)] == [9, 3]
    assert np.mean([share.mean for share in found.ranks]) == pytest.approx(1.0)
    first = found.reliability[0]
    assert sum(first.share) == pytest.approx(1.0)
    assert len(first.probability) == len(first.frequency) <= 9
    values = found.to_json()
    assert (values["members"], values["seconds"]) == (8, 1.5)
    assert len(values["reliability"][2]["frequency"]["mean"]) == len(values["reliability"][2]["probability"])


def test_point_forecast_has_no_scores_of_spread() -> None:
    batch = draw_batch(3, 2, 32, 2)
    found = score_ensemble([measure(draw_members(batch, 1), batch)], resamples=Resamples(3))
    names = ["mean_nrmse", "crps", "energy_score", "skill", "band_low", "band_mid", "band_high"]
    assert list(found.scores.metrics) == list(found.scores.by_step) == list(found.scores.by_seed) == names
    assert not found.ranks
    assert not found.reliability


def test_band_that_the_truth_loses_on_the_way_is_measured_by_all_its_energy() -> None:
    batch = draw_batch(20, 2, 32, 2)
    batch.truth[:, 1] = 1.0  # nothing but the mean is left
    errors = [measure(draw_members(batch, 4, seed=seed), batch) for seed in (1, 2)]
    found = score_ensemble(errors, resamples=Resamples(20, num_resamples=50), row="a").scores
    first, last = found.by_step["band_high"]
    energies = torch.stack([each.bands for each in errors]).mean((0, 1))[..., 2, :]  # (T, C)
    ratios = energies.mean(0) / errors[0].true_bands.mean((0, 1))[2]
    assert found.metrics["band_high"].mean == pytest.approx(ratios.mean().item())
    assert first.is_known
    assert np.isnan(last.mean)
    assert not last.is_known
    assert found.by_step["band_low"][1].is_known


def test_ensembles_are_compared_on_the_same_trajectories() -> None:
    batch = draw_batch(30, 2, 16, 2)
    resamples = Resamples(30, num_resamples=200)
    good, narrow = (
        score_ensemble([measure(draw_members(batch, 8, scale=scale), batch)], resamples=resamples)
        for scale in (1.0, 0.3)
    )
    paired = narrow.scores.paired(good.scores)
    assert paired["crps"].verdict == paired["energy_score"].verdict == "behind"
    assert "spread_skill" not in paired
    assert "band_low" not in paired


def test_member_that_blew_up_leaves_no_finite_score() -> None:
    batch = draw_batch(3, 2, 16, 2)
    members = draw_members(batch, 4)
    members[1][0, 0, 0] = float("nan")
    numbers = ensemble_numbers(measure(members, batch))
    for name in ("crps", "energy_score", "spread_skill", "mean_nrmse"):
        assert np.isnan(numbers[name]), name
