"""From a layout's description to a `SourceInfo`: what the description says is held against the file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from ups_store.errors import ConfigError
from ups_store.ingest.contents import AXIS_NAMES, Contents, Part, StoredArray
from ups_store.ingest.hdf5 import get_dataset, source_error, translated
from ups_store.ingest.info import ArrayInfo, Selection, SourceInfo
from ups_store.ingest.layout import Layout
from ups_store.ingest.parameters import NumberPart
from ups_store.tasks import Task


def measure(file: h5py.File, contents: Contents) -> dict[str, int]:
    """Length of every axis but those of components, by its letter; all datasets have to agree about it.

    Raises:
        SourceError: Kind "missing_dataset", "wrong_rank", "wrong_dtype", "shapes_differ", "no_samples" or
            "empty_axis".
    """
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
    dataset = _checked_dataset(file, name, axes=part.axes, kinds=kinds)
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
    layout: Layout,
    contents: Contents,
    lengths: Mapping[str, int],
    task: Task | None,
    selection: Selection,
) -> SourceInfo:
    """What the file holds after the selection.

    Raises:
        SourceError: Kind "wrong_rank", "wrong_dtype", "wrong_length", "grids_differ", "not_finite",
            "name_clash" or "task_mismatch", or as `Layout.parameters` says.
        ConfigError: Kind "bad_reduction" if the selection leaves one point of many.
    """
    path = Path(file.filename)
    _expect_some_left(path, lengths, selection)
    info = SourceInfo(
        path=path,
        layout=layout.name,
        layout_version=layout.version,
        num_samples=lengths["s"],
        arrays={
            name: _array_info(file, contents, array, lengths, selection)
            for name, array in contents.arrays.items()
        },
        constants={
            **_computed(layout, lengths, selection),
            **_constants(file, contents, lengths, selection),
        },
        parameters=layout.parameters(file),
        channels=contents.channels,
        boundary=dict(layout.boundary(file, task)),
        attrs=layout.attributes(file),
    )
    _expect_distinct_names(info)
    if task is not None:
        _expect_task(info, task, ndim=contents.ndim, num_times=lengths["t"])
    return info


def _expect_some_left(path: Path, lengths: Mapping[str, int], selection: Selection) -> None:
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


def read_coordinates(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], *, sample: int = 0
) -> dict[str, np.ndarray]:
    """Every coordinate as it is stored, from the group of a sample where there are groups.

    Raises:
        SourceError: Kind "missing_dataset", "wrong_rank", "wrong_dtype" or "wrong_length".
    """
    coordinates = {}
    for axis, part in contents.coordinates.items():
        name = contents.dataset_path(part, sample=sample)
        dataset = _checked_dataset(file, name, axes=part.axes, kinds="fiu", sample=sample)
        _expect_lengths(dataset, name, part, lengths)
        with translated("can't read", path=file.filename, dataset=name, sample=sample):
            coordinates[axis] = dataset[...].astype(dataset.dtype.newbyteorder("="), copy=False)
    return coordinates


def _checked_dataset(
    file: h5py.File, name: str, *, axes: str, kinds: str, sample: int | None = None
) -> h5py.Dataset:
    dataset = get_dataset(file, name, sample=sample)
    dtype = dataset.dtype
    if dataset.ndim != len(axes):
        raise source_error(
            f"dataset {name!r} has the wrong rank",
            kind="wrong_rank",
            path=file.filename,
            dataset=name,
            sample=sample,
            expected=f"({', '.join(AXIS_NAMES[axis] for axis in axes)})",
            found=f"shape {dataset.shape}",
        )
    if dtype.kind not in kinds or dtype.itemsize > 8:  # 8: no array type is wider than float64
        raise source_error(
            f"dataset {name!r} has the wrong dtype",
            kind="wrong_dtype",
            path=file.filename,
            dataset=name,
            sample=sample,
            expected="float16, float32 or float64" if kinds == "f" else "numbers of at most 8 bytes",
            found=dtype,
            hint="convert the file",
        )
    return dataset


def _expect_lengths(dataset: h5py.Dataset, name: str, part: Part, lengths: Mapping[str, int]) -> None:
    for axis, length in zip(part.axes, dataset.shape, strict=True):
        # PDEBench's t-coordinate has one entry more than there are frames; the last one is unused.
        if length != lengths[axis] and not (axis == "t" and length == lengths[axis] + 1):
            raise source_error(
                f"coordinate {name!r} doesn't fit the {AXIS_NAMES[axis]} axis",
                kind="wrong_length",
                path=dataset.file.filename,
                dataset=name,
                expected=lengths[axis],
                found=length,
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

    axes = array.axes[1:]
    return ArrayInfo(
        shape=tuple(length(axis) for axis in axes),
        # float16: the least of the floating dtypes that hold integers
        dtype=np.result_type(np.float16, *(dataset.dtype.newbyteorder("=") for _, dataset in datasets)),
        dims=tuple(AXIS_NAMES[axis] for axis in axes),
    )


def _computed(layout: Layout, lengths: Mapping[str, int], selection: Selection) -> dict[str, np.ndarray]:
    computed = layout.computed_coordinates(lengths)
    return {axis: values[:: selection.step(axis)].copy() for axis, values in computed.items()}


def _constants(
    file: h5py.File, contents: Contents, lengths: Mapping[str, int], selection: Selection
) -> dict[str, np.ndarray]:
    """Coordinates as long as their axes, one row for all samples."""
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
        _expect_finite(file, contents.coordinates[axis].dataset, row)
        constants[axis] = row[: lengths[axis] : selection.step(axis)].copy()
    return constants


def _expect_finite(file: h5py.File, name: str, row: np.ndarray) -> None:
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


def _expect_distinct_names(info: SourceInfo) -> None:
    kinds = {"array": info.arrays, "coordinate": info.constants, "parameter": info.parameters}
    for (kind, names), (other, others) in itertools.combinations(kinds.items(), 2):
        for name in sorted(set(names) & set(others)):
            raise source_error(
                f"{kind} and {other} are both called {name!r}",
                kind="name_clash",
                path=info.path,
                hint="declare the layout under other names (docs/layouts.md)",
            )


def _expect_task(info: SourceInfo, task: Task, *, ndim: int, num_times: int) -> None:
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
                hint="use data.files to choose the files, or another data.task",
            )
