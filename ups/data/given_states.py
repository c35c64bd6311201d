"""States that predictions start from, out of a store or an HDF5 file, reduced as the training data were.

A source may have more points and time steps than the training took: every k-th one is taken, from the first
on. Letters: N samples, K frames, X the axes of the grid, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from ups.conditions import condition_of, conditions_among
from ups.data.fields import CONSTANT_FIELDS, STEP_TOLERANCE
from ups.errors import ConfigError
from ups.grid import FIELDS, axis_names
from ups.log import logger
from ups_store.build import BuildConfig, Readers
from ups_store.sources import Selection, samples_by_split

Array = npt.NDArray[Any]
AskSplit = Callable[[Mapping[str, int]], str]  # takes the number of samples by split, gives one of them

ALL = "all"  # in the place of a split


@dataclass(frozen=True, eq=False)
class GivenStates:
    """States that predictions start from, with what is known about them.

    Attributes:
        values: Physical units, float32, shape (N, X..., C).
        after: Frames that follow them in the source, at the same stride, float32, (N, K', X..., C); K' may be
            smaller than what is predicted, and 0.
        parameters: By name, float64, each (N,).
        t: Time of the given state.
        coordinates: Of the axes of the grid, by name.
        attrs: Channels, boundary types and domain lengths, as in a store's root group.
        origin: Name of the source.
    """

    values: npt.NDArray[np.float32]
    after: npt.NDArray[np.float32]
    parameters: Mapping[str, npt.NDArray[np.float64]]
    t: float
    coordinates: Mapping[str, Array]
    attrs: Mapping[str, Any]
    origin: str

    def digest(self) -> str:
        """sha256 of values and parameters: what decides a prediction, besides the model."""
        digest = hashlib.sha256(np.ascontiguousarray(self.values).tobytes())
        for name in sorted(self.parameters):
            digest.update(name.encode() + np.ascontiguousarray(self.parameters[name]).tobytes())
        return digest.hexdigest()

    def known_at(self, mask: npt.NDArray[np.bool_]) -> GivenStates:
        """The same states, 0 where a mask (N, X...) is false: what isn't known there may be no number."""
        known = mask.reshape(*mask.shape, *(1,) * (self.values.ndim - mask.ndim))
        return replace(self, values=np.where(known, self.values, np.float32(0)))

    def with_parameters(self, given: Mapping[str, float]) -> GivenStates:
        """The same states with some parameters set to a number, for all samples."""
        columns = {name: np.full(len(self.values), value, np.float64) for name, value in given.items()}
        return replace(self, parameters={**self.parameters, **columns})


@dataclass(frozen=True)
class Where:
    """Which states of a source are given.

    Attributes:
        points: Of the grid that the operator was trained on, along each axis.
        dt: Time from one step to the next of the data that it was trained on; None of a steady task.
        array: "fields", or the constant field of a steady task.
        start: Time step that is given, after reduction.
        stride: Time steps from one frame to the next, after reduction.
        num_after: Frames that are wanted for comparison, where there are as many.
        split: "train", "val" or "test" of an HDF5 file that has several, or "all"; None where it has one.
        limit: At most so many samples, the first ones.
    """

    points: tuple[int, ...]
    dt: float | None
    array: str = FIELDS
    start: int = 0
    stride: int = 1
    num_after: int = 0
    split: str | None = None
    limit: int | None = None


def read_given(
    path: Path, task: str, where: Where, *, config: BuildConfig, ask: AskSplit | None = None
) -> GivenStates:
    """Read states out of a store (`.zarr.zip`) or an HDF5 file.

    Args:
        where: Which states.
        config: Of the training: how files are shared out, and reduced where nothing says their time steps.
        ask: Asked for the split of an HDF5 file that has samples of several, if none is named.

    Raises:
        ConfigError: Kinds "no_array", "no_start", "empty_split", "other_task", "other_grid", "other_split",
            "which_split".
        ups_store.StoreError: If the file can't be read, or isn't of the task.
    """
    if path.suffix in (".h5", ".hdf5"):
        arrays, constants, attrs, reduction = _from_hdf5(path, task, where, config, ask)
    else:
        arrays, constants, attrs, reduction = _from_store(path, task, where, config)
    if reduction.is_any:
        logger.info(f"{path.name}: reduced as the training data were: {reduction}")
    if where.array not in arrays:
        found = ", ".join(sorted(arrays))
        problem = f"there is no {where.array!r} to start from"
        raise ConfigError(problem, kind="no_array", path=path, expected=where.array, found=found)
    given, is_steady = arrays[where.array], where.array != FIELDS
    num_steps = 1 if is_steady else given.shape[1]
    if len(given) == 0:
        raise ConfigError("there are no samples", kind="empty_split", path=path)
    if not 0 <= where.start < num_steps:
        expected = f"0 to {num_steps - 1}"
        raise ConfigError("--start", kind="no_start", path=path, expected=expected, found=where.start)
    if is_steady:
        after = arrays.get(FIELDS, given[:, :0])  # a source may have inputs only
    else:
        after = given[:, where.start + where.stride :: where.stride]
    t = constants.get("t")
    return GivenStates(
        values=np.asarray(given if is_steady else given[:, where.start], np.float32),
        after=np.asarray(after[:, : where.num_after], np.float32),
        parameters={
            name: np.asarray(condition_of(name, arrays), np.float64) for name in conditions_among(arrays)
        },
        t=float(where.start if t is None else t[where.start]),
        coordinates={name: np.asarray(values) for name, values in constants.items() if name in _SPACE},
        attrs={name: attrs[name] for name in ("channels", "boundary", "domain_lengths") if name in attrs},
        origin=path.name,
    )


@dataclass(frozen=True)
class _Reduction:
    """Every how many-th point and time step is taken, and of how many."""

    space: int
    time: int
    points: tuple[int, ...]
    steps: int

    @property
    def is_any(self) -> bool:
        return (self.space, self.time) != (1, 1)

    def __str__(self) -> str:
        parts = []
        if self.space > 1:
            left = (-(-num // self.space) for num in self.points)
            before, after = (" x ".join(map(str, some)) for some in (self.points, left))
            parts.append(f"1 point of {self.space} along each axis ({before} to {after})")
        if self.time > 1:
            parts.append(f"1 time step of {self.time} ({self.steps} to {-(-self.steps // self.time)})")
        return ", ".join(parts)


_SPACE = ("x", "y", "z")
_Read = tuple[Mapping[str, Array], Mapping[str, Array], Mapping[str, Any], _Reduction]


def _from_store(path: Path, task: str, where: Where, config: BuildConfig) -> _Read:
    store = ups_store.open(path)
    if store.attrs.get("task") not in (None, task):
        found = store.attrs["task"]
        raise ConfigError("a store of another task", kind="other_task", path=path, expected=task, found=found)
    if where.split not in (None, ALL, store.attrs.get("split")):
        found, expected = store.attrs.get("split"), where.split
        raise ConfigError(
            "a store of another split", kind="other_split", path=path, expected=expected, found=found
        )
    num = len(store) if where.limit is None else min(where.limit, len(store))
    if isinstance(store, ups_store.Store):
        arrays = {name: store[name][:num] for name in store.arrays}  # views, so only what is used is read
    else:
        arrays = store.gather(np.arange(num))
    taken = store.identity.get("reduce_time")
    left = config.data.reduce_time // taken if isinstance(taken, int) and taken > 0 else 1
    constants = store.constants
    ndim = len(where.points)
    points, steps = where.points, 1  # what isn't there is found missing later
    if where.array in arrays:
        shape, first = arrays[where.array].shape, 2 if where.array == FIELDS else 1
        points, steps = shape[first : first + ndim], shape[1]
    reduction = _reduction(points, steps, constants.get("t"), where, path, otherwise=max(1, left))
    return *_reduced(arrays, constants, reduction, ndim), store.attrs, reduction


def _from_hdf5(path: Path, task: str, where: Where, config: BuildConfig, ask: AskSplit | None) -> _Read:
    known, follow = config.get_task(task), config.data.follow_external
    with Readers(config.reading.model_copy(update={"on_error": "fail"}), note=logger.info) as readers:
        info = readers.describe(path, known, follow=follow)
        splits = samples_by_split(path, info.num_samples, task=known, fractions=config.data.fractions)
        samples = _samples(path, splits, info.num_samples, where.split, ask)[: where.limit]
        steps, *points, _ = info.arrays[FIELDS].shape
        usual = config.data.reduce_time
        reduction = _reduction(tuple(points), steps, info.constants.get("t"), where, path, otherwise=usual)
        selection = Selection(reduction.space, reduction.time)
        info = readers.describe(path, known, selection, follow=follow)
        arrays = readers.read(info, known, selection, samples, follow=follow)
    arrays |= {name: np.full(len(samples), value) for name, value in info.parameters.items()}
    attrs = {"channels": list(info.channels), "boundary": dict(info.boundary)}
    return arrays, info.constants, attrs, reduction


def _samples(
    path: Path, splits: Mapping[str, range], num_samples: int, wanted: str | None, ask: AskSplit | None
) -> range:
    """Numbers of the samples of the split that is wanted, or the only one that the file has."""
    counts = {split: len(samples) for split, samples in splits.items()}
    if wanted is None and len(counts) > 1:
        if ask is None:
            shown = ", ".join(f"{split} ({num} samples)" for split, num in counts.items())
            raise ConfigError(
                "the file has samples of several splits, and training saw some of them",
                kind="which_split",
                path=path,
                expected=f"{shown} or {ALL}",
                hint="say --split",
            )
        wanted = ask(counts)
    if wanted in (None, ALL):
        return range(num_samples)
    if wanted not in splits:
        found = " and ".join(counts) or "none"
        raise ConfigError("--split", kind="other_split", path=path, expected=found, found=wanted)
    logger.info(f"{path.name}: {counts[wanted]} of {num_samples} samples are of {wanted}")
    return splits[wanted]


def _reduction(
    points: tuple[int, ...], steps: int, t: Array | None, where: Where, path: Path, *, otherwise: int
) -> _Reduction:
    """Every how many-th point and time step gives the training's grid and time steps.

    Args:
        points: Of the source, along each axis.
        steps: Of the source.
        t: Times of the source, as far as it says them.
        where: Which states are wanted.
        path: Of the source.
        otherwise: Stride in time where times don't decide it.
    """
    strides = [-(-num // wanted) for num, wanted in zip(points, where.points, strict=False)]
    space = max(strides, default=1)
    if len(points) != len(where.points) or any(
        -(-num // space) != wanted for num, wanted in zip(points, where.points, strict=True)
    ):
        raise ConfigError(
            "its points can't be reduced to the grid of the operator",
            kind="other_grid",
            path=path,
            expected=f"{' x '.join(map(str, where.points))}, or a whole multiple",
            found=" x ".join(map(str, points)),
        )
    if where.dt is None:
        return _Reduction(space, 1, points, steps)
    time = otherwise
    if t is not None and len(t) > 1 and t[1] != t[0]:
        ratio = where.dt / float(t[1] - t[0])
        if round(ratio) >= 1 and abs(ratio / round(ratio) - 1) < STEP_TOLERANCE:
            time = round(ratio)
    return _Reduction(space, time, points, steps)


def _reduced(
    arrays: Mapping[str, Array], constants: Mapping[str, Array], reduction: _Reduction, ndim: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Views of some points and time steps."""
    space = (slice(None, None, reduction.space),) * ndim
    time = slice(None, None, reduction.time)
    own = dict(arrays)
    for name in own.keys() & {FIELDS, *CONSTANT_FIELDS}:
        own[name] = own[name][(slice(None), time, *space) if name == FIELDS else (slice(None), *space)]
    steps = {"t": reduction.time, **dict.fromkeys(axis_names(ndim), reduction.space)}
    return own, {name: values[:: steps.get(name, 1)] for name, values in constants.items()}
