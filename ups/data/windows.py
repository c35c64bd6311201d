"""`TaskWindows`: the windows of one store, some frames of a trajectory each; `WindowSource`: batches of them.

Letters: B batch, K steps of a window, T stored time steps, L tokens, D channels of a token, X the axes of the
grid, C channels, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import ups_store
from ups.conditions import NUM_STEPS, conditions_among
from ups.data.augment import Symmetries, augment_trajectories, shift_periodic
from ups.data.batches import TaskBatch, TrainingData, random_order
from ups.data.fields import CONSTANT_FIELDS, STEP_TOLERANCE, TIMES, stored_parameters, too_short
from ups.data.stores import Store
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT, LATENT_INPUT
from ups.laws import Laws, laws_of
from ups.trained.specs import SimulatedTask
from ups_store.torch import Allocate, Window, WindowIndex, new_tensor

# Where a store lies by the mode of its preload, in words.
_PLACES = {
    "page-cache": "in the page cache",
    "copy": "in RAM",
    "device": "on the device",
    "mapped": "read when it is used",
    "mixed": "some of its files in RAM",
}

Items = npt.NDArray[np.int64]

Preload = Literal["auto", "off", "page-cache", "copy", "device"]


@dataclass(frozen=True)
class Windows:
    """Some windows of one store.

    Attributes:
        states: As stored, float32, shape (B, K + 1, L, D), or (B, K + 1, X..., C) of fields; on the CPU, or
            where the store was preloaded to.
        parameters: By name, float64, each (B,).
        dt: Physical time of one step, float64, shape (B,); 1 for a steady task.
    """

    states: Tensor
    parameters: dict[str, npt.NDArray[np.float64]]
    dt: npt.NDArray[np.float64]


class TaskWindows:
    """Windows of K + 1 frames of a transient task; pairs of input and solution of a steady one.

    Args:
        store: Latents or fields; one time step means that the task is steady.
        horizon: K.
        stride: Stored time steps from one frame to the next.
        limit: At most so many samples, the first ones.
        is_complete: Whether all samples are there. While they aren't, times that samples have of their own
            are looked at when their windows are read.

    Attributes:
        store: The store.
        state: Name of the array whose windows are taken.
        input_array: Name of a steady task's input, None of a transient task.
        horizon: K; 1 for a steady task.
        parameters: Names of the parameters and boundary values that every sample has.

    Raises:
        ConfigError: Kinds "horizon", "uneven_times", "no_input".
    """

    def __init__(
        self,
        store: Store,
        *,
        horizon: int = 1,
        stride: int = 1,
        limit: int | None = None,
        is_complete: bool = True,
    ) -> None:
        self.store = store
        self.state = LATENT if LATENT in store else FIELDS
        arrays = store.arrays
        self._num_times = arrays[self.state].shape[1]
        self.is_steady = self._num_times == 1
        self.parameters = conditions_among(arrays)
        self.input_array = self._find_input() if self.is_steady else None
        self.horizon = 1 if self.is_steady else horizon
        self._stride = stride
        self.num_samples = min(len(store), limit or len(store))
        self.num_steps = self._read_num_steps()
        self._index = self._make_index()
        self._times = self._make_times(is_complete=is_complete)
        self._on_device: Any = None

    def __len__(self) -> int:
        """Number of windows."""
        return self.num_samples if self.is_steady else len(self._index)

    def read(self, items: Items, *, allocate: Allocate = new_tensor) -> Windows:
        """Windows of these numbers, shape (B,); new arrays, the states' from `allocate`."""
        if self.is_steady:
            samples, states = items, self._pairs(items)
            dt = np.ones(len(items))
        else:
            samples, starts = self._index.locate(items, epoch=0)
            length = self.horizon + 1
            window = {"start": starts, "length": length, "stride": self._stride}
            states = self._gather(self.state, samples, allocate, **window)
            dt = self._dt(samples, starts)
        return Windows(states, stored_parameters(self.store, self.parameters, samples), dt)

    def parameter_ranges(self) -> dict[str, tuple[float, float]]:
        """Least and largest value of every parameter."""
        values = stored_parameters(self.store, self.parameters, np.arange(self.num_samples))
        return {name: (float(column.min()), float(column.max())) for name, column in values.items()}

    def typical_dt(self) -> float:
        """Median physical time of one step; 1 for a steady task."""
        if self.is_steady:
            return 1.0
        num = len(self)
        some = np.unique(np.linspace(0, num - 1, min(num, 1024)).astype(np.int64))
        return float(np.median(self._dt(*self._index.locate(some, epoch=0))))

    def preload(self, mode: Preload, *, device: str) -> str:
        """Bring the store into memory (`docs/guides/preload.md`), and return where it lies then, in words.

        Args:
            mode: "off" leaves it on the disk; so do mapped partitions, whatever is asked for. Packed stores
                take "copy", which decodes them once, and "page-cache".
            device: Where the states will be used.
        """
        if self.store.codec != "none":
            return self._preload_packed(mode)
        if mode == "off" or not isinstance(self.store, ups_store.Store):
            return "read when it is used"
        is_for_device = mode == "device" or (mode == "auto" and device != "cpu")
        report = self.store.preload(mode, device=device if is_for_device else None)
        self._on_device = report.on_device
        # The last part of `why` is the budget of the mode that was taken; before it, what was refused.
        refused = report.why if report.mode == "mapped" else report.why.rpartition("; ")[0]
        return _PLACES[report.mode] + (f" ({refused})" if refused else "")

    def _preload_packed(self, mode: Preload) -> str:
        used = f"packed by {self.store.codec}, decoded when it is used"
        if mode == "off":
            return used
        report = self.store.preload(mode)
        if report.mode == "copy":
            return f"packed by {self.store.codec}, decoded into RAM in {report.seconds:.1f} s"
        return f"{used}, {_PLACES[report.mode]} ({report.why})"

    def valid_frames(self, samples: Items) -> npt.NDArray[np.bool_]:
        """Which frames of samples are theirs, not padding, shape (B, T)."""
        valid: npt.NDArray[np.bool_] = np.arange(self._num_times) < self.num_steps[samples, None]
        return valid

    def _gather(self, name: str, samples: Items, allocate: Allocate = new_tensor, **window: Any) -> Tensor:
        """Samples or windows of them as float32, converted while they are copied."""
        if self._on_device is not None:
            gathered: Tensor = self._on_device.gather(samples, [name], **window)[name]
            return gathered.float()
        shape = self.store.arrays[name].shape[1:]
        if window:
            shape = (window["length"], *shape[1:])
        out = allocate((len(samples), *shape), torch.float32)
        self.store.gather(samples, [name], **window, out={name: out.numpy()})
        return out

    def _pairs(self, samples: Items) -> Tensor:
        """Input and solution of a steady task side by side."""
        assert self.input_array is not None
        solution = self._gather(self.state, samples)[:, 0]
        given = self._gather(self.input_array, samples)
        return torch.stack([given.reshape(solution.shape), solution], dim=1)

    def _find_input(self) -> str:
        """The array that decides the solution: one, of as many numbers."""
        arrays = self.store.arrays
        candidates = (LATENT_INPUT,) if self.state == LATENT else CONSTANT_FIELDS
        found = [name for name in candidates if name in arrays]
        num_values = int(np.prod(arrays[self.state].shape[1:]))
        if len(found) != 1 or int(np.prod(arrays[found[0]].shape[1:])) != num_values:
            raise ConfigError(
                "a steady task needs one input of as many numbers as its solution",
                kind="no_input",
                path=self.store.path,
                expected=f"{' or '.join(candidates)} with {num_values} numbers a sample",
                found=", ".join(f"{name} {tuple(spec.shape[1:])}" for name, spec in arrays.items()),
            )
        return found[0]

    def _read_num_steps(self) -> Items:
        """Valid time steps of every sample."""
        if NUM_STEPS not in self.store:
            return np.full(self.num_samples, self._num_times, np.int64)
        stored = self.store.gather(np.arange(self.num_samples), [NUM_STEPS])[NUM_STEPS]
        return stored.astype(np.int64).clip(0, self._num_times)

    def _make_index(self) -> WindowIndex:
        index = WindowIndex(Window(horizon=self.horizon, stride=self._stride), self.num_steps)
        if not len(index) and not self.is_steady:
            longest = int(self.num_steps.max(initial=0))
            raise too_short(self.horizon, self._stride, path=self.store.path, longest=longest)
        return index

    def _make_times(self, *, is_complete: bool) -> npt.NDArray[np.float64] | None:
        """Time of every stored step, (T,), or its number; None if samples have times of their own."""
        if TIMES not in self.store or self.is_steady:
            return np.arange(self._num_times, dtype=np.float64)
        if TIMES not in self.store.arrays:
            return self._checked_times(self.store.constants[TIMES])
        if is_complete:
            self._read_times(np.arange(self.num_samples))
        return None

    def _read_times(self, samples: Items) -> npt.NDArray[np.float64]:
        """Times of samples that have their own, shape (B, T)."""
        return self._checked_times(self.store.gather(samples, [TIMES])[TIMES])

    def _checked_times(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Times in float64, (T,) or (B, T); several steps in a row have to be of one length."""
        times: npt.NDArray[np.float64] = stored.astype(np.float64)
        steps = times[..., self._stride :] - times[..., : -self._stride]
        is_odd = np.ptp(steps, axis=-1) > STEP_TOLERANCE * np.abs(steps).max(axis=-1)
        if times.shape[-1] != self._num_times or (self.horizon > 1 and is_odd.any()):
            raise ConfigError(
                "the time steps are not of one length",
                kind="uneven_times",
                path=self.store.path,
                expected=f"{self._num_times} evenly spaced times",
                found=f"{times.shape[-1]}, steps of {steps.min():.4g} to {steps.max():.4g}",
                hint="training.horizon=1 takes steps of any length",
            )
        return times

    def _dt(self, samples: Items, starts: Items) -> npt.NDArray[np.float64]:
        times = self._read_times(samples) if self._times is None else self._times[None]
        rows = np.arange(len(samples)) if self._times is None else np.zeros_like(samples)
        ends = starts + self.horizon * self._stride
        return (times[rows, ends] - times[rows, starts]) / self.horizon


@dataclass(frozen=True)
class WindowBatch(TaskBatch):
    """Windows of one task; also see `TaskBatch`.

    Attributes:
        states: As stored, not normalised, float32: latents (B, K + 1, L, D), or fields (B, K + 1, X..., C).
            Of a steady task input and solution, K = 1.
        parameters: And boundary values, in the order that was asked for, NaN where the task has none of that
            name, float32, shape (B, P).
        dt: Physical time of one step, float32, shape (B,); 1 for a steady task.
        pushed: Steps that go before without gradients (`training.pushforward`).
    """

    states: Tensor
    parameters: Tensor
    dt: Tensor
    pushed: int = dataclasses.field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.states)


class WindowSource:
    """Windows of several tasks, each a source of `ups_store.torch.Loader`.

    Args:
        tasks: Windows by task; of samples that are there.
        parameters: Names of the parameters, in the order that batches give them.
    """

    num_tensors = 1

    def __init__(self, tasks: Mapping[str, TaskWindows], *, parameters: tuple[str, ...] = ()) -> None:
        self.tasks, self.parameters, self._names = tasks, parameters, tuple(tasks)

    @property
    def stores(self) -> Sequence[Store]:
        """Those that are there."""
        kinds = (ups_store.Store, ups_store.PackedStore, ups_store.PartitionedStore)
        return [some.store for some in self.tasks.values() if isinstance(some.store, kinds)]

    def num_frames(self) -> dict[str, int]:
        """Frames of each task that windows are taken of: of a steady task its solutions."""
        return {task: int(some.num_steps.sum()) for task, some in self.tasks.items()}

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Allocate) -> WindowBatch:
        """Windows of these numbers of a task; see `ups_store.torch.StoreDataset.fetch`."""
        return self.read(self._names[number], self.tasks[self._names[number]], items, allocate)

    def read(self, task: str, windows: TaskWindows, items: Items, allocate: Allocate) -> WindowBatch:
        """Windows of a task, with their parameters in the models' order."""
        found = windows.read(items, allocate=allocate)
        table = parameter_table(found.parameters, self.parameters, len(items))
        return WindowBatch(task, found.states, table, torch.from_numpy(found.dt.astype(np.float32)))


def window_data(
    windows: Mapping[str, TaskWindows],
    *,
    global_batch_size: int,
    seed: int,
    parameters: tuple[str, ...],
) -> TrainingData[WindowSource]:
    """Batches of random windows of stores that are there, one task each; a pass takes each window once."""
    source = WindowSource(windows, parameters=parameters)
    sizes = [len(some) for some in windows.values()]
    return TrainingData(
        source, random_order(sizes, global_batch_size=global_batch_size, seed=seed), seed=seed
    )


def evenly_spread(num_items: int, num: int) -> npt.NDArray[np.int64]:
    """Numbers of some items that stand for all: the middles of `num` equal parts of them.

    Args:
        num_items: How many there are, numbered from 0.
        num: How many are wanted, >= 1.

    Returns:
        min(num, num_items) different numbers, going up, new, int64.
    """
    num = min(num, num_items)
    return ((np.arange(num) + 0.5) * num_items / num).astype(np.int64)


def parameter_table(known: Mapping[str, npt.ArrayLike], names: Sequence[str], num: int) -> Tensor:
    """Parameters of the equation as models take them.

    Args:
        known: Parameters that a task has, by name, each (B,), on the CPU.
        names: Those that are asked for, in order.
        num: B.

    Returns:
        New, float32, shape (B, P); NaN where the task has none of that name.
    """
    table = np.full((num, len(names)), np.nan, np.float32)
    for column, name in enumerate(names):
        if name in known:
            table[:, column] = known[name]
    return torch.from_numpy(table)


def augment_windows(
    batch: WindowBatch,
    *,
    symmetries: Symmetries,
    tokens: tuple[int, ...],
    is_latent: bool,
) -> WindowBatch:
    """Shift every window, and reflect half of them if they are fields, where that may be.

    Latents are shifted by whole tokens, with which encoder and decoder commute.

    Args:
        batch: Windows of a task.
        tokens: Tokens along each axis.
        is_latent: Whether the states are latents, not fields.
    """
    if not is_latent:
        moved = augment_trajectories(batch.states, symmetries, draws=batch.draws)
        return dataclasses.replace(batch, states=moved)
    states = batch.states.unflatten(2, tokens)
    states = shift_periodic(states, symmetries.shifts, first_axis=2, draws=batch.draws)
    return dataclasses.replace(batch, states=states.flatten(2, 1 + len(tokens)))


def augment_windows_of(
    task: SimulatedTask, batch: WindowBatch, *, laws: Mapping[str, Laws], is_latent: bool = False
) -> WindowBatch:
    """As `augment_windows`, by what is known of the windows' task, and by a configuration's own laws."""
    symmetries = Symmetries.of(
        laws_of(batch.task, laws),
        periodic=task.grid.periodic,
        conditions=task.parameters,
        has_source=not task.steady and len(task.grid.arrays) > 1,
    )
    return augment_windows(batch, symmetries=symmetries, tokens=task.tokens, is_latent=is_latent)
