"""Stages that learn a flow: `FlowStage`, and on it stage `corrector`, the corrector of a frozen operator.

The corrector learns the residuals of an operator that is loaded from its file, in evaluation mode and not
compiled, so that rollouts become ensembles. Stage `prior` is in `ups.train.prior`, the corrector's
student in `ups.train.student`. Letters: B batch, L tokens, D channels of a token; e, r, t, x, v as in
`ups.diffusion.paths`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ups import stages
from ups.config import RunConfig
from ups.config.operator_size import corrector_size
from ups.data.batches import TrainingData, batch_size_of
from ups.data.fields import evenly_spread, times_of
from ups.data.held_out import HeldOutPart, Items
from ups.data.identities import hash_of
from ups.data.residuals import (
    FlowBatch,
    PairBuild,
    ResidualBatch,
    ResidualBuild,
    ResidualSource,
    residual_data,
    shifted,
    sigma_by_lead,
    wanted_residuals,
)
from ups.data.seams import measure_seams
from ups.data.stores import Store
from ups.data.windows import Trajectories
from ups.diffusion.paths import FlowTimes, at_time, flow_matching_error, flow_time
from ups.distributed.sharding import ShardedPart
from ups.eval.ensembles import Climate, EnsembleErrors, ensemble_numbers, roll_out_members
from ups.eval.forecasters import CorrectedForecaster, OperatorForecaster
from ups.eval.gate_verdicts import GateVerdict
from ups.eval.generative_gates import corrector_gates
from ups.log import logger
from ups.train.checks import HOW_TO_HAVE_OPERATOR
from ups.train.distributed import joined_ranks
from ups.train.gated_file import GatedFile
from ups.train.stage import QUIET_START, Losses, Stage, StageStart
from ups.train.validation import scored
from ups.trained.checkpoint import (
    hash_tensors,
    hinting_where_missing,
)
from ups.trained.corrected import CorrectedSimulator, load_corrected, save_corrected
from ups.trained.prior import SteadyPrior
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import CORRECTOR, CORRECTOR_FILE, CorrectorSpec, Sampling, check_simulated_task

VAL_PAIRS = 512  # residuals, or pairs of a teacher, of a task that validation looks at

Stores = Mapping[str, Mapping[HeldOutPart, Store]]
Build = TypeVar("Build", ResidualBuild, PairBuild)


class FlowStage(Stage):
    """Flow matching: |v(x_t, t) - (r - e)|^2, where x_t is between noise e and what is learnt, r.

    A subclass says what flows (`flow_of`) and which items are validated on. Validation takes the same loss;
    the noise and the flow times of an item depend on its number alone.

    Args:
        model: On its device.
        states: What knows the states that flow: of the model, or itself.
    """

    compiled = ("conditions", "velocity")
    score_name = "flow"
    most_checked, rows_checked, times_checked = VAL_PAIRS, 64, 4  # items of a task, at a time, flow times

    def __init__(
        self,
        config: RunConfig,
        model: CorrectedSimulator | SteadyPrior,
        *,
        states: Simulator | SteadyPrior,
        device: torch.device,
    ) -> None:
        self.model, self._config, self._states, self._device = model, config, states, device
        if len(model.spec.tasks) == 1:
            self.gradients = "all" if model.uses_all_weights else "the same"
        self._times = FlowTimes(**config.training.tau_distribution.model_dump())

    @abstractmethod
    def flow_of(self, batch: Any, parameters: Tensor) -> tuple[Any, Tensor]:
        """States that the velocity is given, and r, shape (B, L, D)."""

    @abstractmethod
    def num_checked(self) -> Mapping[str, int]:
        """How many items there are to validate on, by task."""

    @abstractmethod
    def checked(self, task: str, numbers: Items) -> Any:
        """Items of these numbers."""

    @abstractmethod
    def with_flow(self, batch: Any, noise: Tensor, tau: Tensor) -> Any:
        """A batch with noise, shape (B, L, D), and flow times, shape (B,)."""

    def losses(self, forward: Callable[..., Tensor], batch: Any) -> Losses:
        """The mean of `flow_errors`."""
        return {self.score_name: self.flow_errors(forward, batch).mean()}

    def flow_errors(self, forward: Callable[..., Tensor], batch: Any) -> Tensor:
        """Of each row, shape (B,)."""
        noise, tau, parameters = self._moved(batch.noise, batch.tau, batch.parameters)
        given, r = self.flow_of(batch, parameters)
        t = flow_time(tau)
        v = forward(at_time(noise, r, t), t, given, parameters, task=batch.task, **self._more(batch))
        own = self._states.own_dim(batch.task)
        return flow_matching_error(v[..., :own], noise[..., :own], r[..., :own])

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean over items that are spread evenly, and their flow times, by task."""
        means = {}
        for task, num in self.num_checked().items():
            numbers, rows = self.ranks.share(evenly_spread(num, self.most_checked)), self.rows_checked
            firsts = range(0, len(numbers), rows)
            errors = torch.cat([self.checked_errors(task, numbers[i : i + rows]) for i in firsts]).double()
            means[task] = float(self.ranks.joined(torch.from_numpy(numbers), errors).mean())
        return scored(means, self.score_name)

    def checked_errors(self, task: str, numbers: Items) -> Tensor:
        """Of items of these numbers, shape (B,), over all flow times."""
        batch, shape, num = self.checked(task, numbers), self._state_shape(task), self.times_checked
        errors = []
        for time in range(num):
            generators = [torch.Generator().manual_seed(num * int(number) + time) for number in numbers]
            noise = torch.stack([torch.randn(shape, generator=each) for each in generators])
            tau = torch.full((len(numbers),), (time + 0.5) / num)
            errors.append(self.flow_errors(self.called, self.with_flow(batch, noise, tau)))
        return torch.stack(errors).mean(dim=0)

    def _state_shape(self, task: str) -> torch.Size:
        return torch.Size((math.prod(self._states.spec.tasks[task].tokens), self._states.spec.state_dim))

    def _moved(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]

    def _more(self, batch: Any) -> dict[str, Any]:
        """What the velocity takes besides."""
        return {}


def sampling_of(config: RunConfig) -> Sampling:
    """How a flow is drawn from, as configured."""
    values = config.diffusion
    return Sampling(values.sampler, values.num_sampler_steps, values.tolerance, values.max_evaluations)


def make_corrector_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> CorrectorStage:
    """Load the operator, open or build the stores of its residuals, measure sigma_c, and build the model."""
    path = config.corrected_operator_path
    with start.phase("operator_loaded"):
        with hinting_where_missing(HOW_TO_HAVE_OPERATOR):
            simulator = load_simulator(path, device=str(device))
        for task in config.data.tasks:
            check_simulated_task(simulator.spec, task)
        digest = hash_tensors(path)
    with start.phase("data_opening"):
        wanted = wanted_residuals(config, simulator, operator_sha256=digest)
        start.check_data(identity_of(wanted))
        stores = open_residuals(config, wanted, simulator)
    with start.phase("statistics"):
        seams = {task: measure_seams(parts["fit"], simulator, task) for task, parts in stores.items()}
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        spec = CorrectorSpec(
            operator_sha256=digest,
            size=corrector_size(config).to_json(),
            sigma={task: measured.sigma for task, measured in seams.items()},
            lead_times=config.diffusion.lead_times,
            sampling=sampling_of(config),
            takes_seams=True,
        )
        model = CorrectedSimulator(simulator, spec).to(device)
        for task, measured in seams.items():
            model.set_seams(task, measured.weight)
    return CorrectorStage(config, model, wanted=wanted, stores=stores, device=device)


def identity_of(wanted: Mapping[str, Mapping[HeldOutPart, ResidualBuild | PairBuild]]) -> dict[str, str]:
    """Hashes of what decides residuals or pairs, operator and teacher included, by task and part."""
    return {
        f"{task}/{part}": hash_of(build.identity)
        for task, parts in wanted.items()
        for part, build in parts.items()
    }


def open_residuals(
    config: RunConfig, wanted: Mapping[str, Mapping[HeldOutPart, ResidualBuild]], simulator: Simulator
) -> Stores:
    """Open stores of residuals, as `open_stores`."""
    return open_stores(config, wanted, lambda build, task, part: build.make(simulator), what="residuals")


def open_stores(
    config: RunConfig,
    wanted: Mapping[str, Mapping[HeldOutPart, Build]],
    make: Callable[[Build, str, HeldOutPart], None],
    *,
    what: str,
) -> Stores:
    """Open stores of residuals or pairs; the first rank makes what isn't there, or is of something else."""

    def build() -> None:
        for task, parts in wanted.items():
            for part, each in parts.items():
                store = each.opened()
                if store is None:
                    make(each, task, part)
                else:
                    store.close()
                    logger.info(f"{each.path}: {what} reused")

    def opened(build: ResidualBuild | PairBuild) -> Store:
        store = build.opened()
        assert store is not None
        return store

    with joined_ranks(config.training.device, timeout_s=config.training.rank_timeout_s) as (ranks, _):
        ranks.first_does(build)
    return {task: {part: opened(each) for part, each in parts.items()} for task, parts in wanted.items()}


class Measured(NamedTuple):
    """What came of a forecaster on held-out trajectories, by task: errors, and their scores with times."""

    errors: Mapping[str, EnsembleErrors]
    numbers: Mapping[str, dict[str, float]]


class CorrectorStage(FlowStage):
    """Flow matching on the residuals of a frozen operator over sigma_c; see `ups.train.stage.Stage`.

    Args:
        model: On its device.
        wanted: What the stores were made of, by task and part.
        stores: Residuals, by task and part.
    """

    facts = stages.CORRECTOR
    model: CorrectedSimulator
    file_name, kind = CORRECTOR_FILE, CORRECTOR

    def __init__(
        self,
        config: RunConfig,
        model: CorrectedSimulator,
        *,
        wanted: Mapping[str, Mapping[HeldOutPart, ResidualBuild]],
        stores: Stores,
        device: torch.device,
    ) -> None:
        super().__init__(config, model, states=model.simulator, device=device)
        self._wanted, self._stores = wanted, stores
        self._data = self._training_data()
        self.loader = self._data.loader(config, device, prepare=self._prepare)
        checked = {task: parts["check"] for task, parts in stores.items()}
        self._checked = ResidualSource(checked, num_parameters=len(model.spec.parameters))
        self.file = GatedFile(config.checkpoint.dir / self.file_name, kind=self.kind)

    def flow_of(self, batch: ResidualBatch, parameters: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The state and its prediction, and the residual over sigma_c."""
        given_BLD, predicted_BLD, residual_BLD = self._moved(batch.states)[0].unbind(1)
        return self.model.flow_of((given_BLD, predicted_BLD), residual_BLD, task=batch.task)

    def num_checked(self) -> Mapping[str, int]:
        """Residuals of the trajectories that are kept for it."""
        return {task: len(store) for task, store in self._checked.tasks.items()}

    def checked(self, task: str, numbers: Items) -> ResidualBatch:
        """Residuals of these numbers."""
        return self._checked.read(task, numbers)

    def with_flow(self, batch: ResidualBatch, noise: Tensor, tau: Tensor) -> FlowBatch:
        """See `FlowStage.with_flow`."""
        return FlowBatch(**vars(batch), noise=noise, tau=tau)

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write the candidate: corrector, operator, autoencoder."""
        said: dict[str, Any] = {"config": self._config.model_dump(mode="json"), "report": metrics}
        data = {task: f"store {parts['fit'].config_hash}" for task, parts in self._stores.items()}
        save_corrected(self.file.candidate, self.model, weights=weights, data=data, **said)
        return self.file.candidate

    def check_exported(self, score: float) -> None:
        """Look at the candidate, or at what was one and has its name already."""
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
        model = load_corrected(self.file.latest, device=str(self._device), kind=self.kind)
        rows = {name: self.measure(forecaster) for name, forecaster in self.rows_of(model).items()}
        verdicts = [verdict for task in self._wanted for verdict in self.judge(rows, task)]
        by_task = {task: {name: row.numbers[task] for name, row in rows.items()} for task in self._wanted}
        report = {**self._facts_of(model), **_columns(rows), "ensembles": by_task}
        return self.file.export_if_gates_passed(report, verdicts, stage=self, config=self._config)

    def rows_of(self, model: CorrectedSimulator) -> dict[str, CorrectedForecaster | OperatorForecaster]:
        """What is measured: first what was trained, the operator last."""
        return {"corrected": CorrectedForecaster(model), "operator": OperatorForecaster(model.simulator)}

    def judge(self, rows: Mapping[str, Measured], task: str) -> list[GateVerdict]:
        """What the gates say of a task."""
        corrected, operator = (rows[name].errors[task] for name in ("corrected", "operator"))
        return list(corrector_gates(corrected, operator, what=f"the corrector on {task}"))

    def measure(self, forecaster: CorrectedForecaster | OperatorForecaster) -> Measured:
        """Ensembles of the trajectories that are kept for measuring, or single forecasts of an operator.

        All that are measured get the same noise; `ms_per_step` is of one member. A collective.
        """
        config, errors, numbers = self._config, {}, {}
        members = None if isinstance(forecaster, OperatorForecaster) else config.diffusion.val_members
        for task, (trajectories, climate) in self._held_out.items():
            rolled = roll_out_members(
                forecaster, trajectories, climate, members=members, seed=config.seed, ranks=self.ranks
            )
            num = len(self.ranks.share(np.arange(len(trajectories)))) * trajectories.horizon * (members or 1)
            ms = float(self.ranks.sum(torch.tensor(1e3 * rolled.seconds / num))) / self.ranks.world_size
            errors[task] = rolled.errors
            numbers[task] = {**ensemble_numbers(rolled.errors), "ms_per_step": ms}
        return Measured(errors, numbers)

    @cached_property
    def _held_out(self) -> dict[str, tuple[Trajectories, Climate]]:
        """Trajectories that are measured, spread evenly over those that aren't trained on."""
        held_out = {}
        for task, parts in self._wanted.items():
            fields = parts["check"].trajectories.fields
            trajectories = Trajectories(
                fields,
                stored_t=times_of(fields),
                stride=self._config.training.stride,
                max_trajectories=self._config.operator.val_trajectories,
            )
            held_out[task] = (trajectories, Climate.of(trajectories))
        return held_out

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

    def _training_data(self) -> TrainingData[Any]:
        return residual_data(
            {task: parts["fit"] for task, parts in self._stores.items()},
            num_parameters=len(self.model.spec.parameters),
            global_batch_size=batch_size_of(self._config.stage(self.name)),
            seed=self._config.seed,
        )

    def _prepare(self, batch: ResidualBatch, number: int) -> FlowBatch:
        """Shifted, with noise and flow times."""
        if self._config.training.augment:
            task = self.model.spec.tasks[batch.task]
            batch = shifted(batch, tokens=task.tokens, periodic=task.is_periodic)
        draws = batch.draws
        # In this order: both take from one generator.
        tau = draws.of_rows(self._times.draw(draws.num_rows, draws.generator))
        return self.with_flow(batch, draws.normal(batch.states.shape[2:]), tau)

    def _more(self, batch: ResidualBatch) -> dict[str, Any]:
        return {"dt_B": self._moved(batch.dt)[0]}


def _columns(rows: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    """What a report shows for people, by task, of the first row and of the operator alone."""
    first, operator = next(iter(rows.values())), rows["operator"]
    named = {"nrmse": "mean_nrmse", "spread": "spread", "spread_skill": "spread_skill", "crps": "crps"}
    columns = {
        column: {task: numbers[name] for task, numbers in first.numbers.items()}
        for column, name in named.items()
    }
    for column in ("nrmse", "crps"):
        values = {task: numbers[named[column]] for task, numbers in operator.numbers.items()}
        columns[f"operator_{column}"] = values
    return columns
