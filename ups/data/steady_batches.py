"""Batches of inputs and solutions of steady tasks, with what a generative model of solutions draws for each.

Letters: B batch, X the axes of the grid, L tokens, D channels of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.data.batches import TrainingData, random_order
from ups.data.field_batches import FieldWindowSource
from ups.data.trajectories import Trajectories
from ups.data.windows import WindowBatch
from ups.errors import ConfigError
from ups.grid import FIELDS


@dataclass(frozen=True)
class SolutionBatch(WindowBatch):
    """Inputs and solutions, with what was drawn for each; also see `WindowBatch`.

    Attributes:
        noise: Standard normal, float32, shape (B, L, D); 0 of a regression.
        tau: Of the configured distribution, float32, shape (B,), in 0..1; 0 of a regression.
        observed: Where the input is known, bool, shape (B, X...); None for everywhere.
    """

    noise: Tensor
    tau: Tensor
    observed: Tensor | None


class SteadySource:
    """Inputs and solutions of several steady tasks; each is a source of `ups_store.torch.Loader`.

    Args:
        tasks: Samples by task.
        parameters: Names of the parameters, in the order that batches give them.

    Raises:
        ConfigError: Kind "no_input", if an input has more or fewer channels than its solution.
    """

    num_tensors = 1
    stores = ()

    def __init__(self, tasks: Mapping[str, Trajectories], *, parameters: tuple[str, ...]) -> None:
        for task, some in tasks.items():
            _check_channels(task, some)
        self._sources = [
            FieldWindowSource(some, horizon=1, stride=1, parameters=parameters) for some in tasks.values()
        ]
        self.sizes = [size for source in self._sources for size in source.sizes]

    def fetch(
        self, number: int, items: npt.NDArray[np.int64], *, epoch: int, allocate: object
    ) -> WindowBatch:
        """Samples of these numbers of a task; see `ups_store.torch.StoreDataset.fetch`."""
        return self._sources[number].fetch(0, items, epoch=epoch, allocate=allocate)


def steady_data(
    tasks: Mapping[str, Trajectories], *, parameters: tuple[str, ...], global_batch_size: int, seed: int
) -> TrainingData[SteadySource]:
    """Batches of random samples, one task each; a pass takes each of them once."""
    source = SteadySource(tasks, parameters=parameters)
    order = random_order(source.sizes, global_batch_size=global_batch_size, seed=seed)
    return TrainingData(source, order, seed=seed)


def _check_channels(task: str, trajectories: Trajectories) -> None:
    channels = dict(trajectories.info.grid.channels)
    given, solution = channels[trajectories.given_array], channels[FIELDS]
    if given != solution:
        raise ConfigError(
            f"the input of {task} has other channels than its solution",
            kind="no_input",
            path=trajectories.origin,
            expected=f"{solution} channels of {trajectories.given_array!r}",
            found=given,
        )
