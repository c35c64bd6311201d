"""Windows of trajectories that are still being encoded: `LiveWindows`, with the interface of `WindowBatches`.

Letters: B windows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ups.data.on_demand.background import BackgroundBuild
from ups.data.on_demand.order import Draw, Items, PassDraws
from ups.data.on_demand.unkept import UnkeptJob
from ups.data.windows import TaskWindows, WindowBatch, WindowBatches, Windows, make_batch, seed_of
from ups_store.build import Build

_GENERATOR = 2  # purpose of random numbers, beside those of `on_demand.order`


@dataclass(frozen=True, eq=False)
class LiveTask:
    """Where a task's windows are read from.

    Attributes:
        windows: Its windows; their store needn't be complete.
        source: Where the trajectories are, and in `source.store` the store; None where it is complete.
    """

    windows: TaskWindows
    source: Build | UnkeptJob | None

    def has(self, trajectories: Items) -> bool:
        """Whether trajectories are there."""
        return self.source is None or self.source.has(trajectories)

    def read(self, items: Items) -> Windows:
        """Windows of trajectories that are there."""
        if self.source is not None:
            store: Any = self.source.store  # or what stands for one
            self.windows.store = store  # the finished one, once it is: that needn't be asked
        return self.windows.read(items)


class LivePass:
    """One pass over trajectories that come one by one.

    Args:
        draws: What its batches are.
        tasks: Where they are read from, by task.
        build: What makes the trajectories; None where all are there.

    Attributes:
        tasks: As given.
    """

    def __init__(
        self, draws: PassDraws, tasks: Mapping[str, LiveTask], build: BackgroundBuild | None
    ) -> None:
        self._draws, self.tasks, self._build = draws, tasks, build
        self._stretch = dict.fromkeys(tasks, -1)

    @property
    def position(self) -> int:
        """Number in the pass of the batch that is read next."""
        return self._draws.position

    def skip_to(self, position: int) -> None:
        """Leave batches out."""
        self._draws.skip_to(position)

    def read(self) -> tuple[str, Windows]:
        """Task and windows of the next batch, as soon as its trajectories are there.

        Raises:
            BaseException: Whatever the build failed with.
        """
        draw = self._draws.draw()
        task = self.tasks[draw.task]
        if self._build is not None:
            self._build.wait_until(lambda: task.has(draw.trajectories), task=draw.task, stretch=draw.stretch)
        windows = task.read(draw.items)
        self._forget(draw, task)
        return draw.task, windows

    def _forget(self, draw: Draw, task: LiveTask) -> None:
        """Once in a stretch, let go of trajectories that have no window left."""
        if not isinstance(task.source, UnkeptJob) or draw.stretch == self._stretch[draw.task]:
            return
        self._stretch[draw.task] = draw.stretch
        held = task.source.store.held()
        task.source.store.drop(held[self._draws.is_used_up(draw.task, held)])


class Passes(Protocol):
    """Where passes come from.

    Attributes:
        batches_per_pass: Batches in which every window comes once.
    """

    batches_per_pass: int

    @property
    def tasks(self) -> Mapping[str, TaskWindows]:
        """Windows of the first trajectories of each task, for measuring.

        They are waited for when they are read, before the first pass is opened.
        """

    def open(self, which: int, position: int) -> LivePass:
        """The pass of a number, from the batch at a position on."""

    def finished(self) -> WindowBatches | None:
        """What serves all passes but the first, once every store is finished; None if none will be."""

    def close(self) -> None:
        """End what works in the background."""


class LiveWindows:
    """Batches of random windows, homogeneous in task, without end, while latents are still being made.

    The first pass is drawn from the trajectories that have come so far; every window comes in it once. Batch
    i is a function of the seed and i: how fast trajectories come, and which were there before, changes
    nothing. The later passes are those of `WindowBatches`, from the finished stores.

    Args:
        passes: Where passes come from.
        seed: Seed of the order.
        parameters: Names of the parameters, in the order that batches give them.

    Attributes:
        tasks: Windows of the first trajectories of each task, for measuring statistics before the first batch
            is asked for; reading them waits for those.
        batches_per_pass: Number of batches in which every window comes once, as `WindowBatches` has.
    """

    def __init__(self, passes: Passes, *, seed: int, parameters: tuple[str, ...] = ()) -> None:
        self._passes, self._seed, self._parameters = passes, seed, parameters
        self._current: tuple[int, LivePass] | None = None
        self._finished: WindowBatches | None = None
        self.tasks, self.batches_per_pass = passes.tasks, passes.batches_per_pass

    def batch(self, number: int) -> WindowBatch:
        """The batch of a number, >= 0; waits for its trajectories, and after the first pass for the stores.

        Raises:
            BaseException: Whatever the build in the background failed with.
        """
        which, position = divmod(number, self.batches_per_pass)
        if which > 0:
            self._finished = self._finished or self._passes.finished()
            if self._finished is not None:
                self._current = None
                return self._finished.batch(number)
        task, windows = self._pass(which, position).read()
        generator = torch.Generator().manual_seed(seed_of(self._seed, _GENERATOR, number))
        return make_batch(task, windows, parameters=self._parameters, generator=generator)

    def close(self) -> None:
        """End the build in the background; what is committed stays. The end of the process does it, too."""
        self._passes.close()

    def _pass(self, which: int, position: int) -> LivePass:
        if self._current is None or self._current[0] != which or self._current[1].position > position:
            self._current = which, self._passes.open(which, position)
        opened = self._current[1]
        opened.skip_to(position)
        return opened
