"""1D linear advection on the periodic unit interval, solved by exact shift.

    du/dt + beta du/dx = 0,  x in (0, 1) periodic,  so  u(x, t) = u(x - beta t, 0).

Letters: N samples, T time steps, X cells, K Fourier modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import fft

from ups.data.solvers.files import write_single_file
from ups.data.solvers.problem import Array, RandomSines, Trajectories, cell_centres, check_positive


def solve(initial_NX: Array, *, beta: float, t: Array) -> Trajectories:
    """Shift states by beta t, in Fourier space: exact for states with fewer than X/2 periods.

    Args:
        initial_NX: States at the cell centres at t = 0, shape (N, X).
        beta: Speed, lengths per time.
        t: Times, shape (T,).

    Returns:
        Trajectories with `fields` (N, T, X).
    """
    num_points = initial_NX.shape[1]
    spectrum_NK = fft.rfft(initial_NX, axis=1)
    wave_numbers_K = 2 * np.pi * np.arange(spectrum_NK.shape[1])
    shift_TK = np.exp(-1j * np.outer(beta * t, wave_numbers_K))
    fields_NTX = fft.irfft(spectrum_NK[:, None, :] * shift_TK, n=num_points, axis=2)
    return Trajectories(fields_NTX, t=t, x=cell_centres(num_points), parameters={"beta": beta})


@dataclass(frozen=True)
class Advection1D(RandomSines):
    """Advection data set: sums of sines, by default PDEBench's two, carried around the unit interval.

    Attributes:
        beta: Speed, lengths per time, > 0.
    """

    beta: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(beta=self.beta)

    @property
    def file_name(self) -> str:
        """Name as in PDEBench, such as `1D_Advection_Sols_beta0.4.hdf5`."""
        return f"1D_Advection_Sols_beta{float(self.beta)}.hdf5"

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and shift the samples of these numbers."""
        return solve(self.initial_states(indices, seed=seed), beta=self.beta, t=self.t)

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write a single-file layout with the root attribute `beta`."""
        write_single_file(path, batches, num_samples=num_samples, attrs={"beta": self.beta})
