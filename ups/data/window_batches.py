"""Batches of windows for training an operator; batch i is a function of (seed, i) alone.

That makes resuming exact: the data position is a number. Letters: B batch, K steps, L tokens, D channels of a
token, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ups.data.batching import batch_ends, count_batches, parameter_table, seed_of
from ups.data.task_windows import TaskWindows, Windows
from ups_store.read.order import Permutation

_ORDER, _ITEMS, _GENERATOR = range(3)  # purposes of random numbers


@dataclass(frozen=True)
class WindowBatch:
    """Windows of one task.

    Attributes:
        task: Name of the task.
        states: As stored, not normalised, float32: latents (B, K + 1, L, D), or fields (B, K + 1, X..., C).
            Of a steady task input and solution, K = 1.
        parameters: In the order that was asked for, NaN where the task has none of that name, float32,
            shape (B, P).
        dt: Physical time of one step, float32, shape (B,); 1 for a steady task.
        generator: Source of randomness for whoever uses the batch, a function of the batch's number.
    """

    task: str
    states: Tensor
    parameters: Tensor
    dt: Tensor
    generator: torch.Generator

    def __len__(self) -> int:
        return len(self.states)


class WindowBatches:
    """Batches of random windows, homogeneous in task, without end.

    A pass goes through all windows once, tasks mixed and each as often as it has windows. The batches of a
    task have as many windows as one another, or one more; never more than `batch_size`.

    Args:
        tasks: Windows by task.
        batch_size: Most windows of a batch.
        seed: Seed of the order.
        parameters: Names of the parameters, in the order that batches give them.

    Attributes:
        tasks: Windows by task.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskWindows],
        *,
        batch_size: int,
        seed: int,
        parameters: tuple[str, ...] = (),
    ) -> None:
        self.tasks = tasks
        self._names = tuple(tasks)
        self._tasks = tuple(tasks.values())
        self._seed, self._parameters = seed, parameters
        self._ends = [
            batch_ends(len(windows), count_batches(len(windows), batch_size)) for windows in self._tasks
        ]
        self._items = [
            Permutation(len(windows), seed, _ITEMS, number) for number, windows in enumerate(self._tasks)
        ]
        self._pass = -1
        self._order = np.zeros((0, 2), np.int64)

    @property
    def batches_per_pass(self) -> int:
        """Number of batches in which every window comes once."""
        return sum(map(len, self._ends))

    def batch(self, number: int) -> WindowBatch:
        """The batch of a number, >= 0; cheap when numbers go up."""
        which, position = divmod(number, self.batches_per_pass)
        if which != self._pass:
            self._pass, self._order = which, self._draw_order(which)
        task, place = self._order[position].tolist()
        windows = self._tasks[task]
        ends = self._ends[task]
        positions = np.arange(ends[place - 1] if place else 0, ends[place])
        items = self._items[task](positions, tweak=which)
        generator = torch.Generator().manual_seed(seed_of(self._seed, _GENERATOR, number))
        return make_batch(
            self._names[task], windows.read(items), parameters=self._parameters, generator=generator
        )

    def _draw_order(self, which: int) -> np.ndarray:
        """Task, and place among its batches, of every batch of a pass, shape (batches, 2)."""
        places = [
            np.stack([np.full(len(ends), task), np.arange(len(ends))], axis=1)
            for task, ends in enumerate(self._ends)
        ]
        rng = np.random.default_rng(seed_of(self._seed, _ORDER, which))
        return rng.permutation(np.concatenate(places))


def make_batch(
    task: str, windows: Windows, *, parameters: tuple[str, ...], generator: torch.Generator
) -> WindowBatch:
    """Windows as tensors, with their parameters in the models' order."""
    return WindowBatch(
        task,
        windows.states,
        parameter_table(windows.parameters, parameters, len(windows.states)),
        torch.from_numpy(windows.dt.astype(np.float32)),
        generator,
    )
