"""Stores of residuals: what an operator's steps lack on held-out trajectories (kind "residuals").

A generative corrector is trained on r = (y - op(z)) / sigma_c, where z is a state of one of the operator's
own rollouts from true states, and y the true state after the step. Trajectories that the operator was trained
on would show residuals that are too small, so they come from the validation split: a share of its
trajectories, spread evenly, is for training (part "fit"), the others are for measuring (part "check"). Stores
are kept as long as the operator, the trajectories and the settings are the same.

Letters: N residuals, B batch, T time steps, J lead times, L tokens, D channels of a token, P parameters, X
the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ups_store
from ups.config import RunConfig
from ups.data.held_out import HeldOutPart, Items, check_enough, check_lead_times, divided
from ups.data.splits import open_fields
from ups.data.stores import Store, open_as
from ups.data.windows import Array, Trajectories, TrajectoryBatch, evenly_spread, parameter_table, times_of
from ups.grid import FIELDS
from ups.log import logger
from ups.trained.simulator import Simulator
from ups.trained.specs import check_known_encoder

GIVEN, PREDICTED, RESIDUAL, PARAMETERS, DT, LEAD = (
    *("given", "predicted", "residual"),
    *("parameters", "dt", "lead"),
)
_STATES_AT_ONCE = 256
OF_STATISTICS = 4096  # residuals that statistics are measured on


def held_out(config: RunConfig, task: str) -> dict[HeldOutPart, Trajectories]:
    """The validation trajectories of a task: those for training on their residuals, and those for measuring.

    Raises:
        ConfigError: Kind "too_few_trajectories"; and as `open_fields` and `Trajectories`.
        ups_store.StoreError: If the data can't be read.
    """
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
class ResidualBuild:
    """A store of residuals that is wanted: what decides its bytes, and where it lies.

    Attributes:
        path: Of the store.
        identity: JSON values.
        trajectories: Whose residuals.
        lead_times: J.
        num_pairs: Residuals, at most.
        dtype: Of the states.
    """

    path: Path
    identity: Mapping[str, Any]
    trajectories: Trajectories
    lead_times: int
    num_pairs: int
    dtype: str

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
        return cls(path, identity, trajectories, lead_times, diffusion.num_pairs, diffusion.residual_dtype)

    @property
    def rollouts(self) -> Items:
        """Number of the trajectory and the first time step of each rollout, shape (R, 2), spread evenly."""
        num_starts = self.trajectories.horizon - self.lead_times + 1
        chosen = evenly_spread(len(self.trajectories) * num_starts, max(1, self.num_pairs // self.lead_times))
        return np.stack(np.divmod(chosen, num_starts), axis=1)

    def opened(self) -> Store | None:
        """The store that is there, if it is the one that is wanted."""
        return open_as(self.path, self.identity)

    def make(self, simulator: Simulator) -> None:
        """Build the store, or continue to; one that is there is replaced."""
        logger.info(f"{self.path}: residuals of {len(self.trajectories)} trajectories are computed")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        writer = ups_store.create(
            self.path,
            self._specs(simulator),
            identity=self.identity,
            attrs={"task": self.trajectories.info.task},
            on_mismatch="restart",
            note=logger.info,
        )
        with writer:
            missing = writer.missing()
            for numbers, arrays in self._residuals(simulator):
                # Those that are committed may be others now, by the last bits: batches have other sizes.
                rows = np.flatnonzero(np.isin(numbers, missing))
                writer.commit_many(numbers[rows], {name: values[rows] for name, values in arrays.items()})
            writer.finish()

    def _specs(self, simulator: Simulator) -> dict[str, ups_store.ArraySpec]:
        num, spec = len(self.rollouts) * self.lead_times, simulator.spec
        known = spec.tasks[self.trajectories.info.task]
        state = (num, int(np.prod(known.tokens)), spec.state_dim)
        specs = {name: ups_store.ArraySpec(state, self.dtype) for name in (GIVEN, PREDICTED, RESIDUAL)}
        specs[DT] = ups_store.ArraySpec((num,), "float32")
        specs[LEAD] = ups_store.ArraySpec((num,), "int64")
        if spec.parameters:
            specs[PARAMETERS] = ups_store.ArraySpec((num, len(spec.parameters)), "float32")
        return specs

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
    """The stores of residuals of all tasks of a run.

    Raises:
        ConfigError: Kinds "unknown_encoder", "lead_times"; and as `held_out`.
        ups_store.StoreError: If the data can't be read.
    """
    check_known_encoder(simulator.spec)
    return {
        task: {
            part: ResidualBuild.of(config, part, some, operator_sha256=operator_sha256)
            for part, some in held_out(config, task).items()
        }
        for task in config.data.tasks
    }
