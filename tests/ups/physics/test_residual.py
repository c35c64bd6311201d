"""Residuals of equations over a stored step: of exact solutions, of wrong ones, order, gradients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.data.solvers import advection1d, burgers1d, darcy2d
from ups.data.solvers.problem import random_two_phase
from ups.physics.residual import LINE_EQUATIONS, darcy_residual, hermite_weights, line_residual

POINTS = 64


def states(num: int = 3, *, max_wave_number: int = 3) -> Tensor:
    """Smooth states with a mean, float64, shape (B, X)."""
    x = 2 * math.pi * (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    generator = torch.Generator().manual_seed(1)
    draw = torch.rand(3, num, max_wave_number, 1, generator=generator, dtype=torch.float64)
    waves = torch.arange(1, max_wave_number + 1)[:, None]
    return 0.2 + 0.3 * (draw[0] * torch.sin(waves * x + 6 * draw[1])).sum(1)


def burgers(dt: float, *, nu: float, max_wave_number: int = 3) -> Tensor:
    given = states(max_wave_number=max_wave_number).numpy()
    return torch.from_numpy(burgers1d.solve(given, nu=nu, t=np.array([0.0, dt]), max_amplitude=1.0).fields)


def residual_of(name: str, pair: Tensor, dt: float, cell: int = 1, **values: float) -> Tensor:
    num = len(pair)
    columns = {key: torch.full((num,), value, dtype=pair.dtype) for key, value in values.items()}
    return line_residual(
        pair[:, 0],
        pair[:, 1],
        LINE_EQUATIONS[name],
        values=columns,
        dt_B=torch.full((num,), dt, dtype=pair.dtype),
        length=1.0,
        cell=cell,
    )


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def test_exact_advection_has_no_residual_however_long_the_step() -> None:
    """Here a wave passes 45 cells in a step, where differences in time say nothing."""
    pair = torch.from_numpy(
        advection1d.solve(states(max_wave_number=8).numpy(), beta=0.7, t=np.array([0.0, 1.0])).fields
    )
    assert rms(residual_of("advection1d", pair, 1.0, beta=0.7)) < 1e-13
    assert rms(residual_of("advection1d", pair, 1.0, beta=0.71)) > 0.02 * rms(pair[:, 1] - pair[:, 0])


@pytest.mark.parametrize("cell", [1, 8])
def test_burgers_truth_is_far_below_wrong_data(cell: int) -> None:
    dt, nu = 0.1, 0.05
    pair = burgers(dt, nu=nu)
    truth = rms(residual_of("burgers1d", pair, dt, cell, nu=nu))
    stale = torch.stack([pair[:, 0], pair[:, 0]], 1)
    moved = torch.stack([pair[:, 0], pair[:, 1].roll(1, dims=-1)], 1)
    rough = torch.stack([pair[:, 0], pair[:, 1] + 0.01 * torch.randn(pair[:, 1].shape)], 1)
    for wrong, most in ((stale, 0.02), (moved, 0.05), (rough, 0.5)):
        assert truth < most * rms(residual_of("burgers1d", wrong, dt, cell, nu=nu))
    assert truth < 0.1 * rms(residual_of("burgers1d", pair, dt, cell, nu=1.5 * nu))


def test_residual_lies_where_the_later_frame_is_wrong() -> None:
    """Subtracting it mends the frame, although the equation is taken in a moving one."""
    pair = torch.from_numpy(advection1d.solve(states().numpy(), beta=0.7, t=np.array([0.0, 1.0])).fields)
    dented = pair.clone()
    dented[:, 1, 10:14] += 0.1
    mended = dented[:, 1] - residual_of("advection1d", dented, 1.0, cell=0, beta=0.7)
    torch.testing.assert_close(mended, pair[:, 1])


def test_quadrature_is_of_fourth_order_in_the_step() -> None:
    """The integral over one step is wrong by O(dt^5): the residual falls 32-fold where the step is halved."""
    pairs = {dt: burgers(dt, nu=0.02, max_wave_number=1) for dt in (0.04, 0.02)}
    long, half = (rms(residual_of("burgers1d", pair, dt, nu=0.02)) for dt, pair in pairs.items())
    assert 28 < long / half < 34


def test_reaction_diffusion_is_of_fourth_order_too() -> None:
    """Logistic growth of a uniform state is known in closed form; diffusion of a small wave, too."""
    start = torch.full((1, POINTS), 0.2, dtype=torch.float64)

    def after(dt: float) -> Tensor:
        return 0.2 * math.exp(2 * dt) / (1 + 0.2 * (math.exp(2 * dt) - 1)) * torch.ones_like(start)

    found = [
        rms(residual_of("reacdiff1d", torch.stack([start, after(dt)], 1), dt, nu=0.5, rho=2.0))
        for dt in (0.1, 0.05)
    ]
    assert found[0] < 1e-7
    assert 28 < found[0] / found[1] < 34
    wave = 1e-9 * torch.sin(2 * math.pi * torch.arange(POINTS, dtype=torch.float64) / POINTS)[None]
    decayed = torch.stack([wave, wave * math.exp((2 - 0.5 * 4 * math.pi**2) * 0.1)], 1)
    assert rms(residual_of("reacdiff1d", decayed, 0.1, nu=0.5, rho=2.0)) < 0.02 * rms(wave)


def test_mean_residual_of_a_flux_is_the_change_of_the_mean() -> None:
    pair = torch.stack([states(), states().flip(1) + 0.25], 1)
    residual = residual_of("burgers1d", pair, 0.1, nu=0.05)
    torch.testing.assert_close(residual.mean(1), torch.full((3,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("z", [0.0, -1e-9, -0.5, -0.999, -1.001, -3.0, -2000.0])
def test_weights_of_the_cubic_are_its_integrals(z: float) -> None:
    """Against Gauss-Legendre on pieces short enough for the exponential."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = 1 - np.concatenate([[1.0], 2.0 ** -np.arange(1, 25), [0.0]])
    total = np.zeros(4)
    for low, high in itertools.pairwise(edges):
        s = (low + high) / 2 + (high - low) / 2 * nodes
        cubics = [1 - 3 * s**2 + 2 * s**3, s - 2 * s**2 + s**3, 3 * s**2 - 2 * s**3, s**3 - s**2]
        total += [(high - low) / 2 * np.sum(weights * np.exp(z * (1 - s)) * each) for each in cubics]
    found = torch.stack(hermite_weights(torch.tensor([z], dtype=torch.float64)))[:, 0]
    np.testing.assert_allclose(found.numpy(), total, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "values"),
    [("advection1d", {"beta": 0.7}), ("burgers1d", {"nu": 0.05}), ("reacdiff1d", {"nu": 0.05, "rho": 2.0})],
)
@pytest.mark.parametrize("num", [8, 9])
def test_gradients_of_a_line(name: str, values: dict[str, float], num: int) -> None:
    pair = torch.rand(2, 2, num, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: residual_of(name, each, 0.1, 3, **values), pair)


def darcy() -> tuple[Tensor, Tensor]:
    coefficient = random_two_phase(range(3), seed=0, num_points=24, low=0.1, high=1.0)
    solved = darcy2d.solve(coefficient, source=2.0)
    return torch.from_numpy(solved.fields[:, 0]), torch.from_numpy(coefficient)


@pytest.mark.parametrize("cell", [1, 4, 5])
def test_darcy_truth_balances_its_source(cell: int) -> None:
    u, a = darcy()
    options = {"beta_B": torch.full((3,), 2.0, dtype=torch.float64), "lengths": (1.0, 1.0), "cell": cell}
    residual = darcy_residual(u, a, **options)
    assert residual.shape == (3, 24 // cell, 24 // cell)
    assert rms(residual) < 1e-9
    assert rms(darcy_residual(1.01 * u, a, **options)) > 0.01
    assert rms(darcy_residual(u, a.flip(1), **options)) > 0.1


def test_gradients_of_darcy() -> None:
    u = torch.rand(1, 6, 6, dtype=torch.float64, requires_grad=True)
    a, beta = torch.rand(1, 6, 6, dtype=torch.float64) + 0.1, torch.ones(1, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda each: darcy_residual(each, a, beta_B=beta, lengths=(1.0, 2.0), cell=2), u
    )
