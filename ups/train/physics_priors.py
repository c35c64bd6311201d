"""Physics priors in stages: when they are due, with what weight, and of which decoded states.

Letters: B batch, K steps, X the axes of the grid, C channels, L tokens, D channels of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.data.batches import WindowBatch
from ups.data.splits import open_fields
from ups.data.windows import Windows
from ups.distributed.sharding import is_sharded
from ups.errors import ConfigError
from ups.eval.physics import check_residual_floor, physics_of, residual_floor, shown_floor
from ups.grid import FIELDS, directed_lengths
from ups.laws import PRIORS, check_priors
from ups.log import logger
from ups.nn.layers import without_autocast
from ups.physics.priors import TaskPhysics, prior_losses
from ups.trained.simulator import Simulator
from ups.trained.specs import SimulatorSpec


@dataclass(frozen=True)
class PhysicsBatch(WindowBatch):
    """Windows, and what their physics priors take.

    Attributes:
        prior_weights: By prior; empty where none is due.
        clean: The first state without the noise that was added to it, as stored, shape (B, ...); None where
            none was.
    """

    prior_weights: Mapping[str, float] = field(default_factory=dict)
    clean: Tensor | None = None


class PhysicsPriors:
    """The priors of a run.

    Args:
        config: Configuration of the run; at least one prior has a weight.
        tasks: What is known of each task.
    """

    def __init__(self, config: RunConfig, tasks: Mapping[str, TaskPhysics]) -> None:
        self._settings, self._accum_steps = config.training.physics_priors, config.training.accum_steps
        self._tasks = tasks

    def weights_at(self, number: int) -> dict[str, float]:
        """Weights of the priors of the batch of a number; none where they aren't due."""
        settings, step = self._settings, number // self._accum_steps
        if step % settings.every:
            return {}
        grown = 1.0 if not settings.warmup_steps else min(1.0, step / settings.warmup_steps)
        return {name: grown * weight for name, weight in settings.weights.items() if grown}

    def num_due(self, num_batches: int) -> int:
        """Count the batches, from the first one on, that `weights_at` gives weights."""
        settings, accum_steps = self._settings, self._accum_steps
        whole, rest = divmod(num_batches, settings.every * accum_steps)
        due = whole * accum_steps + min(rest, accum_steps)
        return due - (min(num_batches, accum_steps) if settings.warmup_steps else 0)

    def of_all(self, batch: WindowBatch) -> PhysicsBatch:
        """The batch as one that all priors are taken of."""
        known = {"prior_weights": self._settings.weights, "clean": batch.states[:, 0]}
        return PhysicsBatch(**{**vars(batch), **known})

    def losses(
        self,
        simulator: Simulator,
        batch: WindowBatch,
        states_BKLD: Tensor,
        weights: Mapping[str, float],
        *,
        are_fields: bool,
        clean: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Of the decoded predictions of a batch.

        Args:
            simulator: Decodes them; gradients reach what of it is trained.
            batch: Windows as they are stored.
            states_BKLD: Predicted normalised states.
            weights: By prior.
            are_fields: Whether the windows are of fields, not of latents.
            clean: The first state without noise; by default the batch's.
        """
        physics = self._tasks[batch.task]
        if not any(physics.why_not(name) is None for name in PRIORS if weights.get(name)):
            return {}
        device, num_steps = states_BKLD.device, states_BKLD.shape[1]
        known = simulator.spec.tasks[batch.task]
        parameters_BP = batch.parameters.to(device, non_blocking=True)
        later_BP = parameters_BP.repeat_interleave(num_steps, dim=0)
        given = (batch.states[:, 0] if clean is None else clean).to(device, non_blocking=True)
        truth = batch.states[:, 1 : 1 + num_steps].to(device, non_blocking=True).flatten(0, 1)
        # A mean of bfloat16 says nothing about a drift. Sharded weights are gathered in autocast's dtype.
        has_shards = simulator.autoencoder is not None and is_sharded(simulator.autoencoder)
        with nullcontext() if has_shards else without_autocast(device):
            predicted = simulator.decode(states_BKLD.float().flatten(0, 1), later_BP, task=batch.task).float()
            with torch.no_grad():
                if not are_fields:
                    truth = _decoded(simulator, truth, later_BP, task=batch.task, array=FIELDS)
                    given = _decoded(
                        simulator, given, parameters_BP, task=batch.task, array=known.input_array
                    )
        with without_autocast(device):
            return prior_losses(
                physics,
                weights,
                predicted_BKXC=predicted.unflatten(0, (-1, num_steps)),
                truth_BKXC=truth.unflatten(0, (-1, num_steps)),
                given_BXC=given,
                values={
                    name: parameters_BP[:, column]
                    for column, name in enumerate(simulator.spec.parameters)
                    if name in known.parameters
                },
                dt_B=batch.dt.to(device, non_blocking=True),
            )


def make_priors(
    config: RunConfig, spec: SimulatorSpec, windows: Mapping[str, Windows]
) -> PhysicsPriors | None:
    """The priors that the configuration asks for; None if it asks for none.

    Args:
        spec: Of the simulator that is trained.
        windows: Training windows by task, whose stores know the domains.
    """
    settings = config.training.physics_priors
    if not settings.weights:
        return None
    if not spec.is_encoder_known:
        problem = "training.physics_priors need decoded states, and nothing says what encoded these latents"
        raise ConfigError(problem, kind="unknown_encoder", hint="say training.physics_priors.enabled=false")
    tasks = {
        name: physics_of(
            config,
            spec,
            name,
            lengths=directed_lengths(store.attrs.get("domain_lengths"), store.constants),
            cell=settings.cell,
        )
        for name in spec.tasks
        for store in (windows[name].store,)
    }
    for text in check_priors(settings.weights, tasks):
        logger.info(text)
    return PhysicsPriors(config, tasks)


def check_floors(config: RunConfig, tasks: Collection[str]) -> None:
    """Say by how much true frames miss the equation of a residual prior, and refuse it where that is much."""
    for task in tasks if "residual" in config.training.physics_priors.weights else ():
        fields = open_fields(config.build, task, "val", source=config.training.field_source)
        floor = residual_floor(config, fields)
        check_residual_floor(floor, task=task)
        if floor is not None:
            logger.info(f"{task}: {shown_floor(floor)}")


def _decoded(
    simulator: Simulator, latent_BLD: Tensor, parameters_BP: Tensor, *, task: str, array: str
) -> Tensor:
    """Fields of latents as stored, of any array, by the decoder that predictions have, shape (B, X..., C)."""
    assert simulator.autoencoder is not None
    query_PN = simulator.queries.get_buffer(task)
    values_BPC = simulator.autoencoder.decode(
        latent_BLD.float(), query_PN, parameters_BP, task=task, array=array
    )
    return values_BPC.unflatten(1, simulator.spec.tasks[task].grid.points)
