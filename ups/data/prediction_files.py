"""The store of predicted trajectories, while it is written.

Letters: N samples, B of a batch, M members, K predicted frames, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from ups.data.given_states import GivenStates
from ups.data.origins import MADE_FROM, Origin
from ups.grid import FIELDS, axis_names
from ups_store.check import save_preview

Array = npt.NDArray[Any]

MEMBERS = "members"  # the array that ensembles are in


class PredictionStore:
    """A store of predicted trajectories while it is written; a context manager.

    "fields" is (N, K + 1, X..., C): the given state, then the predicted frames; of a steady task (N, 1, X...,
    C) beside the given field. Of an ensemble "members" is (N, M, K + 1, X..., C), and "fields" their mean,
    for whatever reads fields. Parameters are those of `given`. Running again continues.

    Args:
        path: Where it goes.
        given: States that predictions start from.
        frame_shape: (X..., C) of a predicted frame.
        steps: K.
        members: M; None of a single forecast.
        dt: Time from one frame to the next; None of a steady task.
        given_array: Name of the array that is given.
        identity: What decides the predictions besides the given states, JSON values.
        made_from: The operator, and where the given states are from.

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
        members: int | None = None,
        dt: float | None,
        given_array: str,
        identity: Mapping[str, Any],
        made_from: Sequence[Origin],
    ) -> None:
        self._given, self._given_array, self._members = given, given_array, members
        num, is_steady = len(given.values), dt is None
        num_frames = steps + int(not is_steady)
        dims = ("sample", "time", *axis_names(len(frame_shape) - 1), "channel")
        channels = {"channels": list(given.attrs.get("channels", ()))}
        arrays = {
            FIELDS: ups_store.ArraySpec((num, num_frames, *frame_shape), "float32", dims=dims, attrs=channels)
        }
        if members is not None:
            shape = (num, members, num_frames, *frame_shape)
            own = (dims[0], "member", *dims[1:])
            arrays[MEMBERS] = ups_store.ArraySpec(shape, "float32", dims=own, attrs=channels)
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
            attrs={
                "task": task,
                "split": "prediction",
                MADE_FROM: [origin.to_json() for origin in made_from],
                **given.attrs,
            },
            on_mismatch="restart",
        )

    def missing(self) -> npt.NDArray[np.int64]:
        """Samples that aren't predicted yet."""
        return self._writer.missing()

    def commit(self, samples: npt.NDArray[np.int64], frames: npt.NDArray[np.float32]) -> None:
        """Write the predicted frames of samples (B,), shape (B, K, X..., C), or (B, M, K, X..., C)."""
        given = self._given
        arrays: dict[str, Array] = {name: values[samples] for name, values in given.parameters.items()}
        if self._given_array != FIELDS:
            arrays[self._given_array] = given.values[samples]
        if self._members is not None:
            arrays[MEMBERS] = self._after_given(frames, samples)
            frames = frames.mean(1, dtype=np.float64).astype(np.float32)
        arrays[FIELDS] = self._after_given(frames, samples)
        self._writer.commit_many(samples, arrays)

    def _after_given(self, frames: Array, samples: npt.NDArray[np.int64]) -> Array:
        """Frames (B, ..., K, X..., C) with the given state before them, unless it is another field."""
        if self._given_array != FIELDS:
            return frames
        given_BXC = self._given.values[samples]
        axis = frames.ndim - given_BXC.ndim  # of K
        shape = (*frames.shape[:axis], 1, *given_BXC.shape[1:])
        given = given_BXC.reshape(len(samples), *(1,) * axis, *given_BXC.shape[1:])
        return np.concatenate([np.broadcast_to(given, shape), frames], axis=axis)

    def finish(self) -> Path:
        """Publish the store under its name."""
        return self._writer.finish()

    def __enter__(self) -> PredictionStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


def save_preview_of(path: Path, picture: Path) -> None:
    """Draw the first sample of a store, as a PNG, SVG or PDF."""
    with ups_store.open(path) as store:
        save_preview(store, picture)
