"""Random windows of fields: a frame and those after it; batch i is a function of (seed, i) alone.

Letters: B windows, K frames after the first, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.augment import augment_trajectories
from ups.data.fields import Fields
from ups.data.trajectories import given_array
from ups.errors import ConfigError
from ups.grid import FIELDS


@dataclass(frozen=True)
class FieldWindow:
    """Windows side by side.

    Attributes:
        given: Physical units, float32, shape (B, X..., C): the first frame; of a steady task its input.
        truth: The frames after it, or the solution, shape (B, K, X..., C).
        parameters: By name, float64, each (B,).
    """

    given: Tensor
    truth: Tensor
    parameters: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.given)


class FieldWindows:
    """Windows of a training split, drawn with replacement, without end.

    Args:
        fields: Training fields of one task.
        batch_size: B.
        stride: Stored time steps from one frame to the next.
        seed: Of the choice and the augmentation.
        augmented: Whether windows are shifted and reflected at random, all frames of one alike; those of
            steady tasks, whose input is another field, never are.

    Raises:
        ConfigError: Kind "horizon", if no trajectory has two frames.
    """

    def __init__(
        self, fields: Fields, *, batch_size: int, stride: int = 1, seed: int = 0, augmented: bool = True
    ) -> None:
        self._fields, self._batch_size, self._stride, self._seed = fields, batch_size, stride, seed
        self._steady, self._given_array = fields.info.steady, given_array(fields.info)
        self._augmented = augmented and not self._steady
        self.longest = 1 if self._steady else (int(fields.num_steps.max()) - 1) // stride
        if self.longest < 1:
            raise ConfigError(
                f"trajectories of {fields.info.task} are too short to train on",
                kind="horizon",
                path=fields.origin,
                expected=f"more than {stride} stored time steps",
                found=int(fields.num_steps.max()),
            )

    def batch(self, number: int, *, steps: int = 1) -> FieldWindow:
        """The batch of a number, with K = `steps` at most; fewer where no trajectory is as long."""
        steps = min(steps, self.longest)
        seeds = np.random.SeedSequence([self._seed, number])
        samples, starts = self._draw(np.random.default_rng(seeds), steps)
        parameters = self._fields.parameters(samples)
        given, truth = self._read(samples, starts, steps)
        if self._augmented:
            generator = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
            given, truth = self._augment(given, truth, generator)
        return FieldWindow(
            given, truth, {name: torch.from_numpy(column) for name, column in parameters.items()}
        )

    def _read(
        self, samples: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], steps: int
    ) -> tuple[Tensor, Tensor]:
        """What is given, (B, X..., C), and what follows, (B, K, X..., C)."""
        given = self._fields.read(self._given_array, samples, starts)
        offsets = [0] if self._steady else [step * self._stride for step in range(1, steps + 1)]
        frames = [self._fields.read(FIELDS, samples, starts + offset) for offset in offsets]
        return torch.from_numpy(given), torch.from_numpy(np.stack(frames, axis=1))

    def _draw(
        self, rng: np.random.Generator, steps: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples and first time steps, all windows of the split being equally likely."""
        if self._steady:
            samples = rng.integers(len(self._fields.num_steps), size=self._batch_size)
            return samples, np.zeros_like(samples)
        ends = np.cumsum(np.maximum(self._fields.num_steps - steps * self._stride, 0))
        chosen = rng.integers(ends[-1], size=self._batch_size)
        samples = np.searchsorted(ends, chosen, side="right")
        return samples, chosen - np.where(samples > 0, ends[samples - 1], 0)

    def _augment(self, given: Tensor, truth: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        frames, info = torch.cat([given.unsqueeze(1), truth], dim=1), self._fields.info
        moved = augment_trajectories(frames, task=info.task, periodic=info.grid.periodic, generator=generator)
        return moved[:, 0], moved[:, 1:]
