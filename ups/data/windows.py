"""Samples of one task and split as models take them: `Windows` are trained on, `Trajectories` are evaluated.

Letters: N samples, B batch, K steps of a window, T stored or predicted time steps, X the axes of the grid, C
channels; L tokens and D channels of latents, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import ups_store
from ups.config import RunConfig
from ups.data.fields import (
    CONSTANT_FIELDS,
    STEP_TOLERANCE,
    Array,
    Fields,
    Items,
    given_array,
    times_of,
    too_short,
)
from ups.data.identities import hash_of
from ups.data.splits import open_fields, open_latent_fields
from ups.data.stores import Store
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT, LATENT_INPUT
from ups_store.build import BuildConfig
from ups_store.torch import Allocate, Window, WindowIndex, new_tensor

if TYPE_CHECKING:
    from ups.trained.encode_loop import BatchEncoder

# Where a store lies by the mode of its preload, in words.
_PLACES = {
    "page-cache": "in the page cache",
    "copy": "in RAM",
    "device": "on the device",
    "mapped": "read when it is used",
    "mixed": "some of its files in RAM",
}
_BATCH_NBYTES = 64 << 20  # of predicted frames in float32; metrics need several times as much

Preload = Literal["auto", "off", "page-cache", "copy", "device"]


# --- what is trained on -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadWindows:
    """Some windows of one task.

    Attributes:
        states: As stored, float32, shape (B, K + 1, L, D), or (B, K + 1, X..., C) of fields; on the CPU, or
            where the store was preloaded to.
        parameters: By name, float64, each (B,).
        dt: Physical time of one step, float64, shape (B,); 1 for a steady task.
    """

    states: Tensor
    parameters: dict[str, npt.NDArray[np.float64]]
    dt: npt.NDArray[np.float64]


class Windows:
    """Windows of K + 1 frames of a transient task; pairs of input and solution of a steady one.

    Args:
        source: Fields or latents; one time step means that the task is steady.
        horizon: K.
        stride: Stored time steps from one frame to the next.
        limit: At most so many samples of a store, the first ones.
        dt: Physical time of every step, where it isn't to be that of each window.

    Attributes:
        fields: The samples.
        store: Where they lie.
        state: Name of the array whose windows are taken.
        input_array: Name of a steady task's input, None of a transient task.
        is_steady: Whether the task is.
        horizon: K; 1 for a steady task.
        parameters: Names of the parameters and boundary values that every sample has.

    Raises:
        ConfigError: Kinds "horizon", "uneven_times", "no_input".
    """

    def __init__(
        self,
        source: Store | Fields,
        *,
        horizon: int = 1,
        stride: int = 1,
        limit: int | None = None,
        dt: float | None = None,
    ) -> None:
        self.fields = source if isinstance(source, Fields) else Fields(source, limit=limit)
        self.store, self.state, self.parameters = (
            self.fields.store,
            self.fields.array,
            self.fields.info.parameters,
        )
        self.is_steady = self.fields.info.steady
        self.input_array = self._find_input() if self.is_steady else None
        self.horizon, self._stride, self._even_dt = 1 if self.is_steady else horizon, stride, dt
        self._index = WindowIndex(Window(horizon=self.horizon, stride=stride), self.fields.num_steps)
        if not len(self._index) and not self.is_steady:
            longest = int(self.fields.num_steps.max(initial=0))
            raise too_short(self.horizon, stride, path=self.fields.origin, longest=longest)
        self._times = self._checked_times()
        self._on_device: Any = None

    def __len__(self) -> int:
        """Number of windows."""
        return self.num_samples if self.is_steady else len(self._index)

    @property
    def data_hash(self) -> str:
        """Hash of what the states are made from."""
        return self.store.config_hash

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.fields.samples)

    @property
    def num_steps(self) -> Items:
        """Valid time steps of each sample, int64, shape (N,)."""
        return self.fields.num_steps

    def locate(self, items: Items) -> tuple[Items, Items]:
        """Sample and first time step of windows of these numbers, each (B,)."""
        if self.is_steady:
            return items, np.zeros_like(items)
        return self._index.locate(items, epoch=0)

    def read(self, items: Items, *, allocate: Allocate = new_tensor) -> ReadWindows:
        """Read windows of these numbers, shape (B,); new arrays, the states' from `allocate`."""
        samples, starts = self.locate(items)
        if self.input_array is not None:
            solution = self._gather(self.state, samples)[:, 0]
            given = self._gather(self.input_array, samples).reshape(solution.shape)
            states, dt = torch.stack([given, solution], dim=1), np.ones(len(items))
        else:
            window = {"start": starts, "length": self.horizon + 1, "stride": self._stride}
            states, dt = self._gather(self.state, samples, allocate, **window), self._dt(samples, starts)
        if self._even_dt is not None:
            dt = np.full(len(items), self._even_dt)
        return ReadWindows(states, self.fields.parameters(samples), dt)

    def whole(self, samples: Items, array: str) -> Array:
        """Read all states of samples (B,), (B, T, points, C), or of a steady task's input, (B, points, C)."""
        values = self.store.gather(self.fields.samples[samples], [array])[array]
        leading = 2 if array == self.state else 1
        *points, channels = self.store.arrays[self.state].shape[2:]
        return values.reshape(*values.shape[:leading], int(np.prod(points)), channels)

    def parameter_ranges(self) -> dict[str, tuple[float, float]]:
        """Least and largest value of every parameter."""
        values = self.fields.parameters(np.arange(self.num_samples))
        return {name: (float(column.min()), float(column.max())) for name, column in values.items()}

    def typical_dt(self) -> float:
        """Median physical time of one step; 1 for a steady task."""
        if self.is_steady:
            return 1.0
        num = len(self)
        items = np.unique(np.linspace(0, num - 1, min(num, 1024)).astype(np.int64))
        return float(np.median(self._dt(*self.locate(items))))

    def preload(self, mode: Preload, *, device: str) -> str:
        """Bring the store into memory (`docs/guides/preload.md`), and return where it lies then, in words.

        Args:
            mode: "off" leaves it on the disk; so do mapped partitions, whatever is asked for. Packed stores
                take "copy", which decodes them once, and "page-cache".
            device: Where the states will be used.
        """
        store = self.store
        if store.codec != "none":
            used = f"packed by {store.codec}, decoded when it is used"
            if mode == "off":
                return used
            report = store.preload(mode)
            if report.mode == "copy":
                return f"packed by {store.codec}, decoded into RAM in {report.seconds:.1f} s"
            return f"{used}, {_PLACES[report.mode]} ({report.why})"
        if mode == "off" or not isinstance(store, ups_store.Store):
            return "read when it is used"
        is_for_device = mode == "device" or (mode == "auto" and device != "cpu")
        report = store.preload(mode, device=device if is_for_device else None)
        self._on_device = report.on_device
        # The last part of `why` is the budget of the mode that was taken; before it, what was refused.
        refused = report.why if report.mode == "mapped" else report.why.rpartition("; ")[0]
        return _PLACES[report.mode] + (f" ({refused})" if refused else "")

    def valid_frames(self, samples: Items) -> npt.NDArray[np.bool_]:
        """Tell which frames of samples are theirs, not padding, shape (B, T)."""
        num_times = self.store.arrays[self.state].shape[1]
        valid: npt.NDArray[np.bool_] = np.arange(num_times) < self.num_steps[samples, None]
        return valid

    def _gather(self, name: str, samples: Items, allocate: Allocate = new_tensor, **window: Any) -> Tensor:
        """Read samples, or windows of them, as float32, converted while they are copied."""
        numbers = self.fields.samples[samples]
        if self._on_device is not None:
            gathered: Tensor = self._on_device.gather(numbers, [name], **window)[name]
            return gathered.float()
        shape = self.store.arrays[name].shape[1:]
        if window:
            shape = (window["length"], *shape[1:])
        out = allocate((len(samples), *shape), torch.float32)
        self.store.gather(numbers, [name], **window, out={name: out.numpy()})
        return out

    def _find_input(self) -> str:
        """Name the array that decides the solution: one, of as many numbers."""
        arrays = self.store.arrays
        candidates = (LATENT_INPUT,) if self.state == LATENT else CONSTANT_FIELDS
        inputs = [name for name in candidates if name in arrays]
        num_values = int(np.prod(arrays[self.state].shape[1:]))
        if len(inputs) != 1 or int(np.prod(arrays[inputs[0]].shape[1:])) != num_values:
            raise ConfigError(
                "a steady task needs one input of as many numbers as its solution",
                kind="no_input",
                path=self.fields.origin,
                expected=f"{' or '.join(candidates)} with {num_values} numbers a sample",
                found=", ".join(f"{name} {tuple(spec.shape[1:])}" for name, spec in arrays.items()),
            )
        return inputs[0]

    def _checked_times(self) -> npt.NDArray[np.float64]:
        """Times of the stored steps, (T,) or (N, T), or their numbers; several in a row have one length."""
        num_times = self.store.arrays[self.state].shape[1]
        times = None if self.is_steady else self.fields.times()
        if times is None:
            return np.arange(num_times, dtype=np.float64)
        steps = times[..., self._stride :] - times[..., : -self._stride]
        is_odd = np.ptp(steps, axis=-1) > STEP_TOLERANCE * np.abs(steps).max(axis=-1)
        if times.shape[-1] != num_times or (self.horizon > 1 and is_odd.any()):
            raise ConfigError(
                "the time steps are not of one length",
                kind="uneven_times",
                path=self.fields.origin,
                expected=f"{num_times} evenly spaced times",
                found=f"{times.shape[-1]}, steps of {steps.min():.4g} to {steps.max():.4g}",
                hint="training.horizon=1 takes steps of any length",
            )
        return times

    def _dt(self, samples: Items, starts: Items) -> npt.NDArray[np.float64]:
        times = np.atleast_2d(self._times)
        rows = samples if self._times.ndim == 2 else np.zeros_like(samples)
        ends = starts + self.horizon * self._stride
        return (times[rows, ends] - times[rows, starts]) / self.horizon


class EncodedWindows(Windows):
    """Windows of fields whose latents are made in each step, the same to the bit as a store would hold.

    `read` gives fields, so that these can be augmented first; `encoded` makes latents of them.

    Args:
        encoder: Of the task; the other arguments are those of `Windows`.
    """

    def __init__(self, source: Fields, encoder: BatchEncoder, *, horizon: int = 1, stride: int = 1) -> None:
        super().__init__(source, horizon=horizon, stride=stride)
        self.encoder = encoder

    @property
    def data_hash(self) -> str:
        """Hash of the fields, and of what encodes them."""
        return hash_of([self.store.config_hash, self.encoder.identity()])

    def encoded(self, states: Tensor, parameters: Mapping[str, Array], items: Items) -> Tensor:
        """Encode windows of these numbers, perhaps cut or augmented, to (B, K' + 1, L, D) on the CPU."""
        samples, starts = self.locate(items)
        if self.input_array is not None:
            frames = [
                self._encode(states[:, number].numpy(), array, samples, starts, parameters)
                for number, array in enumerate((self.input_array, FIELDS))
            ]
            return torch.stack(frames, dim=1)
        num = states.shape[1]
        steps = (starts[:, None] + self._stride * np.arange(num)).reshape(-1)
        columns = {name: np.repeat(column, num) for name, column in parameters.items()}
        latents = self._encode(states.flatten(0, 1).numpy(), FIELDS, np.repeat(samples, num), steps, columns)
        return latents.unflatten(0, (len(states), num))

    def whole(self, samples: Items, array: str) -> Array:
        """Encode all states of samples, (B, T, L, D), or of a steady task's input, (B, L, D)."""
        parameters = self.fields.parameters(samples)
        if array != FIELDS:
            steps = np.zeros_like(samples)
            return self._encode(
                self.fields.read(array, samples, steps), array, samples, steps, parameters
            ).numpy()
        num = self.store.arrays[FIELDS].shape[1]
        rows, steps = np.repeat(samples, num), np.tile(np.arange(num), len(samples))
        columns = {name: np.repeat(column, num) for name, column in parameters.items()}
        latents = self._encode(self.fields.read(FIELDS, rows, steps), FIELDS, rows, steps, columns)
        return latents.unflatten(0, (len(samples), num)).numpy()

    def _encode(
        self, frames: Array, array: str, samples: Items, steps: Items, parameters: Mapping[str, Array]
    ) -> Tensor:
        num_steps = self.store.arrays[FIELDS].shape[1] if array == FIELDS else 1
        numbers = self.fields.samples[samples]
        return self.encoder.encode_frames(
            frames, parameters, samples=numbers, steps=steps, num_steps=num_steps, array=array
        )


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


# --- what is evaluated on -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrajectoryBatch:
    """Trajectories side by side.

    Attributes:
        samples: Their numbers in the split, int64, shape (B,).
        given: The state that a prediction starts from, physical units, float32, shape (B, X..., C): the first
            frame; of a steady task the constant field that decides the solution.
        truth: The frames to be predicted, physical units, float32, shape (B, T, X..., C).
        parameters: By name, float64, each (B,).
    """

    samples: Items
    given: Tensor
    truth: Tensor
    parameters: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.samples)


class Trajectories:
    """Trajectories of one task and split as an evaluation takes them: a state, and the frames after it.

    Args:
        fields: Where they are.
        stored_t: Time of every stored time step, as `times_of` gives it; by default steps are counted.
        stride: Stored time steps from one frame to the next.
        horizon: Frames to be predicted; by default as many as every trajectory has.
        max_trajectories: At most so many of them, spread evenly over the split.

    Attributes:
        info: What the fields are.
        origin: Where they come from, for people.
        fields: Where they are.
        horizon: T.
        t: Time of each predicted frame since the given one, float64, shape (T,).
        dt: Time from one frame to the next; None of a steady task.
        given_array: Name of the array that is given.

    Raises:
        ConfigError: Kinds "empty_split", "horizon", "uneven_times", "no_input".
    """

    def __init__(
        self,
        fields: Fields,
        *,
        stored_t: npt.NDArray[np.float64] | None,
        stride: int = 1,
        horizon: int | None = None,
        max_trajectories: int | None = None,
    ) -> None:
        self.info, self.origin, self.fields, self._stride = fields.info, fields.origin, fields, stride
        num, name = len(fields.num_steps), self.info.task
        if num == 0:
            raise ConfigError(f"{name} has no samples to evaluate", kind="empty_split", path=fields.origin)
        self._samples: Items = np.arange(num)
        if max_trajectories is not None and max_trajectories < num:  # the first and the last too
            self._samples = np.linspace(0, num - 1, max_trajectories).round().astype(np.int64)
        self.given_array = given_array(self.info)
        longest = 1 if self.info.steady else (int(fields.num_steps.min()) - 1) // stride
        self.horizon = max(1, longest) if horizon is None else horizon
        if not 1 <= self.horizon <= longest:
            steps = "1 step" if self.horizon == 1 else f"{self.horizon} steps"
            raise ConfigError(
                f"a rollout of {steps} doesn't fit into the trajectories of {name}",
                kind="horizon",
                path=fields.origin,
                expected=(f"1 to {longest} steps" if longest > 1 else "1 step")
                if longest >= 1
                else "a smaller training.stride",
                found=f"{int(fields.num_steps.min())} stored time steps, every {stride}. taken",
            )
        times = self._frame_times(stored_t)
        self.t = times[1:] - times[0]
        self.dt = None if self.info.steady else float(self.t[-1] / self.horizon)

    def __len__(self) -> int:
        return len(self._samples)

    def batches(self, batch_size: int | None = None) -> Iterator[TrajectoryBatch]:
        """Read all trajectories in order; by default as many at a time as take about 64 MiB."""
        nbytes = 4 * self.horizon * self.info.grid.num_values(FIELDS)
        size = batch_size or max(1, min(len(self), _BATCH_NBYTES // nbytes))
        for first in range(0, len(self), size):
            yield self.read(np.arange(first, min(first + size, len(self))))

    def read(self, numbers: Items) -> TrajectoryBatch:
        """Read trajectories of these numbers, from 0 on, shape (B,)."""
        samples = self._samples[numbers]
        first = int(not self.info.steady)
        frames = [
            self.fields.read(FIELDS, samples, np.full(len(samples), step * self._stride))
            for step in range(first, self.horizon + first)
        ]
        given = self.fields.read(self.given_array, samples, np.zeros(len(samples), np.int64))
        parameters = self.fields.parameters(samples)
        return TrajectoryBatch(
            samples,
            torch.from_numpy(given),
            torch.from_numpy(np.stack(frames, axis=1)),
            {name: torch.from_numpy(values) for name, values in parameters.items()},
        )

    def _frame_times(self, stored_t: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64]:
        """Times of the given frame and of the predicted ones, shape (T + 1,), evenly spaced."""
        if self.info.steady:
            return np.zeros(2)
        counted = np.arange(self.horizon + 1.0) * self._stride
        times = counted if stored_t is None else stored_t[:: self._stride][: self.horizon + 1]
        steps = np.diff(times)
        if len(times) <= self.horizon or not np.allclose(steps, steps[0], rtol=STEP_TOLERANCE, atol=0):
            raise ConfigError(
                f"the time steps of {self.info.task} are not of one length",
                kind="uneven_times",
                expected=f"{self.horizon + 1} evenly spaced times",
                found=f"{len(times)} times, steps of {steps.min():.4g} to {steps.max():.4g}",
            )
        return times


def open_trajectories(
    config: BuildConfig,
    task: str,
    split: str,
    *,
    source: Any = "auto",
    stride: int = 1,
    horizon: int | None = None,
    max_trajectories: int | None = None,
) -> Trajectories:
    """Open the trajectories of a task and split.

    Args:
        config: Which samples of which files, and where field stores lie.
        split: "train", "val", "dev" or "test"; "val" and "dev" as in `part_of_split`.
        source: As in `open_fields`.
        stride: Stored time steps from one frame to the next.
        horizon: Frames to be predicted.
        max_trajectories: As `Trajectories`.
    """
    fields = open_fields(config, task, split, source=source)
    options: dict[str, Any] = {"stride": stride, "horizon": horizon, "max_trajectories": max_trajectories}
    return Trajectories(fields, stored_t=times_of(fields), **options)


def open_latent_trajectories(config: RunConfig, task: str, split: str, **options: Any) -> Trajectories:
    """Open trajectories of latents, as `open_latent_fields`; options are those of `Trajectories`."""
    fields = open_latent_fields(config, task, split)
    return Trajectories(fields, stored_t=times_of(fields), **options)
