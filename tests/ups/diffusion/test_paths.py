"""The linear path: its ends, its derivative, what follows from a velocity, the closed form of a Gaussian."""

from __future__ import annotations

import torch
from gaussian_path import gaussian_velocity

from ups.diffusion.paths import (
    at_time,
    datum_of_velocity,
    flow_matching_error,
    target_velocity,
    velocity_of_datum,
)

E, R = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
T = torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64)


def test_path_leads_from_noise_to_datum_at_its_velocity() -> None:
    assert torch.equal(at_time(E, R, torch.zeros(3)), E)
    assert torch.equal(at_time(E, R, torch.ones(3)), R)
    moved = (at_time(E, R, T + 1e-6) - at_time(E, R, T)) / 1e-6
    torch.testing.assert_close(moved, target_velocity(E, R), rtol=0, atol=1e-8)


def test_point_and_velocity_give_the_end_of_the_path() -> None:
    x, v = at_time(E, R, T), target_velocity(E, R)
    torch.testing.assert_close(datum_of_velocity(x, v, T), R)
    torch.testing.assert_close(velocity_of_datum(x, R, T), v)


def test_estimate_of_datum_is_the_point_itself_at_the_end() -> None:
    assert torch.equal(datum_of_velocity(R, torch.randn_like(R), torch.ones(3)), R)


def test_gaussian_velocity_is_the_regression_of_velocities_on_points() -> None:
    """E[v | x] is linear where all is normal: its slope is cov(v, x) / var(x), here measured."""
    generator = torch.Generator().manual_seed(1)
    e, z = torch.randn(2, 400_000, generator=generator, dtype=torch.float64)
    r = 0.5 + 2 * z
    for t in (0.0, 0.25, 0.8):
        times = torch.full((len(e),), t)
        x, v = at_time(e, r, times), target_velocity(e, r)
        slope = ((x - x.mean()) * (v - v.mean())).mean() / x.var()
        found = gaussian_velocity(torch.tensor([[0.0], [1.0]]), torch.tensor([t, t]), mean=0.5, std=2.0)
        assert abs(float(found[1] - found[0]) - float(slope)) < 0.02
        at_zero = v.mean() - slope * x.mean()
        assert abs(float(found[0]) - float(at_zero)) < 0.02


def test_flow_matching_error_is_the_mean_square_by_sample() -> None:
    error = flow_matching_error(target_velocity(E, R) + torch.tensor([0.0, 1.0, 2.0])[:, None, None], E, R)
    torch.testing.assert_close(error, torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64))
