"""Geometry: the grid of a field, its patches, and the grid of latent tokens. No tensors, no torch.

Axes are in the order of the arrays: [Z, Y,] X. A periodic axis has no first point: everything built on a grid
treats its points alike. Coordinates are fractions of the domain: point i of n lies at (i + 1/2) / n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy.typing as npt

from ups.errors import ConfigError, needs
from ups.parsing import Count, Length, Parsed

with needs("train"):
    from pydantic import AfterValidator

FIELDS = "fields"  # the array that every task has: what its equation is about
LATENT = "latent"  # what an encoder makes of it
LATENT_INPUT = "latent_input"  # and of a constant field, the input of a steady task
PERIODIC = "periodic"  # boundary type of an axis without ends, as stores name it
UNKNOWN_BOUNDARY = "unknown"  # of an axis that a store says nothing about
_SHOWN = 8  # sizes that an error names
_MOST_AXES, _MOST_POINTS = 3, 1 << 33


def latent_of(array: str) -> str:
    """Name of the array that holds what an encoder makes of `array`."""
    return LATENT if array == FIELDS else LATENT_INPUT


@dataclass(frozen=True)
class GridSpec(Parsed):
    """A kind of field: what an encoder and a decoder are built for. Tasks of the same kind share them.

    Attributes:
        points: Number of points along each axis.
        periodic: Whether each axis is.
        channels: Number of channels of each array on the grid, such as (("fields", 1), ("coefficient", 1)).
    """

    points: tuple[Length, ...]
    periodic: tuple[bool, ...]
    channels: tuple[tuple[str, Count], ...]

    @property
    def ndim(self) -> int:
        """Number of axes, 1 to 3."""
        return len(self.points)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(name for name, _ in self.channels)

    @property
    def name(self) -> str:
        """Short text, different for different grids, usable as a module's name: `256p_fields1`."""
        axes = "x".join(f"{num}{'p' if wraps else 'b'}" for num, wraps in self._axes())
        return "_".join([axes, *(f"{array}{num}" for array, num in self.channels)])

    def _axes(self) -> zip[tuple[int, bool]]:
        return zip(self.points, self.periodic, strict=True)

    def num_values(self, array: str) -> int:
        """Numbers of one frame of an array."""
        return math.prod(self.points) * dict(self.channels)[array]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return {
            "points": list(self.points),
            "periodic": list(self.periodic),
            "channels": [list(pair) for pair in self.channels],
        }


def _is_grid(grid: GridSpec) -> GridSpec:
    if not 1 <= grid.ndim <= _MOST_AXES or math.prod(grid.points) > _MOST_POINTS:
        raise ValueError(f"points {list(grid.points)}")
    if len(grid.periodic) != grid.ndim:
        raise ValueError(f"{len(grid.periodic)} boundaries of {grid.ndim} axes")
    if FIELDS not in grid.arrays or len(set(grid.arrays)) < len(grid.arrays):
        raise ValueError(f"arrays {list(grid.arrays)}")
    return grid


Grid = Annotated[GridSpec, AfterValidator(_is_grid)]  # as a file has it


@dataclass(frozen=True)
class TokenGrid:
    """How a grid is cut: points into patches, patches into the groups that become one token each.

    Attributes:
        patch_size: Points of a patch along each axis.
        patches: Number of patches along each axis.
        tokens: Number of tokens along each axis.
    """

    patch_size: int
    patches: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """Patches of a token along each axis."""
        return tuple(p // t for p, t in zip(self.patches, self.tokens, strict=True))

    @property
    def points_per_token(self) -> tuple[int, ...]:
        """Points of a token along each axis."""
        return tuple(group * self.patch_size for group in self.groups)


def cut_grid(grid: GridSpec, *, patch_size: int, num_tokens: int | None) -> TokenGrid:
    """Cut a grid into patches and these into equal groups, as close to cubes as can be.

    Args:
        patch_size: Points of a patch along each axis.
        num_tokens: Number of groups; None for one of each patch.
    """
    if any(num % patch_size for num in grid.points):
        raise _no_patches(grid, patch_size, num_tokens)
    patches = tuple(num // patch_size for num in grid.points)
    if num_tokens is None:
        return TokenGrid(patch_size, patches, patches)
    fitting = [tokens for tokens in _token_grids(patches) if math.prod(tokens) == num_tokens]
    if not fitting:
        raise _no_tokens(grid, patch_size, num_tokens)
    return TokenGrid(patch_size, patches, min(fitting, key=lambda tokens: _elongation(patches, tokens)))


def token_counts(grid: GridSpec, *, patch_size: int) -> list[int]:
    """Numbers of tokens that the patches of a grid can be grouped into, ascending.

    Args:
        patch_size: Points of a patch along each axis, which divide the grid's.
    """
    return sorted({math.prod(tokens) for tokens in _token_grids(tuple(n // patch_size for n in grid.points))})


def _no_patches(grid: GridSpec, patch_size: int, num_tokens: int | None) -> ConfigError:
    sizes = _divisors(math.gcd(*grid.points))
    fitting = [] if num_tokens is None else _patch_sizes(grid, num_tokens)
    return ConfigError(
        f"encoder.patch_size = {patch_size} on a grid of {_times(grid.points)} points",
        kind="patch_size",
        expected=f"a divisor of all of them: {_one_of(_nearest(sizes, patch_size))}",
        hint=f"{_one_of(fitting)} goes with latent.tokens = {num_tokens}" if fitting else None,
    )


def _no_tokens(grid: GridSpec, patch_size: int, num_tokens: int) -> ConfigError:
    patches = tuple(num // patch_size for num in grid.points)
    counts, sizes = token_counts(grid, patch_size=patch_size), _patch_sizes(grid, num_tokens)
    return ConfigError(
        f"latent.tokens = {num_tokens} of {_times(patches)} patches",
        kind="num_tokens",
        expected=f"a number that they can be grouped into: {_one_of(_nearest(counts, num_tokens))}",
        hint=f"or say encoder.patch_size = {_one_of(sizes)}" if sizes else None,
    )


def _patch_sizes(grid: GridSpec, num_tokens: int) -> list[int]:
    """Patch sizes that give so many tokens."""
    sizes = _divisors(math.gcd(*grid.points))
    return [size for size in sizes if num_tokens in token_counts(grid, patch_size=size)]


def _nearest(numbers: list[int], wanted: int) -> list[int]:
    """The numbers whose ratio to the one that was wanted is least, ascending."""
    return sorted(sorted(numbers, key=lambda number: abs(math.log(number / wanted)))[:_SHOWN])


def _one_of(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _times(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


def axis_names(ndim: int) -> tuple[str, ...]:
    """Letters of the axes of a grid, as stores name them: of two, "y" and "x"."""
    return ("z", "y", "x")[-ndim:]


def boundary_types(named: Mapping[str, str], *, ndim: int) -> tuple[str, ...]:
    """Boundary type of each axis of a grid, from the types that a store names by axis letter.

    Returns:
        In the order of the axes; `UNKNOWN_BOUNDARY` where the store says nothing.
    """
    return tuple(named.get(axis, UNKNOWN_BOUNDARY) for axis in axis_names(ndim))


def domain_lengths(named: Mapping[str, float], *, ndim: int) -> list[float]:
    """Length of the domain along each axis of a grid, from the lengths that a store names by axis letter.

    Returns:
        In the order of the axes, above zero; 1 where the store says nothing.
    """
    return [abs(float(named.get(axis, 1.0))) for axis in axis_names(ndim)]


def directed_lengths(
    named: Mapping[str, float] | None, coordinates: Mapping[str, npt.NDArray[Any]]
) -> dict[str, float]:
    """Lengths by axis letter, below zero where the coordinate falls: so do steps along it, in derivatives."""
    falling = {axis for axis, points in coordinates.items() if len(points) > 1 and points[-1] < points[0]}
    return {axis: -abs(n) if axis in falling else abs(n) for axis, n in (named or {}).items()}


def _token_grids(patches: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(_divisors, patches)))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _elongation(patches: tuple[int, ...], tokens: tuple[int, ...]) -> float:
    groups = [p / t for p, t in zip(patches, tokens, strict=True)]
    return max(groups) / min(groups)


MIN_TOKENS = 8  # along an axis that is still halved
MAX_WINDOW = 8  # tokens along an axis, as in PDE-Transformer
_MIN_WINDOW = 4  # a grid that divides only into smaller windows is one window


def halved_axes(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of a token grid that are long and even enough to be halved."""
    return tuple(axis for axis, length in enumerate(grid) if length >= MIN_TOKENS and length % 2 == 0)


def window_size(length: int, *, largest: int = MAX_WINDOW) -> int:
    """Tokens of a window along an axis: the largest divisor up to `largest`, or all where that is tiny."""
    if length <= largest:
        return length
    size = next(size for size in range(largest, 0, -1) if length % size == 0)
    return size if size >= min(_MIN_WINDOW, largest) else length
