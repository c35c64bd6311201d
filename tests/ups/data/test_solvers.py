"""Physics of the solvers: exact solutions, conserved quantities, orders of convergence, residuals."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from ups.data.solvers import advection1d, burgers1d, darcy2d, reaction_diffusion2d
from ups.data.solvers.problem import cell_centres, random_sines, random_two_phase

REAL_FILES = Path(__file__).resolve().parents[4] / "shared" / "data" / "pdebench"
needs_real_files = pytest.mark.skipif(not REAL_FILES.is_dir(), reason="no PDEBench files beside the checkout")


def relative_l2(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def smooth_states(num_samples, *, num_points, max_mean=0.3):
    return random_sines(
        range(num_samples),
        seed=1,
        num_points=num_points,
        num_waves=3,
        max_wave_number=3,
        max_amplitude=0.6,
        max_mean=max_mean,
    )


# --- initial conditions ---------------------------------------------------------------------------


def test_random_sines_deviate_from_their_mean_by_at_most_the_amplitude():
    states = smooth_states(50, num_points=256)
    deviation = np.abs(states - states.mean(axis=1, keepdims=True))
    assert deviation.max() <= 0.6
    assert deviation.max() > 0.5  # the bound is close, else solvers would waste steps
    assert 0.2 < np.abs(states.mean(axis=1)).max() <= 0.3


def test_random_two_phase_is_smooth_regions_of_both_values():
    media = random_two_phase(range(8), seed=0, num_points=64, low=0.1, high=1.0)
    assert set(np.unique(media)) == {0.1, 1.0}
    jumps = (np.diff(media, axis=1) != 0).mean()
    assert 0 < jumps < 0.05  # half of all faces for white noise


# --- advection ------------------------------------------------------------------------------------


def test_advection_equals_formula_at_shifted_points():
    x = cell_centres(64)
    t = np.array([0.0, 0.3, 1.7])

    def formula(x):
        return 0.2 + np.sin(2 * np.pi * x) + 0.3 * np.cos(10 * np.pi * x + 1)

    found = advection1d.solve(formula(x)[None], beta=0.4, t=t)
    np.testing.assert_allclose(found.fields[0], formula(x - 0.4 * t[:, None]), atol=1e-13)


def test_advection_returns_to_start_after_one_period():
    states = smooth_states(3, num_points=64)
    found = advection1d.solve(states, beta=0.5, t=np.array([0.0, 2.0])).fields
    np.testing.assert_allclose(found[:, 1], states, atol=1e-13)


# --- Burgers --------------------------------------------------------------------------------------


def cole_hopf(potential, *, x, t, viscosity):
    """Evaluate the exact solution on the real line, u(x, t) = <(x - y) / t>, for the potential of u(y, 0).

    The average over y has the weight exp(-G / (2 viscosity)), G = potential(y) + (x - y)^2 / (2 t).
    The largest exponent is taken out, as the weight spans hundreds of decades.
    """
    y = np.linspace(-4, 5, 90_001)
    exponent = -(potential(y) + (x[:, None] - y) ** 2 / (2 * t)) / (2 * viscosity)
    weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return ((x[:, None] - y) / t * weight).sum(axis=1) / weight.sum(axis=1)


@pytest.mark.parametrize("time", [0.2, 1.0])
def test_burgers_equals_cole_hopf_solution(time):
    x = cell_centres(128)
    initial = 0.5 * np.sin(2 * np.pi * x) + 0.2 * np.sin(4 * np.pi * x + 1)

    def potential(y):
        return -0.5 * np.cos(2 * np.pi * y) / (2 * np.pi) - 0.2 * np.cos(4 * np.pi * y + 1) / (4 * np.pi)

    found = burgers1d.solve(initial[None], nu=0.01, t=np.array([0.0, time])).fields[0, 1]
    exact = cole_hopf(potential, x=x[::8], t=time, viscosity=0.01 / np.pi)
    np.testing.assert_allclose(found[::8], exact, atol=1e-5)


def test_burgers_conserves_mean_and_loses_energy():
    states = smooth_states(4, num_points=128)
    fields = burgers1d.solve(states, nu=0.01, t=np.linspace(0, 2, 11)).fields
    assert np.isfinite(fields).all()
    mean = fields.mean(axis=2)
    np.testing.assert_allclose(mean, np.broadcast_to(mean[:, :1], mean.shape), atol=1e-12)
    energy = (fields**2).mean(axis=2)
    assert (np.diff(energy, axis=1) < 0).all()


def test_burgers_flux_neither_makes_nor_destroys_energy_at_any_mode():
    modes = np.random.default_rng(0).standard_normal((3, 20, 2)) @ [1, 1j]
    modes[:, 0] = 0
    power = (np.conj(modes) * burgers1d._minus_flux_divergence(modes)).real
    np.testing.assert_allclose(power.sum(axis=1), 0, atol=1e-11)  # aliasing would break it
    assert np.abs(power).max() > 1


def test_burgers_with_a_mean_flow_is_the_same_solution_carried_along():
    states = smooth_states(2, num_points=128, max_mean=0.0)
    t = np.array([0.0, 0.5, 1.0])
    still = burgers1d.solve(states, nu=0.02, t=t).fields
    moving = burgers1d.solve(states + 0.5, nu=0.02, t=t).fields
    np.testing.assert_allclose(moving[:, 2], 0.5 + np.roll(still[:, 2], 64, axis=1), atol=1e-10)


def test_burgers_error_falls_with_fourth_power_of_step():
    states = smooth_states(2, num_points=128)

    def at_end(courant):
        return burgers1d.solve(states, nu=0.02, t=np.array([0.0, 0.6]), courant=courant).fields[:, 1]

    fine = at_end(0.1)
    errors = [np.abs(at_end(courant) - fine).max() for courant in (2.0, 1.0)]
    assert np.log2(errors[0] / errors[1]) > 3.7


def test_burgers_on_few_cells_equals_the_same_points_of_many():
    problems = [burgers1d.Burgers1D(points=points, frames=2, end_time=1.0) for points in (64, 192)]
    coarse, fine = (problem.sample([0], seed=0) for problem in problems)
    np.testing.assert_allclose(coarse.x, fine.x[1::3])  # an odd ratio, so centres coincide
    np.testing.assert_allclose(coarse.fields[:, 1], fine.fields[:, 1, 1::3], atol=1e-9)


def test_burgers_data_set_is_resolved():
    problem = burgers1d.Burgers1D(points=64, frames=21)
    found = problem.sample([0, 1, 2, 3], seed=0)
    fine = burgers1d.solve(found.fields[:, 0], nu=0.01, t=found.t, num_modes=300, courant=0.5).fields
    np.testing.assert_allclose(found.fields, fine, atol=2e-5)


def test_burgers_data_set_is_hard_but_not_hopeless_for_persistence():
    fields = burgers1d.Burgers1D(points=64).sample(range(64), seed=0).fields
    for first in (0, 9):  # the initial state alone, and PDEBench's ten input frames
        truth = fields[:, first + 1 :]
        error = np.linalg.norm(truth - fields[:, first : first + 1], axis=2) / np.linalg.norm(truth, axis=2)
        assert 0.8 < error.mean() < 1.5


@needs_real_files
def test_burgers_reproduces_the_file_of_another_solver():
    with h5py.File(REAL_FILES / "1D_Burgers_Sols_Nu0.01.hdf5") as file:
        expected = file["tensor"][:2].astype(float)
        t = file["t-coordinate"][:-1].astype(float)
    found = burgers1d.solve(expected[:, 0], nu=0.01, t=t).fields
    # Their finite volumes have errors of about 1e-3; a factor pi in the viscosity would make 1e-1.
    assert relative_l2(found[:, 1:], expected[:, 1:]) < 1e-2


# --- reaction-diffusion ---------------------------------------------------------------------------


def no_reaction(u, v):
    return np.zeros_like(u), np.zeros_like(v)


def cosine_mode(*, rows, columns, num_rows, num_columns):
    y, x = (cell_centres(n, start=-1, end=1) for n in (num_rows, num_columns))
    return np.cos(np.pi * rows * (y + 1) / 2)[:, None] * np.cos(np.pi * columns * (x + 1) / 2)


def test_diffusion_decays_cosine_mode_at_exact_rate():
    mode = cosine_mode(rows=3, columns=1, num_rows=24, num_columns=16)
    t = np.array([0.0, 0.4, 3.0])
    found = reaction_diffusion2d.solve(
        np.stack([mode, 2 * mode], axis=-1)[None], diffusivities=(0.02, 0.05), reaction=no_reaction, t=t
    )
    for channel, (scale, diffusivity) in enumerate([(1, 0.02), (2, 0.05)]):
        rate = diffusivity * (np.pi / 2) ** 2 * (3**2 + 1**2)
        expected = scale * np.exp(-rate * t)[:, None, None] * mode
        np.testing.assert_allclose(found.fields[0, ..., channel], expected, atol=1e-12)


def test_diffusion_without_reaction_conserves_mean():
    states = np.random.default_rng(0).standard_normal((2, 16, 16, 2))
    fields = reaction_diffusion2d.solve(
        states, diffusivities=(1e-3, 5e-3), reaction=no_reaction, t=np.linspace(0, 5, 3)
    ).fields
    mean = fields.mean(axis=(2, 3))
    np.testing.assert_allclose(mean, np.broadcast_to(mean[:, :1], mean.shape), atol=1e-13)
    assert (np.abs(fields[:, -1]) < np.abs(fields[:, 0]).max()).all()


def test_reaction_of_uniform_state_equals_ordinary_differential_equation():
    found = reaction_diffusion2d.solve(
        np.broadcast_to([0.8, -0.3], (1, 4, 4, 2)),
        diffusivities=(1e-3, 5e-3),
        reaction=reaction_diffusion2d.fitzhugh_nagumo(5e-3),
        t=np.array([0.0, 5.0]),
    )

    def rates(_, state):
        u, v = state
        return [u - u**3 - 5e-3 - v, u - v]

    exact = solve_ivp(rates, (0, 5), [0.8, -0.3], rtol=1e-10, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(found.fields[0, 1], np.broadcast_to(exact, (4, 4, 2)), atol=1e-6)


def test_reaction_diffusion_error_falls_with_fourth_power_of_step():
    mode = cosine_mode(rows=2, columns=1, num_rows=12, num_columns=12)
    states = np.stack([mode, 0.5 - mode], axis=-1)[None]

    def at_end(max_step):
        return reaction_diffusion2d.solve(
            states,
            diffusivities=(0.01, 0.05),
            reaction=reaction_diffusion2d.fitzhugh_nagumo(5e-3),
            t=np.array([0.0, 0.25, 2.25]),
            max_step=max_step,
        ).fields[:, -1]

    fine = at_end(0.0125)
    errors = [np.abs(at_end(max_step) - fine).max() for max_step in (0.2, 0.1)]
    assert np.log2(errors[0] / errors[1]) > 3.7


@needs_real_files
def test_reaction_diffusion_reproduces_pdebench_generator():
    with h5py.File(REAL_FILES / "2D_diff-react_NA_NA.h5") as file:
        expected = file["0000/data"][:6].astype(float)
        t = file["0000/grid/t"][:6].astype(float)
        x = file["0000/grid/x"][:]
    found = reaction_diffusion2d.solve(
        expected[None, 0],
        diffusivities=(1e-3, 5e-3),
        reaction=reaction_diffusion2d.fitzhugh_nagumo(5e-3),
        t=t,
    )
    np.testing.assert_allclose(found.x, x, atol=1e-7)
    # Theirs is a second-order difference scheme started from white noise, which it damps less.
    assert relative_l2(found.fields[0, 5], expected[5]) < 0.03


# --- Darcy ----------------------------------------------------------------------------------------


def test_darcy_solution_satisfies_its_equations_and_is_positive():
    media = random_two_phase(range(3), seed=4, num_points=48, low=0.1, high=1.0)
    found = darcy2d.solve(media, source=2.0)
    for medium, solution in zip(media, found.fields[:, 0], strict=True):
        assert np.abs(darcy2d.operator(medium) @ solution.ravel() - 2.0).max() < 1e-8
        assert solution.min() > 0  # maximum principle


def test_darcy_error_falls_with_square_of_cell_size():
    def error(num_points):
        x, y = cell_centres(num_points)[:, None], cell_centres(num_points)[None, :]
        exact = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        source = 0.3 * 5 * np.pi**2 * exact
        found = darcy2d.solve(np.full((1, num_points, num_points), 0.3), source=source)
        return np.abs(found.fields[0, 0] - exact).max()

    order = np.log2(error(16) / error(32))
    assert 1.9 < order < 2.1
    assert error(64) < 2e-3


def test_darcy_flux_between_two_media_uses_harmonic_mean():
    matrix = darcy2d.operator(np.array([[0.1, 1.0], [0.1, 1.0]])).toarray()
    # Cells are 1/2 wide, so weights are 4 x coefficient. Cell 0 has two neighbours and two boundary faces.
    across, along, boundary = 4 * 2 * 0.1 * 1.0 / 1.1, 4 * 0.1, 2 * 4 * 0.1
    np.testing.assert_allclose(matrix[0], [across + along + 2 * boundary, -across, -along, 0])
    np.testing.assert_array_equal(matrix, matrix.T)


@needs_real_files
def test_darcy_reproduces_the_file_of_another_solver():
    with h5py.File(REAL_FILES / "2D_DarcyFlow_beta1.0_Train.hdf5") as file:
        medium = np.where(file["nu"][:1] < 0.5, 0.1, 1.0)
        expected = file["tensor"][:1]
    assert relative_l2(darcy2d.solve(medium, source=1.0).fields, expected) < 1e-6
