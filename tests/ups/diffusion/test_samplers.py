"""Samplers: their orders on an equation with a known solution, what they cost, tolerance, exact ends."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from gaussian_path import gaussian_velocity
from torch import Tensor

from ups.diffusion.paths import velocity_of_datum
from ups.diffusion.samplers import Sampled, Sampler, adaptive, euler, heun, sample

START = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


def oscillating(x: Tensor, t: Tensor) -> Tensor:
    """dx/dt = x cos(3 t), whose solution is x(0) exp(sin(3 t) / 3)."""
    return x * torch.cos(3 * t.to(x.dtype))[:, None]


SOLUTION = START * math.exp(math.sin(3) / 3)


def uniform(num: int) -> list[float]:
    return [number / num for number in range(num + 1)]


def error_of(found: Sampled) -> float:
    return float((found.x - SOLUTION).abs().max())


@pytest.mark.parametrize(("method", "order"), [(euler, 1), (heun, 2)])
def test_error_falls_with_the_order_of_the_method(method: type[euler], order: int) -> None:
    coarse, fine = (error_of(method(oscillating, START, uniform(num))) for num in (40, 80))
    assert abs(math.log2(coarse / fine) - order) < 0.2


def test_fixed_samplers_count_their_evaluations() -> None:
    calls = 0

    def counted(x: Tensor, t: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return oscillating(x, t)

    for name, expected in (("euler", 8), ("heun", 15)):
        calls = 0
        assert sample(counted, START, sampler=name, num_steps=8).num_evaluations == calls == expected
    calls = 0
    assert adaptive(counted, START, tolerance=1e-4, max_evaluations=1000).num_evaluations == calls


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-6])
def test_adaptive_sampler_keeps_its_tolerance(tolerance: float) -> None:
    found = adaptive(oscillating, START, tolerance=tolerance, max_evaluations=10_000, last=1.0)
    assert error_of(found) < 3 * tolerance


def test_smaller_tolerance_costs_more_evaluations() -> None:
    nums = [
        adaptive(oscillating, START, tolerance=tolerance, max_evaluations=10_000).num_evaluations
        for tolerance in (1e-2, 1e-4, 1e-6)
    ]
    assert nums == sorted(set(nums))


@pytest.mark.parametrize("most", [2, 5, 12])
def test_adaptive_sampler_ends_at_its_maximum_of_evaluations(most: int) -> None:
    found = adaptive(oscillating, START, tolerance=1e-9, max_evaluations=most)
    assert found.num_evaluations <= most
    assert torch.isfinite(found.x).all()


def test_sample_takes_steps_that_do_not_depend_on_the_rest_of_its_batch() -> None:
    def stiff(x: Tensor, t: Tensor) -> Tensor:
        return -50 * x * (x.abs() > 0.5)

    start = torch.tensor([[0.1, 0.2], [3.0, -2.0]])
    alone, together = (
        adaptive(stiff, some, tolerance=1e-3, max_evaluations=500).x for some in (start[:1], start)
    )
    assert torch.equal(alone, together[:1])


@pytest.mark.parametrize("name", get_args(Sampler))
def test_gaussian_flow_ends_in_its_distribution(name: Sampler) -> None:
    noise = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return gaussian_velocity(x, t, mean=1.5, std=0.5)

    x = sample(velocity, noise, sampler=name, num_steps=64, tolerance=1e-3).x
    assert abs(float(x.mean()) - 1.5) < 0.02
    assert abs(float(x.std()) - 0.5) < 0.02


@pytest.mark.parametrize("name", get_args(Sampler))
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 32, 50])
def test_flow_towards_zero_ends_there_to_the_bit(name: Sampler, num_steps: int) -> None:
    noise = torch.randn(64, 4, 3)

    def towards_zero(x: Tensor, t: Tensor) -> Tensor:
        return velocity_of_datum(x, torch.zeros_like(x), t)

    assert not sample(towards_zero, noise, sampler=name, num_steps=num_steps).x.any()
