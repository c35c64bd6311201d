"""A store as a source, such as one that `ups_store.write` made of arrays.

Where a task declares a layout, `dataset` names an array or a constant, and `attribute` one of the root group.
Without one the store says itself what it holds, as those that builds make do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import ups_store
from ups_store.errors import SourceError, StoreClosedError, StoreError
from ups_store.sources.contents import (
    AXIS_NAMES,
    Selection,
    SourceArray,
    SourceInfo,
    StoredArray,
    StoredDataset,
    fields_axes,
)
from ups_store.sources.tasks import Task
from ups_store.sources.values import CastLoss, cast_values

if TYPE_CHECKING:
    from ups_store.sources.declaration import LayoutDeclaration

SUFFIX = ".zarr.zip"
_LETTERS = {name: letter for letter, name in AXIS_NAMES.items()}
_DECLARED = "the task's layout in the configuration (tasks.NAME.layout) says so"
Note = Callable[[str], None]


class StoreSource:
    """An open store, read as samples in the axis order of a build's stores; see `source.Source`.

    Args:
        path: Of the store, complete.
        task: What it is meant to be; its layout says where things are.
        selection: Reduction in space and time.

    Attributes:
        info: What it holds, after the selection.

    Raises:
        SourceError: Kinds "missing_dataset", "wrong_rank", "wrong_dtype", "wrong_length", "shapes_differ",
            "bad_parameter", "unknown_layout" and "task_mismatch", as of other files; "unreadable" of a store
            that can't be opened.
    """

    def __init__(self, path: Path, *, task: Task | None, selection: Selection) -> None:
        try:
            self._store: Any = ups_store.open(path)
        except StoreError as error:
            raise SourceError(f"the store can't be read: {error}", kind="unreadable", path=path) from error
        self._path, self._selection = path, selection
        try:
            self._arrays, channels = self._declared(task.layout) if task and task.layout else self._own()
            self.info = self._describe(task, channels)
        except BaseException:
            self._store.close()
            raise

    def read(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Read samples into new memory, by array (len(indices), *shape)."""
        out = {n: np.empty((len(indices), *a.shape), a.dtype) for n, a in self.info.arrays.items()}
        self.read_into(out, indices)
        return out

    def read_into(
        self, out: Mapping[str, np.ndarray], indices: Sequence[int], *, note: Note = lambda dataset: None
    ) -> dict[str, CastLoss]:
        """Read samples, cast to the dtypes of where they go; see `source.Source.read_into`."""
        if self._store is None:
            raise StoreClosedError("the source was closed", path=self._path)
        losses = dict[str, CastLoss]()
        for name, array in self._arrays.items():
            loss, channel = CastLoss(), 0
            for stored in array.datasets:
                note(stored.name)
                values = self._in_order(
                    self._store.gather(indices, [stored.name])[stored.name], stored, array
                )
                target, is_joined = out[name], array.axes[-1] == "c"
                if is_joined:
                    target = target[..., channel : channel + values.shape[-1]]
                made = cast_values(target, values, channel_axes=int(is_joined))
                loss += CastLoss(
                    made.num_zero, made.num_inf, made.low, made.high, (0,) * channel + made.num_flat
                )
                channel += values.shape[-1] if is_joined else 0
            losses[name] = loss
        return losses

    def changed_file(self) -> Path | None:
        """A store takes data from no other file."""
        return None

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> StoreSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _in_order(self, values: np.ndarray, stored: StoredDataset, array: StoredArray) -> np.ndarray:
        """Take every how many-th point and step, in the axes of an array, of length 1 where it lacks one."""
        values = values[tuple(slice(None, None, self._selection.step(axis)) for axis in stored.axes)]
        values = values.transpose([stored.axes.index(axis) for axis in array.axes if axis in stored.axes])
        return values[tuple(slice(None) if axis in stored.axes else np.newaxis for axis in array.axes)]

    def _declared(self, layout: LayoutDeclaration) -> tuple[dict[str, StoredArray], tuple[str, ...]]:
        """Where the task's declaration says that things are."""
        fields, channels = [], list[str]()
        for each in layout.fields:
            spec = self._spec(each.dataset, each.letters)
            count = spec.shape[each.letters.index("c")] if "c" in each.letters else 1
            names = each.names or tuple(f"{each.dataset}_{number}" for number in range(count))
            if len(names) != count:
                self._fail(
                    "names another number of channels", each.dataset, "wrong_length", count, len(names)
                )
            fields.append(StoredDataset(each.dataset, each.letters))
            channels += names
        arrays = {"fields": StoredArray(fields_axes(len(layout.space)), tuple(fields))}
        for name, array in layout.arrays.items():
            self._spec(array.dataset, array.letters)
            axes = "s" + "".join(axis for axis in "tzyxk" if axis in array.letters)
            arrays[name] = StoredArray(axes, (StoredDataset(array.dataset, array.letters),))
        for name, parameter in layout.parameters.items():
            if parameter.dataset is not None and parameter.dataset not in self._store.constants:
                self._spec(parameter.dataset, "s")
                arrays[name] = StoredArray("s", (StoredDataset(parameter.dataset, "s"),))
        return arrays, tuple(channels)

    def _own(self) -> tuple[dict[str, StoredArray], tuple[str, ...]]:
        """Where the store's names of dimensions say that things are."""
        arrays = dict[str, StoredArray]()
        for name, spec in self._store.arrays.items():
            dims = spec.dims or ("sample",) * (len(spec.shape) == 1)
            if len(dims) != len(spec.shape) or not set(dims) <= _LETTERS.keys():
                continue
            axes = letters = "".join(_LETTERS[dim] for dim in dims)
            if name == "fields":
                space = sorted(set(letters) & set("xyz"))
                axes = fields_axes(len(space))
                if "".join(space) not in ("x", "xy", "xyz") or not set(letters) <= set(axes):
                    continue
            arrays[name] = StoredArray(axes, (StoredDataset(name, letters),))
        if "fields" not in arrays:
            self._fail(
                "the store doesn't say where its fields are",
                None,
                "unknown_layout",
                "an array 'fields' with names of dimensions, such as (sample, time, x, channel)",
                ", ".join(
                    f"{name} {spec.dims or tuple(spec.shape)}" for name, spec in self._store.arrays.items()
                ),
                hint="declare its layout (docs/guides/own-data.md)",
            )
        letters = arrays["fields"].datasets[0].axes
        count = self._store.arrays["fields"].shape[letters.index("c")] if "c" in letters else 1
        names: Any = self._store.attrs.get("channels")
        if names is None:
            return arrays, tuple(f"fields_{number}" for number in range(count))
        names = [names] if isinstance(names, str) else names
        is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        if not is_list or len(names) != count:
            self._fail("attribute 'channels'", None, "wrong_length", f"{count} names", repr(names))
        return arrays, tuple(names)

    def _describe(self, task: Task | None, channels: tuple[str, ...]) -> SourceInfo:
        lengths, arrays = dict[str, int](), dict[str, SourceArray]()
        for name, array in self._arrays.items():
            components = dict[str, int]()
            for stored in array.datasets:
                spec = self._store.arrays[stored.name]
                if spec.is_ragged:
                    expected = "samples of one shape"
                    self._fail("is ragged", stored.name, "wrong_rank", expected, tuple(spec.shape))
                for axis, length in zip(stored.axes, spec.shape, strict=True):
                    if axis in "ck":
                        components[axis] = components.get(axis, 0) + length
                    elif lengths.setdefault(axis, length) != length:
                        self._fail("of another size", stored.name, "shapes_differ", lengths[axis], length)
            components.setdefault("c", len(array.datasets))
            sizes = {"t": 1, **lengths, **components}
            shape = tuple(-(-sizes[axis] // self._selection.step(axis)) for axis in array.axes[1:])
            dtypes = [np.dtype(self._store.arrays[stored.name].dtype) for stored in array.datasets]
            kinds = "f" if name == "fields" else "fiub"
            for stored, dtype in zip(array.datasets, dtypes, strict=True):
                if dtype.kind not in kinds and dtype.name != "bfloat16":
                    expected = "floats" if name == "fields" else "numbers"
                    self._fail("has the wrong dtype", stored.name, "wrong_dtype", expected, dtype)
            # NumPy has no dtype for float16 and bfloat16 together.
            wide = [np.dtype("float32") if dtype.name == "bfloat16" else dtype for dtype in dtypes]
            dtype = np.dtype("float64") if array.axes == "s" else np.result_type(np.float16, *wide)
            arrays[name] = SourceArray(shape, dtype, tuple(AXIS_NAMES[axis] for axis in array.axes[1:]))
        layout, boundary = task.layout if task else None, (task.boundary if task else {})
        boundary = boundary or self._store.attrs.get("boundary") or {}
        if not isinstance(boundary, Mapping):
            expected = "a type by axis, such as {x: periodic}"
            self._fail("attribute 'boundary'", None, "bad_parameter", expected, repr(boundary))
        info = SourceInfo(
            path=self._path,
            layout="store",
            layout_version=1,
            num_samples=len(self._store),
            arrays=arrays,
            constants=self._coordinates(layout, lengths),
            parameters=self._numbers(layout) if layout else {},
            channels=channels,
            boundary=dict(boundary),
        )
        ndim = len(arrays["fields"].dims) - 2
        if task is not None and ndim != task.ndim:
            self._fail(
                f"the store can't be of task {task.name!r}", "fields", "task_mismatch", task.ndim, ndim
            )
        return info

    def _coordinates(self, layout: Any, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Of the axes, as declared, or the store's constants of that name."""
        constants, coordinates = self._store.constants, dict[str, np.ndarray]()
        for axis in sorted(lengths.keys() & set("tzyx")):  # along which something varies
            each = layout.coordinates.get(axis) if layout else None
            if each is None and (layout or axis not in constants):
                continue
            if each is not None and each.dataset is None:
                values = each.start + each.step * np.arange(lengths[axis], dtype=np.float64)
            else:
                name = axis if each is None else each.dataset
                if name not in constants:
                    self._fail("there is no constant", name, "missing_dataset", name, ", ".join(constants))
                values = np.asarray(constants[name])
            if values.shape != (lengths[axis],):
                expected = f"({lengths[axis]},)"
                self._fail(f"doesn't fit axis {axis}", str(axis), "wrong_length", expected, values.shape)
            coordinates[axis] = values[:: self._selection.step(axis)].copy()
        return coordinates

    def _numbers(self, layout: LayoutDeclaration) -> dict[str, float]:
        """Numbers that hold for all samples: constants, attributes, and what the file's name says."""
        numbers = dict[str, float]()
        for name, each in layout.parameters.items():
            value: Any = None
            if each.dataset is not None:
                if each.dataset not in self._store.constants:
                    continue
                value = self._store.constants[each.dataset]
            elif each.attribute is not None:
                value = self._store.attrs.get(each.attribute)
            elif each.file_name is not None and (match := re.search(each.file_name, self._path.name)):
                value = match[1]
            try:
                numbers[name] = float(value if np.ndim(value) == 0 else np.asarray(value).item())
            except (TypeError, ValueError):
                self._fail(f"parameter {name!r}", None, "bad_parameter", "one number", repr(value))
        return numbers

    def _spec(self, name: str, letters: str) -> Any:
        """The array of this name, which has to have these axes, the sample's first."""
        spec = self._store.arrays.get(name)
        if spec is None:
            there = ", ".join(self._store.arrays)
            self._fail("there is no array", name, "missing_dataset", name, there, _DECLARED)
        shown = ", ".join(AXIS_NAMES[letter] for letter in letters)
        if len(spec.shape) != len(letters) or letters[:1] != "s":
            expected = f"({shown}), sample first"
            self._fail("has other axes", name, "wrong_rank", expected, tuple(spec.shape), _DECLARED)
        dims = [_LETTERS.get(dim, "") for dim in spec.dims or ()]
        if dims != [*letters] and sorted(dims) == sorted(letters):
            problem = "has its axes in another order"
            self._fail(problem, name, "wrong_rank", f"({shown})", spec.dims, _DECLARED)
        return spec

    def _fail(
        self,
        problem: str,
        name: str | None,
        kind: str,
        expected: object,
        found: object,
        hint: str | None = None,
    ) -> None:
        details: dict[str, Any] = {"dataset": name, "expected": expected, "found": found, "hint": hint}
        raise SourceError(f"{name!r}: {problem}" if name else problem, kind=kind, path=self._path, **details)
