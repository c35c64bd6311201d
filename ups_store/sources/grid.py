"""Coordinates of a source: as they are stored, and as the constants of a store after the selection.

What the files of one store, and the samples of one file, have in common: above all their grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from ups_store.errors import SourceError
from ups_store.sources.contents import AXIS_NAMES, Contents, Part, Selection, SourceInfo
from ups_store.sources.hdf5 import checked_dataset, source_error, translated
from ups_store.sources.layout import Layout


def read_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], *, sample: int = 0
) -> dict[str, np.ndarray]:
    """Every coordinate as it is stored, from the group of a sample where there are groups.

    Raises:
        SourceError: Kind "missing_dataset", "wrong_rank", "wrong_dtype" or "wrong_length".
    """
    coordinates = {}
    for axis, part in contents.coordinates.items():
        name = contents.dataset_path(part, sample=sample)
        dataset = checked_dataset(file, name, axes=part.axes, kinds="fiu", sample=sample)
        _expect_lengths(dataset, name, part, lengths)
        with translated("can't read", path=file.filename, dataset=name, sample=sample):
            coordinates[axis] = dataset[...].astype(dataset.dtype.newbyteorder("="), copy=False)
    return coordinates


def _expect_lengths(dataset: h5py.Dataset, name: str, part: Part, lengths: Mapping[str, int]) -> None:
    for axis, length in zip(part.axes, dataset.shape, strict=True):
        # PDEBench's t-coordinate has one entry more than there are frames; the last one is unused.
        if length != lengths[axis] and not (axis == "t" and length == lengths[axis] + 1):
            raise source_error(
                f"coordinate {name!r} doesn't fit the {AXIS_NAMES[axis]} axis",
                kind="wrong_length",
                path=dataset.file.filename,
                dataset=name,
                expected=lengths[axis],
                found=length,
            )


def computed_coordinates(
    layout: Layout, lengths: Mapping[str, int], selection: Selection
) -> dict[str, np.ndarray]:
    """Coordinates that the layout knows and the file doesn't hold, after the selection."""
    computed = layout.computed_coordinates(lengths)
    return {axis: values[:: selection.step(axis)].copy() for axis, values in computed.items()}


def stored_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], selection: Selection
) -> dict[str, np.ndarray]:
    """Coordinates of the file after the selection, as long as their axes, one row for all samples.

    Raises:
        SourceError: As `read_coordinates`, or kind "grids_differ" or "not_finite".
    """
    constants = {}
    for axis, values in read_coordinates(file, contents, lengths).items():
        row = values
        if values.ndim == 2:
            row = values[0]
            other = np.flatnonzero((values != row).any(axis=1))
            if other.size:
                raise source_error(
                    f"coordinate {axis!r} isn't that of sample 0",
                    kind="grids_differ",
                    path=file.filename,
                    dataset=contents.coordinates[axis].dataset,
                    sample=int(other[0]),
                )
        _expect_finite(file, contents.coordinates[axis].dataset, row)
        constants[axis] = row[: lengths[axis] : selection.step(axis)].copy()
    return constants


def _expect_finite(file: h5py.File, name: str, row: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(row))
    if bad.size:
        raise source_error(
            f"coordinate {name!r} isn't finite",
            kind="not_finite",
            path=file.filename,
            dataset=name,
            expected="numbers",
            found=f"{row[bad[0]]!s} at index {bad[0]}",
            hint="mend the source: there is no grid without coordinates",
        )


def check_same_grid(infos: Sequence[SourceInfo]) -> None:
    """Raise unless the files can make one store: one grid, the same arrays, channels and parameters.

    Raises:
        SourceError: Kind "grids_differ", naming both files and what differs.
    """
    for other in infos[1:]:
        first_facts, other_facts = _facts(infos[0]), _facts(other)
        for what in {**first_facts, **other_facts}:
            shown = difference(first_facts.get(what), other_facts.get(what))
            if shown is not None:
                raise SourceError(
                    f"{what} isn't that of {infos[0].path}",
                    kind="grids_differ",
                    path=other.path,
                    expected=shown[0],
                    found=shown[1],
                    hint="files of one store share their grid; use data.files to choose",
                )


def _facts(info: SourceInfo) -> dict[str, Any]:
    """What files of one store have in common, by what people call it."""
    return {
        "layout": (info.layout, info.layout_version),
        "channels": info.channels,
        "boundary": dict(info.boundary),
        "parameters": sorted(info.parameters),
        **{f"array {name!r}": (array.shape, array.dtype, array.dims) for name, array in info.arrays.items()},
        **{f"coordinate {name!r}": values for name, values in info.constants.items()},
    }


def difference(expected: Any, found: Any) -> tuple[Any, Any] | None:
    """What to show of two facts that differ: of coordinates in short; None if they are equal."""
    if not isinstance(expected, np.ndarray) and not isinstance(found, np.ndarray):
        return None if expected == found else (_shown(expected), _shown(found))
    if expected is None or found is None or (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return _shown(expected), _shown(found)
    unequal = np.flatnonzero(expected != found)
    if not unequal.size:
        return None
    first = unequal[0]
    return f"{expected[first]!s} at index {first}", f"{found[first]!s}"


def _shown(fact: Any) -> Any:
    if isinstance(fact, np.ndarray):
        return f"{len(fact)} {fact.dtype} values {fact[0]!s}..{fact[-1]!s}"
    return "none" if fact is None else fact
