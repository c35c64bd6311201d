"""What stages that are trained on rollouts do with a batch: cut it to the curriculum's length, add noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.data.batches import WindowBatch


@dataclass(frozen=True)
class Curriculum:
    """Rollouts that grow while training lasts.

    Attributes:
        horizon: Steps of the longest ones.
        share: Share of the training in which they grow from 1 step to `horizon`, 0 to 1.
        num_batches: Batches of the whole training.
    """

    horizon: int = 1
    share: float = 0.0
    num_batches: int = 1

    def steps_at(self, number: int) -> int:
        """Steps of the rollouts of a batch, by its number."""
        progress = number / max(1.0, self.share * self.num_batches)
        is_grown = self.share == 0
        return self.horizon if is_grown else min(self.horizon, 1 + int(self.horizon * progress))

    def cut(self, batch: WindowBatch, number: int) -> WindowBatch:
        """The batch of a number, its windows as long as they are to be."""
        num_frames = 1 + min(self.steps_at(number), batch.states.shape[1] - 1)
        return dataclasses.replace(batch, states=batch.states[:, :num_frames])


def pushed(batch: WindowBatch) -> WindowBatch:
    """The batch with as many steps before its trained one as are drawn for it, none among them."""
    num = torch.randint(batch.states.shape[1] - 1, (), generator=batch.draws.generator)
    return dataclasses.replace(batch, pushed=int(num))


def push_forward(
    step: Callable[..., Tensor], given: Tensor, truth: Tensor, *, num: int
) -> tuple[Tensor, Tensor]:
    """The model's own state after some steps without gradients, and what follows it.

    Source: Brandstetter et al. 2022, section 3.1 (arXiv:2202.03376): the state that a step is trained from
    has the errors of earlier steps, and no gradient teaches these to help the later ones.

    Args:
        step: The model; called with a state (B, ...) and `steps`, it returns (B, steps, ...).
        given: The first state, shape (B, ...).
        truth: Those that follow, shape (B, K, ...).
        num: How many steps, 0 to K - 1.

    Returns:
        Shapes (B, ...) and (B, 1, ...).
    """
    if num:
        with torch.no_grad():
            given = step(given, steps=num)[:, -1]
    return given, truth[:, num : num + 1]


def with_noise(batch: WindowBatch, *, level: float, std: Sequence[float]) -> WindowBatch:
    """Noise on the given states, so that rollouts learn to mend what earlier steps did wrong.

    Args:
        batch: Windows; their first state gets the noise.
        level: Standard deviation in normalised units; 0 for none.
        std: Standard deviation of each channel in the training data.
    """
    if not level:
        return batch
    given = batch.states[:, :1]
    drawn = batch.draws.normal(given.shape[1:]).to(given.device)
    noisy = given + level * given.new_tensor(std) * drawn
    return dataclasses.replace(batch, states=torch.cat([noisy, batch.states[:, 1:]], dim=1))
