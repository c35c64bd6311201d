"""Numbers of a sample that its solution depends on: parameters of the equation, and boundary values.

A boundary value is an array of a store whose name begins with `bc_`, such as `bc_left`: a number per sample,
or a few, one per channel, which become the conditions `bc_left_0`, `bc_left_1`, ... Masks and profiles, which
have a place in space, aren't numbers and are no conditions. Models take all of them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BOUNDARY_VALUE = "bc_"  # beginning of the names of arrays and conditions
MAX_COLUMNS = 8  # numbers of one boundary value; what has more is a profile
NUM_STEPS = "num_steps"  # valid time steps of each sample, where trajectories differ in length; no condition

Array = npt.NDArray[Any]


def conditions_among(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the conditions that arrays of samples (anything with a shape) hold, sorted."""
    names: list[str] = []
    for name, array in arrays.items():
        shape = tuple(array.shape)
        if name == NUM_STEPS:
            continue
        if len(shape) == 1 or _is_one_column(name, shape):
            names.append(name)
        elif _has_columns(name, shape):
            names += [f"{name}_{column}" for column in range(shape[1])]
    return tuple(sorted(names))


def arrays_of(conditions: Sequence[str], arrays: Mapping[str, Any]) -> list[str]:
    """Names of the arrays that hold conditions, each once; conditions that none holds are left out."""
    found = (_place_of(name, arrays) for name in conditions)
    return list(dict.fromkeys(place[0] for place in found if place is not None))


def condition_of(name: str, arrays: Mapping[str, Array]) -> Array | None:
    """One condition out of arrays of samples, shape (N,), a view; None where no array holds it."""
    place = _place_of(name, arrays)
    if place is None:
        return None
    array = np.asarray(arrays[place[0]])
    return array if array.ndim == 1 else array[:, place[1]]


def has_boundary_values(conditions: Iterable[str]) -> bool:
    """Whether any of the conditions is a boundary value: such samples aren't the same when reflected."""
    return any(name.startswith(BOUNDARY_VALUE) for name in conditions)


def _place_of(name: str, arrays: Mapping[str, Any]) -> tuple[str, int] | None:
    """The array that holds a condition, and its column there."""
    if name in arrays:
        return name, 0
    owner, _, column = name.rpartition("_")
    if column.isdecimal() and owner in arrays and _has_columns(owner, tuple(arrays[owner].shape)):
        return (owner, int(column)) if int(column) < arrays[owner].shape[1] else None
    return None


def _is_one_column(name: str, shape: tuple[int, ...]) -> bool:
    return _has_columns(name, shape) and shape[1] == 1


def _has_columns(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith(BOUNDARY_VALUE) and len(shape) == 2 and 1 <= shape[1] <= MAX_COLUMNS
