"""Trajectories of latents of which nothing says what encoded them: they can't be decoded, only compared.

Such are stores that were imported from `.pt` files. Letters: N samples, B of a batch, L tokens, D channels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import ups_store
from ups.config import RunConfig
from ups.data.fields import Array, Fields, FieldsInfo, stored_parameters, stored_times
from ups.data.origins import identity_of_store
from ups.data.splits import part_of_split, stored_split
from ups.data.stores import Store, latent_folder, place_of, store_path
from ups.data.trajectories import Trajectories, times_of
from ups.data.windows import TaskWindows
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT, LATENT_INPUT, GridSpec


class LatentFields:
    """Latents of a store in the place of fields: tokens are points, so metrics mean over tokens (`Fields`).

    Args:
        store: A store with the array "latent".
        limit: At most so many samples, the first ones.
    """

    def __init__(self, store: Store, *, task: str, limit: int | None = None) -> None:
        self._store = store
        windows = TaskWindows(store, limit=limit)
        num_tokens, dim = store.arrays[LATENT].shape[-2:]
        arrays = (FIELDS, LATENT_INPUT) if windows.is_steady else (FIELDS,)
        self.info = FieldsInfo(
            task=task,
            grid=GridSpec((num_tokens,), (False,), tuple((name, dim) for name in arrays)),
            channels=tuple(f"latent {number}" for number in range(dim)),
            boundary={},
            domain_lengths={},
            parameters=windows.parameters,
            steady=windows.is_steady,
        )
        self.origin, self.identity = str(store.path), identity_of_store(store)
        self.num_steps = windows.num_steps

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """See `ups.data.fields.Fields.read`; shape (B, L, D)."""
        if array == FIELDS:
            values = self._store.gather(samples, [LATENT], start=steps, length=1)[LATENT][:, 0]
        else:
            values = self._store.gather(samples, [array])[array]
        return values.astype(np.float32)

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """See `ups.data.fields.Fields.parameters`."""
        return stored_parameters(self._store, self.info.parameters, samples)

    def times(self) -> npt.NDArray[np.float64] | None:
        """See `ups.data.fields.Fields.times`."""
        return stored_times(self._store, len(self.num_steps))


def open_latent_fields(config: RunConfig, task: str, split: str) -> Fields:
    """Open the latents of a task and split ("train", "val", "dev" or "test"), whatever encoded them.

    Raises:
        ConfigError: Kinds "no_store", "empty_split".
        ups_store.StoreError: If the store can't be read.
    """
    path = store_path(latent_folder(config), task, stored_split(split))
    place = place_of(path)
    if place is None:
        raise ConfigError(
            f"no latent store of {task} {stored_split(split)}",
            kind="no_store",
            path=path,
            hint="latents of an unknown encoder can't be made from fields: import those of this split, too",
        )
    store = ups_store.open(place)
    if LATENT not in store or len(store) == 0:
        found = ", ".join(store.arrays)
        problem = f"{task} {split} has no latents to evaluate"
        raise ConfigError(problem, kind="empty_split", path=path, found=found)
    return part_of_split(LatentFields(store, task=task, limit=config.data.limit), split)


def open_latent_trajectories(
    config: RunConfig,
    task: str,
    split: str,
    *,
    stride: int,
    horizon: int | None,
    max_trajectories: int | None = None,
) -> Trajectories:
    """Open trajectories of latents; see `ups.data.trajectories.open_trajectories`."""
    fields = open_latent_fields(config, task, split)
    return Trajectories(
        fields,
        stored_t=times_of(fields),
        stride=stride,
        horizon=horizon,
        max_trajectories=max_trajectories,
    )
