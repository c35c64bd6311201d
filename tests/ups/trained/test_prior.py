"""Priors of steady solutions: a Gaussian case with a known posterior, files, masks, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ups
from ups.data.augment import Draws
from ups.data.observations import check_observed, drawn_masks, masks_of_samples
from ups.diffusion.paths import FlowTimes, at_time, flow_matching_error, flow_time
from ups.errors import ConfigError, ShapeError
from ups.eval.forecasters import PriorForecaster, Start
from ups.grid import GridSpec
from ups.models.operator_size import OperatorSize
from ups.trained.prior import SteadyPrior, load_prior, save_prior
from ups.trained.specs import Method, PriorSpec, Sampling, SimulatedTask, SimulatorSpec

POINTS, OBSERVED = 8, 2
TASK = "level"
TIMES = FlowTimes("beta", 1.0, 3.0)  # most of the level is decided near the noise
GRID = GridSpec((POINTS,), (True,), (("fields", 1), ("coefficient", 1)))


def make_prior(method: Method = "flow", observed: int | None = OBSERVED, width: int = 16) -> SteadyPrior:
    unit = {"mean": [0.0], "std": [1.0]}
    task = SimulatedTask(
        grid=GRID,
        boundary=("periodic",),
        tokens=(2,),
        channels=("u",),
        steady=True,
        dt=1.0,
        parameters={},
        statistics={"fields": unit, "coefficient": unit},
    )
    size = OperatorSize(width=width, depths=(1,), mixers=("spectral",), num_heads=2)
    spec = SimulatorSpec("fields", {TASK: task}, (), 4, 4, 1, size.to_json(), None)
    torch.manual_seed(0)
    return SteadyPrior(spec, PriorSpec(method, observed, Sampling("heun", 8)))


def draw_level(num: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Solutions are one standard normal level s everywhere; inputs are s with noise of deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.randn(num, 1, 1, generator=generator)
    solution = level.expand(num, POINTS, 1)
    return solution + torch.randn(num, POINTS, 1, generator=generator), solution


def train(model: SteadyPrior, *, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    share = float(model.prior_spec.method == "flow")
    for step in range(steps):
        given, solution = draw_level(64, seed=step)
        draws, unknown = Draws.of_batch(64, seed=step), torch.zeros(64, 0)
        states = model.given(given, drawn_masks(draws, (POINTS,), num=OBSERVED), unknown, task=TASK)
        r = model.encode(solution, unknown, task=TASK)
        noise = share * draws.normal(r.shape[1:])
        t = flow_time(share * draws.of_rows(TIMES.draw(64, draws.generator)))
        v = model(at_time(noise, r, t), t, states, unknown, task=TASK)
        flow_matching_error(v, noise, r).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def posterior(given: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Mean, shape (B,), and deviation of s given k values s + n: sum / (k + 1) and 1 / sqrt(k + 1)."""
    return (given[..., 0] * mask).sum(1) / (OBSERVED + 1), 1 / math.sqrt(OBSERVED + 1)


@pytest.fixture(scope="module")
def trained() -> SteadyPrior:
    model = make_prior()
    train(model, steps=400)
    return model.eval()


def test_members_have_mean_and_spread_of_the_posterior(trained: SteadyPrior) -> None:
    given, _ = draw_level(24, seed=10_000)
    mask = masks_of_samples(given, num=OBSERVED, seed=0)
    solved = trained.solve(given, members=64, observed=mask)
    mean, std = posterior(given, mask)
    assert (solved.mean(dim=(1, 2, 3)) - mean).square().mean().sqrt() < 0.2  # the prior mean 0 is off by 0.82
    assert solved.std(dim=1).mean().item() == pytest.approx(std, rel=0.2)


def test_regression_says_the_mean_of_the_posterior() -> None:
    model = make_prior("regression")
    train(model, steps=150)
    given, _ = draw_level(24, seed=10_000)
    mask = masks_of_samples(given, num=OBSERVED, seed=0)
    solved = model.eval().solve(given, members=1, observed=mask)
    assert (solved.mean(dim=(1, 2, 3)) - posterior(given, mask)[0]).square().mean().sqrt() < 0.15
    with pytest.raises(ConfigError) as caught:
        model.solve(given, members=2, observed=mask)
    assert caught.value.kind == "no_ensemble"


def test_unknown_values_have_no_effect(trained: SteadyPrior) -> None:
    given, _ = draw_level(3, seed=1)
    mask = masks_of_samples(given, num=OBSERVED, seed=0)
    changed = torch.where(mask[..., None], given, 99.0)
    options = {"members": 2, "seed": 4, "observed": mask}
    assert torch.equal(trained.solve(given, **options), trained.solve(changed, **options))  # type: ignore[arg-type]


def test_file_gives_the_same_solutions_and_those_of_a_rollout(trained: SteadyPrior, tmp_path: Path) -> None:
    path = tmp_path / "prior.safetensors"
    save_prior(path, trained, config={}, report={})
    loaded = ups.load(path)
    assert isinstance(loaded, SteadyPrior)
    assert loaded.prior_spec == trained.prior_spec
    given, _ = draw_level(2, seed=1)
    mask = masks_of_samples(given, num=OBSERVED, seed=0)
    expected = trained.solve(given, members=3, seed=1, observed=mask)
    assert expected.shape == (2, 3, POINTS, 1)
    assert torch.equal(load_prior(path).solve(given, members=3, seed=1, observed=mask), expected)
    rolled = loaded.rollout(given[..., 0], 1, members=3, seed=1, observed=mask)
    assert torch.equal(rolled[:, :, 0], expected)
    assert loaded.rollout(given, observed=mask).shape == (2, 1, POINTS, 1)
    assert "observed=observed" in path.with_name("prior.card.md").read_text()
    with pytest.raises(ConfigError) as caught:
        loaded.rollout(given, 2, observed=mask)
    assert caught.value.kind == "steps"


def test_member_does_not_depend_on_how_many_there_are(trained: SteadyPrior) -> None:
    given, _ = draw_level(2, seed=1)
    mask = masks_of_samples(given, num=OBSERVED, seed=0)
    few, many = (trained.solve(given, members=num, observed=mask) for num in (2, 5))
    torch.testing.assert_close(few, many[:, :2])


def test_forecaster_observes_each_sample_at_points_of_its_own(trained: SteadyPrior) -> None:
    given, _ = draw_level(4, seed=1)
    forecaster = PriorForecaster(trained)
    assert forecaster.forecast(Start(TASK, given, {}, None), 1).shape == (4, 1, POINTS, 1)
    masks = forecaster.observed(given)
    alone = forecaster.observed(given[2:3])
    assert masks is not None
    assert alone is not None
    assert torch.equal(masks[2:3], alone)


@pytest.mark.parametrize(
    ("observed", "mask", "kind"),
    [(OBSERVED, None, "observed"), (None, torch.ones(POINTS, dtype=torch.bool), "observed")],
)
def test_mask_goes_with_the_training(observed: int | None, mask: Tensor | None, kind: str) -> None:
    model = make_prior(observed=observed).eval()
    with pytest.raises(ConfigError) as caught:
        model.solve(torch.zeros(1, POINTS), members=1, observed=mask)
    assert caught.value.kind == kind


def test_mask_of_another_grid_is_refused(trained: SteadyPrior) -> None:
    with pytest.raises(ShapeError):
        trained.solve(torch.zeros(1, POINTS), members=1, observed=torch.ones(POINTS + 1, dtype=torch.bool))


def test_whole_inputs_need_no_mask() -> None:
    model = make_prior(observed=None).eval()
    assert model.solve(torch.zeros(2, POINTS), members=2).shape == (2, 2, POINTS, 1)


def test_masks_are_functions_of_seed_and_sample() -> None:
    given, _ = draw_level(5, seed=1)
    masks = masks_of_samples(given, num=3, seed=7)
    assert masks.sum(dim=1).tolist() == [3] * 5
    assert torch.equal(masks_of_samples(given.flip(0), num=3, seed=7).flip(0), masks)
    assert not torch.equal(masks_of_samples(given, num=3, seed=8), masks)
    drawn = [drawn_masks(Draws.of_batch(5, seed=seed), (4, 4), num=3) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    part = Draws(torch.Generator().manual_seed(1), 5, 2, 2)  # as another rank has it
    assert torch.equal(drawn_masks(part, (4, 4), num=3), drawn[0][2:4])
    with pytest.raises(ConfigError) as caught:
        check_observed(POINTS + 1, GRID, task=TASK)
    assert caught.value.kind == "observed_points"
