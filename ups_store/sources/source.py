"""A source: one HDF5 file of simulations, seen as samples in the axis order of a store."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.errors import ConfigError, StoreClosedError
from ups_store.format.layout import consecutive_ranges
from ups_store.sources.casting import CastLoss
from ups_store.sources.cf import CfEncoding
from ups_store.sources.contents import (
    AXIS_NAMES,
    EVERYTHING,
    ArrayInfo,
    Contents,
    Part,
    Selection,
    SourceInfo,
    StoredArray,
    check_same_grid,
    difference,
)
from ups_store.sources.convention import Convention
from ups_store.sources.conventions import recognise
from ups_store.sources.external_data import CheckedFile
from ups_store.sources.file_state import changed
from ups_store.sources.hdf5 import (
    check_written,
    checked_dataset,
    encoding_of,
    get_dataset,
    h5py,
    is_complete,
    read_whole,
    source_error,
    translated,
)
from ups_store.sources.parameters import NumberPart
from ups_store.sources.regions import DatasetExtent, chunk_length, extent_of, read_samples
from ups_store.sources.tasks import Task
from ups_store.system.urls import check_local

_MAX_WALKED = 1000  # groups of samples whose links are looked at when the file is opened

__all__ = ["ArrayInfo", "Selection", "Source", "SourceInfo", "check_same_grid", "open_source"]


def open_source(
    path: str | os.PathLike[str],
    *,
    task: Task | None = None,
    selection: Selection = EVERYTHING,
    follow: str | os.PathLike[str] | None = None,
    is_mapped: bool = False,
    note: Callable[[str], None] = lambda name: None,
) -> Source:
    """Open a file whose layout is with_companions_marked by what it holds.

    Args:
        path: HDF5 file.
        task: What it is meant to be. Without one, any known layout is taken as it is.
        selection: Reduction in space and time, applied while reading.
        follow: Folder below which other files may lie that it takes data from: by external links, external
            storage or virtual datasets. By default there may be none.
        is_mapped: Whether contiguous data may be copied out of a mapping, see `regions.DatasetExtent`.
        note: Called with the name of each such file that is opened, and of each dataset where there are some.

    Returns:
        The open source, to be closed by the caller; usable as a context manager.

    Raises:
        SourceError: With `path`, `dataset` where one is concerned, and a `kind`, such as "missing_file",
            "truncated", "unknown_layout", "missing_dataset", "wrong_rank" or "task_mismatch".
        SourceError: If data lies in other files, and isn't allowed to, or one of them is missing.
        ConfigError: If `follow` isn't a folder.
    """
    check_local(path)
    path = Path(path)
    file = CheckedFile(path, None if follow is None else Path(follow), note)
    try:
        with translated("can't read the structure", path=path):
            convention = recognise(file, task)
            contents = convention.describe(file, task)
            lengths = measure(file, contents)
            info = describe(
                file,
                convention=convention,
                contents=contents,
                lengths=lengths,
                task=task,
                selection=selection,
            )
            if file.may_have_outer:
                _find_all(file, contents, note)
            else:
                _check_links(file, contents)
            file.is_complete = True
            info = dataclasses.replace(
                info, samples_per_chunk=_samples_per_chunk(file, contents), outer=tuple(file.outer)
            )
    except BaseException:
        file.close()
        raise
    return Source(
        file, info=info, contents=contents, lengths=lengths, selection=selection, is_mapped=is_mapped
    )


@dataclasses.dataclass(frozen=True)
class _Storage:
    """How a dataset lies in its file: where in one piece, how encoded, and whether all of it was written."""

    extent: DatasetExtent | None
    encoding: CfEncoding | None
    is_complete: bool


class Source:
    """An open source file, made by `open_source`.

    Not for several threads (HDF5 has one lock for all of them) and not picklable: a reading process opens
    its own.

    Attributes:
        info: What the file holds, after the selection.
    """

    def __init__(
        self,
        file: CheckedFile,
        *,
        info: SourceInfo,
        contents: Contents,
        lengths: Mapping[str, int],
        selection: Selection,
        is_mapped: bool,
    ) -> None:
        self.info = info
        self._file = file
        self._contents = contents
        self._lengths = lengths
        self._selection = selection
        self._is_mapped = is_mapped
        self._first_grid: dict[str, np.ndarray] | None = None
        self._storages: dict[str, _Storage] = {}  # likewise: asking for one takes 0.5 ms
        self._datasets: dict[str, h5py.Dataset] = {}  # those of all samples: opening one takes 0.1 ms

    def read(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Read samples into new memory.

        Args:
            indices: Sample numbers, in any order.

        Returns:
            For every array of `info.arrays` a new C-contiguous ndarray (len(indices), *shape), owned by
            the caller.

        Raises:
            SourceError: As `read_into`.
            StoreClosedError: If the source was closed.
        """
        out = {
            name: np.empty((len(indices), *array.shape), array.dtype)
            for name, array in self.info.arrays.items()
        }
        self.read_into(out, indices)
        return out

    def read_into(
        self,
        out: Mapping[str, np.ndarray],
        indices: Sequence[int],
        *,
        note: Callable[[str], None] = lambda dataset: None,
    ) -> dict[str, CastLoss]:
        """Read samples, cast to the dtypes of where they go.

        Runs of consecutive numbers are read together: contiguous datasets straight to their place, where that
        has their dtype and axes, others in hyperslabs of at most about `regions.BLOCK_BYTES` (or a chunk).

        Args:
            out: For every array of `info.arrays` a C-contiguous ndarray (len(indices), *shape).
            indices: Sample numbers, in any order.
            note: Called with the HDF5 path of each dataset before it is read, and after every few MiB of it.

        Returns:
            By array what the cast lost.

        Raises:
            SourceError: Kind "no_such_sample", "read_failed" or "not_written" (with the first sample
                concerned), or, with a group per sample, "grids_differ" or "shapes_differ" if one isn't like
                sample 0.
            StoreClosedError: If the source was closed.
        """
        if not self._file:
            raise StoreClosedError("the source was closed", path=self.info.path)
        self._check_in_range(indices)
        losses = dict.fromkeys(out, CastLoss())
        row = 0
        try:
            for run in consecutive_ranges(
                indices, longest=1 if self._contents.groups else max(1, len(indices))
            ):
                rows = {name: array[row : row + len(run)] for name, array in out.items()}
                row += len(run)
                for name, loss in self._read_run(run, rows, note):
                    losses[name] += loss
        finally:  # also where HDF5 said something else about it
            if (outer := self.changed_file()) is not None:
                raise changed(outer) from None
        return losses

    def changed_file(self) -> Path | None:
        """One of the files beside it that isn't what it was when it was opened, if there is one."""
        return self._file.changed_one()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._datasets.clear()
        self._storages.clear()
        self._file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_in_range(self, indices: Sequence[int]) -> None:
        lowest, highest = min(indices, default=0), max(indices, default=-1)
        if lowest < 0 or highest >= self.info.num_samples:
            raise source_error(
                "no such sample",
                kind="no_such_sample",
                path=self.info.path,
                sample=int(lowest if lowest < 0 else highest),
                expected=f"0..{self.info.num_samples - 1}",
            )

    def _read_run(
        self, run: range, out: Mapping[str, np.ndarray], note: Callable[[str], None]
    ) -> Iterator[tuple[str, CastLoss]]:
        """Read samples that lie in the same datasets, array by array."""
        if self._contents.groups:
            note(self._contents.groups[run.start])
            self._check_grid_of_first(run.start)
        for name, array in self._contents.arrays.items():
            yield name, self._read_array(array, run, out[name], note)

    def _read_array(
        self, array: StoredArray, run: range, out: np.ndarray, note: Callable[[str], None]
    ) -> CastLoss:
        """Read the datasets of an array beside each other along the channel axis of `out`."""
        channel, loss = 0, CastLoss()
        for part in array.parts:
            name = self._contents.dataset_path(part, sample=run.start)
            note(name)
            if isinstance(part, NumberPart):
                out[...] = part.read(self._file, name, sample=run.start)
                continue
            dataset = self._dataset(part, run.start)
            end = channel + part.num_channels(dataset.shape)
            is_all = array.axes[-1] not in "ck" or end - channel == out.shape[-1]
            target, to_axes = out if is_all else out[..., channel:end], array.axes
            if "d" in part.axes and "d" not in to_axes:  # the components of a tensor are so many channels
                target = target.reshape(*target.shape[:-1], *dataset.shape[-2:], copy=False)
                to_axes += "d"
            storage = self._storage(name, dataset)
            for sample in () if storage.is_complete else run if "s" in part.axes else (run.start,):
                box = tuple(slice(sample, sample + 1) if axis == "s" else slice(None) for axis in part.axes)
                check_written(dataset, name, box, path=self.info.path, sample=sample)
            facts: dict[str, Any] = {"path": self.info.path, "sample": run.start, "opened": dataset}
            with translated(_reading(run), dataset=name, **facts):
                part_loss = read_samples(
                    target,
                    dataset,
                    axes=part.axes,
                    to_axes=to_axes,
                    first=run.start if "s" in part.axes else 0,
                    selection=self._selection,
                    extent=storage.extent,
                    encoding=storage.encoding,
                    progress=functools.partial(note, name),
                )
            loss += dataclasses.replace(part_loss, num_flat=(0,) * channel + part_loss.num_flat)
            channel = end
        return loss

    def _dataset(self, part: Part, sample: int) -> h5py.Dataset:
        """The part's dataset that holds a sample; it has to be like that of sample 0."""
        name = self._contents.dataset_path(part, sample=sample)
        like = self._dataset_of_first(part)
        if not self._contents.groups:
            return like
        dataset = get_dataset(self._file, name, sample=sample)
        if (dataset.shape, dataset.dtype) != (like.shape, like.dtype):
            raise source_error(
                f"dataset {name!r} isn't like that of sample 0",
                kind="shapes_differ",
                path=self.info.path,
                dataset=name,
                sample=sample,
                expected=f"{like.dtype} {like.shape}",
                found=f"{dataset.dtype} {dataset.shape}",
            )
        return dataset

    def _storage(self, name: str, dataset: h5py.Dataset) -> _Storage:
        if name in self._storages:
            return self._storages[name]
        extent = extent_of(dataset, is_mapped=self._is_mapped)
        encoding = encoding_of(dataset, name, path=self.info.path)
        with translated("can't tell what was written", path=self.info.path, dataset=name):
            storage = _Storage(extent, encoding, extent is not None or is_complete(dataset))
        if not self._contents.groups:  # else there are as many datasets as samples
            self._storages[name] = storage
        return storage

    def _dataset_of_first(self, part: Part) -> h5py.Dataset:
        """The part's dataset that holds sample 0."""
        name = self._contents.dataset_path(part)
        if name not in self._datasets:
            self._datasets[name] = get_dataset(self._file, name)
        return self._datasets[name]

    def _check_grid_of_first(self, sample: int) -> None:
        if self._first_grid is None:
            self._first_grid = read_coordinates(self._file, self._contents, self._lengths)
        grid = read_coordinates(self._file, self._contents, self._lengths, sample=sample)
        for axis, coordinate in grid.items():
            shown = difference(self._first_grid[axis], coordinate)
            if shown is not None:
                name = self._contents.dataset_path(self._contents.coordinates[axis], sample=sample)
                raise source_error(
                    f"grid {name!r} isn't that of sample 0",
                    kind="grids_differ",
                    path=self.info.path,
                    dataset=name,
                    sample=sample,
                    expected=shown[0],
                    found=shown[1],
                )


def _find_all(file: CheckedFile, contents: Contents, note: Callable[[str], None]) -> None:
    """Come across every other file that samples or coordinates lie in."""
    parts = [part for array in contents.arrays.values() for part in array.parts]
    for sample in range(max(1, len(contents.groups))):
        for part in (*parts, *contents.coordinates.values()):
            name = contents.dataset_path(part, sample=sample)
            note(name)
            file.get(name)  # what isn't there is missed when it is read


def _check_links(file: CheckedFile, contents: Contents) -> None:
    """Refuse links into other files before the first sample is read.

    Those to the groups of samples take 18 µs each. Those in the groups take as many reads of the disk as
    there are groups, so of very many they are found when their sample is read.
    """
    parts = [part for array in contents.arrays.values() for part in array.parts]
    for sample, group in enumerate(contents.groups):
        file.check_links(group)
        if len(contents.groups) <= _MAX_WALKED:
            for part in parts:
                file.check_links(contents.dataset_path(part, sample=sample))


def _samples_per_chunk(file: h5py.File, contents: Contents) -> int:
    """How many samples the longest chunks span; 1 with a group per sample."""
    parts = [part for array in contents.arrays.values() for part in array.parts if "s" in part.axes]
    datasets = [(get_dataset(file, contents.dataset_path(part)), part.axes) for part in parts]
    return max((chunk_length(dataset, axes, "s") for dataset, axes in datasets), default=1)


def _reading(run: range) -> str:
    return f"can't read sample {run.start}" if len(run) == 1 else f"can't read samples {run.start}..{run[-1]}"


def measure(file: h5py.File, contents: Contents) -> dict[str, int]:
    """Length of every axis but those of components, by its letter; all datasets have to agree about it."""
    lengths: dict[str, int] = {"s": len(contents.groups)} if contents.groups else {}
    for name, array in contents.arrays.items():
        for part in array.parts:
            if not isinstance(part, NumberPart):
                # Fields are what is computed with; anything else may be counted or marked.
                _measure_part(file, contents, part, lengths, kinds="f" if name == "fields" else "fiub")
    for part in contents.coordinates.values():  # of axes along which no field varies
        dataset = get_dataset(file, contents.dataset_path(part))
        for axis, length in zip(part.axes, dataset.shape, strict=False):
            lengths.setdefault(axis, length)
    return {"s": 1, "t": 1, **lengths}


def _measure_part(
    file: h5py.File, contents: Contents, part: Part, lengths: dict[str, int], *, kinds: str
) -> None:
    name = contents.dataset_path(part)
    dataset = checked_dataset(file, name, axes=part.axes, kinds=kinds)
    for axis, length in zip(part.axes, dataset.shape, strict=True):
        if length == 0:
            raise source_error(
                f"dataset {name!r} is empty along {AXIS_NAMES[axis]}",
                kind="no_samples" if axis == "s" else "empty_axis",
                path=file.filename,
                dataset=name,
                expected=">= 1",
                found=0,
            )
        if axis not in "ckd" and lengths.setdefault(axis, length) != length:
            raise source_error(
                f"dataset {name!r} is of another size along {AXIS_NAMES[axis]}",
                kind="shapes_differ",
                path=file.filename,
                dataset=name,
                expected=lengths[axis],
                found=length,
            )


def describe(
    file: h5py.File,
    *,
    convention: Convention,
    contents: Contents,
    lengths: Mapping[str, int],
    task: Task | None,
    selection: Selection,
) -> SourceInfo:
    """What the file holds after the selection."""
    path = Path(file.filename)
    _check_some_left(path, lengths, selection)
    info = SourceInfo(
        path=path,
        layout=convention.name,
        layout_version=convention.version,
        num_samples=lengths["s"],
        arrays={
            name: _array_info(file, contents, array, lengths, selection)
            for name, array in contents.arrays.items()
        },
        constants={
            **{
                axis: values[:: selection.step(axis)].copy()
                for axis, values in convention.computed_coordinates(lengths).items()
            },
            **stored_coordinates(file, contents, lengths, selection),
        },
        parameters=convention.parameters(file),
        channels=contents.channels,
        boundary=dict(convention.boundary(file, task)),
        attrs=_said(file, contents) | convention.attributes(file),
        decoded=_decoded(file, contents),
    )
    _check_distinct_names(info)
    if task is not None:
        _check_task(info, task, ndim=contents.ndim, num_times=lengths["t"])
    return info


def _check_some_left(path: Path, lengths: Mapping[str, int], selection: Selection) -> None:
    """Refuse a reduction that leaves one point, or one time step, of many."""
    for axis, length in lengths.items():
        if 1 < length <= selection.step(axis):
            raise ConfigError(
                "data.reduce_time" if axis == "t" else "data.reduce_space",
                kind="bad_reduction",
                path=path,
                expected=f"less than {length}, the length of axis {AXIS_NAMES[axis]!r}",
                found=selection.step(axis),
            )


def _array_info(
    file: h5py.File, contents: Contents, array: StoredArray, lengths: Mapping[str, int], selection: Selection
) -> ArrayInfo:
    if isinstance(array.parts[0], NumberPart):
        return ArrayInfo((), np.dtype("float64"), ())
    datasets = [(part, get_dataset(file, contents.dataset_path(part))) for part in array.parts]
    num_channels = sum(part.num_channels(dataset.shape) for part, dataset in datasets)
    first = dict(zip(datasets[0][0].axes, datasets[0][1].shape, strict=True))

    def length(axis: str) -> int:
        if axis in "kd":
            return int(first[axis])
        return num_channels if axis == "c" else -(-lengths[axis] // selection.step(axis))

    dtypes = []
    for part, dataset in datasets:
        encoding = encoding_of(dataset, contents.dataset_path(part), path=file.filename)
        dtypes.append(encoding.dtype(dataset.dtype) if encoding else dataset.dtype.newbyteorder("="))
    axes = array.axes[1:]
    return ArrayInfo(
        shape=tuple(length(axis) for axis in axes),
        # float16: the least of the floating dtypes that hold integers
        dtype=np.result_type(np.float16, *dtypes),
        dims=tuple(AXIS_NAMES[axis] for axis in axes),
    )


def _decoded(file: h5py.File, contents: Contents) -> tuple[str, ...]:
    """Attributes by which the samples' numbers are decoded."""
    parts = [part for array in contents.arrays.values() for part in array.parts]
    names = [contents.dataset_path(part) for part in parts if not isinstance(part, NumberPart)]
    encodings = [encoding_of(get_dataset(file, name), name, path=file.filename) for name in names]
    return tuple(sorted({name for encoding in encodings if encoding for name in encoding.names}))


def _said(file: h5py.File, contents: Contents) -> dict[str, dict[str, str]]:
    """Units and long names that datasets have: of channels, of other arrays, and of coordinates by axis."""
    named = [(axis, part) for axis, part in contents.coordinates.items()]
    said: dict[str, dict[str, str]] = {}
    for name, array in contents.arrays.items():
        channels = list(contents.channels)
        for part in array.parts:
            if isinstance(part, NumberPart):
                continue
            if name != "fields":
                named.append((name, part))
                continue
            count = part.num_channels(get_dataset(file, contents.dataset_path(part)).shape)
            named += [(channel, part) for channel in channels[:count]]
            del channels[:count]
    for name, part in named:
        attrs = get_dataset(file, contents.dataset_path(part)).attrs
        for key in ("units", "long_name"):
            value = attrs.get(key)
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            if isinstance(text, str):
                said.setdefault(key if key == "units" else "long_names", {})[name] = str(text)
    return said


def _check_distinct_names(info: SourceInfo) -> None:
    kinds = {"array": info.arrays, "coordinate": info.constants, "parameter": info.parameters}
    for (kind, names), (other, others) in itertools.combinations(kinds.items(), 2):
        for name in sorted(set(names) & set(others)):
            raise source_error(
                f"{kind} and {other} are both called {name!r}",
                kind="name_clash",
                path=info.path,
                hint="declare the layout under other names (docs/guides/layouts.md)",
            )


def _check_task(info: SourceInfo, task: Task, *, ndim: int, num_times: int) -> None:
    """Raise unless a file can be of the task."""
    facts: list[tuple[str, bool, object, object]] = [
        ("number of spatial axes", ndim == task.ndim, task.ndim, ndim),
    ]
    if task.channels:
        facts.append(("channels", info.channels == task.channels, task.channels, info.channels))
    if task.steady is not None:
        fits = (num_times == 1) == task.steady
        facts.append(("number of frames", fits, "1" if task.steady else ">= 2", num_times))
    if info.parameters and task.parameters:
        shares_one = not set(info.parameters).isdisjoint(task.parameters)
        facts.append(("parameters", shares_one, task.parameters, tuple(info.parameters)))
    for what, fits, expected, found in facts:
        if not fits:
            raise source_error(
                f"the file can't be of task {task.name!r}, by its {what}",
                kind="task_mismatch",
                path=info.path,
                expected=expected,
                found=found,
                hint="use data.files to choose the files, or other data.tasks",
            )


def read_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], *, sample: int = 0
) -> dict[str, np.ndarray]:
    """Every coordinate as it is stored, from the group of a sample where there are groups."""
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


def stored_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], selection: Selection
) -> dict[str, np.ndarray]:
    """Coordinates of the file after the selection, as long as their axes, one row for all samples."""
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
