"""Stage `diff_residual`: flow matching on the residuals of a frozen operator, so that its rollouts are
ensembles.

The operator is loaded from its file, and is in evaluation mode and not compiled. Letters: B batch, L tokens,
D channels of a token; e, r, t, x, v as in `ups.diffusion.paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.config.corrector_size import corrector_size
from ups.data.batches import TrainingData, batch_size_of
from ups.data.cached import (
    FlowBatch,
    PairBuild,
    ResidualBatch,
    ResidualBuild,
    ResidualSource,
    residual_data,
    shifted,
    sigma_by_lead,
    wanted_residuals,
    with_flow,
)
from ups.data.held_out import HeldOutPart, Items
from ups.data.identities import hash_of
from ups.data.seams import measure_seams
from ups.data.stores import Store
from ups.diffusion.paths import at_time, flow_matching_error
from ups.diffusion.schedules import FlowTimes, flow_time
from ups.distributed.sharding import ShardedPart
from ups.eval.forecasters import CorrectedForecaster, OperatorForecaster
from ups.eval.generative_gates import corrector_gates
from ups.log import logger
from ups.train.distributed import joined_ranks
from ups.train.ensemble_validation import EnsembleValidation, columns_of, numbers_of
from ups.train.gated_export import GatedFile
from ups.train.given_models import HOW_TO_HAVE_OPERATOR
from ups.train.meter import startup_phase
from ups.train.stage import QUIET_START, Losses, Stage, StageStart
from ups.train.validation import mean_error, scored
from ups.trained.checkpoint import hash_tensors, hinting_where_missing
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrected_files import load_corrected, save_corrected
from ups.trained.corrector_spec import CorrectorSpec, Sampling
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import CORRECTOR, CORRECTOR_FILE, check_simulated_task

STAGE = "diff_residual"
VAL_PAIRS = 512  # residuals, or pairs of a teacher, of a task that validation looks at
VAL_ROWS = 64  # of them at a time
_VAL_TIMES = 4  # flow times of each

Stores = Mapping[str, Mapping[HeldOutPart, Store]]
Build = TypeVar("Build", ResidualBuild, PairBuild)


def make_corrector_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> CorrectorStage:
    """Load the operator, open or build the stores of its residuals, measure sigma_c, and build the model.

    Raises:
        CheckpointError: If there is no operator, or it is damaged.
        ConfigError: Kinds "unknown_encoder", "too_few_trajectories", "lead_times", "other_task", and those of
            a wrong size.
        ups_store.StoreError: If the data can't be read, or the stores not be written.
    """
    path = config.corrected_operator_path
    with startup_phase("operator_loaded"):
        simulator, digest = _load_operator(path, config, device), hash_tensors(path)
    with startup_phase("data_opening"):
        wanted = wanted_residuals(config, simulator, operator_sha256=digest)
        start.check_data(identity_of(wanted))
        stores = open_stores(
            config,
            wanted,
            lambda build, task, part: build.make(simulator),
            what="residuals",
            start=start,
        )
    with startup_phase("statistics"):
        seams = {task: measure_seams(parts["fit"], simulator, task) for task, parts in stores.items()}
    with startup_phase("model_built"):
        torch.manual_seed(config.seed)
        spec = CorrectorSpec(
            operator_sha256=digest,
            size=corrector_size(config).to_json(),
            sigma={task: found.sigma for task, found in seams.items()},
            lead_times=config.diffusion.lead_times,
            sampling=sampling_of(config),
            takes_seams=True,
        )
        model = CorrectedSimulator(simulator, spec).to(device)
        for task, found in seams.items():
            model.set_seams(task, found.weight)
    return CorrectorStage(config, model, wanted=wanted, stores=stores, device=device)


def sampling_of(config: RunConfig) -> Sampling:
    """How residuals are drawn, as configured."""
    diffusion = config.diffusion
    return Sampling(
        diffusion.sampler, diffusion.num_sampler_steps, diffusion.tolerance, diffusion.max_evaluations
    )


def identity_of(wanted: Mapping[str, Mapping[HeldOutPart, ResidualBuild | PairBuild]]) -> dict[str, str]:
    """Hashes of what decides residuals or pairs, operator and teacher included, by task and part."""
    return {
        f"{task}/{part}": hash_of(build.identity)
        for task, parts in wanted.items()
        for part, build in parts.items()
    }


def open_stores(
    config: RunConfig,
    wanted: Mapping[str, Mapping[HeldOutPart, Build]],
    make: Callable[[Build, str, HeldOutPart], None],
    *,
    what: str,
    start: StageStart,
) -> Stores:
    """Open stores of residuals or pairs; the first rank makes what isn't there, or is of something else."""
    training = config.training

    def build() -> None:
        for task, parts in wanted.items():
            for part, each in parts.items():
                store = each.opened()
                if store is None:
                    make(each, task, part)
                else:
                    store.close()
                    logger.info(f"{each.path}: {what} reused")

    with joined_ranks(training.device, timeout_s=training.rank_timeout_s) as (ranks, _):
        ranks.first_does(build)
    return {task: {part: _opened(each) for part, each in parts.items()} for task, parts in wanted.items()}


def _opened(build: ResidualBuild | PairBuild) -> Store:
    store = build.opened()
    assert store is not None
    return store


class CorrectorStage(Stage):
    """See `ups.train.stage.Stage`.

    Args:
        model: On its device.
        wanted: What the stores were made of, by task and part.
        stores: Residuals, by task and part.
    """

    name = STAGE
    model: CorrectedSimulator
    compiled = ("conditions", "velocity")
    score_name = "flow"

    def __init__(
        self,
        config: RunConfig,
        model: CorrectedSimulator,
        *,
        wanted: Mapping[str, Mapping[HeldOutPart, ResidualBuild]],
        stores: Stores,
        device: torch.device,
    ) -> None:
        self.model, self._config, self._device = model, config, device
        self._wanted, self._stores = wanted, stores
        if len(model.spec.tasks) == 1:
            self.gradients = "all" if model.uses_all_weights else "the same"
        self._times = FlowTimes(**config.training.tau_distribution.model_dump())
        self._data = self._training_data()
        self.loader = self._data.loader(config, device, prepare=self._prepare)
        self._checked = self._residual_source("check")
        self.file = GatedFile(config.checkpoint.dir / CORRECTOR_FILE, kind=CORRECTOR)

    def losses(self, forward: Callable[..., Tensor], batch: FlowBatch) -> Losses:
        """|v(x_t, t) - (r - e)|^2 of the residuals over sigma_c."""
        return {"flow": self._flow_errors(forward, batch).mean()}

    def validate(self) -> dict[str, float]:
        """The loss on residuals of the trajectories that are kept for it, at flow times that never change."""
        return scored({task: self._checked_error(task) for task in self._stores}, "flow")

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write the candidate for `corrector.safetensors`: corrector, operator, autoencoder."""
        said: dict[str, Any] = {"config": self._config.model_dump(mode="json"), "report": metrics}
        data = {task: f"store {parts['fit'].config_hash}" for task, parts in self._stores.items()}
        save_corrected(self.file.candidate, self.model, weights=weights, data=data, **said)
        return self.file.candidate

    def check_exported(self, score: float) -> None:
        """Of the candidate, or of what was one."""
        self.file.check(score)

    def published(self) -> Mapping[Path, str]:
        """What has passed its gates, or was exported all the same."""
        return {self.file.path: self.file.kind}

    def sharded_parts(self) -> list[ShardedPart]:
        """The corrector; the frozen operator stays whole on every rank."""
        return [ShardedPart(self.model.corrector, ("conditions", "velocity"))]

    def data_identity(self) -> Mapping[str, Any]:
        """Hashes of what decides the residuals, operator included, by task and part."""
        return identity_of(self._wanted)

    def finish(self) -> dict[str, Any]:
        """Judge what was exported by its ensembles, beside the operator, and give it its name.

        Raises:
            GateMissedError: If it missed a gate; nothing is exported then.
        """
        model = load_corrected(self.file.latest, device=str(self._device))
        ensembles = self.ensembles()
        corrected = ensembles.members_of(CorrectedForecaster(model))
        operator = ensembles.forecasts_of(OperatorForecaster(model.simulator))
        verdicts = [
            verdict
            for task in self._wanted
            for verdict in corrector_gates(
                corrected.errors[task], operator.errors[task], what=f"the corrector on {task}"
            )
        ]
        rows = {"corrected": corrected, "operator": operator}
        report = {**self._facts_of(model), **columns_of(rows), "ensembles": numbers_of(rows)}
        return self.file.publish(report, verdicts, stage=self.name, config=self._config, ranks=self.ranks)

    def ensembles(self) -> EnsembleValidation:
        """The trajectories that are kept for measuring; a collective."""
        return EnsembleValidation(
            {task: parts["check"].trajectories for task, parts in self._wanted.items()},
            stride=self._config.training.stride,
            num=self._config.operator.val_trajectories,
            members=self._config.diffusion.val_members,
            seed=self._config.seed,
            ranks=self.ranks,
        )

    def _facts_of(self, model: CorrectedSimulator) -> dict[str, Any]:
        """What the report says besides errors."""
        return {
            "operator": str(self._config.corrected_operator_path),
            "parameters": sum(weight.numel() for weight in model.corrector.parameters()),
            "sigma": dict(model.corrector_spec.sigma),
            "sigma_by_lead_time": {
                task: sigma_by_lead(parts["fit"], model.simulator, task)
                for task, parts in self._stores.items()
            },
            "residuals": {
                task: {part: len(store) for part, store in parts.items()}
                for task, parts in self._stores.items()
            },
            "members": self._config.diffusion.val_members,
        }

    def _training_data(self) -> TrainingData[ResidualSource]:
        return residual_data(
            {task: parts["fit"] for task, parts in self._stores.items()},
            num_parameters=len(self.model.spec.parameters),
            global_batch_size=batch_size_of(self._config.stage(self.name)),
            seed=self._config.seed,
        )

    def _residual_source(self, part: HeldOutPart) -> ResidualSource:
        stores = {task: parts[part] for task, parts in self._stores.items()}
        return ResidualSource(stores, num_parameters=len(self.model.spec.parameters))

    def _prepare(self, batch: ResidualBatch, number: int) -> FlowBatch:
        """Shifted, with noise and flow times."""
        if self._config.training.augment:
            task = self.model.spec.tasks[batch.task]
            batch = shifted(batch, tokens=task.tokens, periodic=task.is_periodic)
        draws = batch.draws
        return with_flow(batch, draws.of_rows(self._times.draw(draws.num_rows, draws.generator)))

    def _flow_errors(self, forward: Callable[..., Tensor], batch: FlowBatch) -> Tensor:
        """Of each residual, shape (B,)."""
        states, noise, tau, parameters, dt = (
            tensor.to(self._device, non_blocking=True)
            for tensor in (batch.states, batch.noise, batch.tau, batch.parameters, batch.dt)
        )
        given_BLD, predicted_BLD, residual_BLD = states.unbind(1)
        given, r = self.model.flow_of((given_BLD, predicted_BLD), residual_BLD, task=batch.task)
        t = flow_time(tau)
        v = forward(at_time(noise, r, t), t, given, parameters, task=batch.task, dt_B=dt)
        own = self.model.simulator.own_dim(batch.task)
        return flow_matching_error(v[..., :own], noise[..., :own], r[..., :own])

    @torch.no_grad()
    def _checked_error(self, task: str) -> float:
        """Mean over residuals and flow times; noise and times depend on the residual's number alone."""
        num, errors_of = len(self._checked.tasks[task]), partial(self._errors_at, task)
        return mean_error(errors_of, num=num, most=VAL_PAIRS, rows=VAL_ROWS, ranks=self.ranks)

    def _errors_at(self, task: str, numbers: Items) -> Tensor:
        """Of residuals of these numbers, shape (B,), over all flow times."""
        batch = self._checked.read(task, numbers)
        times = [
            self._flow_errors(self.called, _with_fixed_flow(batch, numbers, time))
            for time in range(_VAL_TIMES)
        ]
        return torch.stack(times).mean(dim=0)


def _with_fixed_flow(batch: ResidualBatch, numbers: Items, time: int) -> FlowBatch:
    """Noise by the residual's number, and one of `_VAL_TIMES` flow times, spread over 0..1."""
    shape = batch.states.shape[2:]
    noise = [
        torch.randn(shape, generator=torch.Generator().manual_seed(_VAL_TIMES * int(number) + time))
        for number in numbers
    ]
    tau = torch.full((len(numbers),), (time + 0.5) / _VAL_TIMES)
    return FlowBatch(**vars(batch), noise=torch.stack(noise), tau=tau)


def _load_operator(path: Path, config: RunConfig, device: torch.device) -> Simulator:
    with hinting_where_missing(HOW_TO_HAVE_OPERATOR):
        simulator = load_simulator(path, device=str(device))
    for task in config.data.tasks:
        check_simulated_task(simulator.spec, task)
    return simulator
