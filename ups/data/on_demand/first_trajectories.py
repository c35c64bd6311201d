"""The first trajectories of a split that is being encoded: what statistics are measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.data.on_demand.order import Items
from ups.data.on_demand.plan import WantedStore
from ups.data.task_windows import TaskWindows


class FirstTrajectories:
    """Some trajectories of a store as a store of their own, for `TaskWindows`.

    Args:
        store: The store, or what stands for it.
        samples: Numbers of the trajectories.
        wait: Waits until they are there.

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
        time_stride: As that of `windows`.
    """

    def __init__(
        self,
        windows: TaskWindows,
        samples: Items,
        wait: Callable[[], None],
        *,
        ranges: Mapping[str, tuple[float, float]],
        horizon: int,
        time_stride: int,
    ) -> None:
        first: Any = FirstTrajectories(windows.store, samples, wait)
        super().__init__(first, horizon=horizon, time_stride=time_stride, is_complete=False)
        self._ranges = ranges

    def parameter_ranges(self) -> dict[str, tuple[float, float]]:
        """Least and largest value of every parameter; of all trajectories where files have one value each."""
        return super().parameter_ranges() | dict(self._ranges)


def ranges_by_file(wanted: WantedStore) -> dict[str, tuple[float, float]]:
    """Least and largest value of the parameters that have one value in each file of the sources."""
    of_files = [info.parameters for info in wanted.plan.infos]
    names = set.intersection(*(set(parameters) for parameters in of_files))
    columns = {name: np.array([parameters[name] for parameters in of_files]) for name in sorted(names)}
    return {name: (float(values.min()), float(values.max())) for name, values in columns.items()}
