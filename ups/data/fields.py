"""`Fields`: samples of one task and split, wherever they lie; nothing here needs torch.

They are of a store: mapped, packed, in partitions, or in memory. Letters: N samples, B batch, T stored time
steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.conditions import NUM_STEPS, arrays_of, condition_of, conditions_among
from ups.data.origins import identity_of_store
from ups.data.stores import Store
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT, LATENT_INPUT, PERIODIC, GridSpec, boundary_types, directed_lengths
from ups.laws import Laws, TaskLaws, laws_of, lengths_of

CONSTANT_FIELDS = ("coefficient", "force")  # that belong to the input of a task
TIMES = "t"  # time of every stored step, of all samples or of each
STEP_TOLERANCE = 1e-3  # relative; of time steps that count as equal: some files have their times in float32

Array = npt.NDArray[Any]
Items = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FieldsInfo:
    """What the fields of a task are.

    Attributes:
        task: Name of the task.
        grid: Points, periodic axes, and channels of each array; of latents their tokens as points.
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


def info_of(described: Any, *, task: str | None = None) -> FieldsInfo:
    """Describe what a store holds, or by its plan will hold; `task` where it needn't say its own."""
    attrs, constants = described.attrs, described.constants
    arrays = {name: tuple(spec.shape) for name, spec in described.arrays.items()}
    parameters, name = (
        conditions_among(described.arrays),
        str(attrs.get("task", "")) if task is None else task,
    )
    if LATENT in arrays:
        num_tokens, dim = arrays[LATENT][-2:]
        latents = [FIELDS, *([LATENT_INPUT] if LATENT_INPUT in arrays else [])]
        grid = GridSpec((num_tokens,), (False,), tuple((array, dim) for array in latents))
        numbered = tuple(f"latent {number}" for number in range(dim))
        return FieldsInfo(name, grid, numbered, {}, {}, parameters, steady=arrays[LATENT][1] == 1)
    ndim = len(arrays[FIELDS]) - 3
    boundary = dict(attrs.get("boundary") or {})
    channels = [(FIELDS, arrays[FIELDS][-1])]
    channels += [
        (constant, arrays[constant][-1] if len(arrays[constant]) == ndim + 2 else 1)
        for constant in CONSTANT_FIELDS
        if constant in arrays
    ]
    periodic = tuple(kind == PERIODIC for kind in boundary_types(boundary, ndim=ndim))
    return FieldsInfo(
        task=name,
        grid=GridSpec(points=arrays[FIELDS][2:-1], periodic=periodic, channels=tuple(channels)),
        channels=tuple(attrs.get("channels") or ()),
        boundary=boundary,
        domain_lengths=dict(attrs.get("domain_lengths") or {}),
        parameters=parameters,
        steady=arrays[FIELDS][1] == 1,
        coordinates={name: constants[name] for name in "zyx" if name in constants},
        units=dict(attrs.get("units") or {}),
    )


class Fields:
    """Samples of a store: their frames, conditions and times.

    Args:
        store: With the array "fields", or "latent" in its place.
        limit: At most so many samples, the first ones.
        samples: Numbers in the store of those that are taken; by default all.
        info: What they are; by default what the store says.
        origin: Where they come from, for people; by default the store's path.
        identity: What they are, wherever they lie; by default the store's hash.

    Attributes:
        store: As given.
        info: What they are.
        origin: As given.
        identity: As given.
        samples: Numbers in the store, int64, shape (N,).
        num_steps: Valid time steps of each sample, int64, shape (N,).
    """

    def __init__(
        self,
        store: Store,
        *,
        limit: int | None = None,
        samples: Items | None = None,
        info: FieldsInfo | None = None,
        origin: str | None = None,
        identity: str | None = None,
    ) -> None:
        self.store, self.info = store, info or info_of(store)
        self.origin = str(store.path) if origin is None else origin
        self.identity = identity_of_store(store) if identity is None else identity
        self.samples = np.arange(min(len(store), limit or len(store))) if samples is None else samples
        self.array = LATENT if LATENT in store else FIELDS  # as the store calls what is read as "fields"
        num_times = store.arrays[self.array].shape[1]
        self.num_steps: Items = np.full(len(self.samples), num_times, np.int64)
        if NUM_STEPS in store:
            self.num_steps[:] = store.gather(self.samples, [NUM_STEPS])[NUM_STEPS].clip(0, num_times)

    def chosen(self, numbers: Items, *, called: str) -> Fields:
        """Take some of the samples; `called` says in the identity which ones."""
        return Fields(
            self.store,
            samples=self.samples[numbers],
            info=self.info,
            origin=self.origin,
            identity=f"{self.identity}, {called}",
        )

    def read(self, array: str, samples: Array, steps: Array) -> npt.NDArray[np.float32]:
        """Read frames of samples (B,) at steps (B,), new, (B, *X, C); constant fields have no steps."""
        name, window = array, dict[str, Any]()
        if array == FIELDS:
            name, window = self.array, {"start": steps, "length": 1}
        values = self.store.gather(self.samples[samples], [name], **window)[name]
        frames = values[:, 0] if array == FIELDS else values
        if frames.ndim == self.info.grid.ndim + 1:  # a constant field of one channel may lack its axis
            frames = frames[..., np.newaxis]
        return frames.astype(np.float32, copy=False)

    def parameters(self, samples: Array) -> dict[str, npt.NDArray[np.float64]]:
        """Read parameters and boundary values of samples by name, each (B,), new."""
        names = self.info.parameters
        wanted = arrays_of(names, self.store.arrays)
        arrays = self.store.gather(self.samples[samples], wanted) if wanted else {}
        columns = {name: condition_of(name, arrays) for name in names}
        return {name: column.astype(np.float64) for name, column in columns.items() if column is not None}

    def times(self) -> npt.NDArray[np.float64] | None:
        """Time of every stored step, (T,), or each sample's own, (N, T); None where the source has none."""
        if TIMES in self.store.constants:
            return np.asarray(self.store.constants[TIMES], np.float64)
        if TIMES not in self.store:
            return None
        return self.store.gather(self.samples, [TIMES])[TIMES].astype(np.float64)


def parameter_names(fields: Mapping[str, Fields]) -> tuple[str, ...]:
    """Names of all parameters that any of the tasks has, sorted: the order in which models take them."""
    return tuple(sorted({name for some in fields.values() for name in some.info.parameters}))


def laws_of_fields(info: FieldsInfo, own: Mapping[str, Laws] | None) -> TaskLaws:
    """The laws of a task on the grid of its fields; `own` is what the configuration says holds."""
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


def times_of(fields: Fields) -> npt.NDArray[np.float64] | None:
    """Time of every stored time step that all samples have, shape (T,); None where the source has none.

    Where samples have times of their own, it is the time since the first step.
    """
    times = fields.times()
    if times is None or times.ndim == 1:
        return times
    times = times[:, : fields.num_steps.min()] - times[:, :1]  # what follows are no frames of some
    if not np.allclose(times, times[0], rtol=STEP_TOLERANCE, atol=0):
        steps = np.diff(times, axis=1)
        raise ConfigError(
            f"the trajectories of {fields.info.task} don't go on in the same time steps",
            kind="uneven_times",
            path=fields.origin,
            expected="one step length for all of a split, as they are rolled out and compared step by step",
            found=f"steps of {steps.min():.4g} to {steps.max():.4g}",
            hint="build a store of the samples of each step length: choose their files with data.files",
        )
    return np.asarray(times[0])


def given_array(info: FieldsInfo) -> str:
    """Name the array that a prediction starts from."""
    if not info.steady:
        return FIELDS
    constant = [name for name in info.grid.arrays if name != FIELDS]
    if len(constant) != 1:
        raise ConfigError(
            f"{info.task} is steady, so one constant field has to decide its solution",
            kind="no_input",
            expected="1 constant field",
            found=", ".join(constant) or "none",
        )
    return constant[0]


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


def evenly_spread(num_items: int, num: int) -> Items:
    """Numbers of some items that stand for all, going up: the middles of `num` >= 1 equal parts of them."""
    num = min(num, num_items)
    return ((np.arange(num) + 0.5) * num_items / num).astype(np.int64)
