"""From a layout's description to a `SourceInfo`: what the description says is held against the file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ups_store.errors import ConfigError
from ups_store.sources.contents import (
    AXIS_NAMES,
    ArrayInfo,
    Contents,
    Part,
    Selection,
    SourceInfo,
    StoredArray,
)
from ups_store.sources.coordinates import computed_coordinates, stored_coordinates
from ups_store.sources.hdf5 import checked_dataset, encoding_of, get_dataset, h5py, source_error
from ups_store.sources.layout import Layout
from ups_store.sources.parameters import NumberPart
from ups_store.sources.tasks import Task


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
    _check_some_left(path, lengths, selection)
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
            **computed_coordinates(layout, lengths, selection),
            **stored_coordinates(file, contents, lengths, selection),
        },
        parameters=layout.parameters(file),
        channels=contents.channels,
        boundary=dict(layout.boundary(file, task)),
        attrs=_said(file, contents) | layout.attributes(file),
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
