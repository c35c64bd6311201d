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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ups_store.sources.contents import Contents, Part, StoredArray, fields_axes
from ups_store.sources.convention import Convention
from ups_store.sources.hdf5 import get_dataset, h5py, source_error, translated
from ups_store.sources.parameters import NumberPart, missing
from ups_store.sources.tasks import Task

_ORDERS = range(3)  # scalars, vectors, tensors
_UNSAID = "open"  # as The Well's own reader takes faces of which a file says nothing


@dataclass(frozen=True)
class _Field:
    """A field of the file: its name, its dataset, and what its channels would be called."""

    name: str
    part: Part
    channels: tuple[str, ...]

    @property
    def is_varying(self) -> bool:
        """Whether it varies in time."""
        return "t" in self.part.axes


class TheWell(Convention):
    """`t0_fields`, `t1_fields`, `t2_fields`, `scalars`, `boundary_conditions`, `dimensions`.

    The first spatial dimension of the file becomes "x", the second "y", the third "z", whatever the file
    calls them (`theta`, `phi`, `log_r`): their names are among the attributes.
    """

    name = "the-well"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """A group of fields."""
        return any(f"t{order}_fields" in file for order in _ORDERS)

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Fields that vary in time are channels, others arrays, as are scalars that vary."""
        spatial = spatial_axes(file)
        fields = list(_fields(file, spatial))
        varying = [field for field in fields if field.is_varying]
        if not varying:
            raise missing("no field varies in time", file, dataset="t0_fields")
        arrays = [
            ("fields", StoredArray(fields_axes(len(spatial)), tuple(field.part for field in varying))),
            *((f.name, _constant_field(f.part, len(spatial))) for f in fields if not f.is_varying),
            *internal_boundaries(file, spatial).items(),
            *_varying_scalars(file),
        ]
        coordinates = {axis: _coordinate(file, name, axis) for name, axis in spatial.items()}
        time = _coordinate(file, "time", "t")
        if _differs_between_samples(file, time):
            arrays.append(("t", StoredArray("st", (time,))))
        else:
            coordinates["t"] = time
        channels = tuple(itertools.chain.from_iterable(field.channels for field in varying))
        return Contents(
            ndim=len(spatial), channels=channels, arrays=_by_name(file, arrays), coordinates=coordinates
        )

    def parameters(self, file: h5py.File) -> dict[str, float]:
        """Scalars that don't vary, and the simulation parameters of the root that are numbers."""
        found = {}
        for name, axes in _scalars(file):
            if not axes:
                found[name] = NumberPart(f"scalars/{name}").read(file, f"scalars/{name}")
        known = {name for name, _ in _scalars(file)}
        for name in names(file, "simulation_parameters"):
            value = np.asarray(file.attrs.get(name, ""))
            if name not in known and value.size == 1 and value.dtype.kind in "fiu":
                found[name] = float(value.item())
        return found

    def boundary(self, file: h5py.File, task: Task | None) -> Mapping[str, str]:
        """What the file says, unless the task says otherwise."""
        return face_types(file, spatial_axes(file)) | dict(task.boundary if task else {})

    def attributes(self, file: h5py.File) -> dict[str, Any]:
        """Name of the set, kind of grid, and what the file calls the spatial dimensions."""
        said = {name: str(file.attrs[name]) for name in ("dataset_name", "grid_type") if name in file.attrs}
        return {**said, "axis_names": {axis: name for name, axis in spatial_axes(file).items()}}


def _by_name(file: h5py.File, arrays: Iterable[tuple[str, StoredArray]]) -> dict[str, StoredArray]:
    by_name: dict[str, StoredArray] = {}
    for name, array in arrays:
        if name in by_name:
            raise source_error(
                f"two arrays are called {name!r}",
                kind="name_clash",
                path=file.filename,
                dataset=array.parts[0].dataset,
                found=f"{by_name[name].parts[0].dataset} and {array.parts[0].dataset}",
                hint="declare the layout under other names (docs/guides/layouts.md)",
            )
        by_name[name] = array
    return by_name


def _fields(file: h5py.File, spatial: Mapping[str, str]) -> Iterator[_Field]:
    for order in _ORDERS:
        group = file.get(f"t{order}_fields")
        components = ["".join(axes) for axes in itertools.product(spatial, repeat=order)]
        for name in names(group, "field_names") if group is not None else ():
            part = _part(file, f"t{order}_fields/{name}", order, spatial)
            _check_components(file, part, components)
            _check_trajectories(file, part)
            yield _Field(name, part, tuple(f"{name}_{c}" if c else name for c in components))


def _part(file: h5py.File, name: str, order: int, spatial: Mapping[str, str]) -> Part:
    """The dataset with the axes that its attributes name; a tensor may be stored as D x D or as D^2."""
    dataset = get_dataset(file, name)
    varies = flags(file, name, "dim_varying", count=len(spatial))
    axes = leading_axes(file, name) + "".join(itertools.compress(spatial.values(), varies))
    is_flat = dataset.ndim == len(axes) + 1
    return Part(name, axes + ("", "c", "c" if is_flat else "cd")[order])


def _check_components(file: h5py.File, part: Part, components: list[str]) -> None:
    dataset = get_dataset(file, part.dataset)
    found = math.prod(n for axis, n in zip(part.axes, dataset.shape, strict=False) if axis in "cd")
    if dataset.ndim == len(part.axes) and found != len(components):
        raise source_error(
            f"components of dataset {part.dataset!r}",
            kind="shapes_differ",
            path=file.filename,
            dataset=part.dataset,
            expected=f"{len(components)}, {', '.join(components)}",
            found=f"{found}, shape {dataset.shape}",
        )


def _check_trajectories(file: h5py.File, part: Part) -> None:
    said = file.attrs.get("n_trajectories")
    found = get_dataset(file, part.dataset).shape[:1]
    if said is not None and part.axes.startswith("s") and found != (said,):
        raise source_error(
            f"number of trajectories in dataset {part.dataset!r}",
            kind="shapes_differ",
            path=file.filename,
            dataset=part.dataset,
            expected=f"{said}, by attribute 'n_trajectories'",
            found=", ".join(map(str, found)),
            hint="download or make the file again",
        )


def _constant_field(part: Part, ndim: int) -> StoredArray:
    """An array for a field that doesn't vary in time; its components aren't channels of "fields"."""
    own = Part(part.dataset, part.axes.replace("c", "k"))
    components = "".join(axis for axis in own.axes if axis in "kd")
    return StoredArray(fields_axes(ndim).replace("t", "").replace("c", components), (own,))


def _scalars(file: h5py.File) -> Iterator[tuple[str, str]]:
    """Names of the scalars, and the axes along which each varies."""
    group = file.get("scalars")
    for name in names(group, "field_names") if group is not None else ():
        yield name, leading_axes(file, f"scalars/{name}")


def _varying_scalars(file: h5py.File) -> Iterator[tuple[str, StoredArray]]:
    for name, axes in _scalars(file):
        if axes:
            yield name, StoredArray("s" + "t" * ("t" in axes), (Part(f"scalars/{name}", axes),))


def _coordinate(file: h5py.File, name: str, axis: str) -> Part:
    dataset = get_dataset(file, f"dimensions/{name}")
    if axis != "t" and bool(dataset.attrs.get("time_varying", False)):
        raise source_error(
            f"dimension {name!r} moves in time",
            kind="unsupported",
            path=file.filename,
            dataset=f"dimensions/{name}",
            expected="a grid that stays",
        )
    return Part(f"dimensions/{name}", "s" + axis if dataset.ndim == 2 else axis)


def _differs_between_samples(file: h5py.File, part: Part) -> bool:
    if "s" not in part.axes:
        return False
    dataset = get_dataset(file, part.dataset)
    with translated("can't read", path=file.filename, dataset=part.dataset):
        rows = dataset[...]
    return bool((rows != rows[:1]).any())


def check_group(file: h5py.File, name: str) -> h5py.Group:
    """A group of the file."""
    group = file.get(name)
    if isinstance(group, h5py.Group):
        return group
    raise missing(f"no group {name!r}", file, dataset=name)


def spatial_axes(file: h5py.File) -> dict[str, str]:
    """Names of the spatial dimensions in the order of the file, with the letter that each becomes."""
    found = names(check_group(file, "dimensions"), "spatial_dims")
    if not 1 <= len(found) <= 3:
        raise source_error(
            "number of spatial dimensions",
            kind="wrong_rank",
            path=file.filename,
            dataset="dimensions",
            expected="1 to 3",
            found=f"spatial_dims {found}",
        )
    return dict(zip(found, "xyz", strict=False))


def names(group: h5py.Group, attribute: str) -> list[str]:
    """The names that an attribute lists; all members of the group where there is no such attribute."""
    if attribute not in group.attrs:
        return sorted(group) if attribute == "field_names" else []
    listed = np.atleast_1d(group.attrs[attribute])
    return [name.decode() if isinstance(name, bytes) else str(name) for name in listed]


def flags(file: h5py.File, name: str, attribute: str, *, count: int = 1) -> tuple[bool, ...]:
    """An attribute of so many truth values, of the dataset or group of a path."""
    attrs = file[name].attrs
    value: Any = attrs.get(attribute)
    if value is None:
        raise source_error(
            f"no attribute {attribute!r} of {name!r}",
            kind="missing_attribute",
            path=file.filename,
            dataset=name,
            found=", ".join(attrs) or "no attributes",
            hint="without it The Well's format doesn't say which axes the dataset has",
        )
    found = np.atleast_1d(value)
    if found.shape != (count,) or found.dtype.kind not in "biu":
        raise source_error(
            f"attribute {attribute!r} of {name!r}",
            kind="bad_attribute",
            path=file.filename,
            dataset=name,
            expected="true or false" if count == 1 else f"{count} times true or false",
            found=value,
        )
    return tuple(bool(flag) for flag in found)


def leading_axes(file: h5py.File, name: str) -> str:
    """The axes before the spatial ones: "s" if it varies between samples, "t" if it varies in time."""
    return "".join(
        axis
        for axis, attribute in (("s", "sample_varying"), ("t", "time_varying"))
        if flags(file, name, attribute)[0]
    )


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
        path = f"boundary_conditions/{name}"
        group = file[path]
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
        axes = leading_axes(file, path) + "".join(spatial[dim] for dim in dims)
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
