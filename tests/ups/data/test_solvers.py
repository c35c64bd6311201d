"""Physics of the solvers: exact solutions, conserved quantities, orders of convergence, residuals."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

from ups.data.solvers import (
    advection1d,
    burgers1d,
    darcy2d,
    reaction_diffusion2d,
    shallow_water2d,
    vorticity2d,
)
from ups.data.solvers.exponential import make_stepper
from ups.data.solvers.problem import cell_centres, random_sines, random_two_phase
from ups_store.errors import ConfigError

REAL_FILES = Path(__file__).resolve().parents[4] / "shared" / "data" / "pdebench"
needs_real_files = pytest.mark.skipif(not REAL_FILES.is_dir(), reason="no PDEBench files beside the checkout")


def relative_l2(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def smooth_states(num_samples, *, num_points, max_mean=0.3, max_wave_number=3, has_walls=False):
    return random_sines(
        range(num_samples),
        seed=1,
        num_points=num_points,
        num_waves=3,
        max_wave_number=max_wave_number,
        max_amplitude=0.6,
        max_mean=max_mean,
        has_walls=has_walls,
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


def on_the_line(initial, potential, *, x, t, viscosity):
    """The solution on the real line: the mean of initial(y) with weight exp(-G / (2 viscosity)),
    G = potential(y) + (x - y)^2 / (2 t). The largest exponent is taken out: weights span hundreds of decades.
    """
    y = np.linspace(-4, 5, 90_001)
    exponent = -(potential(y) + (x[:, None] - y) ** 2 / (2 * t)) / (2 * viscosity)
    weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return (initial(y) * weight).sum(axis=1) / weight.sum(axis=1)


@pytest.mark.parametrize(("nu", "time"), [(0.01, 0.2), (0.01, 1.0), (0.001, 0.05), (0.001, 1.0), (0.3, 0.1)])
def test_burgers_equals_solution_on_the_real_line(nu, time):
    x = cell_centres(128)

    def initial(y):
        return 0.3 + 0.4 * np.sin(2 * np.pi * y) + 0.2 * np.sin(4 * np.pi * y + 1)

    def potential(y):
        return (
            0.3 * y
            - 0.4 * np.cos(2 * np.pi * y) / (2 * np.pi)
            - 0.2 * np.cos(4 * np.pi * y + 1) / (4 * np.pi)
        )

    found = burgers1d.solve(initial(x)[None], nu=nu, t=np.array([0.0, time])).fields[0, 1]
    exact = on_the_line(initial, potential, x=x[::8], t=time, viscosity=nu / np.pi)
    np.testing.assert_allclose(found[::8], exact, atol=1e-11)


def test_burgers_equals_a_spectral_solution_with_small_steps():
    states = smooth_states(2, num_points=128)
    waves = 2j * np.pi * np.arange(65)
    kept = np.arange(65) < 43  # squares of these are free of aliasing on 128 points
    stepper = make_stepper(0.05 / np.pi * (waves**2).real, dt=0.5 / 400)

    def nonlinear(modes):
        return -0.5 * kept * waves * np.fft.rfft(np.fft.irfft(modes, axis=1) ** 2, axis=1)

    modes = np.fft.rfft(states, axis=1)
    for _ in range(400):
        modes = stepper.step(modes, nonlinear)
    found = burgers1d.solve(states, nu=0.05, t=np.array([0.0, 0.5])).fields[:, 1]
    np.testing.assert_allclose(found, np.fft.irfft(modes, axis=1), atol=1e-8)


def wall_states(num_samples, *, num_points):
    return smooth_states(num_samples, num_points=num_points, max_mean=0.0, max_wave_number=2, has_walls=True)


def between_walls(states, *, nu, t):
    return burgers1d.solve_between_walls(
        states, nu=nu, t=np.array([0.0, t]), max_amplitude=0.6, max_wave_number=2
    ).fields[:, 1]


def test_burgers_between_walls_equals_finite_differences_of_second_order():
    """Central fluxes; a wall carries none but of viscosity, towards the mirrored cell behind it."""
    nu, t = 0.1, 0.4
    errors = []
    for num_points in (64, 128):
        states = wall_states(2, num_points=num_points)

        def change(_, flat, num_points=num_points):
            u = flat.reshape(2, num_points)
            cells = np.concatenate([-u[:, :1], u, -u[:, -1:]], axis=1)
            flux = (cells[:, 1:] ** 2 + cells[:, :-1] ** 2) / 4
            flux[:, [0, -1]] = 0  # u = 0 at the walls
            flux = flux - nu / np.pi * np.diff(cells, axis=1) * num_points
            return -(np.diff(flux, axis=1) * num_points).ravel()

        steps = solve_ivp(change, (0, t), states.ravel(), method="BDF", rtol=1e-9, atol=1e-10)
        found = between_walls(states, nu=nu, t=t)
        errors.append(relative_l2(steps.y[:, -1].reshape(found.shape), found))
    assert errors[0] < 2e-3
    assert errors[1] < 0.3 * errors[0]


def test_burgers_between_walls_stands_still_there_and_is_the_same_on_other_grids():
    found = between_walls(wall_states(3, num_points=96), nu=0.03, t=0.7)
    finer = between_walls(wall_states(3, num_points=288), nu=0.03, t=0.7)
    np.testing.assert_allclose(found, finer[:, 1::3], atol=1e-9)
    extrapolated = np.array([35, -35, 21, -5]) / 16  # from the four cells nearest to a wall to its face
    for nearest in (finer[:, :4], finer[:, :-5:-1]):
        assert np.abs(nearest @ extrapolated).max() < 1e-6 < np.abs(nearest[:, 0]).max()


@pytest.mark.parametrize("refused", [{"kicks": 0.1}, {"mean": 0.2}, {"nu": 8e-4}])
def test_burgers_between_walls_refuses_what_walls_exclude(refused):
    with pytest.raises(ConfigError, match=next(iter(refused))):
        burgers1d.Burgers1D(points=64, walls=True, **refused)


def test_burgers_in_two_stretches_equals_one():
    states = smooth_states(3, num_points=256)
    whole = burgers1d.solve(states, nu=0.01, t=np.array([0.0, 0.3, 0.9])).fields
    rest = burgers1d.solve(whole[:, 1], nu=0.01, t=np.array([0.0, 0.6])).fields
    np.testing.assert_allclose(rest[:, 1], whole[:, 2], atol=1e-10)


def test_burgers_refuses_viscosity_that_float64_has_no_weights_for():
    states = smooth_states(1, num_points=64)
    with pytest.raises(ConfigError) as caught:
        burgers1d.solve(states, nu=1e-5, t=np.array([0.0, 1.0]))
    least = float(caught.value.hint.split()[-1])
    fields = burgers1d.solve(states, nu=least, t=np.array([0.0, 0.5, 20.0])).fields
    assert np.abs(fields - states.mean()).max() <= 0.6 + 1e-9  # the maximum principle


def test_burgers_conserves_mean_and_loses_energy():
    states = smooth_states(4, num_points=128)
    fields = burgers1d.solve(states, nu=0.01, t=np.linspace(0, 2, 11)).fields
    assert np.isfinite(fields).all()
    mean = fields.mean(axis=2)
    np.testing.assert_allclose(mean, np.broadcast_to(mean[:, :1], mean.shape), atol=1e-12)
    energy = (fields**2).mean(axis=2)
    assert (np.diff(energy, axis=1) < 0).all()


def test_burgers_with_a_mean_flow_is_the_same_solution_carried_along():
    states = smooth_states(2, num_points=128, max_mean=0.0)
    t = np.array([0.0, 0.5, 1.0])
    still = burgers1d.solve(states, nu=0.02, t=t).fields
    moving = burgers1d.solve(states + 0.5, nu=0.02, t=t).fields
    np.testing.assert_allclose(moving[:, 2], 0.5 + np.roll(still[:, 2], 64, axis=1), atol=1e-10)


def test_burgers_on_few_cells_equals_the_same_points_of_many():
    problems = [burgers1d.Burgers1D(points=points, frames=2, end_time=1.0) for points in (64, 192)]
    coarse, fine = (problem.sample([0], seed=0) for problem in problems)
    np.testing.assert_allclose(coarse.x, fine.x[1::3])  # an odd ratio, so centres coincide
    np.testing.assert_allclose(coarse.fields[:, 1], fine.fields[:, 1, 1::3], atol=1e-9)


def test_settings_of_initial_states_shift_them():
    usual = burgers1d.Burgers1D(points=64, frames=2).sample(range(40), seed=0).fields[:, 0]
    shifted = burgers1d.Burgers1D(points=64, frames=2, amplitude=0.9, mean=0.6, max_wave_number=6)
    found = shifted.sample(range(40), seed=0).fields[:, 0]
    means = found.mean(axis=1)
    assert 0.3 < np.abs(means).max() <= 0.6
    assert 0.6 < np.abs(found - means[:, None]).max() <= 0.9
    power = np.abs(np.fft.rfft(found, axis=1)) ** 2
    assert power[:, 4:7].mean() > 1 > power[:, 7:].max()
    assert (np.abs(np.fft.rfft(usual, axis=1)) ** 2)[:, 4:].max() < 1e-20


def test_burgers_data_set_is_hard_but_not_hopeless_for_persistence():
    fields = burgers1d.Burgers1D(points=64).sample(range(64), seed=0).fields
    for first in (0, 9):  # the initial state alone, and PDEBench's ten input frames
        truth = fields[:, first + 1 :]
        error = np.linalg.norm(truth - fields[:, first : first + 1], axis=2) / np.linalg.norm(truth, axis=2)
        assert 0.8 < error.mean() < 1.5


def test_kicked_burgers_without_size_is_burgers_and_a_kick_is_a_new_start():
    states, t = smooth_states(2, num_points=128), np.array([0.0, 0.2, 0.5])
    still = burgers1d.solve_kicked(states, np.zeros((2, 2, 128)), nu=0.03, t=t).fields
    np.testing.assert_allclose(still, burgers1d.solve(states, nu=0.03, t=t).fields, atol=1e-9)
    kick = 0.2 * np.cos(2 * np.pi * cell_centres(128))
    kicks = np.stack([np.zeros_like(kick), kick])[None].repeat(2, axis=0)
    kicked = burgers1d.solve_kicked(states, kicks, nu=0.03, t=t).fields
    np.testing.assert_array_equal(kicked[:, 1], still[:, 1])
    after = burgers1d.solve(still[:, 1] + kick, nu=0.03, t=np.array([0.0, 0.3])).fields[:, 1]
    np.testing.assert_allclose(kicked[:, 2], after, atol=1e-9)


def test_kicks_are_of_their_size_and_waves_and_belong_to_their_sample():
    problem = burgers1d.Burgers1D(points=64, frames=400, kicks=0.1)
    kicks = problem.kicks_of(3, seed=5)
    assert kicks.shape == (399, 64)
    np.testing.assert_allclose(np.sqrt((kicks**2).mean()), 0.1, rtol=0.05)
    power = np.abs(np.fft.rfft(kicks, axis=1)) ** 2
    assert power[:, 1:4].min() > 1e-9 > power[:, 4:].max()
    assert power[:, 0].max() < 1e-20
    np.testing.assert_allclose(np.corrcoef(kicks[:-1].ravel(), kicks[1:].ravel())[0, 1], 0, atol=0.1)
    shorter = burgers1d.Burgers1D(points=64, frames=5, kicks=0.1)
    np.testing.assert_array_equal(shorter.kicks_of(3, seed=5), kicks[:4])
    two = [shorter.sample(indices, seed=5).fields[-1] for indices in ([3], [2, 3])]
    np.testing.assert_array_equal(*two)  # whatever its neighbours
    still = burgers1d.Burgers1D(points=64, frames=5).sample([3], seed=5).fields
    np.testing.assert_array_equal(two[0][0], still[0, 0])
    assert np.abs(two[0][1] - still[0, 1]).max() > 0.01


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


def test_reaction_diffusion_after_a_burn_in_is_the_rest_of_the_run():
    settings = {"points": 16, "modes": 16}
    whole = reaction_diffusion2d.ReactionDiffusion2D(**settings, frames=5, end_time=1.0).sample([3], seed=0)
    rest = reaction_diffusion2d.ReactionDiffusion2D(**settings, frames=3, end_time=0.5, burn_in=0.5)
    found = rest.sample([3], seed=0)
    np.testing.assert_allclose(found.fields, whole.fields[:, 2:], atol=1e-5)
    assert found.t[0] == 0
    assert np.abs(found.fields[:, 0]).max() < 0.5 * np.abs(whole.fields[:, 0]).max()


def test_same_modes_give_the_same_patterns_and_media_on_another_grid():
    def patterns(points):
        settings = {"points": points, "modes": 6, "frames": 2, "end_time": 0.5, "burn_in": 1.0}
        problem = reaction_diffusion2d.ReactionDiffusion2D(**settings, du=0.05, dv=0.1)
        return problem.sample([0], seed=0).fields

    np.testing.assert_allclose(patterns(24), patterns(72)[:, :, 1::3, 1::3], atol=1e-4)
    coarse, fine = (
        random_two_phase([0], seed=0, num_points=n, low=0.1, high=1.0, num_modes=16) for n in (16, 48)
    )
    np.testing.assert_array_equal(coarse, fine[:, 1::3, 1::3])


# --- incompressible flow --------------------------------------------------------------------------


def vortices(num_samples, *, num_points=32, amplitude=3.0):
    return vorticity2d.random_vorticity(
        range(num_samples), seed=0, num_points=num_points, max_wave_number=3, amplitude=amplitude
    )


def energy_and_enstrophy(vorticity):
    modes = np.fft.fft2(vorticity, norm="forward")
    waves = 2 * np.pi * np.fft.fftfreq(vorticity.shape[-1], 1 / vorticity.shape[-1])
    squared = waves[:, None] ** 2 + waves**2
    squared[0, 0] = np.inf
    power = np.abs(modes) ** 2
    return 0.5 * (power / squared).sum(axis=(-2, -1)), 0.5 * power.sum(axis=(-2, -1))


def test_flow_of_taylor_green_vortices_decays_as_they_do():
    y, x = 2 * np.pi * cell_centres(24)[:, None], 2 * np.pi * cell_centres(24)
    vorticity = 4 * np.pi * np.sin(x) * np.sin(y)
    t = np.array([0.0, 0.3, 1.0])
    found = vorticity2d.solve(vorticity[None], nu=0.01, t=t).fields[0]
    exact = np.exp(-2 * 0.01 * (2 * np.pi) ** 2 * t)[:, None, None] * vorticity
    np.testing.assert_allclose(found, exact, atol=1e-8)


def test_flow_carries_vorticity_along_its_velocity():
    # The rate at t = 0, against derivatives and products of formulas at single points.
    x = cell_centres(32)
    y = x[:, None]
    stream = np.sin(2 * np.pi * x) * np.cos(4 * np.pi * y)
    vorticity = 20 * np.pi**2 * stream + 0.5 * 4 * np.pi**2 * np.cos(2 * np.pi * y)
    u = -4 * np.pi * np.sin(2 * np.pi * x) * np.sin(4 * np.pi * y) - 0.5 * 2 * np.pi * np.sin(2 * np.pi * y)
    v = -2 * np.pi * np.cos(2 * np.pi * x) * np.cos(4 * np.pi * y)
    along_x = 20 * np.pi**2 * 2 * np.pi * np.cos(2 * np.pi * x) * np.cos(4 * np.pi * y)
    along_y = -20 * np.pi**2 * 4 * np.pi * np.sin(2 * np.pi * x) * np.sin(4 * np.pi * y)
    along_y = along_y - 0.5 * 8 * np.pi**3 * np.sin(2 * np.pi * y)
    step = 1e-6
    later = vorticity2d.solve(vorticity[None], nu=0.0, t=np.array([0.0, step])).fields[0, 1]
    expected = -(u * along_x + v * along_y)
    np.testing.assert_allclose((later - vorticity) / step, expected, atol=1e-3 * np.abs(expected).max())


def test_flow_without_viscosity_conserves_energy_and_enstrophy():
    fields = vorticity2d.solve(vortices(2), nu=0.0, t=np.array([0.0, 0.5, 1.0]), courant=0.25).fields
    for values in energy_and_enstrophy(fields):
        np.testing.assert_allclose(values, np.broadcast_to(values[:, :1], values.shape), rtol=1e-6)
    assert relative_l2(fields[:, 2], fields[:, 0]) > 0.5  # it moves


def test_flow_loses_energy_at_the_rate_of_its_enstrophy():
    t = np.linspace(0, 0.2, 41)
    fields = vorticity2d.solve(vortices(1), nu=0.01, t=t).fields[0]
    energy, enstrophy = energy_and_enstrophy(fields)
    lost = 2 * 0.01 * (enstrophy.sum() - 0.5 * (enstrophy[0] + enstrophy[-1])) * t[1]
    np.testing.assert_allclose(energy[0] - energy[-1], lost, rtol=1e-4)


def test_forced_flow_from_rest_grows_as_the_source_and_settles_where_it_dissipates():
    x = cell_centres(16)
    phase = 2 * np.pi * (x[:, None] + x)
    source = np.sin(phase) + np.cos(phase)
    rate = 0.05 * 8 * np.pi**2
    t = np.array([0.0, 0.1, 5.0])
    found = vorticity2d.solve(np.zeros((1, 16, 16)), nu=0.05, t=t, forcing=0.1).fields[0]
    exact = (0.1 * (1 - np.exp(-rate * t)) / rate)[:, None, None] * source
    np.testing.assert_allclose(found, exact, atol=1e-8)


def test_flow_error_falls_with_fourth_power_of_step():
    def at_end(courant):
        return vorticity2d.solve(vortices(1), nu=0.005, t=np.array([0.0, 0.5]), courant=courant).fields[:, 1]

    fine = at_end(0.1)
    errors = [np.abs(at_end(courant) - fine).max() for courant in (1.6, 0.8)]
    assert np.log2(errors[0] / errors[1]) > 3.5


def test_flow_data_set_is_resolved_and_the_same_on_another_grid():
    problems = [vorticity2d.Vorticity2D(nu=2e-3, points=n, frames=3, end_time=1.0) for n in (16, 48)]
    coarse, fine = (problem.sample([0], seed=0).fields for problem in problems)
    np.testing.assert_allclose(coarse, fine[:, :, 1::3, 1::3], atol=1e-8)
    finer = vorticity2d.solve(fine[:, 0], nu=2e-3, t=np.array([0, 0.5, 1.0]), max_wave_number=34, courant=0.5)
    assert relative_l2(fine, finer.fields) < 1e-3


def test_random_vorticity_has_its_amplitude_and_no_longer_waves():
    states = vortices(3)
    np.testing.assert_allclose((states**2).mean(axis=(1, 2)), 9)
    power = np.abs(np.fft.fft2(states)) ** 2
    waves = np.fft.fftfreq(32, 1 / 32)
    assert power[:, waves[:, None] ** 2 + waves**2 > 9].max() < 1e-18 * power.max()
    assert power[:, 0, 0].max() < 1e-18 * power.max()


# --- shallow water --------------------------------------------------------------------------------


def dam_break(position, *, left, right):
    """Stoker's exact solution of a 1D dam break with g = 1, by x / t: the height."""

    def rarefaction_less_shock(middle):
        shock = (middle - right) * np.sqrt(0.5 * (middle + right) / (middle * right))
        return 2 * (np.sqrt(left) - np.sqrt(middle)) - shock

    middle = brentq(rarefaction_less_shock, right, left)
    speed = 2 * (np.sqrt(left) - np.sqrt(middle))
    shock = middle * speed / (middle - right)
    fan = (2 * np.sqrt(left) - position) ** 2 / 9
    pieces = [position < -np.sqrt(left), position < speed - np.sqrt(middle), position < shock]
    return np.select(pieces, [left, fan, middle], right)


def dam_break_error(num_points):
    x = cell_centres(num_points, start=-1, end=1)
    initial = np.broadcast_to(np.where(x < 0, 2.0, 1.0)[:, None], (num_points, 3))
    found = shallow_water2d.solve(initial[None], cell_size=2 / num_points, t=np.array([0.0, 0.4]))
    np.testing.assert_array_equal(found.fields[..., 0, 0], found.fields[..., 2, 0])
    return np.abs(found.fields[0, 1, :, 0, 0] - dam_break(x / 0.4, left=2.0, right=1.0)).mean()


def test_shallow_water_converges_to_the_exact_dam_break():
    errors = [dam_break_error(num_points) for num_points in (50, 100, 200)]
    assert errors[2] < 4e-3
    assert min(errors[0] / errors[1], errors[1] / errors[2]) > 1.7  # first order, as there is a shock


def test_shallow_water_is_second_order_where_it_is_smooth():
    def at_end(num_points):
        x = cell_centres(num_points, start=-1, end=1)
        initial = np.broadcast_to(1 + 0.1 * np.exp(-20 * x[:, None] ** 2), (num_points, 2))
        found = shallow_water2d.solve(initial[None], cell_size=2 / num_points, t=np.array([0.0, 0.3]))
        return found.fields[0, 1, :, 0, 0]

    fine = at_end(800)
    errors = [
        np.abs(at_end(n) - fine.reshape(n, -1).mean(axis=1)).mean() for n in (50, 100)
    ]  # cells hold means
    assert np.log2(errors[0] / errors[1]) > 1.7


def test_shallow_water_conserves_mass_and_keeps_symmetries_until_waves_reach_the_boundary():
    fields = shallow_water2d.ShallowWater2D(points=48, frames=4).sample([0], seed=0).fields[0, ..., 0]
    np.testing.assert_allclose(fields.sum(axis=(1, 2)), fields[0].sum(), rtol=1e-13)
    np.testing.assert_allclose(fields, fields.swapaxes(1, 2), atol=1e-12)
    np.testing.assert_allclose(fields, fields[:, ::-1], atol=1e-12)
    assert np.abs(fields[3] - fields[0]).max() > 0.1


def test_shallow_water_spreads_alike_along_axes_and_diagonals():
    fields = shallow_water2d.ShallowWater2D(points=128, frames=2, end_time=0.8).sample([1], seed=0)
    x = fields.x
    radius = np.hypot(x[:, None], x)
    height = fields.fields[0, 1, ..., 0]
    along = np.interp(radius, x[64:], height[64, 64:])  # the profile along an axis, turned around
    assert np.abs(along - height)[radius < 2].mean() < 0.01


def test_still_water_stays_still():
    fields = shallow_water2d.solve(np.full((1, 8, 6), 1.7), cell_size=0.1, t=np.array([0.0, 1.0])).fields
    np.testing.assert_array_equal(fields, 1.7)


@needs_real_files
def test_shallow_water_reproduces_pdebench_generator():
    with h5py.File(REAL_FILES / "2D_rdb_NA_NA.h5") as file:
        expected = file["0001/data"][:6, ..., 0].astype(float)
        t = file["0001/grid/t"][:6].astype(float)
        x = file["0001/grid/x"][:]
    found = shallow_water2d.solve(expected[None, 0], cell_size=5 / 128, t=t)
    np.testing.assert_allclose(found.x, x, atol=1e-6)
    # Both are second order; the front is one cell wide, and what is left there differs.
    assert relative_l2(found.fields[0, 5, ..., 0] - 1, expected[5] - 1) < 0.08


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
