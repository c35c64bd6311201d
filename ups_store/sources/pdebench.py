"""The layouts of PDEBench's files, published, generated and converted.

Axis orders and exceptions are those measured on files of each family; a version is raised when the same file
would give other arrays.
"""

from __future__ import annotations

from collections.abc import Mapping

from ups_store.sources.contents import Contents, Part, StoredArray, fields_axes
from ups_store.sources.hdf5 import get_dataset, h5py, source_error
from ups_store.sources.layout import Layout
from ups_store.sources.tasks import Task


def root_coordinates(file: h5py.File, axes: str) -> dict[str, Part]:
    """The coordinates that lie at the root under PDEBench's names, such as `x-coordinate`."""
    return {axis: Part(f"{axis}-coordinate", axis) for axis in axes if f"{axis}-coordinate" in file}


class Darcy(Layout):
    """Darcy flow: solution `tensor` (sample, 1, x, y) and coefficient `nu` (sample, x, y)."""

    name = "pdebench-darcy"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """`tensor` with two spatial axes, or beside a coefficient."""
        if "tensor" not in file or "nu" in file:
            return "tensor" in file
        shape: tuple[int, ...] = getattr(file["tensor"], "shape", ())
        return len(shape) == 4 and shape[1] == 1

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Without "t": some files have a t-coordinate of length 10 that belongs to nothing."""
        return Contents(
            ndim=2,
            channels=("u",),
            arrays={
                "fields": StoredArray(fields_axes(2), (Part("tensor", "stxy"),)),
                "coefficient": StoredArray("syx", (Part("nu", "sxy"),)),
            },
            coordinates=root_coordinates(file, "xy"),
        )


class ScalarTensor(Layout):
    """1D equations: `tensor` (sample, time, x), or as PDEBench generates it (1, sample, time, x)."""

    name = "pdebench-1d"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """`tensor` at the root."""
        return "tensor" in file

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """One channel."""
        shape = get_dataset(file, "tensor").shape
        axes = "cstx" if len(shape) == 4 and shape[0] == 1 else "stx"
        return Contents(
            ndim=1,
            channels=("u",),
            arrays={"fields": StoredArray(fields_axes(1), (Part("tensor", axes),))},
            coordinates=root_coordinates(file, "tx"),
        )


class CompressibleFlow(Layout):
    """CFD: a dataset (sample, time, x[, y[, z]]) per variable; the shock tubes have no sample axis."""

    name = "pdebench-cfd"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """Any variable at the root."""
        return any(name in file for name in ("density", "pressure", "Vx"))

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Channels in the order of PDEBench's loader: density, pressure, Vx, Vy, Vz."""
        ndim = 1 + sum(f"V{axis}" in file or f"{axis}-coordinate" in file for axis in "yz")
        channels = ("density", "pressure", "Vx", "Vy", "Vz")[: 2 + ndim]
        axes = "st" + "xyz"[:ndim]
        if get_dataset(file, "density").ndim == len(axes) - 1:
            axes = axes[1:]
        return Contents(
            ndim=ndim,
            channels=channels,
            arrays={"fields": StoredArray(fields_axes(ndim), tuple(Part(name, axes) for name in channels))},
            coordinates=root_coordinates(file, "t" + "xyz"[:ndim]),
        )


class IncompressibleFlow(Layout):
    """NS_incom: `velocity` and `particles` (sample, time, x, y, channel), steady `force`, `t` per sample."""

    name = "pdebench-ns-incom"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """Velocity or particles at the root."""
        return "velocity" in file or "particles" in file

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Channels Vx, Vy, particles. The file holds no coordinates of space."""
        _check_all_frames_written(file)
        parts = (Part("velocity", "stxyc"), Part("particles", "stxyc"))
        return Contents(
            ndim=2,
            channels=("Vx", "Vy", "particles"),
            arrays={
                "fields": StoredArray(fields_axes(2), parts),
                "force": StoredArray("syxk", (Part("force", "sxyk"),)),
            },
            coordinates={"t": Part("t", "st")} if "t" in file else {},
        )


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


# By rank and channels of a sample's `data`: its axes, and the channels' names.
_GROUP_FAMILIES = {
    (3, 1): ("txc", ("concentration",)),  # diffusion-sorption
    (4, 1): ("txyc", ("h",)),  # shallow water: PyClaw's arrays are (x, y)
    (4, 2): ("tyxc", ("u", "v")),  # reaction-diffusion
}


class SampleGroups(Layout):
    """Diffusion-sorption, 2D reaction-diffusion, shallow water: a group "0000", "0001", ... per sample."""

    name = "pdebench-groups"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """A group named by digits that holds `data`."""
        names = _sample_groups(file)
        return bool(names) and f"{names[0]}/data" in file

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Groups in the order of their names as text, as PDEBench's loader has them."""
        groups = _sample_groups(file)
        name = f"{groups[0]}/data"
        shape = get_dataset(file, name).shape
        if len(shape) < 3 or (len(shape), shape[-1]) not in _GROUP_FAMILIES:
            raise source_error(
                f"dataset {name!r} is of no known family",
                kind="wrong_rank",
                path=file.filename,
                dataset=name,
                expected="(time, x, 1), (time, x, y, 1) or (time, y, x, 2)",
                found=f"shape {shape}",
            )
        axes, channels = _GROUP_FAMILIES[len(shape), shape[-1]]
        ndim = len(axes) - 2
        return Contents(
            ndim=ndim,
            channels=channels,
            arrays={"fields": StoredArray(fields_axes(ndim), (Part("data", axes),))},
            coordinates={a: Part(f"grid/{a}", a) for a in axes[:-1] if f"{groups[0]}/grid/{a}" in file},
            groups=groups,
        )


def _sample_groups(file: h5py.File) -> tuple[str, ...]:
    # By name only: opening 10,000 groups to ask for their class takes 0.6 s, the names 0.02 s.
    return tuple(sorted(name for name in file if name.isdigit()))


class Converted(Layout):
    """`data` (sample, time, [z, y,] x[, channel]), in any storage; coordinates `x` or `x-coordinate`, ..."""

    name = "converted"
    version = 1

    def matches(self, file: h5py.File) -> bool:
        """`data` at the root."""
        return isinstance(file.get("data"), h5py.Dataset)

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """The rank decides, with the task's number of spatial axes or the coordinates that are there."""
        data = get_dataset(file, "data")
        coordinates = root_coordinates(file, "tzyx") | {a: Part(a, a) for a in "tzyx" if a in file}
        ndim = task.ndim if task else _guess_ndim(data, coordinates)
        axes = fields_axes(ndim)
        num_channels = data.shape[-1] if data.ndim == len(axes) else 1
        if data.ndim == len(axes) - 1:
            axes = axes[:-1]
        return Contents(
            ndim=ndim,
            channels=_channel_names(num_channels, task),
            arrays={"fields": StoredArray(fields_axes(ndim), (Part("data", axes),))},
            coordinates={axis: part for axis, part in coordinates.items() if axis in axes},
        )


def _guess_ndim(data: h5py.Dataset, coordinates: Mapping[str, Part]) -> int:
    # (sample, time, x, channel) and (sample, time, y, x) have one rank: coordinates tell them apart, and
    # without any there is a channel axis wherever there can be one.
    return sum(axis in coordinates for axis in "xyz") or min(max(data.ndim - 3, 1), 3)


def _channel_names(num_channels: int, task: Task | None) -> tuple[str, ...]:
    """The task's names where they fit."""
    if task and len(task.channels) == num_channels:
        return task.channels
    return ("u",) if num_channels == 1 else tuple(f"u{i}" for i in range(num_channels))
