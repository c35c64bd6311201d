"""The layout of The Well (https://polymathic-ai.org/the_well/data_format/): fields grouped by tensor order.

Every dataset says in attributes along which axes it varies, and is stored without the others. Fields that
vary in time are channels of "fields", scalars first, then vectors, then tensors, each in the order of the
file and named as The Well's own reader names them: `density`, `velocity_x`, `D_xy`. What doesn't vary in time
is an array of its own name, repeated for every sample: files of one set may differ in it, and it takes no
more room than one more time step. A boundary condition is a group with its type and a mask of where it holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ups_store.sources.contents import (
    Contents,
    Convention,
    StoredArray,
    StoredDataset,
    StoredNumber,
    fields_axes,
)
from ups_store.sources.hdf5 import get_dataset, h5py, missing, read_number, source_error, translated
from ups_store.sources.tasks import Task

_ORDERS = range(3)  # scalars, vectors, tensors
_UNSAID = "open"  # as The Well's own reader takes faces of which a file says nothing


class TheWell(Convention):
    """`t0_fields`, `t1_fields`, `t2_fields`, `scalars`, `boundary_conditions`, `dimensions`.

    The first spatial dimension of the file becomes "x", the second "y", the third "z", whatever the file
    calls them (`theta`, `phi`, `log_r`): their names are among the attributes.
    """

    name = "the-well"

    def matches(self, file: h5py.File) -> bool:
        """Look for a group of fields."""
        return any(f"t{order}_fields" in file for order in _ORDERS)

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Describe fields that vary in time as channels, others as arrays, and scalars that vary, too."""
        spatial = _spatial_axes(file)
        ndim, channels, varying = len(spatial), list[str](), list[StoredDataset]()
        constant: list[tuple[str, StoredArray]] = []
        for name, dataset, components in _fields(file, spatial):
            if "t" in dataset.axes:
                varying.append(dataset)
                channels += [f"{name}_{c}" if c else name for c in components]
                continue
            # Its components aren't channels of "fields".
            dataset = StoredDataset(dataset.name, dataset.axes.replace("c", "k"))
            components_axes = "".join(axis for axis in dataset.axes if axis in "kd")
            axes = fields_axes(ndim).replace("t", "").replace("c", components_axes)
            constant.append((name, StoredArray(axes, (dataset,))))
        if not varying:
            raise missing("no field varies in time", file, "t0_fields")
        arrays = [("fields", StoredArray(fields_axes(ndim), tuple(varying))), *constant]
        for boundary in _boundaries(file, spatial):
            space = [axis for axis in boundary.mask.axes if axis in spatial.values()]
            if len(space) > 1:  # a mask over dimensions, such as the walls of a maze: 1 where it holds
                axes = "s" + "t" * ("t" in boundary.mask.axes) + "".join(sorted(space, reverse=True))
                arrays.append((f"bc_{boundary.name}", StoredArray(axes, (boundary.mask,))))
        for name, axes in _scalars(file):
            if axes:
                scalar = StoredDataset(f"scalars/{name}", axes)
                arrays.append((name, StoredArray("s" + "t" * ("t" in axes), (scalar,))))
        coordinates = {axis: _coordinate(file, name, axis) for name, axis in spatial.items()}
        time, differs = _coordinate(file, "time", "t"), False  # between samples
        if "s" in time.axes:
            dataset = get_dataset(file, time.name)
            with translated("can't read", file.filename, time.name):
                rows = dataset[...]
            differs = bool((rows != rows[:1]).any())
        if differs:
            arrays.append(("t", StoredArray("st", (time,))))
        else:
            coordinates["t"] = time
        by_name: dict[str, StoredArray] = {}
        for name, array in arrays:
            if name in by_name:
                raise source_error(
                    f"two arrays are called {name!r}",
                    "name_clash",
                    file.filename,
                    array.datasets[0].name,
                    found=f"{by_name[name].datasets[0].name} and {array.datasets[0].name}",
                    hint="declare the layout under other names (docs/guides/layouts.md)",
                )
            by_name[name] = array
        return Contents(ndim, tuple(channels), by_name, coordinates)

    def parameters(self, file: h5py.File) -> dict[str, float]:
        """Read scalars that don't vary, and the simulation parameters of the root that are numbers."""
        values, scalars = {}, dict(_scalars(file))
        for name, axes in scalars.items():
            if not axes:
                values[name] = read_number(file, StoredNumber(f"scalars/{name}"), f"scalars/{name}")
        for name in _names(file, "simulation_parameters"):
            value = np.asarray(file.attrs.get(name, ""))
            if name not in scalars and value.size == 1 and value.dtype.kind in "fiu":
                values[name] = float(value.item())
        return values

    def boundary(self, file: h5py.File, task: Task | None) -> Mapping[str, str]:
        """Return what the file says, unless the task does; "wall_open" where the ends of an axis differ.

        A face is a wall if all of it is, periodic or open if any of it is: so The Well's own reader has it.
        """
        spatial = _spatial_axes(file)
        faces = {axis: [_UNSAID, _UNSAID] for axis in spatial.values()}
        for boundary in _boundaries(file, spatial):
            everywhere = np.all if boundary.kind == "wall" else np.any
            for axis in faces.keys() & set(boundary.mask.axes):
                for end in (0, 1):
                    if everywhere(_read_face(file, boundary.mask, axis, end)):
                        faces[axis][end] = boundary.kind
        types = {axis: low if low == high else f"{low}_{high}" for axis, (low, high) in faces.items()}
        return types | dict(task.boundary if task else {})

    def attributes(self, file: h5py.File) -> dict[str, Any]:
        """Read name of the set, kind of grid, and what the file calls the spatial dimensions."""
        attrs: dict[str, Any] = {
            name: str(file.attrs[name]) for name in ("dataset_name", "grid_type") if name in file.attrs
        }
        return attrs | {"axis_names": {axis: name for name, axis in _spatial_axes(file).items()}}


def _fields(file: h5py.File, spatial: Mapping[str, str]) -> Iterator[tuple[str, StoredDataset, list[str]]]:
    """Give name, dataset and components of each field; a tensor may be stored as D x D or as D^2."""
    for order in _ORDERS:
        group = file.get(f"t{order}_fields")
        components = ["".join(axes) for axes in itertools.product(spatial, repeat=order)]
        for name in _names(group, "field_names") if group is not None else ():
            path = f"t{order}_fields/{name}"
            dataset = get_dataset(file, path)
            varies = _flags(file, path, "dim_varying", count=len(spatial))
            axes = _leading_axes(file, path) + "".join(itertools.compress(spatial.values(), varies))
            axes += ("", "c", "c" if dataset.ndim == len(axes) + 1 else "cd")[order]
            shape = dataset.shape
            count = math.prod(n for axis, n in zip(axes, shape, strict=False) if axis in "cd")
            if dataset.ndim == len(axes) and count != len(components):
                raise source_error(
                    f"components of dataset {path!r}",
                    "shapes_differ",
                    file.filename,
                    path,
                    expected=f"{len(components)}, {', '.join(components)}",
                    found=f"{count}, shape {shape}",
                )
            trajectories = file.attrs.get("n_trajectories")
            if trajectories is not None and axes.startswith("s") and shape[:1] != (trajectories,):
                raise source_error(
                    f"number of trajectories in dataset {path!r}",
                    "shapes_differ",
                    file.filename,
                    path,
                    expected=f"{trajectories}, by attribute 'n_trajectories'",
                    found=", ".join(map(str, shape[:1])),
                    hint="download or make the file again",
                )
            yield name, StoredDataset(path, axes), components


def _scalars(file: h5py.File) -> Iterator[tuple[str, str]]:
    """Give names of the scalars, and the axes along which each varies."""
    group = file.get("scalars")
    for name in _names(group, "field_names") if group is not None else ():
        yield name, _leading_axes(file, f"scalars/{name}")


def _coordinate(file: h5py.File, name: str, axis: str) -> StoredDataset:
    path = f"dimensions/{name}"
    dataset = get_dataset(file, path)
    if axis != "t" and bool(dataset.attrs.get("time_varying", False)):
        problem, expected = f"dimension {name!r} moves in time", "a grid that stays"
        raise source_error(problem, "unsupported", file.filename, path, expected=expected)
    return StoredDataset(path, "s" + axis if dataset.ndim == 2 else axis)


def _spatial_axes(file: h5py.File) -> dict[str, str]:
    """Name the spatial dimensions in the order of the file, with the letter that each becomes."""
    group = file.get("dimensions")
    if not isinstance(group, h5py.Group):
        raise missing("no group 'dimensions'", file, "dimensions")
    dims = _names(group, "spatial_dims")
    if not 1 <= len(dims) <= 3:
        facts = {"expected": "1 to 3", "found": f"spatial_dims {dims}"}
        raise source_error("number of spatial dimensions", "wrong_rank", file.filename, "dimensions", **facts)
    return dict(zip(dims, "xyz", strict=False))


def _names(group: h5py.Group, attribute: str) -> list[str]:
    """List the names of an attribute; all members of the group where there is no such attribute."""
    if attribute not in group.attrs:
        return sorted(group) if attribute == "field_names" else []
    listed = np.atleast_1d(group.attrs[attribute])
    return [name.decode() if isinstance(name, bytes) else str(name) for name in listed]


def _flags(file: h5py.File, name: str, attribute: str, *, count: int = 1) -> tuple[bool, ...]:
    """Read an attribute of so many truth values, of the dataset or group of a path."""
    attrs = file[name].attrs
    value: Any = attrs.get(attribute)
    if value is None:
        raise source_error(
            f"no attribute {attribute!r} of {name!r}",
            "missing_attribute",
            file.filename,
            name,
            found=", ".join(attrs) or "no attributes",
            hint="without it The Well's format doesn't say which axes the dataset has",
        )
    flags = np.atleast_1d(value)
    if flags.shape != (count,) or flags.dtype.kind not in "biu":
        problem, path = f"attribute {attribute!r} of {name!r}", file.filename
        expected = "true or false" if count == 1 else f"{count} times true or false"
        raise source_error(problem, "bad_attribute", path, name, expected=expected, found=value)
    return tuple(bool(flag) for flag in flags)


def _leading_axes(file: h5py.File, name: str) -> str:
    """Give the axes before the spatial ones: "s" if it varies between samples, "t" if it varies in time."""
    varying = {"s": "sample_varying", "t": "time_varying"}
    return "".join(axis for axis, attribute in varying.items() if _flags(file, name, attribute)[0])


@dataclass(frozen=True)
class _Boundary:
    """One boundary condition: "periodic", "wall" or "open" where its mask is true.

    The mask's axes are sample and time where it varies with them, then its dimensions.
    """

    name: str
    kind: str
    mask: StoredDataset


def _boundaries(file: h5py.File, spatial: Mapping[str, str]) -> Iterator[_Boundary]:
    for name in sorted(file.get("boundary_conditions", {})):
        path = f"boundary_conditions/{name}"
        group = file[path]
        kind, dims = "".join(_names(group, "bc_type")).lower(), _names(group, "associated_dims")
        if not kind or not dims or any(dim not in spatial for dim in dims):
            raise source_error(
                f"boundary condition {name!r}",
                "bad_attribute",
                file.filename,
                path,
                expected=f"bc_type, and associated_dims among {', '.join(spatial)}",
                found=f"bc_type {kind!r}, associated_dims {dims}",
            )
        axes = _leading_axes(file, path) + "".join(spatial[dim] for dim in dims)
        yield _Boundary(name, kind, StoredDataset(f"{path}/mask", axes))


def _read_face(file: h5py.File, mask: StoredDataset, axis: str, end: int) -> np.ndarray[Any, Any]:
    """Read a mask at the first (0) or last (1) point along an axis; no more of it is read."""
    dataset = get_dataset(file, mask.name)
    if dataset.ndim != len(mask.axes) or not dataset.size:
        facts = {"expected": f"{len(mask.axes)} axes", "found": f"shape {dataset.shape}"}
        raise source_error(f"dataset {mask.name!r}", "wrong_rank", file.filename, mask.name, **facts)
    before = (slice(None),) * mask.axes.index(axis)
    with translated("can't read", file.filename, mask.name):
        face: np.ndarray[Any, Any] = dataset[(*before, -end)]
    return face
