"""Passes over latents that are made while they are trained on: into stores, or anew for every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ups.data.on_demand.background import BackgroundBuild
from ups.data.on_demand.latent_builds import arrivals_of
from ups.data.on_demand.live_windows import LivePass, LiveTask
from ups.data.on_demand.order import Arrivals, Items, PassDraws, most_ahead
from ups.data.on_demand.unkept import FirstWindows, UnkeptJob, ranges_by_file
from ups.data.stores import Store
from ups.data.windows import Preload, TaskWindows, WindowBatches, count_batches, seed_of
from ups.output import Note
from ups_store.build import Build, BuildRank, ReadingConfig

_ARRIVAL = 3  # purpose of random numbers, beside those of `order` and `live_windows`
_UNKEPT_NBYTES = 64 << 20  # of latents that may come before they are needed where nothing keeps them
_STRETCHES_AHEAD = 2  # that are encoded before they are needed, there


@dataclass(frozen=True)
class WindowSettings:
    """What windows and batches are wanted.

    Attributes:
        batch_size: Most windows of a batch.
        horizon: Steps of a window.
        time_stride: Stored time steps of a step.
        seed: Of every random choice.
        parameters: Names of the parameters, in the order that batches give them.
        preload: How a finished store is brought into memory.
        device: Where it will be used.
    """

    batch_size: int
    horizon: int
    time_stride: int
    seed: int
    parameters: tuple[str, ...]
    preload: Preload
    device: str

    def windows(self, store: Any, *, is_complete: bool) -> TaskWindows:
        """Windows of a store, complete or not, or of what stands for one."""
        return TaskWindows(store, horizon=self.horizon, time_stride=self.time_stride, is_complete=is_complete)

    def first_windows(
        self, windows: TaskWindows, wanted: Build, samples: Items, wait: Callable[[], None]
    ) -> FirstWindows:
        """Windows of the first trajectories, which are waited for."""
        return FirstWindows(
            windows,
            samples,
            wait,
            ranges=ranges_by_file(wanted),
            horizon=self.horizon,
            time_stride=self.time_stride,
        )

    def batches(self, windows: Mapping[str, TaskWindows]) -> WindowBatches:
        """Batches of complete stores."""
        return WindowBatches(windows, batch_size=self.batch_size, seed=self.seed, parameters=self.parameters)


class StorePasses:
    """A first pass while stores are filled; the later ones from the finished stores. See `Passes`.

    Args:
        wanted: What the stores hold, by task.
        opened: By task the finished store, or the job that fills it; these are closed here.
        settings: What windows are wanted.
        ranks: Place of this process among those of its machine that fill the stores together.
        reading: How sources are read.
        note: Told how it goes.
    """

    def __init__(
        self,
        wanted: Mapping[str, Build],
        opened: Mapping[str, Build | Store],
        settings: WindowSettings,
        *,
        ranks: BuildRank,
        reading: ReadingConfig,
        note: Note,
    ) -> None:
        self._settings, self._opened, self._note = settings, opened, note
        self._windows = {
            task: settings.windows(store_of(some), is_complete=not isinstance(some, Build))
            for task, some in opened.items()
        }
        for task, some in opened.items():
            if not isinstance(some, Build):
                self._preload(task)
        self._arrivals = {
            task: _arrivals(wanted[task], some, settings, number)
            for number, (task, some) in enumerate(self._windows.items())
        }
        self.batches_per_pass = sum(some.num_batches for some in self._arrivals.values())
        jobs = {task: some for task, some in opened.items() if isinstance(some, Build)}
        shares = {task: self._arrivals[task].stretches[ranks.local_rank :: ranks.num_local] for task in jobs}
        self._build = BackgroundBuild(jobs, shares, reading=reading, note=note) if jobs else None
        self._tasks = {task: LiveTask(some, jobs.get(task)) for task, some in self._windows.items()}
        self.tasks = {task: self._first(task, wanted[task]) for task in self._windows}

    def open(self, which: int, position: int) -> LivePass:
        """The first pass, from a batch on."""
        draws = PassDraws(self._arrivals, seed=self._settings.seed, which=which)
        return LivePass(draws, self._tasks, self._build)

    def finished(self) -> WindowBatches:
        """What serves the later passes; waits for the build."""
        if self._build is not None:
            self._build.wait_finished()
        for task, some in self._opened.items():
            if isinstance(some, Build):
                self._windows[task] = self._settings.windows(some.store, is_complete=True)
                self._preload(task)
        return self._settings.batches(self._windows)

    def close(self) -> None:
        """End the build."""
        if self._build is not None:
            self._build.close()

    def _preload(self, task: str) -> None:
        windows = self._windows[task]
        why = windows.preload(self._settings.preload, device=self._settings.device)
        self._note(f"{windows.store.path}: {len(windows.store)} trajectories, {why}")

    def _first(self, task: str, wanted: Build) -> FirstWindows:
        samples = self._arrivals[task].stretches[0]

        def wait() -> None:
            if self._build is not None:
                self._build.wait_until(lambda: self._tasks[task].has(samples), task=task)

        return self._settings.first_windows(self._windows[task], wanted, samples, wait)


class UnkeptPasses:
    """Passes for each of which fields are read and encoded again; nothing is kept. See `Passes`.

    Args:
        wanted: What is encoded, by task.
        settings: What windows are wanted.
        reading: How sources are read.
        note: Told how it goes.
    """

    def __init__(
        self,
        wanted: Mapping[str, Build],
        settings: WindowSettings,
        *,
        reading: ReadingConfig,
        note: Note,
    ) -> None:
        self._wanted, self._settings, self._reading, self._note = wanted, settings, reading, note
        self._build: BackgroundBuild | None = None
        self._prepared: LivePass | None = self._begin(0, 0)  # so that it goes on while the model is made
        self.tasks = {task: self._first(task, some) for task, some in self._prepared.tasks.items()}
        self.batches_per_pass = sum(some.num_batches for some in self._arrivals.values())

    def open(self, which: int, position: int) -> LivePass:
        """The pass of a number; trajectories whose windows all lie before the position aren't encoded."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and (which, position) == (0, 0):
            return prepared
        return self._begin(which, position)

    def finished(self) -> None:
        """There are no stores that would ever be finished."""

    def close(self) -> None:
        """End the build."""
        if self._build is not None:
            self._build.close()

    def _begin(self, which: int, position: int) -> LivePass:
        self.close()
        jobs = {task: UnkeptJob(some) for task, some in self._wanted.items()}
        windows = {task: self._settings.windows(job.store, is_complete=False) for task, job in jobs.items()}
        self._arrivals = {
            task: _arrivals(
                self._wanted[task], some, self._settings, number, which=which, nbytes=_UNKEPT_NBYTES
            )
            for number, (task, some) in enumerate(windows.items())
        }
        draws = PassDraws(self._arrivals, seed=self._settings.seed, which=which)
        draws.skip_to(position)
        left = {
            task: [stretch[~draws.is_used_up(task, stretch)] for stretch in some.stretches]
            for task, some in self._arrivals.items()
        }
        build = self._build = BackgroundBuild(
            jobs, left, reading=self._reading, note=self._note, ahead=_STRETCHES_AHEAD
        )
        return LivePass(draws, {task: LiveTask(windows[task], job) for task, job in jobs.items()}, build)

    def _first(self, task: str, some: LiveTask) -> FirstWindows:
        build, samples = self._build, self._arrivals[task].stretches[0]

        def wait() -> None:
            assert build is not None
            build.wait_until(lambda: some.has(samples), task=task)

        return self._settings.first_windows(some.windows, self._wanted[task], samples, wait)


def store_of(opened: Build | Store) -> Store:
    """The store, finished or being filled."""
    return opened.store if isinstance(opened, Build) else opened


def _arrivals(
    wanted: Build,
    windows: TaskWindows,
    settings: WindowSettings,
    number: int,
    *,
    which: int = 0,
    nbytes: int | None = None,
) -> Arrivals:
    num = wanted.plan.num_samples
    stretches = arrivals_of(wanted, seed=seed_of(settings.seed, _ARRIVAL, number, which))
    ahead = most_ahead(num)
    if nbytes is not None:
        ahead = min(ahead, max(1, nbytes // wanted.plan.sample_nbytes))
    return Arrivals(stretches, len(windows) // num, count_batches(len(windows), settings.batch_size), ahead)
