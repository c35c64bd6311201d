"""Fields of one task and split: out of a field store, or read straight from HDF5 into memory, whole.

Letters: N samples, T time steps, X the axes of the grid, C channels, B batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

import ups_store
from ups.conditions import NUM_STEPS, arrays_of, condition_of, conditions_among
from ups.data.stores import Store, differing_selection, place_of, store_path
from ups.errors import ConfigError
from ups.grid import FIELDS, PERIODIC, GridSpec, boundary_types
from ups_store.build import Build, BuildConfig, DataConfig, Readers, open_build
from ups_store.errors import StoreNotFoundError
from ups_store.printable import printable

# Constant fields that belong to the input of a task.
CONSTANT_FIELDS = ("coefficient", "force")

TIMES = "t"  # time of every stored step, of all samples or of each

STEP_TOLERANCE = 1e-3  # relative; of time steps that count as equal: some files have their times in float32

Array = npt.NDArray[Any]

_log = logging.getLogger(__name__)

Split = Literal["dev", "val", "test", "train"]
SPLITS: tuple[Split, ...] = get_args(Split)
_MEMORY_SHARE = 0.5  # of what is free, for one split


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
        identity: What they are, wherever they lie: a store by its hash, files by their names.
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
        self.info = _info_of(store)
        self.origin, self.identity = str(store.path), f"store {store.config_hash}"
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


class MemoryFields:
    """Fields in memory, read from HDF5 once.

    Args:
        info: What they are.
        arrays: "fields" (N, T, *X, C), constant fields (N, *X[, C]) and parameters (N,).
        origin: Where they come from.
        times: As `Fields.times` gives them.
    """

    def __init__(
        self, info: FieldsInfo, arrays: Mapping[str, Array], *, origin: str, times: Array | None = None
    ) -> None:
        self.info, self.origin, self.identity = info, origin, f"files {origin}"
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


class EverySecond:
    """Every second sample of some fields, in their order (`Fields`).

    Args:
        fields: All of them.
        first: 0 or 1, the number of the first sample.
    """

    def __init__(self, fields: Fields, *, first: int) -> None:
        self._fields, self._first = fields, first
        self.info, self.origin = fields.info, fields.origin
        self.identity = f"{fields.identity}, every second sample"
        self.num_steps = fields.num_steps[first::2]

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """See `Fields.read`."""
        return self._fields.read(array, self._number(samples), steps)

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """See `Fields.parameters`."""
        return self._fields.parameters(self._number(samples))

    def times(self) -> npt.NDArray[np.float64] | None:
        """See `Fields.times`."""
        times = self._fields.times()
        return times if times is None or times.ndim == 1 else times[self._first :: 2]

    def _number(self, samples: Array) -> Array:
        return 2 * samples + self._first


def stored_split(split: str) -> str:
    """The split of the stores that a split of trainings is part of: "dev" is cut from "val"."""
    return "val" if split == "dev" else split


def part_of_split(fields: Fields, split: str) -> Fields:
    """What a split has of the fields of its `stored_split`.

    Trainings choose weights by the even samples of validation, "val"; "dev" has the odd ones, so what is
    reported on them wasn't chosen by them. Samples lie file by file, so both have their share of every file
    with several.

    Raises:
        ConfigError: Kind "empty_split", if one sample is all that there is to divide.
    """
    if split not in ("val", "dev"):
        return fields
    part = EverySecond(fields, first=int(split == "dev"))
    if len(fields.num_steps) and not len(part.num_steps):
        raise ConfigError(
            f"the development split of {fields.info.task} is empty",
            kind="empty_split",
            path=fields.origin,
            expected="at least 2 samples of validation, of which every second one is of development",
            found="1",
            hint="change data.split_fractions, or bring more samples",
        )
    return part


def open_fields(
    config: BuildConfig,
    task: str,
    split: str,
    *,
    source: Literal["auto", "store", "hdf5"] = "auto",
) -> Fields:
    """Open the fields of a task and split.

    Args:
        config: Which samples of which files, and where field stores lie.
        task: Name of the task.
        split: "train", "val", "dev" or "test"; "val" and "dev" as in `part_of_split`.
        source: "store", "hdf5", or "auto": the store if there is one of this configuration.

    Raises:
        ConfigError: If there is no such store, the split has no samples, or it doesn't fit into memory.
        ups_store.StoreError: If the store or the HDF5 files can't be read.
    """
    return part_of_split(_open_stored(config, task, stored_split(split), source), split)


def _open_stored(
    config: BuildConfig, task: str, split: str, source: Literal["auto", "store", "hdf5"]
) -> StoreFields | MemoryFields:
    """All fields of a split of the stores."""
    path = store_path(config.cache.dir, task, split)
    store, problem = _open_suitable(path, config.data) if source != "hdf5" else (None, "")
    if store is not None:
        if store.codec != "none":  # or every frame would take decoding its trajectory
            report = store.preload()
            _log.info("%s: packed by %s, decoded: %s", store.path, store.codec, report.why)
        return StoreFields(store, limit=config.data.limit)
    if source == "store":
        command = "`ups-store build --config ... latent.encoder=none`"
        hint = f"build it with {command}, or say training.field_source=hdf5"
        raise ConfigError(f"no field store to train on ({problem})", kind="no_store", path=path, hint=hint)
    build, arrays = read_split(config, task, split)
    origin = ", ".join(dict.fromkeys(part.path.name for part in build.plan.parts))
    times = arrays.get(TIMES, build.plan.constants.get(TIMES))
    return MemoryFields(_info_of(build.plan), arrays, origin=origin, times=times)


def describe_fields(config: BuildConfig, task: str) -> FieldsInfo:
    """What the training fields of a task are, by their store or the heads of the files; no sample is read.

    Args:
        config: Which samples of which files, and where field stores lie.
        task: Name of the task.

    Raises:
        ConfigError: As `open_split`.
        ups_store.StoreError: If the store or the HDF5 files can't be read.
    """
    store, _ = _open_suitable(store_path(config.cache.dir, task, "train"), config.data)
    if store is not None:
        with store:
            return _info_of(store)
    with Readers(config.reading, note=lambda text: _log.info(printable(text))) as readers:
        return _info_of(open_split(config, task, "train", readers=readers).plan)


def _open_suitable(path: Path, data: DataConfig) -> tuple[Store | None, str]:
    """The store of a path, or None and why it can't serve."""
    place = place_of(path)
    if place is None:
        return None, "there is none"
    try:
        store = ups_store.open(place)
    except StoreNotFoundError as error:  # a partition is missing
        return None, str(error)
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        problem = _problem_with(store, data)
        if problem:
            return None, problem
        stack.pop_all()
    return store, ""


def _problem_with(store: Store, data: DataConfig) -> str:
    """Why a store can't serve; empty if it can."""
    if FIELDS not in store:
        return "it holds no fields"
    differing = differing_selection(store, data)
    return ", ".join(f"{key} is {found}" for key, (found, _) in differing.items())


def _info_of(described: Any) -> FieldsInfo:
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


def read_split(config: BuildConfig, task: str, split: str) -> tuple[Build, dict[str, Array]]:
    """Read all samples of a split.

    Args:
        config: Which samples of which files; `data.on_nan` decides about NaN and Inf.
        task: Name of the task.
        split: "train", "val" or "test".

    Returns:
        What would build a store of it, and its arrays by name, new, the samples along the first axis; fields
        in float32.
    Raises:
        ConfigError: As `open_split`; kind "too_large".
        ups_store.SourceError: If the files can't be read; kind "not_finite", with the file and the number of
            the sample in it.
    """
    cache = config.cache.model_copy(update={"dtype": "float32"})
    reading = config.reading.model_copy(update={"on_error": "fail"})  # nothing goes on without a sample here
    with Readers(reading, note=lambda text: _log.info(printable(text))) as readers:
        build = open_split(config.model_copy(update={"cache": cache}), task, split, readers=readers)
        _check_room(build)
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in build.plan.arrays.items()}
        for batch in build.read():
            for name, values in batch.arrays.items():
                arrays[name][batch.samples] = values
    return build, arrays


def _check_room(build: Build) -> None:
    needed, free = build.num_samples * build.plan.sample_nbytes, ups_store.available_memory_bytes()
    if needed > _MEMORY_SHARE * free:
        raise ConfigError(
            f"{build.title} doesn't fit into memory",
            kind="too_large",
            expected=f"at most {_MEMORY_SHARE * free / 2**20:.0f} MiB, {_MEMORY_SHARE:.0%} of what is free",
            found=f"{needed / 2**20:.0f} MiB",
            hint="build a field store with `python -m ups_store.build`, use data.limit, or raise the limit of"
            " the container",
        )


def open_split(config: BuildConfig, task: str, split: str, **options: Any) -> Build:
    """Open the build of a split's store, which has samples.

    Args:
        config: Which samples of which files.
        task: Name of the task.
        split: "train", "val" or "test".
        **options: Those of `ups_store.build.open_build`.

    Raises:
        ConfigError: Kind "empty_split".
        ups_store.SourceError: If sources are missing or unreadable.
    """
    build = open_build(config, task, split, **options)
    if build.num_samples == 0:
        raise ConfigError(
            f"{build.title} would be empty",
            kind="empty_split",
            path=config.data.root,
            expected="at least 1 sample",
            hint="change data.split_fractions, or bring more samples",
        )
    return build
