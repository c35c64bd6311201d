"""Fields of one task and split: out of a field store, or read straight from HDF5 into memory, whole.

Letters: N samples, T time steps, X the axes of the grid, C channels, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups.conditions import NUM_STEPS, arrays_of, condition_of, conditions_among
from ups.data.origins import identity_of_store
from ups.data.stores import Store
from ups.errors import ConfigError
from ups.grid import FIELDS, PERIODIC, GridSpec, boundary_types, directed_lengths
from ups.laws import Laws, TaskLaws, laws_of, lengths_of

# Constant fields that belong to the input of a task.
CONSTANT_FIELDS = ("coefficient", "force")

TIMES = "t"  # time of every stored step, of all samples or of each

STEP_TOLERANCE = 1e-3  # relative; of time steps that count as equal: some files have their times in float32

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FieldsInfo:
    """What the fields of a task are.

    Attributes:
        task: Name of the task.
        grid: Points, periodic axes, and channels of each array.
        channels: Names along the channel axis of "fields".
        boundary: Boundary type by axis name.
        domain_lengths: Length of the domain by axis name.
        parameters: Names of the parameters and boundary values that every sample has.
        steady: Whether a sample is one state instead of a trajectory.
        coordinates: Of the points along an axis, by axis name, as far as the source has them.
        units: By name of a channel or a coordinate, as far as the source has them.
    """

    task: str
    grid: GridSpec
    channels: tuple[str, ...]
    boundary: Mapping[str, str]
    domain_lengths: Mapping[str, float]
    parameters: tuple[str, ...]
    steady: bool
    coordinates: Mapping[str, Array] = field(default_factory=dict, compare=False)
    units: Mapping[str, str] = field(default_factory=dict, compare=False)


class Fields(Protocol):
    """Fields of one task and split.

    Attributes:
        info: What they are.
        origin: Where they come from, for people.
        identity: What they are, wherever they lie: a store by its hash, files by names and digests.
        num_steps: Valid time steps of each sample, int64, shape (N,).
    """

    info: FieldsInfo
    origin: str
    identity: str
    num_steps: npt.NDArray[np.int64]

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """Frames of samples (B,) at steps (B,), new, shape (B, *X, C); constant fields have no steps."""
        ...

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """Parameters of samples by name, each (B,)."""
        ...

    def times(self) -> npt.NDArray[np.float64] | None:
        """Time of every stored step, (T,), or each sample's own, (N, T); None where the source has none."""
        ...


class StoreFields:
    """Fields of a store, mapped, or packed.

    Args:
        store: A store with the array "fields".
        limit: At most so many samples, the first ones.
    """

    def __init__(self, store: Store, *, limit: int | None = None) -> None:
        self._store = store
        self.info = info_of(store)
        self.origin, self.identity = str(store.path), identity_of_store(store)
        num_samples = min(len(store), limit or len(store))
        self.num_steps = np.full(num_samples, store.arrays[FIELDS].shape[1], np.int64)
        if NUM_STEPS in store:
            self.num_steps[:] = store.gather(np.arange(num_samples), [NUM_STEPS])[NUM_STEPS]

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """See `Fields.read`."""
        window: dict[str, Any] = {"start": steps, "length": 1} if array == FIELDS else {}
        values = self._store.gather(samples, [array], **window)[array]
        frames = values[:, 0] if array == FIELDS else values
        return _with_channels(frames, self.info.grid).astype(np.float32, copy=False)

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """See `Fields.parameters`."""
        return stored_parameters(self._store, self.info.parameters, samples)

    def times(self) -> npt.NDArray[np.float64] | None:
        """See `Fields.times`."""
        return stored_times(self._store, len(self.num_steps))


class ChosenSamples:
    """Some samples of some fields (`Fields`).

    Args:
        fields: All of them.
        numbers: Those that are taken, int64, shape (N,).
        called: What they are called in the identity.
    """

    def __init__(self, fields: Fields, numbers: npt.NDArray[np.int64], *, called: str) -> None:
        self._fields, self._numbers = fields, numbers
        self.info, self.origin = fields.info, fields.origin
        self.identity = f"{fields.identity}, {called}"
        self.num_steps = fields.num_steps[numbers]

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """See `Fields.read`."""
        return self._fields.read(array, self._numbers[samples], steps)

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """See `Fields.parameters`."""
        return self._fields.parameters(self._numbers[samples])

    def times(self) -> npt.NDArray[np.float64] | None:
        """See `Fields.times`."""
        times = self._fields.times()
        return times if times is None or times.ndim == 1 else times[self._numbers]


class MemoryFields:
    """Fields in memory, read from HDF5 once.

    Args:
        info: What they are.
        arrays: "fields" (N, T, *X, C), constant fields (N, *X[, C]) and parameters (N,).
        origin: Where they come from.
        identity: As `Fields.identity`; by default the origin.
        times: As `Fields.times` gives them.
    """

    def __init__(
        self,
        info: FieldsInfo,
        arrays: Mapping[str, Array],
        *,
        origin: str,
        identity: str = "",
        times: Array | None = None,
    ) -> None:
        self.info, self.origin, self.identity = info, origin, identity or f"files {origin}"
        self._times = None if times is None else np.asarray(times, np.float64)
        self._arrays = arrays
        num_samples, num_steps = arrays[FIELDS].shape[:2]
        self.num_steps = np.full(num_samples, num_steps, np.int64)
        self.num_steps[:] = arrays.get(NUM_STEPS, num_steps)

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """See `Fields.read`."""
        values = self._arrays[array]
        frames = values[samples, steps] if array == FIELDS else values[samples]
        return np.asarray(_with_channels(frames, self.info.grid), np.float32)

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """See `Fields.parameters`."""
        return _columns(self.info.parameters, self._arrays, samples)

    def times(self) -> npt.NDArray[np.float64] | None:
        """See `Fields.times`."""
        return self._times


def info_of(described: Any) -> FieldsInfo:
    """What a store holds, or by its plan will hold."""
    attrs, constants = described.attrs, described.constants
    arrays = {name: tuple(spec.shape) for name, spec in described.arrays.items()}
    ndim = len(arrays[FIELDS]) - 3
    boundary = dict(attrs.get("boundary") or {})
    constant = [name for name in CONSTANT_FIELDS if name in arrays]
    channels = [(FIELDS, arrays[FIELDS][-1])]
    channels += [(name, arrays[name][-1] if len(arrays[name]) == ndim + 2 else 1) for name in constant]
    return FieldsInfo(
        task=str(attrs["task"]),
        grid=GridSpec(
            points=arrays[FIELDS][2:-1],
            periodic=tuple(kind == PERIODIC for kind in boundary_types(boundary, ndim=ndim)),
            channels=tuple(channels),
        ),
        channels=tuple(attrs.get("channels") or ()),
        boundary=boundary,
        domain_lengths=dict(attrs.get("domain_lengths") or {}),
        parameters=conditions_among(described.arrays),
        steady=arrays[FIELDS][1] == 1,
        coordinates={name: constants[name] for name in "zyx" if name in constants},
        units=dict(attrs.get("units") or {}),
    )


def stored_times(store: Store, num_samples: int) -> npt.NDArray[np.float64] | None:
    """What `Fields.times` gives of the first samples of a store."""
    if TIMES not in store:
        return None
    if TIMES in store.constants:
        return np.asarray(store.constants[TIMES], np.float64)
    return store.gather(np.arange(num_samples), [TIMES])[TIMES].astype(np.float64)


def stored_parameters(
    store: Store, names: Sequence[str], samples: Array
) -> dict[str, npt.NDArray[np.float64]]:
    """What `Fields.parameters` gives of samples of a store."""
    wanted = arrays_of(names, store.arrays)
    return _columns(names, store.gather(samples, wanted) if wanted else {})


def _columns(
    names: Sequence[str], arrays: Mapping[str, Array], samples: Array | slice = slice(None)
) -> dict[str, npt.NDArray[np.float64]]:
    """Conditions out of arrays of samples, new."""
    found = {name: condition_of(name, arrays) for name in names}
    return {name: column[samples].astype(np.float64) for name, column in found.items() if column is not None}


def _with_channels(frames: Array, grid: GridSpec) -> Array:
    """Add the channel axis that constant fields of one channel lack."""
    return frames[..., np.newaxis] if frames.ndim == grid.ndim + 1 else frames


def parameter_names(fields: Mapping[str, Fields]) -> tuple[str, ...]:
    """Names of all parameters that any of the tasks has, sorted: the order in which models take them."""
    return tuple(sorted({name for some in fields.values() for name in some.info.parameters}))


def laws_of_fields(info: FieldsInfo, own: Mapping[str, Laws] | None) -> TaskLaws:
    """The laws of a task on the grid of its fields.

    Args:
        own: What the configuration says holds.
    """
    kinds = boundary_types(info.boundary, ndim=info.grid.ndim)
    return TaskLaws(
        laws=laws_of(info.task, own),
        channels=info.channels,
        boundary=tuple(
            PERIODIC if wraps else kind for kind, wraps in zip(kinds, info.grid.periodic, strict=True)
        ),
        lengths=lengths_of(directed_lengths(info.domain_lengths, info.coordinates), ndim=info.grid.ndim),
        conditions=info.parameters,
    )


def too_short(horizon: int, stride: int, *, path: object, longest: int) -> ConfigError:
    """The error about trajectories, of at most `longest` time steps, that no window of training fits into."""
    return ConfigError(
        f"training.horizon = {horizon} with training.stride = {stride}",
        kind="horizon",
        path=path,
        expected=f"trajectories of at least {horizon * stride + 1} time steps",
        found=f"at most {longest}",
        hint="take a shorter horizon or a smaller stride",
    )
