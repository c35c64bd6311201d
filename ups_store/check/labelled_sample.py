"""One sample with its axes in order, their coordinates, channel names and units: what a picture shows.

Coordinates come from the store's constants (or per-sample arrays) `x`, `y`, `z`, `t`, channel names from the
attribute `channels`, units from the attribute `units`, a mapping from channel and coordinate names.
Axes: T time steps, Z Y X space, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.read.base import AnyStore
from ups_store.read.gather import TIME_DIM

MAIN_ARRAY = "fields"
_SPACE = ("z", "y", "x")
_CHANNEL_DIMS = ("channel", "component")
_MAX_PARAMETERS = 6  # in a title

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Axis:
    """One axis of a picture.

    Attributes:
        name: Name of the coordinate.
        unit: Its unit, "-" if none is known; None where only indices are known.
        points: Where the values lie, shape (n,), float64, strictly monotonic.
    """

    name: str
    unit: str | None
    points: npt.NDArray[np.float64]

    @property
    def label(self) -> str:
        """Label of the axis: "x [m]"."""
        return f"{self.name} (index)" if self.unit is None else f"{self.name} [{self.unit}]"

    def at(self, index: int) -> str:
        """One place on it: "t = 0.25 s"."""
        unit = f" {self.unit}" if self.unit not in (None, "-") else ""
        return f"{self.name} = {self.points[index]:.4g}{unit}"


@dataclass(frozen=True)
class LabelledSample:
    """One sample of an array.

    Attributes:
        values: Shape (T, Z, Y, X, C) with length 1 for axes that the array doesn't have, or, where
            `is_flat`, as in the store. A view, unless inputs of a steady sample stand beside it.
        axes: The axes that it has, by dimension, channels excepted; time only if it has several steps.
        channels: C labels.
        title: What it is, and its parameters.
        is_flat: Whether it has axes whose meaning isn't known; then there are neither axes nor channels.
        is_image: Whether it is a picture: values uint8, shape (H, W, C), as in the store, C 1 for grey, 3 for
            RGB, 4 for RGBA; there are neither axes nor channels then.
    """

    values: npt.NDArray[Any]
    axes: Mapping[str, Axis]
    channels: tuple[str, ...]
    title: str
    is_flat: bool = False
    is_image: bool = False

    @property
    def space(self) -> list[str]:
        """The dimensions in space that it has, of "z", "y", "x"."""
        return [dim for dim in _SPACE if dim in self.axes]


def label_sample(store: AnyStore, *, sample: int | None = None, array: str | None = None) -> LabelledSample:
    """Take one sample of one array, with everything that the store says about it.

    Args:
        store: May be unfinished.
        sample: Sample number; by default the first one that is committed.
        array: Array name; by default "fields" if there is one, else the largest, and of a steady sample the
            fields that decide it before it.
    Raises:
        SampleIndexError: If there is no such sample.
        NotCommittedError: If it isn't committed yet.
        ArrayNotFoundError: If there is no such array.
        SpecError: If the array has no sample axis, or no elements.
    """
    number = _number(store, sample)
    arrays = {key: value for key, value in store.sample(number).items() if isinstance(value, np.ndarray)}
    name = array if array is not None else _main_array(arrays)
    if name not in arrays:
        if name not in store:
            store[name]  # raises
        encoding = store.arrays[name].encoding if name in store.arrays else None
        problem = {None: "it has no sample axis", "bytes": "it is bytes", "utf-8": "it is text"}[encoding]
        raise SpecError(problem, path=store.path, array=name, hint="choose another array")
    if not arrays[name].size:
        shape = arrays[name].shape
        raise SpecError("it has no elements", path=store.path, array=name, found=f"shape {shape}")
    dims = _dims(store, name)
    if _is_image(arrays[name], dims):
        title = _title(store, [name], number, arrays)
        return LabelledSample(arrays[name], {}, (), title, is_image=True)
    order = _order(dims)
    if len(order) < len(dims) or not set(order) - {"channel"}:
        title = _title(store, [name], number, arrays)
        return LabelledSample(arrays[name], {}, (), title, is_flat=True)
    inputs = _inputs(store, name, arrays) if array is None else []
    names = [*inputs, name]
    values = [_ordered(arrays[one], _dims(store, one), _order(_dims(store, one))) for one in names]
    if TIME_DIM in order and "num_steps" in arrays and arrays["num_steps"].shape == ():
        values[-1] = values[-1][
            : max(1, int(arrays["num_steps"]))
        ]  # a ragged run has no valid frame behind it
    units = _attribute(store, name, "units", dict) or {}
    axes = {
        dim: _axis(dim, num, store.constants | arrays, units)
        for dim, num in zip((TIME_DIM, *_SPACE), values[-1].shape[:4], strict=True)
        if dim in order and (dim in _SPACE or num > 1)
    }
    channels = [
        label
        for one, some in zip(names, values, strict=True)
        for label in _channels(store, one, some.shape[4], units)
    ]
    shown = np.concatenate([some.astype(np.float64) for some in values], axis=4) if inputs else values[-1]
    return LabelledSample(shown, axes, tuple(channels), _title(store, names, number, arrays))


def sample_text(store: AnyStore, *, sample: int | None = None, array: str | None = None) -> str | None:
    """One sample of an array of text; None where there is a picture to draw, or the array isn't text.

    Args:
        store: May be unfinished.
        sample: As for `label_sample`.
        array: Array name; by default the first text, where the store has nothing else with a sample axis.
    Raises:
        SampleIndexError: If there is no such sample.
        NotCommittedError: If it isn't committed yet.
    """
    arrays = store.arrays
    texts = [name for name, spec in arrays.items() if spec.encoding == "utf-8"]
    if array is None and texts and all(spec.encoding is not None for spec in arrays.values()):
        array = texts[0]
    if array not in texts:
        return None
    text: str = store.gather([_number(store, sample)], [array])[array][0]
    return text


def _number(store: AnyStore, sample: int | None) -> int:
    """The sample that is asked for; by default the first one that is committed."""
    if sample is not None:
        return sample
    committed = np.flatnonzero(store.committed)
    return int(committed[0]) if len(committed) else 0


def _is_image(values: npt.NDArray[Any], dims: list[str]) -> bool:
    """Whether a sample is rows of pixels from the top, by its dtype and shape, and no field by its axes."""
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] not in (1, 3, 4):
        return False
    return [dim for dim in dims if dim in (TIME_DIM, *_SPACE)] in ([], ["y", "x"]) and dims[2] not in _SPACE


def _dims(store: AnyStore, name: str) -> list[str]:
    return ["channel" if dim in _CHANNEL_DIMS else dim for dim in store.dims[name][1:]]


def _order(dims: list[str]) -> list[str]:
    return [dim for dim in (TIME_DIM, *_SPACE, "channel") if dim in dims]


def _inputs(store: AnyStore, name: str, arrays: Arrays) -> list[str]:
    """Fields that decide a steady sample, such as Darcy's coefficient: constant ones on the same points."""
    dims = _dims(store, name)
    lengths = dict(zip(dims, arrays[name].shape, strict=True))
    if lengths.get(TIME_DIM, 1) > 1:
        return []
    space = {dim: lengths[dim] for dim in _SPACE if dim in dims}
    found = []
    for other in arrays.keys() - {name, *_SPACE}:  # each sample may have coordinates of its own
        others = dict(zip(_dims(store, other), arrays[other].shape, strict=True))
        others.pop("channel", None)
        if others == space:
            found.append(other)
    return sorted(found)


def _main_array(arrays: Arrays) -> str:
    if not arrays:
        raise SpecError(
            "it has no array that can be drawn", kind="arrays", hint="text and bytes aren't drawn"
        )
    return MAIN_ARRAY if MAIN_ARRAY in arrays else max(arrays, key=lambda name: arrays[name].nbytes)


def _ordered(values: npt.NDArray[Any], dims: list[str], order: list[str]) -> npt.NDArray[Any]:
    """The sample as (T, Z, Y, X, C)."""
    missing = [axis for axis, dim in enumerate((TIME_DIM, *_SPACE, "channel")) if dim not in order]
    return np.expand_dims(values.transpose([dims.index(dim) for dim in order]), missing)


def _axis(dim: str, num: int, arrays: Arrays, units: Mapping[str, Any]) -> Axis:
    name = "t" if dim == TIME_DIM else dim
    found = arrays.get(name)
    if found is not None and found.ndim == 1 and len(found) >= num:
        points = found[:num].astype(np.float64)
        steps = np.diff(points)
        if np.isfinite(points).all() and ((steps > 0).all() or (steps < 0).all()):
            return Axis(name, str(units.get(name, "-")), points)
    return Axis(name, None, np.arange(num, dtype=np.float64))


def _channels(store: AnyStore, name: str, num: int, units: Mapping[str, Any]) -> tuple[str, ...]:
    names = _attribute(store, name, "channels", list) or []
    if len(names) != num:
        names = [name] if num == 1 else [f"{name} {i}" for i in range(num)]
    return tuple(f"{channel} [{units.get(str(channel), '-')}]" for channel in names)


def _attribute(store: AnyStore, name: str, key: str, kind: type) -> Any:
    """An attribute of the array, else of the store, if it is of the kind."""
    attrs = store.arrays[name].attrs or {}
    if key not in attrs and (name == MAIN_ARRAY or key == "units"):  # the store's channels are its fields'
        attrs = store.attrs
    value = attrs.get(key)
    return value if isinstance(value, kind) else None


def _title(store: AnyStore, names: list[str], sample: int, arrays: Arrays) -> str:
    task = " ".join(str(store.attrs[key]) for key in ("task", "split") if key in store.attrs)
    parts = [task or store.path.name, ", ".join(names), f"sample {sample} of {len(store)}"]
    scalars = [key for key, value in arrays.items() if value.shape == () and key not in names]
    parts += [f"{key} = {arrays[key].item():.6g}" for key in scalars[:_MAX_PARAMETERS]]
    num_bad = sum(int(np.count_nonzero(~np.isfinite(arrays[name]))) for name in names)
    return " · ".join([*parts, f"{num_bad:,} NaN or Inf"] if num_bad else parts)
