"""What predictions start from, out of a store or an HDF5 file, and the store that they are written into.

A source may have more points and time steps than the training took: every k-th one is taken, from the first
on. Letters: N samples, B of a batch, M members, K predicted frames, X the axes of the grid, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from ups.conditions import condition_of, conditions_among
from ups.data.fields import CONSTANT_FIELDS, STEP_TOLERANCE
from ups.data.origins import MADE_FROM, Origin
from ups.errors import ConfigError
from ups.grid import FIELDS, axis_names
from ups.log import logger
from ups_store.build import BuildConfig, Readers
from ups_store.check import save_preview
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
    """
    if path.suffix in (".h5", ".hdf5"):
        arrays, constants, attrs = _from_hdf5(path, task, where, config, ask)
    else:
        arrays, constants, attrs = _from_store(path, task, where, config)
    if where.array not in arrays:
        found = ", ".join(sorted(arrays))
        problem = f"there is no {where.array!r} to start from"
        hint = "take the store of fields that a build or a training made of it, in cache.dir"
        raise ConfigError(problem, kind="no_array", path=path, expected=where.array, found=found, hint=hint)
    states, is_steady = arrays[where.array], where.array != FIELDS
    if len(states) == 0:
        raise ConfigError("there are no samples", kind="empty_split", path=path)
    num_steps = 1 if is_steady else states.shape[1]
    if not 0 <= where.start < num_steps:
        expected = f"0 to {num_steps - 1}"
        raise ConfigError("--start", kind="no_start", path=path, expected=expected, found=where.start)
    if is_steady:
        given, after = states, arrays.get(FIELDS, states[:, :0])  # a source may have inputs only
    else:
        given, after = states[:, where.start], states[:, where.start + where.stride :: where.stride]
    t = constants.get("t")
    return GivenStates(
        values=np.asarray(given, np.float32),
        after=np.asarray(after[:, : where.num_after], np.float32),
        parameters={
            name: np.asarray(condition_of(name, arrays), np.float64) for name in conditions_among(arrays)
        },
        t=float(where.start if t is None else t[where.start]),
        coordinates={
            name: np.asarray(values) for name, values in constants.items() if name in ("x", "y", "z")
        },
        attrs={name: attrs[name] for name in ("channels", "boundary", "domain_lengths") if name in attrs},
        origin=path.name,
    )


_Read = tuple[Mapping[str, Array], Mapping[str, Array], Mapping[str, Any]]  # arrays, constants, attributes


def _from_store(path: Path, task: str, where: Where, config: BuildConfig) -> _Read:
    store = ups_store.open(path)
    found = store.attrs.get("task")
    if found not in (None, task):
        raise ConfigError("a store of another task", kind="other_task", path=path, expected=task, found=found)
    found = store.attrs.get("split")
    if where.split not in (None, ALL, found):
        problem = "a store of another split"
        raise ConfigError(problem, kind="other_split", path=path, expected=where.split, found=found)
    num = len(store) if where.limit is None else min(where.limit, len(store))
    if isinstance(store, ups_store.Store):
        arrays = {name: store[name][:num] for name in store.arrays}  # views, so only what is used is read
    else:
        arrays = dict(store.gather(np.arange(num)))
    taken = store.identity.get("reduce_time")
    left = config.data.reduce_time // taken if isinstance(taken, int) and taken > 0 else 1
    ndim = len(where.points)
    points, steps = where.points, 1  # of an array that isn't there, which is found missing later
    if where.array in arrays:
        shape, first = arrays[where.array].shape, 2 if where.array == FIELDS else 1
        points, steps = shape[first : first + ndim], shape[1]
    selection = _selection(points, steps, store.constants.get("t"), where, path, otherwise=max(1, left))
    space, time = (slice(None, None, stride) for stride in (selection.reduce_space, selection.reduce_time))
    for name in arrays.keys() & {FIELDS, *CONSTANT_FIELDS}:
        axes = (time, *(space,) * ndim) if name == FIELDS else (space,) * ndim
        arrays[name] = arrays[name][(slice(None), *axes)]
    strides = {"t": time, **dict.fromkeys(axis_names(ndim), space)}
    constants = {name: values[strides.get(name, slice(None))] for name, values in store.constants.items()}
    return arrays, constants, store.attrs


def _from_hdf5(path: Path, task: str, where: Where, config: BuildConfig, ask: AskSplit | None) -> _Read:
    known, follow = config.get_task(task), config.data.follow_external
    with Readers(config.reading.model_copy(update={"on_error": "fail"}), note=logger.info) as readers:
        info = readers.describe(path, known, follow=follow)
        splits = samples_by_split(path, info.num_samples, task=known, fractions=config.data.fractions)
        samples = _samples(path, splits, info.num_samples, where.split, ask)[: where.limit]
        steps, *points, _ = info.arrays[FIELDS].shape
        usual, t = config.data.reduce_time, info.constants.get("t")
        selection = _selection(tuple(points), steps, t, where, path, otherwise=usual)
        info = readers.describe(path, known, selection, follow=follow)
        arrays = readers.read(info, known, selection, samples, follow=follow)
    arrays |= {name: np.full(len(samples), value) for name, value in info.parameters.items()}
    return arrays, info.constants, {"channels": list(info.channels), "boundary": dict(info.boundary)}


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


def _selection(
    points: tuple[int, ...], steps: int, t: Array | None, where: Where, path: Path, *, otherwise: int
) -> Selection:
    """Every how many-th point and time step gives the training's grid and time steps.

    Args:
        points: Of the source, along each axis; as `steps` and the times `t`, as far as it says them.
        otherwise: Stride in time where times don't decide it.
    """
    strides = [-(-num // wanted) for num, wanted in zip(points, where.points, strict=False)]
    space = max(strides, default=1)
    left = tuple(-(-num // space) for num in points)
    if left != where.points:
        raise ConfigError(
            "its points can't be reduced to the grid of the operator",
            kind="other_grid",
            path=path,
            expected=f"{' x '.join(map(str, where.points))}, or a whole multiple",
            found=" x ".join(map(str, points)),
        )
    time = 1 if where.dt is None else otherwise
    if where.dt is not None and t is not None and len(t) > 1 and t[1] != t[0]:
        ratio = where.dt / float(t[1] - t[0])
        if round(ratio) >= 1 and abs(ratio / round(ratio) - 1) < STEP_TOLERANCE:
            time = round(ratio)
    reduced = []
    if space > 1:
        before, after = (" x ".join(map(str, some)) for some in (points, left))
        reduced.append(f"1 point of {space} along each axis ({before} to {after})")
    if time > 1:
        reduced.append(f"1 time step of {time} ({steps} to {-(-steps // time)})")
    if reduced:
        logger.info(f"{path.name}: reduced as the training data were: {', '.join(reduced)}")
    return Selection(space, time)


# --- predictions ---------------------------------------------------------------------------------------


def write_predictions(
    path: Path,
    given: GivenStates,
    predict: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]],
    *,
    task: str,
    frame_shape: tuple[int, ...],
    steps: int,
    members: int | None,
    dt: float | None,
    given_array: str,
    batch_size: int,
    identity: Mapping[str, Any],
    made_from: Sequence[Origin],
    progress: Callable[[int, int], None],
) -> Path:
    """Write a store of predicted trajectories, a batch of samples at a time; running again continues.

    "fields" is (N, K + 1, X..., C): the given state, then the predicted frames; of a steady task (N, 1, X...,
    C) beside the given field. Of an ensemble "members" is (N, M, K + 1, X..., C), and "fields" their mean,
    for whatever reads fields. Parameters are those of `given`.

    Args:
        given: States that predictions start from.
        predict: The frames that follow samples (B,): (B, K, X..., C), or of members (B, M, K, X..., C).
        frame_shape: (X..., C) of a predicted frame.
        steps: K.
        members: M; None of a single forecast.
        dt: Time from one frame to the next; None of a steady task.
        given_array: Name of the array that is given.
        identity: What decides the predictions besides the given states, JSON values.
        made_from: The operator, and where the given states are from.
        progress: Called after every batch with the number of samples that are done, and of all.
    """
    num, is_steady = len(given.values), dt is None
    num_frames = steps + int(not is_steady)
    dims = ("sample", "time", *axis_names(len(frame_shape) - 1), "channel")
    described: dict[str, Any] = {"attrs": {"channels": list(given.attrs.get("channels", ()))}}
    spec = ups_store.ArraySpec
    arrays = {FIELDS: spec((num, num_frames, *frame_shape), "float32", dims=dims, **described)}
    if members is not None:
        of_members = (num, members, num_frames, *frame_shape)
        arrays["members"] = spec(of_members, "float32", dims=(dims[0], "member", *dims[1:]), **described)
    if is_steady:
        arrays[given_array] = spec(given.values.shape, "float32")
    for name in sorted(given.parameters):
        arrays[name] = spec((num,), "float64", dims=("sample",))
    writer = ups_store.create(
        path,
        arrays,
        constants={**given.coordinates, "t": given.t + np.arange(num_frames) * (dt or 0.0)},
        dims={**{name: (name,) for name in given.coordinates}, "t": ("time",)},
        identity={"kind": "prediction", "task": task, "given": given.digest(), "steps": steps, **identity},
        attrs={
            "task": task,
            "split": "prediction",
            MADE_FROM: [origin.to_json() for origin in made_from],
            **given.attrs,
        },
        on_mismatch="restart",
    )

    def after_given(frames: Array, given_BXC: Array) -> Array:
        """Frames (B, ..., K, X..., C) with the given state before them, unless it is another field."""
        if is_steady:
            return frames
        axis = frames.ndim - given_BXC.ndim  # of K
        first = np.expand_dims(given_BXC, tuple(range(1, axis + 1)))
        shape = (*frames.shape[:axis], 1, *given_BXC.shape[1:])
        return np.concatenate([np.broadcast_to(first, shape), frames], axis=axis)

    with writer:
        missing = writer.missing()
        for begin in range(0, len(missing), batch_size):
            samples = missing[begin : begin + batch_size]
            frames, given_BXC = predict(samples), given.values[samples]
            rows: dict[str, Array] = {name: values[samples] for name, values in given.parameters.items()}
            if is_steady:
                rows[given_array] = given_BXC
            if members is not None:
                rows["members"] = after_given(frames, given_BXC)
                frames = frames.mean(1, dtype=np.float64).astype(np.float32)
            rows[FIELDS] = after_given(frames, given_BXC)
            writer.commit_many(samples, rows)
            progress(num - len(missing) + begin + len(samples), num)
        return writer.finish()


def save_preview_of(path: Path, picture: Path) -> None:
    """Draw the first sample of a store, as a PNG, SVG or PDF."""
    with ups_store.open(path) as store:
        save_preview(store, picture)
