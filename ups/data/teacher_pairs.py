"""Stores of pairs: noises, and the residuals that a teacher makes of them (kind "teacher_pairs").

A student of rectified flow is trained on them, and every student is validated on some. A pair is drawn under
the conditions of a residual of the same task and part (`ups.data.residuals`), which lie beside it, so that a
store of pairs is a store of residuals, too: drawn ones, with the noise that they were drawn from. It is kept
as long as the teacher, the conditions and the way of sampling are the same.

Letters: N pairs, B batch, L tokens, D channels of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import ups_store
from ups.data.batches import seed_of
from ups.data.held_out import HeldOutPart
from ups.data.identities import hash_of
from ups.data.residual_batches import ResidualBatch, ResidualSource, shifted
from ups.data.residuals import DT, GIVEN, PARAMETERS, PREDICTED, RESIDUAL, ResidualBuild
from ups.data.stores import Store, open_as
from ups.data.windows import Array
from ups.log import logger
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrector_spec import Sampling
from ups_store.torch import Allocate, new_tensor

NOISE = "noise"
_ROWS = 256  # pairs that are drawn at once
_GENERATOR = 7  # purpose of random numbers

Items = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PairBuild:
    """A store of pairs that is wanted: what decides its bytes, and where it lies.

    Attributes:
        path: Of the store.
        identity: JSON values.
        task: Name of the task.
        num_pairs: N; pair number i has the conditions of residual number i, counted round.
        sampling: How the teacher draws.
        seed: Of the noise, which is another one for every pair.
        dtype: Of the states; noise is float32.
    """

    path: Path
    identity: Mapping[str, Any]
    task: str
    num_pairs: int
    sampling: Sampling
    seed: int
    dtype: str

    @classmethod
    def of(
        cls,
        residuals: ResidualBuild,
        part: HeldOutPart,
        *,
        folder: Path,
        teacher_sha256: str,
        num_pairs: int,
        sampling: Sampling,
        seed: int,
    ) -> PairBuild:
        """The store of a task and part.

        Args:
            residuals: The store whose conditions it takes.
            part: Which part that is.
            folder: Where it goes.
            teacher_sha256: Hash of the teacher's file.
            num_pairs: N.
            sampling: How the teacher draws.
            seed: Of the noise; parts don't share any.
        """
        task = residuals.trajectories.info.task
        identity = {
            "kind": "teacher_pairs",
            "version": 1,
            "residuals": hash_of(residuals.identity),
            "teacher_sha256": teacher_sha256,
            "num_pairs": num_pairs,
            "sampling": dataclasses.asdict(sampling),
            "seed": seed,
            "dtype": residuals.dtype,
        }
        path = folder / f"{task}_{part}_pairs.zarr.zip"
        own_seed = seed_of(seed, _GENERATOR, int(part == "check"))
        return cls(path, identity, task, num_pairs, sampling, own_seed, residuals.dtype)

    def opened(self) -> Store | None:
        """The store that is there, if it is the one that is wanted."""
        return open_as(self.path, self.identity)

    def make(self, teacher: CorrectedSimulator, residuals: Store) -> None:
        """Build the store, or continue to; one that is there is replaced.

        Args:
            teacher: In evaluation mode.
            residuals: The store whose conditions it takes.
        """
        logger.info(f"{self.path}: the teacher draws {self.num_pairs} residuals, {_shown(self.sampling)}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        writer = ups_store.create(
            self.path,
            self._specs(residuals, len(teacher.spec.parameters)),
            identity=self.identity,
            attrs={"task": self.task},
            on_mismatch="restart",
            note=logger.info,
        )
        with writer:
            missing = writer.missing()
            for first in range(0, len(missing), _ROWS):
                numbers = missing[first : first + _ROWS]
                writer.commit_many(numbers, self._drawn(teacher, residuals, numbers))
            writer.finish()

    def _specs(self, residuals: Store, num_parameters: int) -> dict[str, ups_store.ArraySpec]:
        state = (self.num_pairs, *residuals.arrays[GIVEN].shape[1:])
        specs = {name: ups_store.ArraySpec(state, self.dtype) for name in (GIVEN, PREDICTED, RESIDUAL)}
        specs[NOISE] = ups_store.ArraySpec(state, "float32")
        specs[DT] = ups_store.ArraySpec((self.num_pairs,), "float32")
        if num_parameters:
            specs[PARAMETERS] = ups_store.ArraySpec((self.num_pairs, num_parameters), "float32")
        return specs

    @torch.no_grad()
    def _drawn(self, teacher: CorrectedSimulator, residuals: Store, numbers: Items) -> dict[str, Array]:
        """Arrays of these pairs, drawn on the teacher's device."""
        source = ResidualSource({self.task: residuals}, num_parameters=len(teacher.spec.parameters))
        batch = source.read(self.task, numbers % len(residuals))
        noise_BLD = noise_of(self.seed, numbers, batch.states.shape[2:])
        given_BLD, predicted_BLD, _ = batch.states.to(teacher.device).unbind(1)
        drawn_BLD = teacher.residual(
            noise_BLD.to(teacher.device),
            (given_BLD, predicted_BLD),
            batch.parameters.to(teacher.device),
            task=self.task,
            dt_B=batch.dt.to(teacher.device),
            sampling=self.sampling,
        )
        states = {GIVEN: given_BLD, PREDICTED: predicted_BLD, RESIDUAL: drawn_BLD}
        arrays = {name: state.cpu().numpy().astype(self.dtype) for name, state in states.items()}
        arrays |= {NOISE: noise_BLD.numpy(), DT: batch.dt.numpy()}
        return {**arrays, PARAMETERS: batch.parameters.numpy()} if batch.parameters.shape[1] else arrays


def noise_of(seed: int, numbers: Items, shape: torch.Size) -> Tensor:
    """Standard normal numbers for things of these numbers, which don't depend on what is beside them."""
    generators = (torch.Generator().manual_seed(seed_of(seed, int(number))) for number in numbers)
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def _shown(sampling: Sampling) -> str:
    if sampling.sampler == "adaptive":
        return f"adaptive to {sampling.tolerance:g}"
    return f"{sampling.sampler} {sampling.num_steps}"


@dataclass(frozen=True)
class PairBatch(ResidualBatch):
    """Pairs of one task: residuals that a teacher drew, in `states`, and what it drew them from.

    Attributes:
        noise: Float32, shape (B, L, D).
    """

    noise: Tensor


class PairSource(ResidualSource):
    """Stores of pairs; arguments are those of `ResidualSource`."""

    def read(self, task: str, items: Items, allocate: Allocate = new_tensor) -> PairBatch:
        """Pairs of these numbers of a task."""
        batch = super().read(task, items, allocate)
        noise = torch.from_numpy(self.tasks[task].gather(items, [NOISE])[NOISE])
        return PairBatch(**vars(batch), noise=noise)


def shifted_pairs(batch: PairBatch, *, tokens: tuple[int, ...], periodic: tuple[bool, ...]) -> PairBatch:
    """As `shifted`, noise together with what was drawn from it."""
    together = dataclasses.replace(batch, states=torch.cat([batch.states, batch.noise[:, None]], dim=1))
    moved = shifted(together, tokens=tokens, periodic=periodic).states
    return dataclasses.replace(batch, states=moved[:, :-1], noise=moved[:, -1])
