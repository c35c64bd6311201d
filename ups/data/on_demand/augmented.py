"""Fields that are shifted by points and reflected before they are encoded, again in every pass.

Latents in a store can only be shifted by whole tokens. Where every pass encodes again, a trajectory comes
each time as another one that solves the equation as well. Letters: B batch, T time steps, X the axes of the
grid, C channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ups.conditions import conditions_among
from ups.data.augment import Draws, Symmetries, augment_trajectories
from ups.data.batches import seed_of
from ups.data.fields import CONSTANT_FIELDS
from ups.data.windows import Items
from ups.grid import FIELDS, PERIODIC, boundary_types
from ups.laws import Laws
from ups_store.build import Build, Filling

Arrays = Mapping[str, npt.NDArray[Any]]


class AugmentingEncoder:
    """A build's encoder that is given other fields; also see `ups_store.building.encode.OverlappingEncoder`.

    Args:
        encoder: What encodes.
        laws: Of the task.
        periodic: Whether each axis of the grid is.
        seed: With a sample's number it decides what becomes of the sample, whatever lies beside it.
    """

    def __init__(self, encoder: Any, *, laws: Laws, periodic: tuple[bool, ...], seed: int) -> None:
        self._encoder, self._laws, self._periodic, self._seed = encoder, laws, periodic, seed

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, D): tokens and channels of one frame's latent state."""
        shape: tuple[int, int] = self._encoder.latent_shape
        return shape

    def identity(self) -> Mapping[str, Any]:
        """That of the encoder: what comes of it is never stored."""
        identity: Mapping[str, Any] = self._encoder.identity()
        return identity

    def output_spec(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """As of the encoder."""
        specs: Mapping[str, Any] = self._encoder.output_spec(arrays)
        return specs

    def group_size(self, arrays: Mapping[str, Any]) -> int:
        """As of the encoder."""
        return int(self._encoder.group_size(arrays))

    def prepare(self) -> None:
        """As of the encoder."""
        self._encoder.prepare()

    def device_state(self) -> str:
        """As of the encoder."""
        return str(self._encoder.device_state())

    def encode(self, batch: Arrays, *, samples: Items) -> dict[str, npt.NDArray[Any]]:
        """Latents of augmented samples."""
        return self.begin(batch, samples=samples)()

    def begin(self, batch: Arrays, *, samples: Items) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """Begin to encode augmented samples; returns what waits for their latents."""
        symmetries = Symmetries.of(self._laws, periodic=self._periodic, conditions=conditions_among(batch))
        moved = {**batch, FIELDS: self._moved(batch[FIELDS], samples, symmetries)}
        begun: Callable[[], dict[str, npt.NDArray[Any]]] = self._encoder.begin(moved, samples=samples)
        return begun

    def _moved(
        self, fields_BTXC: npt.NDArray[Any], samples: Items, symmetries: Symmetries
    ) -> npt.NDArray[Any]:
        """Each trajectory by what is drawn for it."""
        moved = np.empty_like(fields_BTXC)
        for row, sample in enumerate(samples.tolist()):
            draws = Draws.of_batch(1, seed=seed_of(self._seed, sample))
            one = torch.from_numpy(np.array(fields_BTXC[row : row + 1]))
            moved[row] = augment_trajectories(one, symmetries, draws=draws)[0]
        return moved


def augmented_filling(filling: Filling, build: Build, *, laws: Laws, seed: int) -> Filling:
    """Let a filling augment what it encodes; one of a task without symmetries stays as it is.

    A steady task's input and a force would have to move with the fields, so such tasks aren't augmented.
    """
    plan = build.plan
    shape = plan.source_arrays[FIELDS].shape
    is_alone = shape[1] > 1 and not any(name in plan.source_arrays for name in CONSTANT_FIELDS)
    if is_alone and hasattr(plan.encoder, "begin"):
        kinds = boundary_types(plan.attrs.get("boundary") or {}, ndim=len(shape) - 3)
        periodic = tuple(kind == PERIODIC for kind in kinds)
        encoder = AugmentingEncoder(plan.encoder, laws=laws, periodic=periodic, seed=seed)
        filling.plan = dataclasses.replace(plan, encoder=encoder)
    return filling
