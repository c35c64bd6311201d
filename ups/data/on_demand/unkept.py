"""Latents that are encoded when they are needed, and kept no longer: no store at all.

The first trajectories of a split that is being encoded: what statistics are measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.data.on_demand.background import Progress
from ups.data.windows import Items, TaskWindows
from ups_store.build import Build, Filling, Readers

Arrays = Mapping[str, npt.NDArray[Any]]


class UnkeptLatents:
    """Latents of the trajectories that are needed now, for `Filling` a committer, for windows a store.

    Attributes:
        path: Stands for the store in messages.
        config_hash: As a store of all would have.
        arrays: As a store of all would have.
        constants: Coordinates.
        attrs: As a store of all would have.
    """

    def __init__(self, build: Build) -> None:
        self.path = f"latents of {build.title}"
        self.config_hash = build.config_hash
        self.arrays, self.constants = build.plan.arrays, build.plan.constants
        self.attrs = build.plan.attrs
        self._samples: dict[int, dict[str, npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return int(next(iter(self.arrays.values())).shape[0])

    def __contains__(self, name: object) -> bool:
        return name in self.arrays or name in self.constants

    def has(self, samples: Items) -> bool:
        """Whether samples are there."""
        return all(sample in self._samples for sample in samples.tolist())

    def held(self) -> Items:
        """Numbers of the samples that are there."""
        return np.array(sorted(self._samples), np.int64)

    def drop(self, samples: Items) -> None:
        """Forget samples."""
        for sample in samples.tolist():
            del self._samples[sample]

    def commit_many(self, samples: Items, arrays: Arrays) -> None:
        """Keep a copy of samples."""
        for row, sample in enumerate(samples.tolist()):
            self._samples[sample] = {name: np.array(values[row]) for name, values in arrays.items()}

    def gather(
        self,
        samples: Items,
        names: Sequence[str],
        *,
        start: Items | None = None,
        length: int | None = None,
        stride: int = 1,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """As `ups_store.Store.gather`, of samples that are there."""
        gathered = {}
        for name in names:
            rows = [self._samples[sample][name] for sample in samples.tolist()]
            if start is not None and length is not None:
                ends = start + (length - 1) * stride + 1
                windows = zip(rows, start.tolist(), ends.tolist(), strict=True)
                rows = [row[first:end:stride] for row, first, end in windows]
            target = None if out is None else out.get(name)
            gathered[name] = np.stack(rows, out=target, casting="unsafe")
        return gathered


class UnkeptJob:
    """Encodes trajectories as they are needed, and keeps nothing.

    Args:
        build: What would build a store of it.
        prepare: Given what reads and encodes its samples, returns what does so instead.

    Attributes:
        title: Task and split.
        num_samples: N.
        store: What is there at the moment.
    """

    def __init__(
        self, build: Build, *, prepare: Callable[[Filling], Filling] = lambda filling: filling
    ) -> None:
        self._prepare = prepare
        self.title, self.num_samples = build.title, build.num_samples
        self.store = UnkeptLatents(build)
        self._build, self._num_made = build, 0

    def has(self, samples: Items) -> bool:
        """Whether samples are there."""
        return self.store.has(samples)

    def num_there(self) -> int:
        """How many samples were encoded in this pass."""
        return self._num_made

    def use(self, readers: Readers, watcher: Progress) -> None:
        """See `TaskBuild.use`."""
        self._build.use(readers, watcher)
        self._filling = self._prepare(self._build.filling_into(self.store))

    def fill(self, samples: Items) -> None:
        """See `TaskBuild.fill`."""
        self._filling.fill(samples)
        self._num_made += len(samples)

    def check_complete(self) -> None:
        """See `TaskBuild.check_complete`."""
        self._filling.check_complete()

    def finish(self) -> None:
        """Make sure that the sources are still those that the run began with."""
        self._build.plan.check_sources()

    def close(self) -> None:
        """Nothing is open."""


class FirstTrajectories:
    """Some trajectories of a store as a store of their own, for `TaskWindows`.

    Attributes:
        path: Of the store.
        config_hash: Of the store.
        arrays: Of the store.
        constants: Coordinates.
        attrs: Of the store.
    """

    def __init__(self, store: Any, samples: Items, wait: Callable[[], None]) -> None:
        self.path, self.config_hash = store.path, store.config_hash
        self.constants, self.arrays, self.attrs = store.constants, store.arrays, store.attrs
        self._store, self._samples, self._wait = store, samples, wait

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, name: object) -> bool:
        return name in self._store

    def gather(self, samples: Items, names: Sequence[str], **window: Any) -> dict[str, npt.NDArray[Any]]:
        """As `ups_store.Store.gather`, once the trajectories are there."""
        self._wait()
        gathered: dict[str, npt.NDArray[Any]] = self._store.gather(self._samples[samples], names, **window)
        return gathered


class FirstWindows(TaskWindows):
    """Windows of the first trajectories of a task.

    Args:
        windows: Windows of all.
        samples: Numbers of the first trajectories.
        wait: Waits until they are there.
        ranges: Ranges of parameters that are known of all trajectories.
        horizon: As that of `windows`.
        stride: As that of `windows`.
    """

    def __init__(
        self,
        windows: TaskWindows,
        samples: Items,
        wait: Callable[[], None],
        *,
        ranges: Mapping[str, tuple[float, float]],
        horizon: int,
        stride: int,
    ) -> None:
        first: Any = FirstTrajectories(windows.store, samples, wait)
        super().__init__(first, horizon=horizon, stride=stride, is_complete=False)
        self._ranges = ranges

    def parameter_ranges(self) -> dict[str, tuple[float, float]]:
        """Least and largest value of every parameter; of all trajectories where files have one value each."""
        return super().parameter_ranges() | dict(self._ranges)


def ranges_by_file(build: Build) -> dict[str, tuple[float, float]]:
    """Least and largest value of the parameters that have one value in each file of the sources."""
    of_files = [info.parameters for info in build.plan.infos]
    names = set.intersection(*(set(parameters) for parameters in of_files))
    columns = {name: np.array([parameters[name] for parameters in of_files]) for name in sorted(names)}
    return {name: (float(values.min()), float(values.max())) for name, values in columns.items()}
