"""Files of predictions: states that they start from, out of a store or HDF5, and the store they go to.

Letters: N samples, B of a batch, K predicted frames, X the axes of the grid, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from ups.data.fields import parameters_among
from ups.errors import ConfigError
from ups.grid import FIELDS, axis_names
from ups_store.build import BuildConfig
from ups_store.check import save_preview
from ups_store.sources import Selection, open_source

Array = npt.NDArray[Any]


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

    def with_parameters(self, given: Mapping[str, float]) -> GivenStates:
        """The same states with some parameters set to a number, for all samples."""
        columns = {name: np.full(len(self.values), value, np.float64) for name, value in given.items()}
        return replace(self, parameters={**self.parameters, **columns})


@dataclass(frozen=True)
class Where:
    """Which states of a source are given.

    Attributes:
        array: "fields", or the constant field of a steady task.
        start: Time step that is given, after reduction.
        stride: Time steps from one frame to the next.
        num_after: Frames that are wanted for comparison, where there are as many.
        limit: At most so many samples, the first ones.
    """

    array: str = FIELDS
    start: int = 0
    stride: int = 1
    num_after: int = 0
    limit: int | None = None


def read_given(path: Path, task: str, where: Where, *, config: BuildConfig) -> GivenStates:
    """Read states out of a store (`.zarr.zip`) or an HDF5 file.

    Args:
        path: The file.
        task: Name of the task.
        where: Which states.
        config: Its reduction holds for HDF5 files; a store is taken as it is.

    Raises:
        ConfigError: Kinds "no_array", "no_start", "empty_split", "other_task".
        ups_store.StoreError: If the file can't be read, or isn't of the task.
    """
    read = _from_hdf5 if path.suffix in (".h5", ".hdf5") else _from_store
    arrays, constants, attrs = read(path, task, config, where.limit)
    if where.array not in arrays:
        found = ", ".join(sorted(arrays))
        problem = f"there is no {where.array!r} to start from"
        raise ConfigError(problem, kind="no_array", path=path, expected=where.array, found=found)
    num_samples, num_steps = arrays[FIELDS].shape[:2]
    if num_samples == 0:
        raise ConfigError("there are no samples", kind="empty_split", path=path)
    if not 0 <= where.start < num_steps:
        expected = f"0 to {num_steps - 1}"
        raise ConfigError("--start", kind="no_start", path=path, expected=expected, found=where.start)
    fields = arrays[FIELDS]
    is_steady = where.array != FIELDS
    after = fields if is_steady else fields[:, where.start + where.stride :: where.stride]
    t = constants.get("t")
    return GivenStates(
        values=np.asarray(arrays[where.array] if is_steady else fields[:, where.start], np.float32),
        after=np.asarray(after[:, : where.num_after], np.float32),
        parameters={name: np.asarray(arrays[name], np.float64) for name in parameters_among(arrays)},
        t=float(where.start if t is None else t[where.start]),
        coordinates={
            name: np.asarray(values) for name, values in constants.items() if name in ("x", "y", "z")
        },
        attrs={name: attrs[name] for name in ("channels", "boundary", "domain_lengths") if name in attrs},
        origin=path.name,
    )


_Read = tuple[Mapping[str, Array], Mapping[str, Array], Mapping[str, Any]]


def _from_store(path: Path, task: str, config: BuildConfig, limit: int | None) -> _Read:
    store = ups_store.open(path)
    if store.attrs.get("task") not in (None, task):
        found = store.attrs["task"]
        raise ConfigError("a store of another task", kind="other_task", path=path, expected=task, found=found)
    num = len(store) if limit is None else min(limit, len(store))
    if isinstance(store, ups_store.Store):
        arrays = {name: store[name][:num] for name in store.arrays}  # views, so only what is used is read
    else:
        arrays = store.gather(np.arange(num))
    return arrays, store.constants, store.attrs


def _from_hdf5(path: Path, task: str, config: BuildConfig, limit: int | None) -> _Read:
    selection = Selection(config.data.reduce_space, config.data.reduce_time)
    follow = config.data.follow_external
    with open_source(path, task=config.get_task(task), selection=selection, follow=follow) as source:
        info = source.info
        num = info.num_samples if limit is None else min(limit, info.num_samples)
        arrays = source.read(range(num))
    arrays |= {name: np.full(num, value) for name, value in info.parameters.items()}
    attrs = {"channels": list(info.channels), "boundary": dict(info.boundary)}
    return arrays, info.constants, attrs


class PredictionStore:
    """A store of predicted trajectories while it is written; a context manager.

    "fields" is (N, K + 1, X..., C): the given state, then the predicted frames; of a steady task (N, 1, X...,
    C) beside the given field. Parameters are those of `given`. Running again continues.

    Args:
        path: Where it goes.
        given: States that predictions start from.
        task: Name of the task.
        frame_shape: (X..., C) of a predicted frame.
        steps: K.
        dt: Time from one frame to the next; None of a steady task.
        given_array: Name of the array that is given.
        identity: What decides the predictions besides the given states, JSON values.

    Raises:
        ups_store.StoreError: As `ups_store.create`.
    """

    def __init__(
        self,
        path: Path,
        given: GivenStates,
        *,
        task: str,
        frame_shape: tuple[int, ...],
        steps: int,
        dt: float | None,
        given_array: str,
        identity: Mapping[str, Any],
    ) -> None:
        self._given, self._given_array = given, given_array
        num, is_steady = len(given.values), dt is None
        num_frames = steps + int(not is_steady)
        dims = ("sample", "time", *axis_names(len(frame_shape) - 1), "channel")
        channels = {"channels": list(given.attrs.get("channels", ()))}
        arrays = {
            FIELDS: ups_store.ArraySpec((num, num_frames, *frame_shape), "float32", dims=dims, attrs=channels)
        }
        if is_steady:
            arrays[given_array] = ups_store.ArraySpec(given.values.shape, "float32")
        for name in sorted(given.parameters):
            arrays[name] = ups_store.ArraySpec((num,), "float64", dims=("sample",))
        times = given.t + np.arange(num_frames) * (dt or 0.0)
        self._writer = ups_store.create(
            path,
            arrays,
            constants={**given.coordinates, "t": times},
            dims={**{name: (name,) for name in given.coordinates}, "t": ("time",)},
            identity={
                "kind": "prediction",
                "task": task,
                "given": given.digest(),
                "steps": steps,
                **identity,
            },
            attrs={"task": task, "split": "prediction", **given.attrs},
            on_mismatch="restart",
        )

    def missing(self) -> npt.NDArray[np.int64]:
        """Samples that aren't predicted yet."""
        return self._writer.missing()

    def commit(self, samples: npt.NDArray[np.int64], frames: npt.NDArray[np.float32]) -> None:
        """Write the predicted frames of samples (B,), shape (B, K, X..., C)."""
        given = self._given
        arrays: dict[str, Array] = {name: values[samples] for name, values in given.parameters.items()}
        if self._given_array == FIELDS:
            arrays[FIELDS] = np.concatenate([given.values[samples][:, np.newaxis], frames], axis=1)
        else:
            arrays |= {FIELDS: frames, self._given_array: given.values[samples]}
        self._writer.commit_many(samples, arrays)

    def finish(self) -> Path:
        """Publish the store under its name."""
        return self._writer.finish()

    def __enter__(self) -> PredictionStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


def save_preview_of(path: Path, picture: Path) -> None:
    """Draw the first sample of a store as a PNG."""
    with ups_store.open(path) as store:
        save_preview(store, picture)
