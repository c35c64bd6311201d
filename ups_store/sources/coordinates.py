"""Coordinates of a source: as they are stored, and as the constants of a store after the selection."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ups_store.sources.contents import AXIS_NAMES, Contents, Part, Selection
from ups_store.sources.hdf5 import checked_dataset, h5py, read_whole, source_error
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
        _check_lengths(file, dataset, name, part, lengths)
        coordinates[axis] = read_whole(dataset, name, path=file.filename, sample=sample)
    return coordinates


def _check_lengths(
    file: h5py.File, dataset: h5py.Dataset, name: str, part: Part, lengths: Mapping[str, int]
) -> None:
    for axis, length in zip(part.axes, dataset.shape, strict=True):
        # PDEBench's t-coordinate has one entry more than there are frames; the last one is unused.
        if length != lengths[axis] and not (axis == "t" and length == lengths[axis] + 1):
            raise source_error(
                f"coordinate {name!r} doesn't fit the {AXIS_NAMES[axis]} axis",
                kind="wrong_length",
                path=file.filename,
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
        _check_finite(file, contents.coordinates[axis].dataset, row)
        constants[axis] = row[: lengths[axis] : selection.step(axis)].copy()
    return constants


def _check_finite(file: h5py.File, name: str, row: np.ndarray) -> None:
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
