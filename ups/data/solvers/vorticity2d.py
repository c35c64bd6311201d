"""2D incompressible flow on the periodic unit square, as vorticity: dealiased Fourier pseudo-spectral method.

    dw/dt + u . grad w = nu lap(w) + f,   u = (dpsi/dy, -dpsi/dx),   -lap(psi) = w.

The product is taken on 3/2 as many points as modes are kept, so the truncated equations conserve energy and
enstrophy as the full ones do. Diffusion is exact, the rest of fourth order (`exponential`).
Letters: N samples, T time steps, Y and X cells; C velocity components; spectral arrays are (K, L), K wave
numbers along y of both signs, L along x from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from ups.data.solvers.exponential import make_stepper
from ups.data.solvers.files import write_converted
from ups.data.solvers.problem import (
    Array,
    Trajectories,
    Transient,
    cell_centres,
    check_at_least,
    check_not_negative,
    check_positive,
    sample_generator,
)
from ups_store.errors import ConfigError

# Step times speed times highest wave number; measured error against a quarter of it: 2e-6.
_COURANT = 1.0
# Modes that are kept, in units of the wave number at which the initial vorticity dissipates. Measured error
# against half as many again: 2e-4.
_BEYOND_DISSIPATION = 2.0
_MAX_WAVE_NUMBER = 512

Spectrum = NDArray[np.complex128]


def wave_number_needed(*, nu: float, amplitude: float, forcing: float = 0.0) -> int:
    """Return the highest wave number, in periods per unit length, that a flow of this vorticity takes.

    Enstrophy dissipates from about sqrt(w / nu) on, in radians per length. Forcing holds a vorticity of about
    its square root.
    """
    vorticity = max(amplitude, float(np.sqrt(forcing)))
    return int(np.ceil(_BEYOND_DISSIPATION * np.sqrt(vorticity / nu) / (2 * np.pi)))


def solve(
    initial_NYX: Array,
    *,
    nu: float,
    t: Array,
    forcing: float = 0.0,
    max_wave_number: int | None = None,
    courant: float = _COURANT,
) -> Trajectories:
    """Solve for the vorticity.

    Args:
        initial_NYX: Vorticity at the cell centres at t = 0, shape (N, Y, X) with Y = X. Its mean is kept.
        nu: Kinematic viscosity, >= 0, lengths^2 per time.
        t: Times, increasing from 0, shape (T,).
        forcing: F of the steady source F (sin 2 pi (x + y) + cos 2 pi (x + y)), Li et al. 2021.
        max_wave_number: Modes that are kept along each axis; by default what the cells hold.
        courant: Step size in units of 1 / (highest wave number x speed); fourth order.

    Returns:
        Trajectories with `fields` (N, T, Y, X), point values at the cell centres.
    """
    num_points = initial_NYX.shape[1]
    kept = (num_points - 1) // 2 if max_wave_number is None else max_wave_number
    grid = _Grid(kept)
    source_KL = _resized(_to_modes(_diagonal_waves(num_points, forcing)), grid.num_points)
    fields_NTYX = np.empty((len(initial_NYX), len(t), num_points, num_points))
    for initial_YX, fields_TYX in zip(initial_NYX, fields_NTYX, strict=True):
        modes_KL = grid.kept_KL * _resized(_to_modes(initial_YX), grid.num_points)
        fields_TYX[0] = initial_YX
        for frame, (begin, end) in enumerate(pairwise(t), start=1):
            modes_KL = _advance(
                modes_KL, grid, nu=nu, source_KL=source_KL, interval=end - begin, courant=courant
            )
            fields_TYX[frame] = _to_points(modes_KL, num_points=num_points)
    x = cell_centres(num_points)
    return Trajectories(fields_NTYX, t=t, x=x, y=x, parameters={"nu": nu})


def _advance(
    modes_KL: Spectrum, grid: _Grid, *, nu: float, source_KL: Spectrum, interval: float, courant: float
) -> Spectrum:
    """Advance one sample by steps that its own speed allows, so that it doesn't depend on its neighbours."""
    fastest = 2 * np.pi * grid.max_wave_number * grid.speed(modes_KL)
    num_steps = max(1, int(np.ceil(interval * fastest / courant)))
    stepper = make_stepper(nu * grid.laplacian_KL, dt=interval / num_steps)
    for _ in range(num_steps):
        modes_KL = stepper.step(modes_KL, lambda w_KL: grid.advection(w_KL) + source_KL)
    return modes_KL


class _Grid:
    """Modes up to a wave number, and the points on which their products are free of aliasing.

    Attributes:
        max_wave_number: Along each axis, periods per unit length.
        num_points: Points per side.
        kept_KL: 1 for modes that are kept, 0 for those that only products have.
        laplacian_KL: Of every mode, 1/length^2.
    """

    def __init__(self, max_wave_number: int) -> None:
        self.max_wave_number = max_wave_number
        self.num_points = fft.next_fast_len(3 * max_wave_number + 1, real=True)
        rows = np.rint(fft.fftfreq(self.num_points, 1 / self.num_points))[:, None]
        columns = np.arange(self.num_points // 2 + 1.0)[None, :]
        self.kept_KL = 1.0 * (np.maximum(np.abs(rows), columns) <= max_wave_number)
        self._dy_KL, self._dx_KL = 2j * np.pi * rows, 2j * np.pi * columns
        self.laplacian_KL = (self._dy_KL**2 + self._dx_KL**2).real
        inverse_KL = np.zeros_like(self.laplacian_KL)
        np.divide(-1.0, self.laplacian_KL, out=inverse_KL, where=self.laplacian_KL != 0)
        self._velocity_CKL = np.stack([self._dy_KL * inverse_KL, -self._dx_KL * inverse_KL])
        self._cross_KL = -self.kept_KL * self._dx_KL * self._dy_KL
        self._difference_KL = -self.kept_KL * (self._dx_KL**2 - self._dy_KL**2)

    def velocity(self, modes_KL: Spectrum) -> Array:
        """Evaluate u and v at the points, shape (2, Y, X)."""
        return np.asarray(fft.irfft2(self._velocity_CKL * modes_KL, s=self._shape, norm="forward"))

    def speed(self, modes_KL: Spectrum) -> float:
        """Return the highest speed along an axis."""
        return float(np.abs(self.velocity(modes_KL)).max())

    def advection(self, modes_KL: Spectrum) -> Spectrum:
        """Return the modes of -u . grad w, as the curl of -div(u u): four transforms instead of five."""
        u, v = self.velocity(modes_KL)
        normal_KL, shear_KL = fft.rfft2(np.stack([v * v - u * u, u * v]), norm="forward")
        return np.asarray(self._cross_KL * normal_KL + self._difference_KL * shear_KL)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.num_points, self.num_points


def _to_modes(field_YX: Array) -> Spectrum:
    return np.asarray(fft.rfft2(field_YX, norm="forward"))


def _to_points(modes_KL: Spectrum, *, num_points: int) -> Array:
    """Evaluate a Fourier series at the cells; on a finer grid of which they are part if it has more modes."""
    refinement = -(-len(modes_KL) // num_points)
    fine = refinement * num_points
    fine_YX = fft.irfft2(_resized(modes_KL, fine), s=(fine, fine), norm="forward")
    return np.asarray(fine_YX[::refinement, ::refinement])


def _resized(modes_KL: Spectrum, num_points: int) -> Spectrum:
    """Return the modes that both grids hold, on the grid with `num_points` points per side."""
    highest = (min(len(modes_KL), num_points) - 1) // 2
    resized = np.zeros((num_points, num_points // 2 + 1), dtype=np.complex128)
    resized[: highest + 1, : highest + 1] = modes_KL[: highest + 1, : highest + 1]
    if highest > 0:
        resized[-highest:, : highest + 1] = modes_KL[-highest:, : highest + 1]
    return resized


def _diagonal_waves(num_points: int, forcing: float) -> Array:
    x = cell_centres(num_points)
    phase = 2 * np.pi * (x[:, None] + x)
    return np.asarray(forcing * (np.sin(phase) + np.cos(phase)))


def random_vorticity(
    indices: Sequence[int], *, seed: int, num_points: int, max_wave_number: int, amplitude: float
) -> Array:
    """Draw smooth periodic vorticity: all waves of length up to `max_wave_number`, normal and alike.

    Args:
        indices: Sample numbers, N of them.
        seed: Seed of the data set.
        num_points: Cells per side, more than twice `max_wave_number`; values are at their centres.
        max_wave_number: Longest wave vector, periods per unit length.
        amplitude: Root mean square of every sample.

    Returns:
        Vorticity without mean, shape (N, Y, X).
    """
    waves = np.arange(-max_wave_number, max_wave_number + 1)
    squared = waves[:, None] ** 2 + waves**2
    is_drawn = (squared > 0) & (squared <= max_wave_number**2)
    along = np.exp(2j * np.pi * np.outer(cell_centres(num_points), waves))
    states = np.empty((len(indices), num_points, num_points))
    for row, index in enumerate(indices):
        noise = sample_generator(index, seed=seed).standard_normal((2, *squared.shape))
        states[row] = (along @ (is_drawn * (noise[0] + 1j * noise[1])) @ along.T).real
        states[row] *= amplitude / np.sqrt((states[row] ** 2).mean())
    return states


@dataclass(frozen=True)
class Vorticity2D(Transient):
    """Flow data set: random vortices on a periodic square that decay, or are kept going by a steady source.

    Attributes:
        nu: Kinematic viscosity, > 0.
        points: Cells per side.
        amplitude: Root mean square of the initial vorticity, > 0; 1 / amplitude is the time of a turn.
        max_wave_number: Longest initial wave vector, periods per unit length.
        forcing: Amplitude of the source F (sin 2 pi (x + y) + cos 2 pi (x + y)), >= 0.
    """

    nu: float = 1e-3
    points: int = 64
    amplitude: float = 5.0
    max_wave_number: int = 4
    forcing: float = 0.0
    batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(nu=self.nu, amplitude=self.amplitude)
        check_not_negative(forcing=self.forcing)
        check_at_least(1, max_wave_number=self.max_wave_number)
        check_at_least(2 * self.max_wave_number + 1, points=self.points)
        if self._kept > _MAX_WAVE_NUMBER:
            enough = 1.01 * self.nu * (self._kept / _MAX_WAVE_NUMBER) ** 2
            raise ConfigError(
                f"nu = {self.nu} makes vortices of wave number {self._kept}",
                kind="unresolved",
                expected=f"at most {_MAX_WAVE_NUMBER}",
                hint=f"use nu >= {enough:.2g}",
            )

    @property
    def _kept(self) -> int:
        needed = wave_number_needed(nu=self.nu, amplitude=self.amplitude, forcing=self.forcing)
        return max(needed, 3 * self.max_wave_number)

    @property
    def file_name(self) -> str:
        """Name such as `2D_Vorticity_Nu0.001.hdf5`; PDEBench has no such file."""
        return f"2D_Vorticity_Nu{float(self.nu)}.hdf5"

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers."""
        initial_NYX = random_vorticity(
            indices,
            seed=seed,
            num_points=self.points,
            max_wave_number=self.max_wave_number,
            amplitude=self.amplitude,
        )
        return solve(initial_NYX, nu=self.nu, t=self.t, forcing=self.forcing, max_wave_number=self._kept)

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write a dataset `data` with the root attributes `nu` and `forcing`."""
        attrs = {"nu": self.nu, "forcing": self.forcing}
        write_converted(path, batches, num_samples=num_samples, attrs=attrs)
