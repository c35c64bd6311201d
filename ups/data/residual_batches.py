"""Batches of an operator's residuals, with the noise and the flow times that they are trained at.

Letters: B batch, L tokens, D channels of a token, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.augment import shift_periodic
from ups.data.batches import TaskBatch, TrainingData, random_order
from ups.data.residuals import DT, GIVEN, PARAMETERS, PREDICTED, RESIDUAL
from ups.data.stores import Store
from ups_store.torch import Allocate, new_tensor

_STATES = (GIVEN, PREDICTED, RESIDUAL)


@dataclass(frozen=True)
class ResidualBatch(TaskBatch):
    """Residuals of one task; also see `TaskBatch`.

    Attributes:
        states: z, op(z) and y - op(z) beside each other, normalised, float32, shape (B, 3, L, D).
        parameters: In the order of the model, NaN where the task has none of that name, shape (B, P).
        dt: Physical time of the step, shape (B,).
    """

    states: Tensor
    parameters: Tensor
    dt: Tensor

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True)
class FlowBatch(ResidualBatch):
    """Residuals, with what was drawn for each.

    Attributes:
        noise: Standard normal, float32, shape (B, L, D).
        tau: Of the configured distribution, float32, shape (B,), in 0..1.
    """

    noise: Tensor
    tau: Tensor


class ResidualSource:
    """Stores of residuals, each a source of `ups_store.torch.Loader`.

    Args:
        tasks: By task.
        num_parameters: P.
    """

    num_tensors = len(_STATES)

    def __init__(self, tasks: Mapping[str, Store], *, num_parameters: int) -> None:
        self.tasks, self._num_parameters, self._names = tasks, num_parameters, tuple(tasks)

    @property
    def stores(self) -> Sequence[Store]:
        """All of them."""
        return list(self.tasks.values())

    def fetch(
        self, number: int, items: npt.NDArray[np.int64], *, epoch: int, allocate: Allocate
    ) -> ResidualBatch:
        """Residuals of these numbers of a task; see `ups_store.torch.StoreDataset.fetch`."""
        return self.read(self._names[number], items, allocate)

    def read(self, task: str, items: npt.NDArray[np.int64], allocate: Allocate = new_tensor) -> ResidualBatch:
        """Residuals of these numbers of a task."""
        store = self.tasks[task]
        shape = (len(items), len(_STATES), *store.arrays[GIVEN].shape[1:])
        states, parts = allocate(shape, torch.float32), store.gather(items, _STATES)
        for place, name in enumerate(_STATES):
            states[:, place] = torch.from_numpy(parts[name])
        rest = store.gather(items, [DT, *([PARAMETERS] if self._num_parameters else [])])
        parameters = rest.get(PARAMETERS, np.zeros((len(items), 0), np.float32))
        return ResidualBatch(task, states, torch.from_numpy(parameters), torch.from_numpy(rest[DT]))


def residual_data(
    stores: Mapping[str, Store], *, num_parameters: int, global_batch_size: int, seed: int
) -> TrainingData[ResidualSource]:
    """Batches of random residuals, one task each; a pass takes each of them once."""
    source = ResidualSource(stores, num_parameters=num_parameters)
    sizes = [len(store) for store in stores.values()]
    return TrainingData(
        source, random_order(sizes, global_batch_size=global_batch_size, seed=seed), seed=seed
    )


def shifted(batch: ResidualBatch, *, tokens: tuple[int, ...], periodic: tuple[bool, ...]) -> ResidualBatch:
    """Shift each residual, with its states, by whole tokens along periodic axes."""
    states = shift_periodic(batch.states.unflatten(2, tokens), periodic, first_axis=2, draws=batch.draws)
    return dataclasses.replace(batch, states=states.flatten(2, 1 + len(tokens)))


def with_flow(batch: ResidualBatch, tau: Tensor) -> FlowBatch:
    """Add noise to a batch, and flow times, of this rank's rows."""
    return FlowBatch(**vars(batch), noise=batch.draws.normal(batch.states.shape[2:]), tau=tau)
