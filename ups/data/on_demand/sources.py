"""Latents that are made while they are trained on, as sources of the one loader.

`FilledStores` fills stores in the first pass and reads them in the later ones; `UnkeptWindows` encodes every
pass again. The loader has one thread here: batches are waited for in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ups.data.batches import TrainingData, random_order, seed_of
from ups.data.on_demand.augmented import augmented_filling
from ups.data.on_demand.background import BackgroundBuild
from ups.data.on_demand.latent_builds import arrivals_of
from ups.data.on_demand.order import ArrivalOrder, Arrivals, PassDraws, count_batches, most_ahead
from ups.data.on_demand.unkept import FirstWindows, UnkeptJob, ranges_by_file
from ups.data.stores import Store, shown_place
from ups.data.windows import Items, Preload, TaskWindows, WindowBatch, WindowSource
from ups.laws import Laws, laws_of
from ups.log import logger
from ups_store.build import Build, BuildRank, ReadingConfig
from ups_store.torch import Allocate

_ARRIVAL = 3  # purpose of random numbers, beside those of `order` and `batches`
_AUGMENTATION = 4  # another one
_UNKEPT_NBYTES = 64 << 20  # of latents that may come before they are needed where nothing keeps them
_STRETCHES_AHEAD = 2  # that are encoded before they are needed, there


@dataclass(frozen=True)
class WindowSettings:
    """What windows and batches are wanted.

    Attributes:
        global_batch_size: Most windows of a batch, over all ranks.
        horizon: Steps of a window.
        stride: Stored time steps of a step.
        seed: Of every random choice.
        parameters: Names of the parameters, in the order that batches give them.
        preload: How a finished store is brought into memory.
        device: Where it will be used.
        augment: Whether fields that are encoded in every pass are shifted and reflected before.
        laws: What the configuration says of tasks.
    """

    global_batch_size: int
    horizon: int
    stride: int
    seed: int
    parameters: tuple[str, ...]
    preload: Preload
    device: str
    augment: bool = False
    laws: Mapping[str, Laws] = field(default_factory=dict)

    def windows(self, store: Any, *, is_complete: bool) -> TaskWindows:
        """Windows of a store, complete or not, or of what stands for one."""
        return TaskWindows(store, horizon=self.horizon, stride=self.stride, is_complete=is_complete)

    def arrivals(
        self,
        wanted: Build,
        windows: TaskWindows,
        number: int,
        *,
        which: int = 0,
        nbytes: int | None = None,
    ) -> Arrivals:
        """How the trajectories of a task come in a pass; at most about `nbytes` before they are needed."""
        num, num_windows = wanted.plan.num_samples, len(windows)
        ahead = most_ahead(num)
        if nbytes is not None:
            ahead = min(ahead, max(1, nbytes // wanted.plan.sample_nbytes))
        stretches = arrivals_of(wanted, seed=seed_of(self.seed, _ARRIVAL, number, which))
        return Arrivals(
            stretches, num_windows // num, count_batches(num_windows, self.global_batch_size), ahead
        )


class LiveSource(WindowSource):
    """Windows of trajectories that come one by one.

    Attributes:
        tasks: Windows of the first trajectories of each task, for measuring statistics before the first batch
            is asked for; reading them waits for those.
        num_batches: Batches of a pass.
    """

    def __init__(self, wanted: Mapping[str, Build], settings: WindowSettings) -> None:
        self._wanted, self._settings = wanted, settings
        self._windows: dict[str, TaskWindows] = {}
        self._jobs: dict[str, Build | UnkeptJob] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._build: BackgroundBuild | None = None

    def _ready(self) -> None:
        """Once windows, arrivals and the build are there: what others see."""
        super().__init__(
            {task: self._first(task) for task in self._windows}, parameters=self._settings.parameters
        )
        self.num_batches = sum(some.num_batches for some in self._arrivals.values())

    @property
    def stores(self) -> tuple[()]:
        """None that could be reported on yet."""
        return ()

    def num_frames(self) -> dict[str, int]:
        """See `WindowSource.num_frames`; also of trajectories that are still to come."""
        return {task: int(some.num_steps.sum()) for task, some in self._windows.items()}

    def begin(self, which: int, position: int) -> PassDraws:
        """The batches of a pass, from a position on."""
        draws = PassDraws(self._arrivals, seed=self._settings.seed, which=which)
        draws.skip_to(position)
        return draws

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Allocate) -> WindowBatch:
        """Windows of a task, as soon as their trajectories are there.

        Raises:
            BaseException: Whatever the build failed with.
        """
        task = self._names[number]
        windows, job = self._windows[task], self._jobs.get(task)
        if job is not None:
            trajectories = np.unique(items // self._arrivals[task].num_windows)
            self._wait(task, trajectories)
            store: Any = job.store  # the finished one, once it is; or what stands for one
            windows.store = store
        return self.read(task, windows, items, allocate)

    def close(self) -> None:
        """End the build in the background; what is committed stays. The end of the process does it, too."""
        if self._build is not None:
            self._build.close()

    def _wait(self, task: str, trajectories: Items, *, stretch: int = 0) -> None:
        job = self._jobs.get(task)
        if self._build is not None and job is not None:
            self._build.wait_until(lambda: job.has(trajectories), task=task, stretch=stretch)

    def _first(self, task: str) -> FirstWindows:
        samples = self._arrivals[task].stretches[0]
        build, job = self._build, self._jobs.get(task)

        def wait() -> None:
            if build is not None and job is not None:
                build.wait_until(lambda: job.has(samples), task=task)

        return FirstWindows(
            self._windows[task],
            samples,
            wait,
            ranges=ranges_by_file(self._wanted[task]),
            horizon=self._settings.horizon,
            stride=self._settings.stride,
        )


class FilledStores(LiveSource):
    """A first pass while stores are filled; the later ones from the finished stores.

    Args:
        wanted: What the stores hold, by task.
        opened: By task the finished store, or the job that fills it; these are closed here.
        settings: What windows are wanted.
        ranks: Place of this process among those of its machine that fill the stores together.
        reading: How sources are read.
        finished: Called with each store that was made here, once all are; see `BackgroundBuild`.
    """

    def __init__(
        self,
        wanted: Mapping[str, Build],
        opened: Mapping[str, Build | Store],
        settings: WindowSettings,
        *,
        ranks: BuildRank,
        reading: ReadingConfig,
        finished: Callable[[Collection[Build], Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__(wanted, settings)
        jobs = {task: some for task, some in opened.items() if isinstance(some, Build)}
        self._jobs = dict(jobs)
        for task, some in opened.items():
            store = some.store if isinstance(some, Build) else some
            self._windows[task] = settings.windows(store, is_complete=task not in jobs)
            if task not in jobs:
                self._preload(task)
        self._arrivals = {
            task: settings.arrivals(wanted[task], some, number)
            for number, (task, some) in enumerate(self._windows.items())
        }
        shares = {task: self._arrivals[task].stretches[ranks.local_rank :: ranks.num_local] for task in jobs}
        after = None if finished is None else partial(finished, jobs.values())
        made = BackgroundBuild(jobs, shares, reading=reading, finished=after) if jobs else None
        self._build = made
        self._ready()

    def data(self) -> TrainingData[WindowSource]:
        """Batches for training."""
        size, seed = self._settings.global_batch_size, self._settings.seed
        later = random_order(
            [len(some) for some in self._windows.values()], global_batch_size=size, seed=seed
        )
        order = ArrivalOrder(self, tuple(self._windows), later=later, global_batch_size=size)
        return TrainingData(self, order, seed=seed, close=self.close)

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Allocate) -> WindowBatch:
        """As `LiveSource.fetch`; after the first pass once all stores are finished."""
        if epoch > 0 and self._jobs:
            self._finish()
        return super().fetch(number, items, epoch=epoch, allocate=allocate)

    def _finish(self) -> None:
        if self._build is not None:
            self._build.wait_finished()
        for task, job in self._jobs.items():
            self._windows[task] = self._settings.windows(job.store, is_complete=True)
            self._preload(task)
        self._jobs = {}

    def _preload(self, task: str) -> None:
        windows = self._windows[task]
        why = windows.preload(self._settings.preload, device=self._settings.device)
        logger.info(f"{shown_place(windows.store)}: {len(windows.store)} trajectories, {why}")


class UnkeptWindows(LiveSource):
    """Passes for each of which fields are read, augmented and encoded again; nothing is kept."""

    def __init__(
        self,
        wanted: Mapping[str, Build],
        settings: WindowSettings,
        *,
        reading: ReadingConfig,
    ) -> None:
        super().__init__(wanted, settings)
        self._reading = reading
        self._prepared: PassDraws | None = self._begin(0, 0)  # so that it goes on while the model is made
        self._ready()

    def data(self) -> TrainingData[WindowSource]:
        """Batches for training."""
        size = self._settings.global_batch_size
        order = ArrivalOrder(self, tuple(self._windows), later=None, global_batch_size=size)
        return TrainingData(self, order, seed=self._settings.seed, close=self.close)

    def begin(self, which: int, position: int) -> PassDraws:
        """The batches of a pass; trajectories whose windows all lie before the position aren't encoded."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and (which, position) == (0, 0):
            return prepared
        return self._begin(which, position)

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Allocate) -> WindowBatch:
        """As `LiveSource.fetch`; once in a stretch, trajectories that have no window left are let go of."""
        batch = super().fetch(number, items, epoch=epoch, allocate=allocate)
        task = self._names[number]
        if (stretch := self._latest[task]) != self._forgotten.get(task):
            self._forgotten[task] = stretch
            store = self._unkept[task].store
            held = store.held()
            store.drop(held[self._draws.is_used_up(task, held)])
        return batch

    def _begin(self, which: int, position: int) -> PassDraws:
        self.close()
        unkept = self._unkept = {
            task: self._job(task, some, seed_of(self._settings.seed, _AUGMENTATION, number, which))
            for number, (task, some) in enumerate(self._wanted.items())
        }
        self._jobs = dict(unkept)
        self._windows = {
            task: self._settings.windows(job.store, is_complete=False) for task, job in unkept.items()
        }
        self._arrivals = {
            task: self._settings.arrivals(
                self._wanted[task], some, number, which=which, nbytes=_UNKEPT_NBYTES
            )
            for number, (task, some) in enumerate(self._windows.items())
        }
        draws = self._draws = super().begin(which, position)
        self._latest, self._forgotten = dict.fromkeys(unkept, 0), dict[str, int]()
        left = {
            task: [stretch[~draws.is_used_up(task, stretch)] for stretch in some.stretches]
            for task, some in self._arrivals.items()
        }
        self._build = BackgroundBuild(unkept, left, reading=self._reading, ahead=_STRETCHES_AHEAD)
        return draws

    def _job(self, task: str, wanted: Build, seed: int) -> UnkeptJob:
        """What encodes a task in one pass."""
        if not self._settings.augment:
            return UnkeptJob(wanted)
        laws = laws_of(task, self._settings.laws)
        return UnkeptJob(wanted, prepare=partial(augmented_filling, build=wanted, laws=laws, seed=seed))

    def _wait(self, task: str, trajectories: Items, *, stretch: int = 0) -> None:
        """Have the build go on to the last stretch that is needed."""
        stretches = self._arrivals[task].stretches
        needed = max(number for number, some in enumerate(stretches) if np.isin(trajectories, some).any())
        self._latest[task] = max(needed, self._latest[task])
        super()._wait(task, trajectories, stretch=self._latest[task])
