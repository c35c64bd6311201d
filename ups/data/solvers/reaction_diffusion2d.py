"""2D FitzHugh-Nagumo reaction-diffusion on a square without flux: cosine spectral, exponential time stepping.

    du/dt = Du lap(u) + u - u^3 - k - v      (activator, channel 0)
    dv/dt = Dv lap(v) + u - v                (inhibitor, channel 1)

on (-1, 1)^2 with zero normal derivative at the boundary, as in PDEBench's diff-react. A cosine basis with
points at cell centres has that boundary condition built in.
Letters: N samples, T time steps, Y and X cells, C channels; spectral arrays are (N, C, Y, X).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
from scipy import fft

from ups.data.solvers.exponential import make_stepper
from ups.data.solvers.files import square, write_groups
from ups.data.solvers.problem import (
    Array,
    Trajectories,
    Transient,
    cell_centres,
    check_at_least,
    check_not_negative,
    check_positive,
    random_noise,
)

# From (u, v), each (N, Y, X), to their rates.
Reaction = Callable[[Array, Array], tuple[Array, Array]]

_START, _END = -1.0, 1.0
# White noise reacts fast until diffusion has smoothed it: early on the step is a fifth. Measured error: 2e-6.
_MAX_STEP, _ROUGH_TIME, _ROUGH_FACTOR = 0.05, 0.25, 0.2


def fitzhugh_nagumo(k: float) -> Reaction:
    """Return the reaction term u - u^3 - k - v, u - v."""

    def reaction(u: Array, v: Array) -> tuple[Array, Array]:
        return u - u * u * u - k - v, u - v

    return reaction


def solve(
    initial_NYXC: Array,
    *,
    diffusivities: tuple[float, float],
    reaction: Reaction,
    t: Array,
    max_step: float = _MAX_STEP,
    rough_until: float = _ROUGH_TIME,
) -> Trajectories:
    """Solve a two-species reaction-diffusion system on (-1, 1)^2 without flux through the boundary.

    Args:
        initial_NYXC: States at the cell centres at t = 0, shape (N, Y, X, 2).
        diffusivities: Du and Dv, lengths^2 per time.
        reaction: Rates of u and v.
        t: Times, increasing from 0, shape (T,).
        max_step: Largest time step. Fourth order.
        rough_until: Until this time the step is a fifth of it.

    Returns:
        Trajectories with `fields` (N, T, Y, X, 2).
    """
    num_rows, num_columns = initial_NYXC.shape[1:3]
    laplacian_YX = _laplacian(num_rows, num_columns)
    linear_CYX = np.stack([diffusivity * laplacian_YX for diffusivity in diffusivities])

    def nonlinear(modes_NCYX: Array) -> Array:
        fields = _to_points(modes_NCYX)
        return _to_modes(np.stack(reaction(fields[:, 0], fields[:, 1]), axis=1))

    modes_NCYX = _to_modes(np.moveaxis(initial_NYXC, -1, 1))
    frames = [initial_NYXC]
    for begin, end in pairwise(t):
        step = max_step * (_ROUGH_FACTOR if begin < rough_until else 1.0)
        num_steps = int(np.ceil((end - begin) / step - 1e-9))  # rounding must not add a step
        stepper = make_stepper(linear_CYX, dt=(end - begin) / num_steps)
        for _ in range(num_steps):
            modes_NCYX = stepper.step(modes_NCYX, nonlinear)
        frames.append(np.moveaxis(_to_points(modes_NCYX), 1, -1))
    return Trajectories(
        np.stack(frames, axis=1),
        t=t,
        x=cell_centres(num_columns, start=_START, end=_END),
        y=cell_centres(num_rows, start=_START, end=_END),
        parameters={"Du": diffusivities[0], "Dv": diffusivities[1]},
    )


def _laplacian(num_rows: int, num_columns: int) -> Array:
    """Return the Laplacian of every cosine mode, shape (Y, X), 1/length^2."""
    rows = np.pi / (_END - _START) * np.arange(num_rows)
    columns = np.pi / (_END - _START) * np.arange(num_columns)
    return np.asarray(-(rows[:, None] ** 2 + columns[None, :] ** 2))


def _to_modes(fields_NCYX: Array) -> Array:
    return np.asarray(fft.dctn(fields_NCYX, axes=(2, 3), norm="ortho"))


def _on_cells(fields_NYXC: Array, num_points: int) -> Array:
    """Evaluate cosine series on another number of cells; modes that these don't resolve are left out."""
    num_given = fields_NYXC.shape[1]
    if num_given == num_points:
        return fields_NYXC
    kept = min(num_given, num_points)
    modes_NCYX = np.zeros((len(fields_NYXC), 2, num_points, num_points))
    given_NCYX = _to_modes(np.moveaxis(fields_NYXC, -1, 1))
    modes_NCYX[:, :, :kept, :kept] = given_NCYX[:, :, :kept, :kept] * (num_points / num_given)
    return np.moveaxis(_to_points(modes_NCYX), 1, -1)


def _to_points(modes_NCYX: Array) -> Array:
    return np.asarray(fft.idctn(modes_NCYX, axes=(2, 3), norm="ortho"))


@dataclass(frozen=True)
class ReactionDiffusion2D(Transient):
    """Reaction-diffusion data set: patterns that grow out of white noise.

    The noise is gone within a few hundredths of time, so that the first stored step is like no other. With a
    `burn_in` the stored times begin after it.

    Attributes:
        du: Diffusivity of the activator, lengths^2 per time, > 0.
        dv: Diffusivity of the inhibitor, > 0.
        k: Constant sink of the activator, > 0.
        points: Cells per side.
        burn_in: Time from the noise to the first stored step, >= 0.
        amplitude: Standard deviation of the noise, > 0.
        modes: Cells per side that the noise is drawn for; as many as `points` by default. Data sets on
            other grids start from the same noise if it is the same, as far as they resolve it.
    """

    du: float = 1e-3
    dv: float = 5e-3
    k: float = 5e-3
    points: int = 128
    end_time: float = 5.0
    burn_in: float = 0.0
    amplitude: float = 1.0
    modes: int | None = None
    batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(du=self.du, dv=self.dv, k=self.k, amplitude=self.amplitude)
        check_not_negative(burn_in=self.burn_in)
        check_at_least(2, points=self.points, modes=self._modes)

    @property
    def _modes(self) -> int:
        return self.points if self.modes is None else self.modes

    @property
    def file_name(self) -> str:
        """Name as in PDEBench, which doesn't hold the parameters."""
        return "2D_diff-react_NA_NA.h5"

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers."""
        noise_NYXC = self.amplitude * random_noise(indices, seed=seed, shape=(self._modes, self._modes, 2))
        initial_NYXC = _on_cells(noise_NYXC, self.points)
        if self.burn_in > 0:
            rough = min(self.burn_in, _ROUGH_TIME)
            initial_NYXC = self._solve(initial_NYXC, np.unique([0.0, rough, self.burn_in])).fields[:, -1]
        return self._solve(initial_NYXC, self.t, rough_until=_ROUGH_TIME - self.burn_in)

    def _solve(self, initial_NYXC: Array, t: Array, *, rough_until: float = _ROUGH_TIME) -> Trajectories:
        return solve(
            initial_NYXC,
            diffusivities=(self.du, self.dv),
            reaction=fitzhugh_nagumo(self.k),
            t=t,
            rough_until=rough_until,
        )

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write one group per sample, the settings under the names that PDEBench's generator gives them."""
        settings = {
            "Du": self.du,
            "Dv": self.dv,
            "k": self.k,
            "t": self.end_time,
            "burn_in": self.burn_in,
            "tdim": self.frames,
            **square(start=_START, end=_END, points=self.points),
        }
        write_groups(path, batches, num_samples=num_samples, settings=settings)
