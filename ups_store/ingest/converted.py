"""The layout of users' own files."""

from __future__ import annotations

from collections.abc import Mapping

import h5py

from ups_store.ingest.contents import Contents, Part, StoredArray, fields_axes
from ups_store.ingest.hdf5 import get_dataset
from ups_store.ingest.layout import Layout
from ups_store.ingest.pdebench import root_coordinates
from ups_store.tasks import Task


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
