"""A source: one HDF5 file of simulations, seen as samples in the axis order of a store."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.errors import ConfigError, StoreClosedError
from ups_store.format.layout import consecutive_ranges
from ups_store.sources.cf_encoding import CfEncoding
from ups_store.sources.contents import (
    AXIS_NAMES,
    EVERYTHING,
    Contents,
    Convention,
    Selection,
    SourceArray,
    SourceInfo,
    StoredArray,
    StoredDataset,
    StoredNumber,
    changed,
    difference,
)
from ups_store.sources.conventions import recognise
from ups_store.sources.external_data import CheckedFile
from ups_store.sources.hdf5 import (
    cf_encoding,
    check_written,
    checked_dataset,
    get_dataset,
    h5py,
    is_complete,
    read_number,
    read_whole,
    source_error,
    translated,
)
from ups_store.sources.regions import DatasetExtent, chunk_length, read_hyperslabs
from ups_store.sources.stores import SUFFIX, StoreSource
from ups_store.sources.tasks import Task
from ups_store.sources.values import CastLoss
from ups_store.system.paths import check_local

_MAX_WALKED = 1000  # groups of samples whose links are looked at when the file is opened

Note = Callable[[str], None]


def open_source(
    path: str | os.PathLike[str],
    *,
    task: Task | None = None,
    selection: Selection = EVERYTHING,
    follow: str | os.PathLike[str] | None = None,
    is_mapped: bool = False,
    note: Note = lambda name: None,
) -> Source | StoreSource:
    """Open a file whose layout is recognised by what it holds.

    Args:
        path: HDF5 file, or a store (`.zarr.zip`).
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
            "truncated", "unknown_layout", "missing_dataset", "wrong_rank" or "task_mismatch"; also if data
            lies in other files, and isn't allowed to, or one of them is missing.
        ConfigError: If `follow` isn't a folder.
    """
    check_local(path)
    path = Path(path)
    if path.name.endswith(SUFFIX):
        return StoreSource(path, task=task, selection=selection)
    file = CheckedFile(path, None if follow is None else Path(follow), note)
    try:
        with translated("can't read the structure", path):
            convention = recognise(file, task)
            contents = convention.describe(file, task)
            lengths = _measure(file, contents)
            info = _describe(file, convention, contents, lengths, task, selection)
            _look_at_links(file, contents, note)
            info = dataclasses.replace(info, outer=tuple(file.outer))
    except BaseException:
        file.close()
        raise
    return Source(file, info, contents, lengths, selection, is_mapped)


@dataclasses.dataclass(frozen=True)
class _Storage:
    """How a dataset lies in its file: where without gaps, how encoded, and whether all of it was written."""

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
        info: SourceInfo,
        contents: Contents,
        lengths: Mapping[str, int],
        selection: Selection,
        is_mapped: bool,
    ) -> None:
        self.info = info
        self._file, self._contents, self._lengths = file, contents, lengths
        self._selection, self._is_mapped = selection, is_mapped
        self._first_grid: dict[str, np.ndarray] | None = None
        self._storages: dict[str, _Storage] = {}  # asking for one takes 0.5 ms
        self._datasets: dict[str, h5py.Dataset] = {}  # those of sample 0: opening one takes 0.1 ms

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
        out = {n: np.empty((len(indices), *a.shape), a.dtype) for n, a in self.info.arrays.items()}
        self.read_into(out, indices)
        return out

    def read_into(
        self, out: Mapping[str, np.ndarray], indices: Sequence[int], *, note: Note = lambda dataset: None
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
        lowest, highest = min(indices, default=0), max(indices, default=-1)
        if lowest < 0 or highest >= self.info.num_samples:
            sample, expected = int(lowest if lowest < 0 else highest), f"0..{self.info.num_samples - 1}"
            path = self.info.path
            raise source_error("no such sample", "no_such_sample", path, sample=sample, expected=expected)
        losses, row = dict.fromkeys(out, CastLoss()), 0
        longest = 1 if self._contents.groups else max(1, len(indices))
        try:
            for run in consecutive_ranges(indices, longest=longest):  # of samples in the same datasets
                if self._contents.groups:
                    note(self._contents.groups[run.start])
                    self._check_grid_of_first(run.start)
                for name, array in self._contents.arrays.items():
                    losses[name] += self._read_array(array, run, out[name][row : row + len(run)], note)
                row += len(run)
        finally:  # also where HDF5 said something else about it
            if (outer := self.changed_file()) is not None:
                raise changed(outer) from None
        return losses

    def changed_file(self) -> Path | None:
        """Give one of the files beside it that isn't what it was when it was opened, if there is one."""
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

    def _read_array(self, array: StoredArray, run: range, out: np.ndarray, note: Note) -> CastLoss:
        """Read the datasets of an array beside each other along the channel axis of `out`."""
        channel, loss, path = 0, CastLoss(), self.info.path
        reading = f"samples {run.start}..{run[-1]}" if len(run) > 1 else f"sample {run.start}"
        for stored in array.datasets:
            name = self._contents.path_of(stored, sample=run.start)
            note(name)
            if isinstance(stored, StoredNumber):
                out[...] = read_number(self._file, stored, name, sample=run.start)
                continue
            dataset = self._dataset(stored, name, run.start)
            end = channel + stored.num_channels(dataset.shape)
            is_all = array.axes[-1] not in "ck" or end - channel == out.shape[-1]
            target, to_axes = out if is_all else out[..., channel:end], array.axes
            if "d" in stored.axes and "d" not in to_axes:  # the components of a tensor are so many channels
                target = target.reshape(*target.shape[:-1], *dataset.shape[-2:], copy=False)
                to_axes += "d"
            storage = self._storage(name, dataset)
            if not storage.is_complete:
                for sample in run if "s" in stored.axes else (run.start,):
                    box = tuple(slice(sample, sample + 1) if a == "s" else slice(None) for a in stored.axes)
                    check_written(dataset, name, box, path=path, sample=sample)
            with translated(f"can't read {reading}", path, name, run.start, dataset):
                dataset_loss = read_hyperslabs(
                    target,
                    dataset,
                    axes=stored.axes,
                    to_axes=to_axes,
                    first=run.start if "s" in stored.axes else 0,
                    selection=self._selection,
                    extent=storage.extent,
                    encoding=storage.encoding,
                    progress=functools.partial(note, name),
                )
            loss += dataclasses.replace(dataset_loss, num_flat=(0,) * channel + dataset_loss.num_flat)
            channel = end
        return loss

    def _dataset(self, stored: StoredDataset, name: str, sample: int) -> h5py.Dataset:
        """Open the dataset that holds a sample; it has to be like that of sample 0."""
        first_name = self._contents.path_of(stored)
        if first_name not in self._datasets:
            self._datasets[first_name] = get_dataset(self._file, first_name)
        first = self._datasets[first_name]
        if not self._contents.groups:
            return first
        dataset = get_dataset(self._file, name, sample=sample)
        if (dataset.shape, dataset.dtype) != (first.shape, first.dtype):
            raise source_error(
                f"dataset {name!r} isn't like that of sample 0",
                "shapes_differ",
                self.info.path,
                name,
                sample=sample,
                expected=f"{first.dtype} {first.shape}",
                found=f"{dataset.dtype} {dataset.shape}",
            )
        return dataset

    def _storage(self, name: str, dataset: h5py.Dataset) -> _Storage:
        if name in self._storages:
            return self._storages[name]
        extent = DatasetExtent.of(dataset, is_mapped=self._is_mapped)
        encoding = cf_encoding(dataset, name, path=self.info.path)
        with translated("can't tell what was written", self.info.path, name):
            storage = _Storage(extent, encoding, extent is not None or is_complete(dataset))
        if not self._contents.groups:  # else there are as many datasets as samples
            self._storages[name] = storage
        return storage

    def _check_grid_of_first(self, sample: int) -> None:
        if self._first_grid is None:
            self._first_grid = _read_coordinates(self._file, self._contents, self._lengths)
        grid = _read_coordinates(self._file, self._contents, self._lengths, sample=sample)
        for axis, coordinate in grid.items():
            unequal = difference(self._first_grid[axis], coordinate)
            if unequal is not None:
                name = self._contents.path_of(self._contents.coordinates[axis], sample=sample)
                raise source_error(
                    f"grid {name!r} isn't that of sample 0",
                    "grids_differ",
                    self.info.path,
                    name,
                    sample=sample,
                    expected=unequal[0],
                    found=unequal[1],
                )


def _measure(file: h5py.File, contents: Contents) -> dict[str, int]:
    """Measure every axis but those of components, by its letter; all datasets have to agree about it."""
    lengths: dict[str, int] = {"s": len(contents.groups)} if contents.groups else {}
    path = file.filename
    for array_name, array in contents.arrays.items():
        for stored in array.datasets:
            if isinstance(stored, StoredNumber):
                continue
            name = contents.path_of(stored)
            # Fields are what is computed with; anything else may be counted or marked.
            kinds = "f" if array_name == "fields" else "fiub"
            dataset = checked_dataset(file, name, axes=stored.axes, kinds=kinds)
            for axis, length in zip(stored.axes, dataset.shape, strict=True):
                if length == 0:
                    problem = f"dataset {name!r} is empty along {AXIS_NAMES[axis]}"
                    kind = "no_samples" if axis == "s" else "empty_axis"
                    raise source_error(problem, kind, path, name, expected=">= 1", found=0)
                if axis not in "ckd" and (known := lengths.setdefault(axis, length)) != length:
                    problem = f"dataset {name!r} is of another size along {AXIS_NAMES[axis]}"
                    raise source_error(problem, "shapes_differ", path, name, expected=known, found=length)
    for stored in contents.coordinates.values():  # of axes along which no field varies
        dataset = get_dataset(file, contents.path_of(stored))
        for axis, length in zip(stored.axes, dataset.shape, strict=False):
            lengths.setdefault(axis, length)
    return {"s": 1, "t": 1, **lengths}


def _describe(
    file: h5py.File,
    convention: Convention,
    contents: Contents,
    lengths: Mapping[str, int],
    task: Task | None,
    selection: Selection,
) -> SourceInfo:
    """Tell what the file holds after the selection."""
    path = Path(file.filename)
    for axis, length in lengths.items():
        if 1 < length <= selection.step(axis):
            raise ConfigError(
                "data.reduce_time" if axis == "t" else "data.reduce_space",
                kind="bad_reduction",
                path=path,
                expected=f"less than {length}, the length of axis {AXIS_NAMES[axis]!r}",
                found=selection.step(axis),
            )
    named: dict[str, dict[str, str]] = {"units": {}, "long_names": {}}
    arrays = _describe_arrays(file, contents, lengths, selection, named)
    constants = {
        axis: values[:: selection.step(axis)].copy()
        for axis, values in convention.computed_coordinates(lengths).items()
    }
    info = SourceInfo(
        path=path,
        layout=convention.name,
        layout_version=convention.version,
        num_samples=lengths["s"],
        constants=constants | _stored_coordinates(file, contents, lengths, selection),
        parameters=convention.parameters(file),
        channels=contents.channels,
        boundary=dict(convention.boundary(file, task)),
        attrs={key: labels for key, labels in named.items() if labels} | convention.attributes(file),
        **arrays,
    )
    kinds = {"array": info.arrays, "coordinate": info.constants, "parameter": info.parameters}
    for (kind, names), (other, others) in itertools.combinations(kinds.items(), 2):
        for name in sorted(set(names) & set(others)):
            hint = "declare the layout under other names (docs/guides/layouts.md)"
            problem = f"{kind} and {other} are both called {name!r}"
            raise source_error(problem, "name_clash", path, hint=hint)
    if task is not None:
        _check_task(info, task, ndim=contents.ndim, num_times=lengths["t"])
    return info


def _describe_arrays(
    file: h5py.File,
    contents: Contents,
    lengths: Mapping[str, int],
    selection: Selection,
    named: Mapping[str, dict[str, str]],
) -> dict[str, Any]:
    """Tell shape, dtype and chunks of the arrays, as `SourceInfo` has them.

    Units and long names go to `named`: of coordinates by axis, of other arrays, and of channels.
    """
    arrays, samples_per_chunk, decoded = {}, 1, set[str]()

    def note_attributes(labels: Sequence[str], dataset: h5py.Dataset) -> None:
        for names, key in zip(named.values(), ("units", "long_name"), strict=True):
            value = dataset.attrs.get(key)
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            if isinstance(text, str):
                names |= dict.fromkeys(labels, str(text))

    for axis, stored in contents.coordinates.items():
        note_attributes([axis], get_dataset(file, contents.path_of(stored)))
    for name, array in contents.arrays.items():
        if isinstance(array.datasets[0], StoredNumber):
            arrays[name] = SourceArray((), np.dtype("float64"), ())
            continue
        dtypes, num_channels, components = list[Any](), 0, dict[str, int]()
        for stored in array.datasets:
            dataset_name = contents.path_of(stored)
            dataset = get_dataset(file, dataset_name)
            encoding = cf_encoding(dataset, dataset_name, path=file.filename)
            dtypes.append(encoding.dtype(dataset.dtype) if encoding else dataset.dtype.newbyteorder("="))
            decoded |= set(encoding.names if encoding else ())
            count = stored.num_channels(dataset.shape)
            labels = contents.channels[num_channels : num_channels + count] if name == "fields" else (name,)
            note_attributes(labels, dataset)
            num_channels += count
            components = components or dict(zip(stored.axes, dataset.shape, strict=True))
            if "s" in stored.axes:
                samples_per_chunk = max(samples_per_chunk, chunk_length(dataset, stored.axes, "s"))
            del dataset  # HDF5 takes one folder of outer bytes for all that have a dataset open
        shape = []
        for axis in array.axes[1:]:
            length = num_channels if axis == "c" else components[axis] if axis in "kd" else lengths[axis]
            shape.append(int(-(-length // selection.step(axis))))
        # float16: the least of the floating dtypes that hold integers
        dtype, dims = np.result_type(np.float16, *dtypes), tuple(AXIS_NAMES[a] for a in array.axes[1:])
        arrays[name] = SourceArray(tuple(shape), dtype, dims)
    return {"arrays": arrays, "samples_per_chunk": samples_per_chunk, "decoded": tuple(sorted(decoded))}


def _check_task(info: SourceInfo, task: Task, *, ndim: int, num_times: int) -> None:
    """Raise unless a file can be of the task."""
    parameters, frames = tuple(info.parameters), "1" if task.steady else ">= 2"
    is_apart = bool(parameters and task.parameters) and set(parameters).isdisjoint(task.parameters)
    is_other_frames = task.steady is not None and (num_times == 1) != task.steady
    table = (
        ("number of spatial axes", ndim != task.ndim, task.ndim, ndim),
        ("channels", task.channels not in ((), info.channels), task.channels, info.channels),
        ("number of frames", is_other_frames, frames, num_times),
        ("parameters", is_apart, task.parameters, parameters),
    )
    for fact, differs, expected, value in table:
        if differs:
            problem = f"the file can't be of task {task.name!r}, by its {fact}"
            hint = "use data.files to choose the files, or other data.tasks"
            facts: dict[str, Any] = {"expected": expected, "found": value, "hint": hint}
            raise source_error(problem, "task_mismatch", info.path, **facts)


def _read_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], *, sample: int = 0
) -> dict[str, np.ndarray]:
    """Read every coordinate as it is stored, from the group of a sample where there are groups."""
    coordinates = {}
    for axis, stored in contents.coordinates.items():
        name = contents.path_of(stored, sample=sample)
        dataset = checked_dataset(file, name, axes=stored.axes, kinds="fiu", sample=sample)
        for letter, length in zip(stored.axes, dataset.shape, strict=True):
            # PDEBench's t-coordinate has one entry more than there are frames; the last one is unused.
            expected = lengths[letter]
            if length != expected and not (letter == "t" and length == expected + 1):
                problem = f"coordinate {name!r} doesn't fit the {AXIS_NAMES[letter]} axis"
                path = file.filename
                raise source_error(problem, "wrong_length", path, name, expected=expected, found=length)
        coordinates[axis] = read_whole(dataset, name, path=file.filename, sample=sample)
    return coordinates


def _stored_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], selection: Selection
) -> dict[str, np.ndarray]:
    """Read coordinates after the selection, as long as their axes, one row for all samples."""
    constants, path = {}, file.filename
    for axis, values in _read_coordinates(file, contents, lengths).items():
        name, row = contents.coordinates[axis].name, values
        if values.ndim == 2:
            row = values[0]
            other = np.flatnonzero((values != row).any(axis=1))
            if other.size:
                problem, sample = f"coordinate {axis!r} isn't that of sample 0", int(other[0])
                raise source_error(problem, "grids_differ", path, name, sample=sample)
        bad = np.flatnonzero(~np.isfinite(row))
        if bad.size:
            raise source_error(
                f"coordinate {name!r} isn't finite",
                "not_finite",
                path,
                name,
                expected="numbers",
                found=f"{row[bad[0]]!s} at index {bad[0]}",
                hint="mend the source: there is no grid without coordinates",
            )
        constants[axis] = row[: lengths[axis] : selection.step(axis)].copy()
    return constants


def _look_at_links(file: CheckedFile, contents: Contents, note: Note) -> None:
    """Come across every other file that samples or coordinates lie in; refuse them where none is allowed.

    Links to the groups of samples take 18 µs each. Those in the groups take as many reads of the disk as
    there are groups, so of very many they are found when their sample is read.
    """
    stored = [dataset for array in contents.arrays.values() for dataset in array.datasets]
    for sample in range(max(1, len(contents.groups))):
        if file.may_have_outer:
            for dataset in (*stored, *contents.coordinates.values()):
                name = contents.path_of(dataset, sample=sample)
                note(name)
                file.get(name)  # what isn't there is missed when it is read
        elif contents.groups:
            file.check_links(contents.groups[sample])
            for dataset in stored if len(contents.groups) <= _MAX_WALKED else ():
                file.check_links(contents.path_of(dataset, sample=sample))
    file.is_complete = True
