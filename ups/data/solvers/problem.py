"""What a solver gives and what a data set is made from: `Trajectories`, `Problem`, random states and media.

Every sample has its own generator, seeded by (seed, index): sample i is the same however many are made, in
whatever batches. Letters: N samples, T time steps, X and Y cells along the axes, C
channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from ups_store.errors import ConfigError

Array = NDArray[np.float64]

# Of the covariance of two-phase media: tau, 1/length, and s.
_INVERSE_LENGTH, _SMOOTHNESS = 3.0, 2.0


@dataclass(frozen=True)
class Trajectories:
    """Solutions of one equation for several initial states or coefficients; everything float64.

    Attributes:
        fields: Solution; (N, T, X) in 1D, (N, T, Y, X, C) for reaction-diffusion, (N, T, Y, X) for vorticity,
            (N, T, X, Y, 1) for shallow water, (N, 1, X, Y) for Darcy.
        t: Times of the stored steps, shape (T,).
        x: Cell centres, shape (X,).
        y: Cell centres, shape (Y,); None in 1D.
        coefficient: Constant field that the solution belongs to, shape (N, X, Y); None where there is none.
        parameters: Physical parameters by name, the same for every sample.
    """

    fields: Array
    t: Array
    x: Array
    y: Array | None = None
    coefficient: Array | None = None
    parameters: dict[str, float] = field(default_factory=dict)


class Problem(Protocol):
    """An equation with its parameters, its random initial states and its file layout.

    A problem is a frozen dataclass whose fields are its settings, all with defaults; wrong values raise
    `ConfigError` at construction.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    batch_size: ClassVar[int]  # samples solved together, so that the work arrays stay in cache

    @property
    def file_name(self) -> str:
        """Name of the file, as PDEBench spells it."""
        ...

    def sample(self, indices: Sequence[int], *, seed: int) -> Trajectories:
        """Draw and solve the samples of these numbers; sample i is a function of (settings, seed, i)."""
        ...

    def write(self, path: Path, batches: Iterable[Trajectories], *, num_samples: int) -> None:
        """Write batches, `num_samples` samples in all and in order, to a new file."""
        ...


def cell_centres(num_points: int, *, start: float = 0.0, end: float = 1.0) -> Array:
    """Return the centres of `num_points` equal cells of (start, end), shape (num_points,)."""
    return start + (end - start) * (np.arange(num_points) + 0.5) / num_points


def check_positive(**settings: float) -> None:
    """Raise `ConfigError` for the first setting that isn't a finite number above zero."""
    for name, value in settings.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name} = {value}", kind="setting_out_of_range", expected="a finite number > 0"
            )


def check_not_negative(**settings: float) -> None:
    """Raise `ConfigError` for the first setting that isn't a finite number >= 0."""
    for name, value in settings.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{name} = {value}", kind="setting_out_of_range", expected="a finite number >= 0"
            )


def check_at_least(least: int, **settings: int) -> None:
    """Raise `ConfigError` for the first setting that is below `least`."""
    for name, value in settings.items():
        if value < least:
            raise ConfigError(f"{name} = {value}", kind="setting_out_of_range", expected=f">= {least}")


@dataclass(frozen=True)
class Transient:
    """Settings of every problem in time.

    Attributes:
        frames: Stored time steps T, the initial state included.
        end_time: Time of the last one.
    """

    frames: int = 21
    end_time: float = 2.0

    def __post_init__(self) -> None:
        check_positive(end_time=self.end_time)
        check_at_least(2, frames=self.frames)

    @property
    def t(self) -> Array:
        """Times of the stored steps, shape (T,)."""
        return np.linspace(0.0, self.end_time, self.frames)


def sample_generator(index: int, *, seed: int) -> np.random.Generator:
    """Return the random generator of one sample of the data set with this seed; both are >= 0."""
    return np.random.default_rng([seed, index])


def random_sines(
    indices: Sequence[int],
    *,
    seed: int,
    num_points: int,
    num_waves: int,
    max_wave_number: int,
    max_amplitude: float,
    max_mean: float = 0.0,
    has_walls: bool = False,
) -> Array:
    """Draw smooth periodic states on (0, 1): a mean plus a few sines of low wave number.

    u(x) = m + sum_j a_j sin(2 pi k_j x + phi_j) with sum_j a_j = `max_amplitude`, so |u - m| is at most
    `max_amplitude` for every sample; solvers choose their resolution and their steps by that bound. With
    walls, u is 0 at both ends: u(x) = sum_j +-a_j sin(pi k_j x), and k_j counts half periods.

    Args:
        indices: Sample numbers, N of them.
        seed: Seed of the data set.
        num_points: Number of cells X; values are at their centres.
        num_waves: Sines per sample.
        max_wave_number: Wave numbers k_j are uniform in 1..`max_wave_number`, periods per unit length.
        max_amplitude: Sum of the amplitudes a_j.
        max_mean: The mean m is uniform in (-`max_mean`, `max_mean`); 0 with walls.
        has_walls: Whether u is 0 at 0 and 1.

    Returns:
        States, shape (N, X).
    """
    x = cell_centres(num_points)
    states = np.empty((len(indices), num_points))
    for row, index in enumerate(indices):
        rng = sample_generator(index, seed=seed)
        weights = rng.uniform(0.1, 1.0, num_waves)
        wave_numbers = rng.integers(1, max_wave_number * (1 + has_walls), num_waves, endpoint=True)
        phases = rng.uniform(0.0, 2 * np.pi, num_waves)
        if has_walls:
            phases = np.where(phases < np.pi, 0.0, np.pi)
        mean = rng.uniform(-max_mean, max_mean)
        turns = np.pi if has_walls else 2 * np.pi
        waves = np.sin(turns * np.outer(wave_numbers, x) + phases[:, None])
        states[row] = mean + max_amplitude / weights.sum() * (weights[:, None] * waves).sum(axis=0)
    return states


@dataclass(frozen=True)
class RandomSines(Transient):
    """Settings of a problem on the periodic unit interval that starts from a mean and a few sines.

    Attributes:
        points: Cells X.
        amplitude: Sum of the sines' amplitudes, > 0.
        mean: Means are uniform within this of zero.
        max_wave_number: Wave numbers are uniform in 1..this, periods per unit length.
        waves: Sines of a sample.
    """

    points: int = 1024
    frames: int = 41
    amplitude: float = 1.0
    mean: float = 0.0
    max_wave_number: int = 8
    waves: int = 2
    batch_size: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(amplitude=self.amplitude)
        check_not_negative(mean=self.mean)
        check_at_least(1, max_wave_number=self.max_wave_number, waves=self.waves)
        check_at_least(2 * self.max_wave_number + 1, points=self.points)

    def initial_states(self, indices: Sequence[int], *, seed: int, has_walls: bool = False) -> Array:
        """Draw the initial states of these samples, shape (N, X)."""
        return random_sines(
            indices,
            seed=seed,
            num_points=self.points,
            num_waves=self.waves,
            max_wave_number=self.max_wave_number,
            max_amplitude=self.amplitude,
            max_mean=0.0 if has_walls else self.mean,
            has_walls=has_walls,
        )


def random_noise(indices: Sequence[int], *, seed: int, shape: tuple[int, ...]) -> Array:
    """Draw standard normal white noise, one array of `shape` per sample: shape (N, *shape)."""
    return np.stack([sample_generator(index, seed=seed).standard_normal(shape) for index in indices])


def random_two_phase(
    indices: Sequence[int],
    *,
    seed: int,
    num_points: int,
    low: float,
    high: float,
    num_modes: int | None = None,
) -> Array:
    """Draw two-valued media on the unit square: the sign of a smooth Gaussian random field picks the value.

    The field has the covariance (-Laplacian + tau^2)^-s, with zero-flux boundary and no mean.

    Args:
        indices: Sample numbers, N of them.
        seed: Seed of the data set.
        num_points: Cells per side.
        low: Value where the field is negative.
        high: Value elsewhere.
        num_modes: Cosine modes per side that are drawn, by default as many as cells. Media on other grids are
            the same, cut into other cells, if it is the same and at most `num_points`.

    Returns:
        Coefficients, shape (N, X, Y), each entry `low` or `high`.
    """
    num_modes = num_points if num_modes is None else num_modes
    wave_numbers = np.pi * np.arange(num_modes)
    squared = wave_numbers[:, None] ** 2 + wave_numbers[None, :] ** 2
    deviation = (squared + _INVERSE_LENGTH**2) ** (-_SMOOTHNESS / 2)
    deviation[0, 0] = 0.0
    noise = random_noise(indices, seed=seed, shape=(num_modes, num_modes))
    smooth = fft.idctn(noise * deviation, s=(num_points, num_points), axes=(1, 2), norm="ortho")
    return np.where(smooth < 0.0, low, high)
