"""What a source file holds before any sample is read, and what tells it from another, without HDF5.

Axes are letters in the order in which the file stores them, since PDEBench's families disagree about it and
square grids hide it.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ups_store.errors import ConfigError, SourceError
from ups_store.sources.tasks import Task


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
        for name, value in (("reduce_space", self.reduce_space), ("reduce_time", self.reduce_time)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                expected = "a whole number >= 1"
                raise ConfigError(f"data.{name}", kind="bad_reduction", expected=expected, found=repr(value))

    def step(self, axis: str) -> int:
        """Return the stride along an axis, given by its letter."""
        if axis == "t":
            return self.reduce_time
        return self.reduce_space if axis in ("x", "y", "z") else 1


EVERYTHING = Selection()


@dataclass(frozen=True)
class SourceArray:
    """An array of every sample as `Source.read` returns it: its shape without samples, dtype and axes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...]


FileState: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class OuterFile:
    """A file that a source needs beside itself: its name there, real path, and state when first opened."""

    name: str
    path: Path
    state: FileState


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
        decoded: Attributes by which stored numbers are decoded, such as "scale_factor" (`values.CfEncoding`).
    """

    path: Path
    layout: str
    layout_version: int
    num_samples: int
    arrays: Mapping[str, SourceArray]
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
    """Return the axes of "fields" in a store, such as "styxc"."""
    return "st" + "zyx"[-ndim:] + "c"


@dataclass(frozen=True)
class StoredDataset:
    """A dataset: its HDF5 path, from the root if it starts with "/", and its axes in stored order."""

    name: str
    axes: str

    def num_channels(self, shape: tuple[int, ...]) -> int:
        """Return how many channels, or components, a dataset of this shape contributes."""
        return math.prod(length for axis, length in zip(self.axes, shape, strict=True) if axis in "ckd")


@dataclass(frozen=True)
class StoredNumber(StoredDataset):
    """One number for every sample: a dataset with a single value, or an attribute of what `name` is."""

    axes: str = ""
    attribute: str = ""  # empty for the dataset's value
    asked_by: str = ""  # what asks for it, for messages


@dataclass(frozen=True)
class StoredArray:
    """An array of datasets that are joined along the channel axis; `axes` as in the store, "s" first."""

    axes: str
    datasets: tuple[StoredDataset, ...]


@dataclass(frozen=True)
class Contents:
    """Where a file keeps what."""

    ndim: int  # number of spatial axes
    channels: tuple[str, ...]  # names along the channel axis of "fields"
    arrays: Mapping[str, StoredArray]
    coordinates: Mapping[str, StoredDataset]  # by the letter of their axis
    # One group per sample, in order, from which the datasets' paths start; empty where datasets hold all.
    groups: tuple[str, ...] = field(default=(), repr=False)

    def path_of(self, dataset: StoredDataset, *, sample: int = 0) -> str:
        """Return the HDF5 path of a dataset, in the group of a sample where there are groups."""
        return path_in(self.groups[sample] if self.groups else "", dataset.name)


def path_in(group: str, name: str) -> str:
    """Return the path of a name in a group; names that start with "/" start from the root."""
    if name.startswith("/"):
        return name[1:] or "/"
    return f"{group}/{name}" if group else name


class Convention(ABC):
    """One way of keeping simulations in HDF5; it only describes, `regions` reads them all alike."""

    name: str  # part of a store's identity
    version: int = 1  # likewise; raised when the same file would give other arrays

    @abstractmethod
    def matches(self, file: Any) -> bool:
        """Tell whether an HDF5 file is meant to follow this convention, complete or not."""

    @abstractmethod
    def describe(self, file: Any, task: Task | None) -> Contents:
        """Say where the file keeps what; that it is so is checked when it is measured."""

    @abstractmethod
    def parameters(self, file: Any) -> dict[str, float]:
        """Read numbers that hold for all samples of the file."""

    def boundary(self, file: Any, task: Task | None) -> Mapping[str, str]:
        """Tell the boundary type by spatial axis, as far as the task and the file's name say it."""
        return task.boundary_of(Path(file.filename).name) if task else {}

    def computed_coordinates(self, lengths: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Compute coordinates that the file doesn't hold, by the letter of their axis, as long as it is."""
        return {}

    def attributes(self, file: Any) -> dict[str, Any]:
        """Tell what else a store's root group should say, as JSON values."""
        return {}


def check_same_grid(infos: Sequence[SourceInfo]) -> None:
    """Raise unless the files can make one store: one grid, the same arrays, channels and parameters."""
    common = [
        {
            "layout": (info.layout, info.layout_version),
            "channels": info.channels,
            "boundary": dict(info.boundary),
            "parameters": sorted(info.parameters),
            **{f"array {name!r}": (a.shape, a.dtype, a.dims) for name, a in info.arrays.items()},
            **{f"coordinate {name!r}": values for name, values in info.constants.items()},
        }
        for info in infos
    ]
    for info, facts in zip(infos[1:], common[1:], strict=True):
        for name in {**common[0], **facts}:
            unequal = difference(common[0].get(name), facts.get(name))
            if unequal is not None:
                raise SourceError(
                    f"{name} isn't that of {infos[0].path}",
                    kind="grids_differ",
                    path=info.path,
                    expected=unequal[0],
                    found=unequal[1],
                    hint="files of one store have to agree in it; use data.files to choose",
                )


def difference(expected: Any, found: Any) -> tuple[Any, Any] | None:
    """Return what to show of two facts that differ, of coordinates in short; None if they are equal."""
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        if (expected.shape, expected.dtype) == (found.shape, found.dtype):
            unequal = np.flatnonzero(expected != found)
            if not unequal.size:
                return None
            first = unequal[0]
            return f"{expected[first]!s} at index {first}", f"{found[first]!s}"
    elif type(expected) is type(found) and expected == found:
        return None
    return _in_short(expected), _in_short(found)


def _in_short(fact: Any) -> Any:
    if isinstance(fact, np.ndarray):
        return f"{len(fact)} {fact.dtype} values {fact[0]!s}..{fact[-1]!s}"
    return "none" if fact is None else fact


def file_state(path: Path) -> FileState:
    """Return what differs once a file was replaced, written or deleted."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def outer_state(files: Sequence[OuterFile]) -> FileState:
    """Return the states of any number of outer files as one number, to stand behind that of their source."""
    states = [(os.fspath(file.path), *file.state) for file in files]
    return (int.from_bytes(hashlib.sha256(repr(states).encode()).digest()[:8], "little"),) if states else ()


def changed(path: Path | str) -> SourceError:
    """Return the error for a source that isn't what it was when the build began."""
    hint = "wait until no program writes to it and run again; --overwrite if samples were committed"
    return SourceError("source changed during the build", kind="source_changed", path=path, hint=hint)
