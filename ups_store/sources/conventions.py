"""The conventions that are understood, PDEBench's as data, and how one is recognised.

A file is recognised by what it holds, never by its name: by the first rule that it fits, complete or not.
Axis orders and exceptions are those measured on files of each family, published, generated and converted; a
version is raised when the same file would give other arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ups_store.sources.contents import Contents, Part, StoredArray, fields_axes
from ups_store.sources.convention import Convention
from ups_store.sources.declared import Declared
from ups_store.sources.hdf5 import get_dataset, h5py, source_error, tree
from ups_store.sources.tasks import Task
from ups_store.sources.well import TheWell

Shape = tuple[int | None, ...]  # None: any length
_IN_GROUP = "data"  # the dataset of a sample's group


@dataclass(frozen=True)
class Rule(Convention):
    """Where the files of a family keep what, if they hold certain datasets.

    Attributes:
        name: See `Convention`; several rules may share one.
        datasets: The datasets of the fields at the root, in channel order, or in the group of each sample.
        axes: Theirs, in stored order; see `contents.AXIS_NAMES`.
        channels: Names along the channel axis.
        holds: Datasets that a file of the rule holds at the root: of each of these, one at least.
        shapes: Shapes of some of its datasets; with groups, of the first sample's.
        arrays: Other arrays by name: dataset, stored axes, axes in a store.
        coordinates: Axes with a root dataset such as `x-coordinate`, where it is there.
        coordinate_paths: Other datasets of coordinates by axis, with their stored axes, where they are there.
        has_groups: Whether a group "0000", "0001", ... holds each sample.
    """

    name: str
    datasets: tuple[str, ...]
    axes: str
    channels: tuple[str, ...]
    holds: tuple[tuple[str, ...], ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    arrays: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    coordinates: str = ""
    coordinate_paths: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    has_groups: bool = False

    def matches(self, file: h5py.File) -> bool:
        """Whether the datasets are there, of these shapes."""
        folder = ""
        if self.has_groups:
            groups = _sample_groups(file)
            if not groups or f"{groups[0]}/{_IN_GROUP}" not in file:
                return False
            folder = f"{groups[0]}/"
        return all(any(name in file for name in names) for names in self.holds) and all(
            _has_shape(file, folder + name, shape) for name, shape in self.shapes.items()
        )

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Describe a file that matches; what else it lacks is missed when it is measured."""
        if self.name == _INCOMPRESSIBLE:
            _check_all_frames_written(file)
        groups = _sample_groups(file) if self.has_groups else ()
        folder = f"{groups[0]}/" if groups else ""
        ndim = sum(axis in "xyz" for axis in self.axes)
        coordinates = {axis: (f"{axis}-coordinate", axis) for axis in self.coordinates}
        return Contents(
            ndim=ndim,
            channels=self.channels,
            arrays={
                "fields": StoredArray(fields_axes(ndim), tuple(Part(n, self.axes) for n in self.datasets)),
                **{
                    n: StoredArray(to_axes, (Part(d, axes),)) for n, (d, axes, to_axes) in self.arrays.items()
                },
            },
            coordinates={
                axis: Part(name, axes)
                for axis, (name, axes) in {**coordinates, **self.coordinate_paths}.items()
                if folder + name in file
            },
            groups=groups,
        )


class Converted(Convention):
    """`data` (sample, time, [z, y,] x[, channel]), in any storage; coordinates `x` or `x-coordinate`, ..."""

    name = "converted"

    def matches(self, file: h5py.File) -> bool:
        """`data` at the root."""
        return isinstance(file.get("data"), h5py.Dataset)

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """The rank decides, with the task's number of spatial axes or the coordinates that are there."""
        data = get_dataset(file, "data")
        names = {axis: f"{axis}-coordinate" for axis in "tzyx"}
        coordinates = {
            axis: Part(axis if axis in file else name, axis)
            for axis, name in names.items()
            if axis in file or name in file
        }
        # (sample, time, x, channel) and (sample, time, y, x) have one rank: coordinates tell them apart, and
        # without any there is a channel axis wherever there can be one.
        guess = sum(axis in coordinates for axis in "xyz") or min(max(data.ndim - 3, 1), 3)
        ndim = task.ndim if task else guess
        axes = fields_axes(ndim)
        num_channels = data.shape[-1] if data.ndim == len(axes) else 1
        if data.ndim == len(axes) - 1:
            axes = axes[:-1]
        channels = ("u",) if num_channels == 1 else tuple(f"u{i}" for i in range(num_channels))
        if task and len(task.channels) == num_channels:
            channels = task.channels
        return Contents(
            ndim=ndim,
            channels=channels,
            arrays={"fields": StoredArray(fields_axes(ndim), (Part("data", axes),))},
            coordinates={axis: part for axis, part in coordinates.items() if axis in axes},
        )


def _darcy(shapes: Mapping[str, Shape], *holds: tuple[str, ...]) -> Rule:
    """Solution and coefficient; some files have a t-coordinate of length 10 that belongs to nothing."""
    return Rule(
        "pdebench-darcy",
        ("tensor",),
        "stxy",
        ("u",),
        holds=(("tensor",), *holds),
        shapes=shapes,
        arrays={"coefficient": ("nu", "sxy", "syx")},
        coordinates="xy",
    )


_CFD_CHANNELS = ("density", "pressure", "Vx", "Vy", "Vz")  # in the order of PDEBench's loader
_CFD_ALSO = {3: [("Vz", "z-coordinate")], 2: [("Vy", "y-coordinate")], 1: []}


def _compressible() -> Iterator[Rule]:
    """A dataset for each variable; the shock tubes have no sample axis."""
    for ndim, also in _CFD_ALSO.items():
        channels, axes = _CFD_CHANNELS[: 2 + ndim], "t" + "xyz"[:ndim]
        one: Mapping[str, Shape] = {"density": (None,) * len(axes)}
        for shapes, stored in ((one, axes), ({}, "s" + axes)):
            yield Rule(
                "pdebench-cfd",
                channels,
                stored,
                channels,
                holds=(_CFD_CHANNELS[:3], *also),
                shapes=shapes,
                coordinates=axes,
            )


def _groups(axes: str, *channels: str) -> Rule:
    """Diffusion-sorption, shallow water, 2D reaction-diffusion: told apart by rank and channels."""
    shape = (*(None,) * (len(axes) - 1), len(channels))
    paths = {axis: (f"grid/{axis}", axis) for axis in axes[:-1]}
    return Rule(
        _GROUPS,
        (_IN_GROUP,),
        axes,
        channels,
        shapes={_IN_GROUP: shape},
        coordinate_paths=paths,
        has_groups=True,
    )


_INCOMPRESSIBLE = "pdebench-ns-incom"
_GROUPS = "pdebench-groups"
_1D = ("pdebench-1d", ("tensor",))
CONVENTIONS: tuple[Convention, ...] = (
    TheWell(),
    _darcy({}, ("nu",)),
    _darcy({"tensor": (None, 1, None, None)}),
    # As PDEBench generates it (1, sample, time, x), and as it is published.
    Rule(*_1D, "cstx", ("u",), shapes={"tensor": (1, None, None, None)}, coordinates="tx"),
    Rule(*_1D, "stx", ("u",), holds=(("tensor",),), coordinates="tx"),
    *_compressible(),
    Rule(
        _INCOMPRESSIBLE,
        ("velocity", "particles"),
        "stxyc",
        ("Vx", "Vy", "particles"),
        holds=(("velocity", "particles"),),
        arrays={"force": ("force", "sxyk", "syxk")},
        coordinate_paths={"t": ("t", "st")},  # none of space
    ),
    _groups("txc", "concentration"),
    _groups("txyc", "h"),  # PyClaw's arrays are (x, y)
    _groups("tyxc", "u", "v"),
    Converted(),
)


def recognise(file: h5py.File, task: Task | None = None) -> Convention:
    """The convention that the task's configuration declares, else the first that matches."""
    if task is not None and task.layout is not None:
        return Declared(task.name, task.layout)
    for convention in CONVENTIONS:
        if convention.matches(file):
            return convention
    groups = _sample_groups(file)
    if groups and f"{groups[0]}/{_IN_GROUP}" in file:
        name = f"{groups[0]}/{_IN_GROUP}"
        raise source_error(
            f"dataset {name!r} is of no known family",
            kind="wrong_rank",
            path=file.filename,
            dataset=name,
            expected="(time, x, 1), (time, x, y, 1) or (time, y, x, 2)",
            found=f"shape {get_dataset(file, name).shape}",
        )
    names = dict.fromkeys(convention.name for convention in CONVENTIONS)
    raise source_error(
        "no layout fits",
        kind="unknown_layout",
        path=file.filename,
        expected=f"one of {', '.join(names)}",
        found=tree(file),
        hint="convert the file: one root dataset 'data' (sample, time, [z, y,] x[, channel]), or declare its "
        "layout (docs/guides/layouts.md)",
    )


def _has_shape(file: h5py.File, name: str, shape: Shape) -> bool:
    found: tuple[int, ...] = getattr(file.get(name), "shape", ())
    return len(found) == len(shape) and all(n in (None, m) for n, m in zip(shape, found, strict=True))


def _sample_groups(file: h5py.File) -> tuple[str, ...]:
    """Groups in the order of their names as text, as PDEBench's loader has them."""
    # By name only: opening 10,000 groups to ask for their class takes 0.6 s, the names 0.02 s.
    return tuple(sorted(name for name in file if name.isdigit()))


def _check_all_frames_written(file: h5py.File) -> None:
    # The generator allocates every frame and counts up what it wrote; the rest reads as zeros.
    velocity = get_dataset(file, "velocity")
    last = file.attrs.get("latestIndex")
    if last is not None and velocity.ndim > 1 and last < velocity.shape[1] - 1:
        raise source_error(
            "the simulation didn't finish",
            kind="incomplete",
            path=file.filename,
            dataset="velocity",
            expected=f"{velocity.shape[1]} frames",
            found=f"{last + 1} written",
            hint="download or make the file again",
        )
