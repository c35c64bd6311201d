"""Stores that a run computes and keeps: what an operator's steps lack, what a teacher makes of noise.

A generative corrector is trained on residuals r = (y - op(z)) / sigma_c, where z is a state of one of the
operator's own rollouts from true states, and y the true state after the step. Trajectories that the operator
was trained on would show residuals that are too small, so they come from the validation split: a share of its
trajectories, spread evenly, is for training (part "fit"), the others are for measuring (part "check").

A student of rectified flow is trained on pairs of noises and the residuals that a teacher makes of them, and
every student is validated on some. A pair is drawn under the conditions of a residual of the same task and
part, which lie beside it, so a store of pairs is a store of residuals, too: drawn ones, with their noise.

Either is kept as long as the models, the conditions and the settings are the same. Letters: N residuals, R
rollouts, B batch, T time steps, J lead times, L tokens, D channels of a token, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ups_store
from ups.config import RunConfig
from ups.data.augment import shift_periodic
from ups.data.batches import TaskBatch, TrainingData, random_order, seed_of
from ups.data.fields import Array, Items, evenly_spread, times_of
from ups.data.held_out import HeldOutPart, check_enough, check_lead_times, divided
from ups.data.identities import hash_of
from ups.data.splits import open_fields
from ups.data.stores import Store, open_as
from ups.data.windows import Trajectories, TrajectoryBatch, parameter_table
from ups.grid import FIELDS
from ups.log import logger
from ups.trained.corrected import CorrectedSimulator
from ups.trained.simulator import Simulator
from ups.trained.specs import Sampling, check_known_encoder
from ups_store.torch import Allocate, new_tensor

GIVEN, PREDICTED, RESIDUAL = "given", "predicted", "residual"
PARAMETERS, DT, LEAD, NOISE = "parameters", "dt", "lead", "noise"
_STATES = (GIVEN, PREDICTED, RESIDUAL)
_STATES_AT_ONCE = 256
_GENERATOR = 7  # purpose of random numbers
OF_STATISTICS = 4096  # residuals that statistics are measured on


@dataclass(frozen=True)
class CachedStore:
    """A store that a run computes: what decides its bytes, and where it lies.

    Attributes:
        path: Of the store.
        identity: JSON values.
        task: Name of the task.
        dtype: Of the states.
    """

    path: Path
    identity: Mapping[str, Any]
    task: str
    dtype: str

    def opened(self) -> Store | None:
        """The store that is there, if it is the one that is wanted."""
        return open_as(self.path, self.identity)

    def _writer(
        self, num: int, state: tuple[int, ...], num_parameters: int, more: Mapping[str, ups_store.ArraySpec]
    ) -> ups_store.StoreWriter:
        """Begin the store of `num` states of this shape, or continue it; one that is there is replaced."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        specs = {name: ups_store.ArraySpec((num, *state), self.dtype) for name in _STATES}
        specs |= {**more, DT: ups_store.ArraySpec((num,), "float32")}
        if num_parameters:
            specs[PARAMETERS] = ups_store.ArraySpec((num, num_parameters), "float32")
        options: dict[str, Any] = {"identity": self.identity, "attrs": {"task": self.task}}
        return ups_store.create(self.path, specs, on_mismatch="restart", note=logger.info, **options)


def held_out(config: RunConfig, task: str) -> dict[HeldOutPart, Trajectories]:
    """Divide the validation trajectories of a task: for training on their residuals, and for measuring."""
    fields = open_fields(config.build, task, "val", source=config.training.field_source)
    num, share = len(fields.num_steps), config.diffusion.residual_share
    check_enough(num, share, task=task, origin=fields.origin)
    stored_t, stride = times_of(fields), config.training.stride
    return {
        part: Trajectories(
            fields.chosen(chosen, called=f"{len(chosen)} of its samples"),
            stored_t=stored_t,
            stride=stride,
        )
        for part, chosen in divided(num, share).items()
    }


@dataclass(frozen=True)
class ResidualBuild(CachedStore):
    """A store of residuals that is wanted: what decides its bytes, and where it lies.

    Attributes:
        trajectories: Whose residuals.
        lead_times: J.
        num_pairs: Residuals, at most.
    """

    trajectories: Trajectories
    lead_times: int
    num_pairs: int

    @classmethod
    def of(
        cls, config: RunConfig, part: HeldOutPart, trajectories: Trajectories, *, operator_sha256: str
    ) -> ResidualBuild:
        """The store of a part, as configured.

        Raises:
            ConfigError: Kind "lead_times", if trajectories are shorter than the rollouts.
        """
        diffusion, task = config.diffusion, trajectories.info.task
        lead_times = 1 if trajectories.info.steady else diffusion.lead_times
        horizon, origin = trajectories.horizon, trajectories.origin
        check_lead_times(lead_times, horizon=horizon, task=task, origin=origin)
        folder = diffusion.residual_dir or config.checkpoint.dir / "residuals"
        identity = {
            "kind": "residuals",
            "version": 1,
            "task": task,
            "part": part,
            "share": diffusion.residual_share,
            "trajectories": trajectories.fields.identity,
            "operator_sha256": operator_sha256,
            "lead_times": lead_times,
            "stride": config.training.stride,
            "num_pairs": diffusion.num_pairs,
            "dtype": diffusion.residual_dtype,
        }
        path = folder / f"{task}_{part}_residuals.zarr.zip"
        own = (path, identity, task, diffusion.residual_dtype)
        return cls(*own, trajectories, lead_times, diffusion.num_pairs)

    @property
    def rollouts(self) -> Items:
        """Number of the trajectory and the first time step of each rollout, shape (R, 2), spread evenly."""
        num_starts = self.trajectories.horizon - self.lead_times + 1
        chosen = evenly_spread(len(self.trajectories) * num_starts, max(1, self.num_pairs // self.lead_times))
        return np.stack(np.divmod(chosen, num_starts), axis=1)

    def make(self, simulator: Simulator) -> None:
        """Build the store, or continue to; one that is there is replaced."""
        logger.info(f"{self.path}: residuals of {len(self.trajectories)} trajectories are computed")
        spec, num = simulator.spec, len(self.rollouts) * self.lead_times
        state = (int(np.prod(spec.tasks[self.task].tokens)), spec.state_dim)
        lead = {LEAD: ups_store.ArraySpec((num,), "int64")}
        with self._writer(num, state, len(spec.parameters), lead) as writer:
            missing = writer.missing()
            for numbers, arrays in self._residuals(simulator):
                # Those that are committed may be others now, by the last bits: batches have other sizes.
                rows = np.flatnonzero(np.isin(numbers, missing))
                writer.commit_many(numbers[rows], {name: values[rows] for name, values in arrays.items()})
            writer.finish()

    def _residuals(self, simulator: Simulator) -> Iterator[tuple[Items, dict[str, Array]]]:
        """Numbers of residuals, and their arrays; some trajectories after the other."""
        rollouts = self.rollouts
        size = max(1, _STATES_AT_ONCE // (self.trajectories.horizon + 1))
        for first in range(0, len(self.trajectories), size):
            numbers = np.arange(first, min(first + size, len(self.trajectories)))
            own = np.flatnonzero(np.isin(rollouts[:, 0], numbers))
            if len(own):
                batch = self.trajectories.read(numbers)
                rows, starts = rollouts[own, 0] - first, rollouts[own, 1]
                arrays = _residuals_of(simulator, self.trajectories, batch, rows, starts, self.lead_times)
                places = (own[:, None] * self.lead_times + np.arange(self.lead_times)).reshape(-1)
                cast = {name: arrays[name].astype(self.dtype) for name in (GIVEN, PREDICTED, RESIDUAL)}
                yield places, {**arrays, **cast}


@torch.no_grad()
def _residuals_of(
    simulator: Simulator,
    trajectories: Trajectories,
    batch: TrajectoryBatch,
    rows: Items,
    starts: Items,
    lead_times: int,
) -> dict[str, Array]:
    """Residuals of rollouts that begin at true states of a batch's trajectories.

    Returns:
        By name, R J residuals along the first axis, those of a rollout one after the other.
    """
    task, device, spec = trajectories.info.task, simulator.device, simulator.spec
    known = spec.tasks[task]
    table_BP = parameter_table(batch.parameters, spec.parameters, len(batch)).to(device)
    true_BTLD = _true_states(simulator, batch, table_BP, task=task)
    rows_R, starts_R = torch.from_numpy(rows).to(device), torch.from_numpy(starts).to(device)
    parameters_RP = table_BP[rows_R]
    dt = known.dt if trajectories.dt is None else trajectories.dt
    dt_R = torch.full((len(rows),), dt, device=device)
    state_RLD, found = true_BTLD[rows_R, starts_R], list[tuple[Tensor, Tensor, Tensor]]()
    for lead in range(1, lead_times + 1):
        predicted_RLD = _in_parts(
            lambda part, state=state_RLD: simulator.step(  # type: ignore[misc]
                state[part], parameters_RP[part], task=task, dt_B=dt_R[part]
            ),
            len(rows),
        )
        found.append((state_RLD, predicted_RLD, true_BTLD[rows_R, starts_R + lead] - predicted_RLD))
        state_RLD = predicted_RLD
    names = (GIVEN, PREDICTED, RESIDUAL)
    arrays: dict[str, Array] = {
        name: torch.stack([each[number] for each in found], dim=1).flatten(0, 1).cpu().numpy()
        for number, name in enumerate(names)
    }
    arrays[DT] = dt_R.repeat_interleave(lead_times).cpu().numpy()
    arrays[LEAD] = np.tile(np.arange(1, lead_times + 1), len(rows))
    if spec.parameters:
        arrays[PARAMETERS] = parameters_RP.repeat_interleave(lead_times, dim=0).cpu().numpy()
    return arrays


def _true_states(simulator: Simulator, batch: TrajectoryBatch, parameters_BP: Tensor, *, task: str) -> Tensor:
    """Normalised states of the given frames and of those after them, shape (B, T + 1, L, D)."""
    device, input_array = simulator.device, simulator.spec.tasks[task].input_array
    first_BLD = simulator.encode(batch.given.to(device), parameters_BP, task=task, array=input_array)
    num = batch.truth.shape[1]
    frames, parameters = batch.truth.flatten(0, 1), parameters_BP.repeat_interleave(num, dim=0)
    later = _in_parts(
        lambda part: simulator.encode(frames[part].to(device), parameters[part], task=task, array=FIELDS),
        len(frames),
    )
    return torch.cat([first_BLD[:, None], later.unflatten(0, (len(batch), num))], dim=1)


def _in_parts(work: Callable[[slice], Tensor], num: int) -> Tensor:
    """What some work gives for all rows, done for a part of them at a time."""
    firsts = range(0, num, _STATES_AT_ONCE)
    return torch.cat([work(slice(first, first + _STATES_AT_ONCE)) for first in firsts])


def sigma_by_lead(store: Store, simulator: Simulator, task: str) -> list[float]:
    """Root mean square of the residuals at each lead time, from the first on."""
    arrays = store.gather(evenly_spread(len(store), OF_STATISTICS), [RESIDUAL, LEAD])
    own = np.square(arrays[RESIDUAL][..., : simulator.own_dim(task)].astype(np.float64)).mean((1, 2))
    return [float(np.sqrt(own[arrays[LEAD] == lead].mean())) for lead in np.unique(arrays[LEAD])]


def wanted_residuals(
    config: RunConfig, simulator: Simulator, *, operator_sha256: str
) -> dict[str, dict[HeldOutPart, ResidualBuild]]:
    """The stores of residuals of all tasks of a run."""
    check_known_encoder(simulator.spec)
    return {
        task: {
            part: ResidualBuild.of(config, part, some, operator_sha256=operator_sha256)
            for part, some in held_out(config, task).items()
        }
        for task in config.data.tasks
    }


# --- pairs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairBuild(CachedStore):
    """A store of pairs that is wanted: what decides its bytes, and where it lies.

    Attributes:
        num_pairs: N; pair number i has the conditions of residual number i, counted round.
        sampling: How the teacher draws.
        seed: Of the noise, which is another one for every pair, in float32.
    """

    num_pairs: int
    sampling: Sampling
    seed: int

    @classmethod
    def of(
        cls,
        residuals: ResidualBuild,
        part: HeldOutPart,
        *,
        folder: Path,
        teacher_sha256: str,
        num_pairs: int,
        sampling: Sampling,
        seed: int,
    ) -> PairBuild:
        """The store of a task and part.

        Args:
            residuals: The store whose conditions it takes.
            part: Which part that is.
            folder: Where it goes.
            teacher_sha256: Hash of the teacher's file.
            num_pairs: N.
            sampling: How the teacher draws.
            seed: Of the noise; parts don't share any.
        """
        task = residuals.task
        identity = {
            "kind": "teacher_pairs",
            "version": 1,
            "residuals": hash_of(residuals.identity),
            "teacher_sha256": teacher_sha256,
            "num_pairs": num_pairs,
            "sampling": dataclasses.asdict(sampling),
            "seed": seed,
            "dtype": residuals.dtype,
        }
        path = folder / f"{task}_{part}_pairs.zarr.zip"
        own_seed = seed_of(seed, _GENERATOR, int(part == "check"))
        return cls(path, identity, task, residuals.dtype, num_pairs, sampling, own_seed)

    def make(self, teacher: CorrectedSimulator, residuals: Store) -> None:
        """Build the store, or continue to; one that is there is replaced.

        Args:
            teacher: In evaluation mode.
            residuals: The store whose conditions it takes.
        """
        how = f"{self.sampling.sampler} {self.sampling.num_steps}"
        if self.sampling.sampler == "adaptive":
            how = f"adaptive to {self.sampling.tolerance:g}"
        logger.info(f"{self.path}: the teacher draws {self.num_pairs} residuals, {how}")
        state = tuple(residuals.arrays[GIVEN].shape[1:])
        noise = {NOISE: ups_store.ArraySpec((self.num_pairs, *state), "float32")}
        with self._writer(self.num_pairs, state, len(teacher.spec.parameters), noise) as writer:
            missing = writer.missing()
            for first in range(0, len(missing), _STATES_AT_ONCE):
                numbers = missing[first : first + _STATES_AT_ONCE]
                writer.commit_many(numbers, self._drawn(teacher, residuals, numbers))
            writer.finish()

    @torch.no_grad()
    def _drawn(self, teacher: CorrectedSimulator, residuals: Store, numbers: Items) -> dict[str, Array]:
        """Arrays of these pairs, drawn on the teacher's device."""
        source = ResidualSource({self.task: residuals}, num_parameters=len(teacher.spec.parameters))
        batch = source.read(self.task, numbers % len(residuals))
        noise_BLD = noise_of(self.seed, numbers, batch.states.shape[2:])
        given_BLD, predicted_BLD, _ = batch.states.to(teacher.device).unbind(1)
        drawn_BLD = teacher.residual(
            noise_BLD.to(teacher.device),
            (given_BLD, predicted_BLD),
            batch.parameters.to(teacher.device),
            task=self.task,
            dt_B=batch.dt.to(teacher.device),
            sampling=self.sampling,
        )
        states = {GIVEN: given_BLD, PREDICTED: predicted_BLD, RESIDUAL: drawn_BLD}
        arrays = {name: state.cpu().numpy().astype(self.dtype) for name, state in states.items()}
        arrays |= {NOISE: noise_BLD.numpy(), DT: batch.dt.numpy()}
        return {**arrays, PARAMETERS: batch.parameters.numpy()} if batch.parameters.shape[1] else arrays


def noise_of(seed: int, numbers: Items, shape: torch.Size) -> Tensor:
    """Standard normal numbers for things of these numbers, which don't depend on what is beside them."""
    generators = (torch.Generator().manual_seed(seed_of(seed, int(number))) for number in numbers)
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


# --- batches of either --------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidualBatch(TaskBatch):
    """Residuals of one task; also see `TaskBatch`.

    Attributes:
        states: z, op(z) and y - op(z) beside each other, normalised, float32, shape (B, 3, L, D).
        parameters: In the order of the model, NaN where the task has none of that name, shape (B, P).
        dt: Physical time of the step, shape (B,).
    """

    states: Tensor
    parameters: Tensor
    dt: Tensor

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True)
class FlowBatch(ResidualBatch):
    """Residuals, with what was drawn for each.

    Attributes:
        noise: Standard normal, float32, shape (B, L, D).
        tau: Of the configured distribution, float32, shape (B,), in 0..1.
    """

    noise: Tensor
    tau: Tensor


class ResidualSource:
    """Stores of residuals, each a source of `ups_store.torch.Loader`.

    Args:
        tasks: By task.
        num_parameters: P.
    """

    num_tensors = len(_STATES)

    def __init__(self, tasks: Mapping[str, Store], *, num_parameters: int) -> None:
        self.tasks, self._num_parameters, self._names = tasks, num_parameters, tuple(tasks)

    @property
    def stores(self) -> Sequence[Store]:
        """All of them."""
        return list(self.tasks.values())

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Allocate) -> ResidualBatch:
        """Residuals of these numbers of a task; see `ups_store.torch.StoreDataset.fetch`."""
        return self.read(self._names[number], items, allocate)

    def read(self, task: str, items: Items, allocate: Allocate = new_tensor) -> ResidualBatch:
        """Residuals of these numbers of a task."""
        store = self.tasks[task]
        shape = (len(items), len(_STATES), *store.arrays[GIVEN].shape[1:])
        states, parts = allocate(shape, torch.float32), store.gather(items, _STATES)
        for place, name in enumerate(_STATES):
            states[:, place] = torch.from_numpy(parts[name])
        rest = store.gather(items, [DT, *([PARAMETERS] if self._num_parameters else [])])
        parameters = rest.get(PARAMETERS, np.zeros((len(items), 0), np.float32))
        return ResidualBatch(task, states, torch.from_numpy(parameters), torch.from_numpy(rest[DT]))


def residual_data(
    stores: Mapping[str, Store], *, num_parameters: int, global_batch_size: int, seed: int
) -> TrainingData[ResidualSource]:
    """Batches of random residuals, one task each; a pass takes each of them once."""
    source = ResidualSource(stores, num_parameters=num_parameters)
    sizes = [len(store) for store in stores.values()]
    return TrainingData(
        source, random_order(sizes, global_batch_size=global_batch_size, seed=seed), seed=seed
    )


def shifted(batch: ResidualBatch, *, tokens: tuple[int, ...], periodic: tuple[bool, ...]) -> ResidualBatch:
    """Shift each residual, with its states, by whole tokens along periodic axes."""
    states = shift_periodic(batch.states.unflatten(2, tokens), periodic, first_axis=2, draws=batch.draws)
    return dataclasses.replace(batch, states=states.flatten(2, 1 + len(tokens)))


def with_flow(batch: ResidualBatch, tau: Tensor) -> FlowBatch:
    """Add noise to a batch, and flow times, of this rank's rows."""
    return FlowBatch(**vars(batch), noise=batch.draws.normal(batch.states.shape[2:]), tau=tau)


@dataclass(frozen=True)
class PairBatch(ResidualBatch):
    """Pairs of one task: residuals that a teacher drew, in `states`, and what it drew them from.

    Attributes:
        noise: Float32, shape (B, L, D).
    """

    noise: Tensor


class PairSource(ResidualSource):
    """Stores of pairs; arguments are those of `ResidualSource`."""

    def read(self, task: str, items: Items, allocate: Allocate = new_tensor) -> PairBatch:
        """Pairs of these numbers of a task."""
        batch = super().read(task, items, allocate)
        noise = torch.from_numpy(self.tasks[task].gather(items, [NOISE])[NOISE])
        return PairBatch(**vars(batch), noise=noise)


def shifted_pairs(batch: PairBatch, *, tokens: tuple[int, ...], periodic: tuple[bool, ...]) -> PairBatch:
    """As `shifted`, noise together with what was drawn from it."""
    together = dataclasses.replace(batch, states=torch.cat([batch.states, batch.noise[:, None]], dim=1))
    moved = shifted(together, tokens=tokens, periodic=periodic).states
    return dataclasses.replace(batch, states=moved[:, :-1], noise=moved[:, -1])
