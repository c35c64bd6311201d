"""1D viscous Burgers equation on the periodic unit interval: dealiased Fourier pseudo-spectral method.

    du/dt + d(u^2/2)/dx = (nu/pi) d^2u/dx^2,  x in (0, 1) periodic.

This is PDEBench's definition: its `nu` is pi times the viscosity. The mean is conserved exactly and only
carries the rest of the solution along (Galilean invariance), so only the deviation from it is solved for.
Letters: N samples, T time steps, X cells, K Fourier modes 0..K-1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from ups.data.solvers.exponential import make_stepper
from ups.data.solvers.files import write_single_file
from ups.data.solvers.problem import (
    Array,
    Trajectories,
    cell_centres,
    check_at_least,
    check_positive,
    random_sines,
)
from ups_store.errors import ConfigError

# Step times speed times highest wave number; measured error against a quarter of it: 1e-6.
_COURANT = 2.0
# Fourier coefficients are kept until those of the steepest possible front fell to this part of the first.
_TAIL = 1e-4
_MIN_MODES = 32
_MAX_MODES = 4096

# Chosen so that persistence has an nRMSE between 0.8 and 1.5 until t = 2, from t = 0 (1.36) as well as from
# t = 0.45 (0.84): the mean keeps the solution from vanishing, low wave numbers keep it from decaying early.
_NUM_WAVES, _MAX_WAVE_NUMBER, _MAX_AMPLITUDE, _MAX_MEAN = 3, 3, 0.6, 0.3


def num_modes_needed(*, nu: float, max_amplitude: float) -> int:
    """Count the Fourier modes that resolve any solution with |u - mean| <= `max_amplitude`.

    The steepest front is a tanh(a x / (2 nu/pi)) with a = `max_amplitude`; mode k of it falls as
    exp(-2 pi k nu / a).
    """
    return int(np.ceil(-np.log(_TAIL) * max_amplitude / (2 * np.pi * nu)))


def solve(
    initial_NX: Array,
    *,
    nu: float,
    t: Array,
    max_amplitude: float | None = None,
    num_modes: int | None = None,
    courant: float = _COURANT,
) -> Trajectories:
    """Solve Burgers' equation for a batch of states.

    Args:
        initial_NX: States at the cell centres at t[0], shape (N, X), with fewer than `num_modes` periods.
        nu: pi times the viscosity, > 0.
        t: Times, increasing from 0, shape (T,).
        max_amplitude: Bound of |u - mean| at t = 0, which sets the step. Give one and the same bound to every
            batch if a sample mustn't depend on its neighbours; by default it is taken from `initial_NX`.
        num_modes: Fourier modes K; by default what the cells hold and the steepest front needs.
        courant: Step size in units of 1 / (highest wave number x speed); fourth order.

    Returns:
        Trajectories with `fields` (N, T, X), point values at the cell centres.
    """
    num_points = initial_NX.shape[1]
    mean_N1 = initial_NX.mean(axis=1, keepdims=True)
    amplitude = float(np.abs(initial_NX - mean_N1).max()) if max_amplitude is None else max_amplitude
    if num_modes is None:
        num_modes = max((num_points + 1) // 2, num_modes_needed(nu=nu, max_amplitude=amplitude))
    wave_numbers_K = 2 * np.pi * np.arange(num_modes)
    deviation_NK = _to_modes(initial_NX - mean_N1, num_modes=num_modes)
    fields_NTX = np.empty((len(initial_NX), len(t), num_points))
    fields_NTX[:, 0] = initial_NX
    for frame in range(1, len(t)):
        interval = t[frame] - t[frame - 1]
        speed = _speed_bound(amplitude, t[frame - 1])
        num_steps = max(1, int(np.ceil(interval * wave_numbers_K[-1] * speed / courant)))
        stepper = make_stepper(-nu / np.pi * wave_numbers_K**2, dt=interval / num_steps)
        for _ in range(num_steps):
            deviation_NK = stepper.step(deviation_NK, _minus_flux_divergence)
        carried_NK = deviation_NK * np.exp(-1j * mean_N1 * t[frame] * wave_numbers_K)
        fields_NTX[:, frame] = mean_N1 + _to_points(carried_NK, num_points=num_points)
    return Trajectories(fields_NTX, t=t, x=cell_centres(num_points), parameters={"nu": nu})


def _speed_bound(amplitude: float, time: float) -> float:
    """Bound |u - mean| at a time: it never grows, and on a unit period du/dx <= 1/t keeps it below 1/(2t)."""
    return min(amplitude, 0.5 / time) if time > 0 else amplitude


def _minus_flux_divergence(u_NK: NDArray[Any]) -> NDArray[Any]:
    """Return the modes of -d(u^2/2)/dx, free of aliasing: the square is taken on 3/2 as many points."""
    num_modes = u_NK.shape[1]
    num_points = fft.next_fast_len(3 * num_modes, real=True)
    u_NX = fft.irfft(u_NK, n=num_points, axis=1, norm="forward")
    square_NK = fft.rfft(u_NX * u_NX, axis=1, norm="forward")[:, :num_modes]
    minus_half_derivative_K = -1j * np.pi * np.arange(num_modes)
    return np.asarray(minus_half_derivative_K * square_NK)


def _to_modes(u_NX: Array, *, num_modes: int) -> NDArray[np.complex128]:
    """Return the first modes of point values; zero for those that the points don't determine."""
    num_points = u_NX.shape[1]
    kept = min(num_modes, (num_points + 1) // 2)
    modes_NK = np.zeros((len(u_NX), num_modes), dtype=np.complex128)
    modes_NK[:, :kept] = fft.rfft(u_NX, axis=1, norm="forward")[:, :kept]
    return modes_NK


def _to_points(modes_NK: NDArray[np.complex128], *, num_points: int) -> Array:
    """Evaluate a Fourier series at the cells; on a finer grid of which they are part if it has more modes."""
    refinement = -(-2 * modes_NK.shape[1] // num_points)
    fine_NX = fft.irfft(modes_NK, n=refinement * num_points, axis=1, norm="forward")
    return np.asarray(fine_NX[:, ::refinement])


@dataclass(frozen=True)
class Burgers1D:
    """Burgers data set: a mean flow plus three sines of wave number up to 3, which steepen into fronts.

    Attributes:
        nu: pi times the viscosity, > 0; the cost grows as 1/nu^2.
        points: Cells X.
        frames: Stored time steps T, the initial state included.
        end_time: Time of the last one.
    """

    nu: float = 0.01
    points: int = 1024
    frames: int = 41
    end_time: float = 2.0
    batch_size: ClassVar[int] = 16

    def __post_init__(self) -> None:
        check_positive(nu=self.nu, end_time=self.end_time)
        check_at_least(2 * _MAX_WAVE_NUMBER + 1, points=self.points)
        check_at_least(2, frames=self.frames)
        if self._num_modes > _MAX_MODES:
            enough = 1.1 * self.nu * self._num_modes / _MAX_MODES  # a tenth more, as it is rounded
            raise ConfigError(
                f"nu = {self.nu} makes fronts that take {self._num_modes} Fourier modes",
                kind="unresolved",
                expected=f"at most {_MAX_MODES}",
                hint=f"use nu >= {enough:.2g}",
            )

    @property
    def file_name(self) -> str:
        """Name as in PDEBench, such as `1D_Burgers_Sols_Nu0.01.hdf5`."""
        return f"1D_Burgers_Sols_Nu{float(self.nu)}.hdf5"

    @property
    def _num_modes(self) -> int:
        return max(_MIN_MODES, num_modes_needed(nu=self.nu, max_amplitude=_MAX_AMPLITUDE))

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers."""
        initial_NX = random_sines(
            indices,
            seed=seed,
            num_points=self.points,
            num_waves=_NUM_WAVES,
            max_wave_number=_MAX_WAVE_NUMBER,
            max_amplitude=_MAX_AMPLITUDE,
            max_mean=_MAX_MEAN,
        )
        t = np.linspace(0.0, self.end_time, self.frames)
        return solve(initial_NX, nu=self.nu, t=t, max_amplitude=_MAX_AMPLITUDE, num_modes=self._num_modes)

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write a single-file layout with the root attribute `Nu`."""
        write_single_file(path, batches, num_samples=num_samples, attrs={"Nu": self.nu})
