"""Flow times: moments of the distributions, repeatable draws, grids of samplers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ups.diffusion.paths import LAST_TIME, FlowTimes, flow_time, time_grid


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("times", "mean", "variance"),
    [
        (FlowTimes(), 1 / 2, 1 / 12),
        (FlowTimes("beta", alpha=1.2), 1.2 / 2.2, 1.2 / (2.2**2 * 3.2)),
        (FlowTimes("beta", alpha=2.0, beta=5.0), 2 / 7, 10 / (49 * 8)),
    ],
)
def test_drawn_times_have_the_moments_of_their_distribution(
    times: FlowTimes, mean: float, variance: float
) -> None:
    drawn = times.draw(200_000, generator())
    assert drawn.dtype == torch.float32
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1
    assert abs(float(drawn.mean()) - mean) < 3e-3
    assert abs(float(drawn.var()) - variance) < 2e-3


def test_logit_of_logit_normal_times_is_normal() -> None:
    logits = torch.logit(FlowTimes("logit_normal", mean=-0.5, std=0.8).draw(100_000, generator()).double())
    assert abs(float(logits.mean()) + 0.5) < 0.01
    assert abs(float(logits.std()) - 0.8) < 0.01


@pytest.mark.parametrize("name", ["uniform", "beta", "logit_normal"])
def test_draws_are_a_function_of_the_generator(name: str) -> None:
    times = FlowTimes(name)
    assert torch.equal(times.draw(5, generator(3)), times.draw(5, generator(3)))
    assert not torch.equal(times.draw(5, generator(3)), times.draw(5, generator(4)))


def test_training_asks_for_no_time_after_the_last() -> None:
    assert float(flow_time(torch.tensor(1.0))) == LAST_TIME


@pytest.mark.parametrize("num", [1, 2, 3, 4, 10, 32, 100])
def test_time_grid_goes_from_0_to_1_and_asks_before_the_last_time(num: int) -> None:
    times = time_grid(num)
    assert len(times) == num + 1
    assert times[0] == 0
    assert times[-1] == 1
    assert times == sorted(times)
    assert times[-2] <= LAST_TIME
    lengths = [after - before for before, after in pairwise(times[:-1])]
    assert max(lengths, default=0) - min(lengths, default=0) < 1e-12
    assert 1 / num >= times[-1] - times[-2] > 1 / (2 * num) or times[-2] == LAST_TIME


def test_time_grid_of_a_power_of_two_is_uniform() -> None:
    assert time_grid(8) == [number / 8 for number in range(9)]
