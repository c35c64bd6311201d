"""2D shallow water over a flat bottom: second-order finite volumes with the HLL flux.

    dh/dt + div(h u) = 0,   d(h u)/dt + div(h u u) + grad(g h^2 / 2) = 0

on (-2.5, 2.5)^2 with open ends, as in PDEBench's radial dam break. Slopes of (h, u, v) are limited (MUSCL);
what leaves a cell enters the next, so mass changes by what crosses the boundary alone.
Letters: N samples, T time steps, X and Y cells, C the components h, h u, h v.

Source: Harten, Lax & van Leer 1983 (the flux); van Leer 1979 (limited slopes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from ups.data.solvers.files import square, write_groups
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

_START, _END = -2.5, 2.5
_OUTSIDE = 1.0  # height of the water outside the dam
_COURANT = 0.45  # of both axes together: at most half a cell each step
_GHOSTS = 2
_SUBCELLS = 8  # per side, by which the share of a cell inside the dam is counted


def solve(initial_NXY: Array, *, cell_size: float, t: Array, gravity: float = 1.0) -> Trajectories:
    """Solve for the height of water that is at rest at t = 0.

    Args:
        initial_NXY: Heights, means over the cells, shape (N, X, Y), > 0.
        cell_size: Side of a cell.
        t: Times, increasing from 0, shape (T,).
        gravity: Acceleration g, > 0.

    Returns:
        Trajectories with `fields` (N, T, X, Y, 1).
    """
    num_x, num_y = initial_NXY.shape[1:]
    fields_NTXY = np.empty((len(initial_NXY), len(t), num_x, num_y))
    for height_XY, fields_TXY in zip(initial_NXY, fields_NTXY, strict=True):
        state_CXY = np.stack([height_XY, np.zeros_like(height_XY), np.zeros_like(height_XY)])
        fields_TXY[0] = height_XY
        for frame, (begin, end) in enumerate(pairwise(t), start=1):
            state_CXY = _advance(state_CXY, end - begin, cell_size=cell_size, gravity=gravity)
            fields_TXY[frame] = state_CXY[0]
    x, y = (cell_centres(n, start=-n * cell_size / 2, end=n * cell_size / 2) for n in (num_x, num_y))
    return Trajectories(fields_NTXY[..., None], t=t, x=x, y=y, parameters={"g": gravity})


def _advance(state_CXY: Array, interval: float, *, cell_size: float, gravity: float) -> Array:
    """Advance one sample; steps are those of its own waves, so that it doesn't depend on its neighbours.

    Heun's method, which doesn't make new extrema (SSP).
    """
    left = interval
    while left > 0:
        height, *momenta = state_CXY
        wave = np.sqrt(gravity * height)
        fastest = sum(float((np.abs(momentum) / height + wave).max()) for momentum in momenta)
        step = min(2 * _COURANT * cell_size / fastest, left)
        half = state_CXY + step * _rate(state_CXY, cell_size=cell_size, gravity=gravity)
        state_CXY = 0.5 * (state_CXY + half + step * _rate(half, cell_size=cell_size, gravity=gravity))
        left -= step
    return state_CXY


def _rate(state_CXY: Array, *, cell_size: float, gravity: float) -> Array:
    """Return the rate of change, from the fluxes along x and, with the axes and momenta swapped, along y."""
    along_x = _flux_difference(state_CXY, gravity)
    swapped = [0, 2, 1]
    along_y = _flux_difference(state_CXY[swapped].swapaxes(1, 2), gravity)[swapped].swapaxes(1, 2)
    return np.asarray(-(along_x + along_y) / cell_size)


def _flux_difference(state_CXY: Array, gravity: float) -> Array:
    """Return the flux through the end of every cell less that through its start, along x."""
    h, hu, hv = np.pad(state_CXY, ((0, 0), (_GHOSTS, _GHOSTS), (0, 0)), mode="edge")
    cells = np.stack([h, hu / h, hv / h])
    jumps = np.diff(cells, axis=1)
    half_slopes = 0.5 * _limited(jumps[:, :-1], jumps[:, 1:])
    inner = cells[:, 1:-1]
    return np.diff(_hll((inner + half_slopes)[:, :-1], (inner - half_slopes)[:, 1:], gravity), axis=1)


def _limited(before: Array, after: Array) -> Array:
    """Return the monotonised central slope: none at an extremum, at most twice either jump."""
    least = np.minimum(2 * np.minimum(np.abs(before), np.abs(after)), 0.5 * np.abs(before + after))
    return np.asarray(np.where(before * after > 0, np.sign(before) * least, 0.0))


def _hll(left: Array, right: Array, gravity: float) -> Array:
    """Return the HLL flux of (h, h u, h v) along the normal of u between states (h, u, v)."""
    (h_left, u_left, _), (h_right, u_right, _) = left, right
    c_left, c_right = np.sqrt(gravity * h_left), np.sqrt(gravity * h_right)
    slowest = np.minimum(0.0, np.minimum(u_left - c_left, u_right - c_right))
    fastest = np.maximum(0.0, np.maximum(u_left + c_left, u_right + c_right))
    flux_left, flux_right = _flux(left, gravity), _flux(right, gravity)
    jump = _conserved(right) - _conserved(left)
    mixed = fastest * flux_left - slowest * flux_right + slowest * fastest * jump
    return np.asarray(mixed / (fastest - slowest))


def _conserved(state: Array) -> Array:
    h, u, v = state
    return np.stack([h, h * u, h * v])


def _flux(state: Array, gravity: float) -> Array:
    h, u, v = state
    return np.stack([h * u, h * u * u + 0.5 * gravity * h * h, h * u * v])


@dataclass(frozen=True)
class ShallowWater2D(Transient):
    """Radial dam break: a round column of water, twice as high as the water around it, collapses.

    The file holds the height alone, as PDEBench's: the first state is at rest and determines all others, but
    one of these alone doesn't determine the next.

    Attributes:
        height: Water inside the dam, > 1; outside it is 1.
        min_radius: Radii are uniform from this to `max_radius`, > 0.
        max_radius: The domain is a square of side 5.
        shift: Dams are centred within this of the middle, along each axis; PDEBench's are in the middle.
        points: Cells per side.
    """

    height: float = 2.0
    min_radius: float = 0.3
    max_radius: float = 0.7
    shift: float = 0.0
    points: int = 128
    end_time: float = 1.0
    batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(height=self.height, min_radius=self.min_radius)
        check_not_negative(shift=self.shift)
        check_at_least(2, points=self.points)
        room = _END - self.shift
        if not self.min_radius <= self.max_radius <= room:
            raise ConfigError(
                f"max_radius = {self.max_radius}",
                kind="setting_out_of_range",
                expected=f"at least {self.min_radius} (min_radius), and at most {room:g} to stay inside",
            )

    @property
    def file_name(self) -> str:
        """Name as in PDEBench, which doesn't hold the parameters."""
        return "2D_rdb_NA_NA.h5"

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers."""
        initial_NXY = np.stack([self._dam(sample_generator(index, seed=seed)) for index in indices])
        return solve(initial_NXY, cell_size=(_END - _START) / self.points, t=self.t)

    def _dam(self, rng: np.random.Generator) -> Array:
        """Draw a column of water, shape (X, Y); a cell that its edge cuts has the mean height."""
        radius = rng.uniform(self.min_radius, self.max_radius)
        centre_x, centre_y = rng.uniform(-self.shift, self.shift, 2)
        x = cell_centres(_SUBCELLS * self.points, start=_START, end=_END)
        is_inside = (x[:, None] - centre_x) ** 2 + (x - centre_y) ** 2 <= radius**2
        share = is_inside.reshape(self.points, _SUBCELLS, self.points, _SUBCELLS).mean(axis=(1, 3))
        return np.asarray(_OUTSIDE + (self.height - _OUTSIDE) * share)

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write one group per sample, uncompressed, with the settings."""
        settings = {
            "T_end": self.end_time,
            "n_time_steps": self.frames - 1,
            "gravity": 1.0,
            **square(start=_START, end=_END, points=self.points),
            "inner_height": self.height,
            "dam_radius": [self.min_radius, self.max_radius],
            "shift": self.shift,
        }
        write_groups(
            path, batches, num_samples=num_samples, settings=settings, name="2d_rdb", compression=None
        )
