"""What a source file holds before any sample is read: datasets, axes, grid; in words that need no HDF5.

Axes are letters in the order in which the file stores them, since PDEBench's families disagree about it and
square grids hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.errors import ConfigError, SourceError
from ups_store.sources.file_state import OuterFile


@dataclass(frozen=True)
class Selection:
    """Which points and time steps of a file are taken, as PDEBench's published numbers do it.

    Attributes:
        reduce_space: Every how many-th point is kept, on every spatial axis, from the first on.
        reduce_time: Every how many-th time step is kept, from the first on.

    Raises:
        ConfigError: If one isn't a whole number of at least 1.
    """

    reduce_space: int = 1
    reduce_time: int = 1

    def __post_init__(self) -> None:
        for name in ("reduce_space", "reduce_time"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"data.{name}", kind="bad_reduction", expected="a whole number >= 1", found=repr(value)
                )

    def step(self, axis: str) -> int:
        """Stride along an axis given by its letter (`contents.AXIS_NAMES`)."""
        if axis == "t":
            return self.reduce_time
        return self.reduce_space if axis in ("x", "y", "z") else 1


EVERYTHING = Selection()


@dataclass(frozen=True)
class ArrayInfo:
    """One array of every sample, as `Source.read` returns it.

    Attributes:
        shape: Shape without the sample axis, after reduction.
        dtype: Floating dtype of the file, native byte order.
        dims: Names of the axes in `shape`, such as ("time", "y", "x", "channel").
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SourceInfo:
    """What a source file holds, after the selection.

    Attributes:
        path: The file, as it was named.
        layout: Name of the layout that was recognised by content.
        layout_version: Version of the reader of that layout; part of a store's identity.
        num_samples: Number of samples in the file.
        arrays: "fields" (time, [z, y,] x, channel) always; "coefficient" (y, x) of Darcy flow and
            "force" (y, x, component) of incompressible flow.
        constants: Coordinates that the file has, among "x", "y", "z" and "t": 1-D, as long as their axis.
        parameters: Numbers that hold for all samples of the file: "nu", "beta", "rho", "eta", "zeta", "mach"
            (PDEBench's attribute `M`), in lower case.
        channels: Names along the channel axis of "fields".
        boundary: Boundary type by spatial axis, from the task and the file's name; empty without a task.
        attrs: What else the store's root group should say, as JSON values.
        samples_per_chunk: How many samples the file's chunks span: read together, each chunk is decoded once.
        outer: Other files that it takes data from, in the order of their first use.
        decoded: Attributes by which stored numbers are decoded, such as "scale_factor" (`cf.CfEncoding`).
    """

    path: Path
    layout: str
    layout_version: int
    num_samples: int
    arrays: Mapping[str, ArrayInfo]
    constants: Mapping[str, np.ndarray]
    parameters: Mapping[str, float]
    channels: tuple[str, ...]
    boundary: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    samples_per_chunk: int = 1
    outer: tuple[OuterFile, ...] = ()
    decoded: tuple[str, ...] = ()


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


def check_same_grid(infos: Sequence[SourceInfo]) -> None:
    """Raise unless the files can make one store: one grid, the same arrays, channels and parameters."""
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
                    hint="files of one store have to agree in it; use data.files to choose",
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
