"""Boundary conditions of The Well: a group for each, with its type, and a mask of where it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from ups_store.ingest.contents import Part, StoredArray
from ups_store.ingest.hdf5 import get_dataset, source_error, translated
from ups_store.ingest.well_attributes import leading_axes, names

_UNSAID = "open"  # as The Well's own reader takes faces of which a file says nothing


@dataclass(frozen=True)
class _Boundary:
    """One boundary condition.

    Attributes:
        name: Its group's name.
        kind: "periodic", "wall" or "open".
        mask: Its mask, whose axes are sample and time where it varies with them, then its dimensions.
    """

    name: str
    kind: str
    mask: Part


def face_types(file: h5py.File, spatial: Mapping[str, str]) -> dict[str, str]:
    """Type of boundary by the letter of the axis; "wall_open" where its two ends differ.

    A face is a wall if all of it is, periodic or open if any of it is: so The Well's own reader has it.

    Args:
        file: The file.
        spatial: Letters of the spatial dimensions by their names.
    """
    faces = {axis: [_UNSAID, _UNSAID] for axis in spatial.values()}
    for boundary in _boundaries(file, spatial):
        everywhere = np.all if boundary.kind == "wall" else np.any
        for axis in faces.keys() & set(boundary.mask.axes):
            for end in (0, 1):
                if everywhere(_read_face(file, boundary.mask, axis, end)):
                    faces[axis][end] = boundary.kind
    return {axis: low if low == high else f"{low}_{high}" for axis, (low, high) in faces.items()}


def internal_boundaries(file: h5py.File, spatial: Mapping[str, str]) -> dict[str, StoredArray]:
    """Masks over more than one dimension, such as the walls of a maze: `bc_<name>`, 1 where it holds."""
    arrays = {}
    for boundary in _boundaries(file, spatial):
        axes = [axis for axis in boundary.mask.axes if axis in spatial.values()]
        if len(axes) > 1:
            to_axes = "s" + "t" * ("t" in boundary.mask.axes) + "".join(sorted(axes, reverse=True))
            arrays[f"bc_{boundary.name}"] = StoredArray(to_axes, (boundary.mask,))
    return arrays


def _boundaries(file: h5py.File, spatial: Mapping[str, str]) -> Iterator[_Boundary]:
    groups = file.get("boundary_conditions", {})
    for name in sorted(groups):
        group, path = groups[name], f"boundary_conditions/{name}"
        kind = "".join(names(group, "bc_type")).lower()
        dims = names(group, "associated_dims")
        unknown = [dim for dim in dims if dim not in spatial]
        if not kind or not dims or unknown:
            raise source_error(
                f"boundary condition {name!r}",
                kind="bad_attribute",
                path=file.filename,
                dataset=path,
                expected=f"bc_type, and associated_dims among {', '.join(spatial)}",
                found=f"bc_type {kind!r}, associated_dims {dims}",
            )
        axes = leading_axes(group) + "".join(spatial[dim] for dim in dims)
        yield _Boundary(name, kind, Part(f"{path}/mask", axes))


def _read_face(file: h5py.File, part: Part, axis: str, end: int) -> np.ndarray[Any, Any]:
    """A mask at the first (0) or last (1) point along an axis; no more of it is read."""
    dataset = get_dataset(file, part.dataset)
    if dataset.ndim != len(part.axes) or not dataset.size:
        raise source_error(
            f"dataset {part.dataset!r}",
            kind="wrong_rank",
            path=file.filename,
            dataset=part.dataset,
            expected=f"{len(part.axes)} axes",
            found=f"shape {dataset.shape}",
        )
    before = (slice(None),) * part.axes.index(axis)
    with translated("can't read", path=file.filename, dataset=part.dataset):
        face: np.ndarray[Any, Any] = dataset[(*before, -end)]
    return face
