"""2D Darcy flow, steady state, on the unit square: cell-centred finite volumes and a sparse direct solve.

    -div(a grad u) = beta,  (x, y) in (0, 1)^2,  u = 0 on the boundary.

Fluxes between cells use the harmonic mean of both coefficients, exact where the coefficient jumps at a face.
The matrix is symmetric and an M-matrix, so a positive right-hand side gives a positive solution.
Letters: N samples, X and Y cells along the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu

from ups.data.solvers.files import write_single_file
from ups.data.solvers.problem import (
    Array,
    Trajectories,
    cell_centres,
    check_at_least,
    check_positive,
    random_two_phase,
)

_LOW, _HIGH = 0.1, 1.0  # the two permeabilities of PDEBench


def solve(coefficient_NXY: Array, *, source: float | Array) -> Trajectories:
    """Solve for the steady state of every coefficient field.

    Args:
        coefficient_NXY: Permeability a at the cell centres, shape (N, X, Y), > 0.
        source: Right-hand side beta, one number or an array (X, Y).

    Returns:
        Trajectories with `fields` (N, 1, X, Y), the axis of length 1 standing for time, and `coefficient`.
    """
    num_x, num_y = coefficient_NXY.shape[1:]
    right_side = np.broadcast_to(np.asarray(source, dtype=np.float64), (num_x, num_y)).ravel()
    # The pattern is symmetric, which this ordering makes use of: a third faster than the default.
    factors = (splu(operator(a_XY), permc_spec="MMD_AT_PLUS_A") for a_XY in coefficient_NXY)
    solutions = np.stack([factor.solve(right_side).reshape(1, num_x, num_y) for factor in factors])
    return Trajectories(
        solutions,
        t=np.zeros(1),
        x=cell_centres(num_x),
        y=cell_centres(num_y),
        coefficient=coefficient_NXY,
    )


def operator(a_XY: Array) -> sparse.csc_array:
    """Assemble -div(a grad) with zero boundary values.

    Args:
        a_XY: Permeability, shape (X, Y).

    Returns:
        Sparse matrix (X Y, X Y), unknowns in C order, 1/length^2 times permeability.
    """
    num_x, num_y = a_XY.shape
    cells = np.arange(num_x * num_y).reshape(num_x, num_y)
    along_x = num_x**2 * _harmonic_mean(a_XY[1:], a_XY[:-1])
    along_y = num_y**2 * _harmonic_mean(a_XY[:, 1:], a_XY[:, :-1])
    rows = np.concatenate([cells[1:].ravel(), cells[:, 1:].ravel()])
    columns = np.concatenate([cells[:-1].ravel(), cells[:, :-1].ravel()])
    weights = np.concatenate([along_x.ravel(), along_y.ravel()])
    half = sparse.coo_array((weights, (rows, columns)), shape=(cells.size, cells.size))
    neighbours = half + half.T
    diagonal = neighbours.sum(axis=1) + _boundary_weights(a_XY).ravel()
    return sparse.csc_array(sparse.diags_array(diagonal) - neighbours)


def _harmonic_mean(a: Array, b: Array) -> Array:
    return np.asarray(2 * a * b / (a + b))


def _boundary_weights(a_XY: Array) -> Array:
    """Return what the boundary adds to the diagonal: it is half a cell away, hence twice the weight."""
    num_x, num_y = a_XY.shape
    weights = np.zeros_like(a_XY)
    weights[[0, -1], :] += 2 * num_x**2 * a_XY[[0, -1], :]
    weights[:, [0, -1]] += 2 * num_y**2 * a_XY[:, [0, -1]]
    return weights


@dataclass(frozen=True)
class Darcy2D:
    """Darcy data set: smooth random regions of permeability 0.1 and 1.0 under a uniform source.

    Attributes:
        beta: Uniform right-hand side, > 0; the solution is proportional to it.
        points: Cells per side.
        modes: Cosine modes per side that the regions are drawn from; as many as `points` by default. Data
            sets on other grids have the same regions if it is the same and at most `points`.
    """

    beta: float = 1.0
    points: int = 128
    modes: int | None = None
    batch_size: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        check_at_least(2, points=self.points, modes=self.points if self.modes is None else self.modes)

    @property
    def file_name(self) -> str:
        """Name as in PDEBench, such as `2D_DarcyFlow_beta1.0_Train.hdf5`."""
        return f"2D_DarcyFlow_beta{float(self.beta)}_Train.hdf5"

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers."""
        coefficient_NXY = random_two_phase(
            indices, seed=seed, num_points=self.points, low=_LOW, high=_HIGH, num_modes=self.modes
        )
        return solve(coefficient_NXY, source=self.beta)

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write a single-file layout with the root attribute `beta`."""
        write_single_file(path, batches, num_samples=num_samples, attrs={"beta": self.beta})
