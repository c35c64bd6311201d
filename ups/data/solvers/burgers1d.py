"""1D viscous Burgers equation, periodic or between walls: the exact solution of Cole and Hopf.

    du/dt + d(u^2/2)/dx = (nu/pi) d^2u/dx^2,  x in (0, 1).

This is PDEBench's definition: its `nu` is pi times the viscosity. With m the mean of u(y, 0), P the integral
of u(y, 0) - m, and K the periodic heat kernel,

    u(x, t) = m + <u(y, 0) - m>  averaged with the weight  exp(-P(y) / (2 viscosity)) K(x - m t - y, t).

All weights are positive, so nothing cancels, and no time step is taken: the error is that of the sum over y,
which is rounding error for smooth states. With kicks, a random field is added after every stored step, so
that one state has many futures; between them the solution is as exact. Between walls, where u is 0, the
solution is half a period of the odd one on a line twice as long.
Letters: N samples, T time steps, X cells, M nodes of the sum.

Source: Cole 1951, eq. 20; Hopf 1950, eq. 8; kicks: Bec, Frisch and Khanin 2000 (arXiv:nlin/0001022).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import fft

from ups.data.solvers.files import write_single_file
from ups.data.solvers.problem import (
    Array,
    RandomSines,
    Trajectories,
    cell_centres,
    check_not_negative,
    check_positive,
)
from ups_store.errors import ConfigError

# Nodes within the narrowest weight's standard deviation; with twice as many the solution moves by 2e-14.
_NODES_PER_DEVIATION = 2.5
# A weight that is exp(-40) of the largest adds nothing.
_NEGLIGIBLE = 40.0
# exp(-P / (2 viscosity)) and K may each span this exponent before the smallest weight that counts underflows.
_MAX_EXPONENT = 640.0
_KICKS = 1  # a stream of their own beside that of the initial states


def solve(
    initial_NX: Array,
    *,
    nu: float,
    t: Array,
    max_amplitude: float | None = None,
    max_wave_number: int | None = None,
) -> Trajectories:
    """Evaluate the solution of Burgers' equation for a batch of states.

    Args:
        initial_NX: States at the cell centres at t = 0, shape (N, X), with fewer than X/2 periods.
        nu: pi times the viscosity, > 0.
        t: Times, increasing from 0, shape (T,).
        max_amplitude: Bound of |u - mean| at t = 0. Give one and the same bound to every batch if a sample
            mustn't depend on its neighbours; by default it is taken from `initial_NX`.
        max_wave_number: Highest wave number in `initial_NX`; by default what the cells hold.

    Returns:
        Trajectories with `fields` (N, T, X), point values at the cell centres.

    Raises:
        ConfigError: Kind "unresolved", if weights are outside the range of float64.
    """
    num_points = initial_NX.shape[1]
    x = cell_centres(num_points)
    mean_N1 = initial_NX.mean(axis=1, keepdims=True)
    amplitude = float(np.abs(initial_NX - mean_N1).max()) if max_amplitude is None else max_amplitude
    wave_number = (num_points - 1) // 2 if max_wave_number is None else max_wave_number
    viscosity = nu / np.pi
    modes_NK = fft.rfft(initial_NX - mean_N1, axis=1, norm="forward")[:, : wave_number + 1]
    fields_NTX = np.empty((len(initial_NX), len(t), num_points))
    fields_NTX[:, 0] = initial_NX
    for frame, time in enumerate(t[1:], start=1):
        # The exponent's second derivative is at most 1/t + du/dx, in units of 1 / (2 viscosity).
        steepest = 1 / time + 2 * np.pi * wave_number * amplitude
        nodes = _NODES_PER_DEVIATION * np.sqrt(steepest / (2 * viscosity))
        num_nodes = _num_nodes(max(int(np.ceil(nodes)), 2 * wave_number + 1), num_points=num_points)
        kernel_XM = _heat_kernel(num_points, num_nodes, variance=viscosity * time)
        for sample, modes_K in enumerate(modes_NK):
            mean = mean_N1[sample, 0]
            # Carrying the initial state by m t instead of the points keeps one kernel for all samples.
            state_M, potential_M = _states_at_nodes(modes_K, shift=mean * time + x[0], num_nodes=num_nodes)
            weight_M = np.exp(-_centred(potential_M, nu=nu) / (2 * viscosity))
            total_X, weighted_X = (kernel_XM @ np.stack([weight_M, state_M * weight_M], axis=1)).T
            fields_NTX[sample, frame] = mean + weighted_X / total_X
    return Trajectories(fields_NTX, t=t, x=x, parameters={"nu": nu})


def solve_between_walls(
    initial_NX: Array, *, nu: float, t: Array, max_amplitude: float, max_wave_number: int
) -> Trajectories:
    """Evaluate the solution with u = 0 at both ends of the interval.

    The odd continuation over x = 1 is periodic on (0, 2), and stays odd. There y = x / 2 and v = u / 2 solve
    the same equation with a quarter of the viscosity.

    Args:
        initial_NX: As in `solve`, with u = 0 at 0 and 1.
        nu: As in `solve`.
        t: As in `solve`.
        max_amplitude: Bound of |u| at t = 0, as in `solve`.
        max_wave_number: Highest wave number in `initial_NX`, periods per unit length.

    Returns:
        Trajectories with `fields` (N, T, X).
    """
    num_points = initial_NX.shape[1]
    whole = solve(
        np.concatenate([initial_NX, -initial_NX[:, ::-1]], axis=1) / 2,
        nu=nu / 4,
        t=t,
        max_amplitude=max_amplitude / 2,
        max_wave_number=2 * max_wave_number,
    )
    fields_NTX = 2 * whole.fields[..., :num_points]
    return Trajectories(fields_NTX, t=t, x=cell_centres(num_points), parameters={"nu": nu})


def solve_kicked(initial_NX: Array, kicks_NTX: Array, *, nu: float, t: Array) -> Trajectories:
    """Evaluate the solution with a field added at once after every stored step but the last.

    Args:
        initial_NX: As in `solve`.
        kicks_NTX: What is added after steps 0 to T - 2, shape (N, T - 1, X), without mean.
        nu: As in `solve`.
        t: As in `solve`.

    Returns:
        Trajectories with `fields` (N, T, X): states before their kick.
    """
    fields_NTX = np.empty((len(initial_NX), len(t), initial_NX.shape[1]))
    fields_NTX[:, 0] = initial_NX
    for sample, kicks_TX in enumerate(kicks_NTX):  # one by one: a sample's nodes follow from its own states
        for frame, interval in enumerate(np.diff(t)):
            kicked_1X = (fields_NTX[sample, frame] + kicks_TX[frame])[None]
            fields_NTX[sample, frame + 1] = solve(kicked_1X, nu=nu, t=np.array([0.0, interval])).fields[0, 1]
    return Trajectories(fields_NTX, t=t, x=cell_centres(initial_NX.shape[1]), parameters={"nu": nu})


def random_kicks(
    rng: np.random.Generator, *, num: int, num_points: int, max_wave_number: int, size: float
) -> Array:
    """Draw independent fields without mean whose waves are normal and alike.

    Args:
        rng: What they are drawn from.
        num: How many.
        num_points: Cells; values are at their centres.
        max_wave_number: Longest wave vector, periods per unit length.
        size: Root mean square over all fields.

    Returns:
        Shape (num, X).
    """
    wave_numbers = np.arange(1, max_wave_number + 1)
    phases_KX = 2 * np.pi * np.outer(wave_numbers, cell_centres(num_points))
    waves_KX = np.concatenate([np.cos(phases_KX), np.sin(phases_KX)])
    amplitudes = rng.standard_normal((num, len(waves_KX)))
    return np.asarray(size / np.sqrt(max_wave_number) * amplitudes @ waves_KX)


def least_nu(*, max_amplitude: float, has_walls: bool = False) -> float:
    """Return the least nu at which every state of random sines with this bound can be solved for.

    The potential of a sine of wave number 1 spans amplitude / pi, that of half a period twice as much.
    """
    return max_amplitude * (1 + has_walls) / (2 * _MAX_EXPONENT)


def _states_at_nodes(modes_K: Array, *, shift: float, num_nodes: int) -> tuple[Array, Array]:
    """Evaluate a series without mean, carried along by `shift`, and its integral, at j / M: each (M,)."""
    wave_numbers_K = 2j * np.pi * np.arange(len(modes_K))
    carried_K = modes_K * np.exp(-wave_numbers_K * shift)
    integral_K = np.zeros_like(carried_K)
    integral_K[1:] = carried_K[1:] / wave_numbers_K[1:]
    state_M, potential_M = fft.irfft(np.stack([carried_K, integral_K]), n=num_nodes, norm="forward")
    return state_M, potential_M


def _centred(potential_M: Array, *, nu: float) -> Array:
    """Subtract the middle of a potential, so that neither its largest nor its smallest weight overflows."""
    low, high = potential_M.min(), potential_M.max()
    enough = float(high - low) * np.pi / (2 * _MAX_EXPONENT)
    if nu < enough:
        raise _too_small(nu, enough)
    return potential_M - (low + high) / 2


def _num_nodes(least: int, *, num_points: int) -> int:
    """Round up to a divisor of the number of points, or a multiple: then few distances differ."""
    divisors = [n for n in range(1, num_points + 1) if num_points % n == 0 and n >= least]
    return divisors[0] if divisors else -(-least // num_points) * num_points


def _heat_kernel(num_points: int, num_nodes: int, *, variance: float) -> Array:
    """Return the periodic heat kernel between cell centres and nodes j / M up to a factor, shape (X, M).

    `variance` is viscosity times time, half the variance.
    """
    reach = np.sqrt(4 * variance * (_MAX_EXPONENT + _NEGLIGIBLE))
    num_distances = max(num_points, num_nodes)
    distances = np.arange(num_distances) / num_distances + 0.5 / num_points
    distances -= np.round(distances)
    images = np.arange(-int(reach + 0.5), int(reach + 0.5) + 1)
    kernel = np.exp(-((distances[:, None] + images) ** 2) / (4 * variance)).sum(axis=1)
    points = num_distances // num_points * np.arange(num_points)
    nodes = num_distances // num_nodes * np.arange(num_nodes)
    return np.asarray(kernel[(points[:, None] - nodes) % num_distances])


def _too_small(nu: float, enough: float) -> ConfigError:
    return ConfigError(
        f"nu = {nu} gives the exact solution weights outside the range of float64",
        kind="unresolved",
        expected=f">= {enough:.3g}",
        hint=f"use nu >= {1.01 * enough:.2g}",
    )


@dataclass(frozen=True)
class Burgers1D(RandomSines):
    """Burgers data set: a mean flow plus a few sines of low wave number, which steepen into fronts.

    By default persistence has an nRMSE between 0.8 and 1.5 until t = 2, from t = 0 (1.36) as well as from
    t = 0.45 (0.84): the mean keeps the solution from vanishing, low wave numbers keep it from decaying early.

    Attributes:
        nu: pi times the viscosity, > 0.
        kicks: Root mean square of the random field added after every stored step; 0 for none. Its wave
            numbers are those of the initial states.
        walls: Whether u is 0 at both ends, instead of periodic; then states have no mean and no kicks.
    """

    nu: float = 0.01
    kicks: float = 0.0
    walls: bool = False
    amplitude: float = 0.6
    mean: float = 0.3
    max_wave_number: int = 3
    waves: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(nu=self.nu)
        check_not_negative(kicks=self.kicks)
        if self.walls and (self.kicks or self.mean not in (0.0, Burgers1D.mean)):
            name = "kicks" if self.kicks else "mean"
            raise ConfigError(
                f"{name} = {getattr(self, name)} between walls, where u is 0",
                kind="setting_out_of_range",
                expected="0",
                hint=f"leave out {name}, or walls",
            )
        if self.nu < (enough := least_nu(max_amplitude=self.amplitude, has_walls=self.walls)):
            raise _too_small(self.nu, enough)

    @property
    def file_name(self) -> str:
        """Name as in PDEBench, such as `1D_Burgers_Sols_Nu0.01.hdf5`; between walls `..._walls.hdf5`."""
        return f"1D_Burgers_Sols_Nu{float(self.nu)}{'_walls' * self.walls}.hdf5"

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers."""
        if self.walls:
            return solve_between_walls(
                self.initial_states(indices, seed=seed, has_walls=True),
                nu=self.nu,
                t=self.t,
                max_amplitude=self.amplitude,
                max_wave_number=self.max_wave_number,
            )
        initial_NX = self.initial_states(indices, seed=seed)
        if self.kicks:
            kicks = [self.kicks_of(index, seed=seed) for index in indices]
            return solve_kicked(initial_NX, np.stack(kicks), nu=self.nu, t=self.t)
        return solve(
            initial_NX,
            nu=self.nu,
            t=self.t,
            max_amplitude=self.amplitude,
            max_wave_number=self.max_wave_number,
        )

    def kicks_of(self, index: int, *, seed: int) -> Array:
        """Draw the kicks of a sample, shape (T - 1, X); longer trajectories begin with the same ones."""
        return random_kicks(
            np.random.default_rng([seed, index, _KICKS]),
            num=self.frames - 1,
            num_points=self.points,
            max_wave_number=self.max_wave_number,
            size=self.kicks,
        )

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write a single-file layout with the root attribute `Nu`."""
        write_single_file(path, batches, num_samples=num_samples, attrs={"Nu": self.nu})
