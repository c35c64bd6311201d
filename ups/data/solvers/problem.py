"""What a solver gives and what a data set is made from: `Trajectories` and the `Problem` protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ups_store.errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trajectories:
    """Solutions of one equation for several initial states or coefficients; everything float64.

    Letters: N samples, T time steps, X and Y cells along the axes, C channels.

    Attributes:
        fields: Solution; (N, T, X) in 1D, (N, T, Y, X, C) for reaction-diffusion, (N, 1, X, Y) for Darcy.
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


def require_positive(**settings: float) -> None:
    """Raise `ConfigError` for the first setting that isn't a finite number above zero."""
    for name, value in settings.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name} = {value}", kind="setting_out_of_range", expected="a finite number > 0"
            )


def require_at_least(least: int, **settings: int) -> None:
    """Raise `ConfigError` for the first setting that is below `least`."""
    for name, value in settings.items():
        if value < least:
            raise ConfigError(f"{name} = {value}", kind="setting_out_of_range", expected=f">= {least}")
