"""Where one file keeps what: datasets and their axes, in words that need no HDF5.

Axes are letters in the order in which the file stores them, since PDEBench's families disagree about it and
square grids hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

AXIS_NAMES = {
    "s": "sample",
    "t": "time",
    "z": "z",
    "y": "y",
    "x": "x",
    "c": "channel",
    "k": "component",  # of a vector that isn't in `fields`: one dimension name has one length in a store
    "d": "column",  # second axis of a tensor's components
}


def fields_axes(ndim: int) -> str:
    """Axes of "fields" in a store, such as "styxc"."""
    return "st" + "zyx"[-ndim:] + "c"


@dataclass(frozen=True)
class Part:
    """One dataset: its HDF5 path, from the root if it starts with "/", and its axes in stored order."""

    dataset: str
    axes: str

    def num_channels(self, shape: tuple[int, ...]) -> int:
        """How many channels, or components, the dataset contributes, given its shape."""
        return math.prod(length for axis, length in zip(self.axes, shape, strict=True) if axis in "ckd")


@dataclass(frozen=True)
class StoredArray:
    """An array made of datasets that are joined along the channel axis.

    Attributes:
        axes: Axes of the array as letters, in the order of the store; "s" first.
        parts: The datasets, in channel order.
    """

    axes: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Contents:
    """The description of one file.

    Attributes:
        ndim: Number of spatial axes.
        channels: Names along the channel axis of "fields".
        arrays: The arrays by name.
        coordinates: Dataset of each coordinate, by the letter of its axis.
        groups: One group per sample, in order, from which the datasets' paths start; empty where datasets
            hold all samples.
    """

    ndim: int
    channels: tuple[str, ...]
    arrays: Mapping[str, StoredArray]
    coordinates: Mapping[str, Part]
    groups: tuple[str, ...] = field(default=(), repr=False)

    def dataset_path(self, part: Part, *, sample: int = 0) -> str:
        """HDF5 path of a part, in the group of a sample where there are groups."""
        if part.dataset.startswith("/"):
            return part.dataset[1:] or "/"
        return f"{self.groups[sample]}/{part.dataset}" if self.groups else part.dataset
