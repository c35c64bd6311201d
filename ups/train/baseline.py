"""Stages `fno`, `unet`, `fno_neuraloperator` and `own_baseline`: baselines on the fields of one task.

They are trained as the operator on fields is: the same windows, losses, augmentation and validation. With
several tasks each has its own baseline and training (`ups.train.train_baselines`). Letters: B batch, K steps,
X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.data.augment import Symmetries
from ups.data.batches import WindowBatch, augment_windows, batch_size_of, window_data
from ups.data.windows import Trajectories, Windows, open_trajectories
from ups.distributed.sharding import ShardedPart
from ups.errors import ConfigError
from ups.eval.baseline_model import (
    BASELINE,
    Baseline,
    BaselineSpec,
    Effort,
    OnPatches,
    check_kinds,
    load_baseline,
    make_spec,
    own_kind,
    save_baseline,
    stage_of,
)
from ups.eval.training_logs import log_path, read_stage_log
from ups.grid import FIELDS
from ups.laws import laws_of
from ups.losses import LossContext, check_losses, loss_weights, rollout_losses
from ups.stages import FNO_NEURALOPERATOR, STAGES
from ups.train.schedules import Schedule
from ups.train.stage import (
    QUIET_START,
    Curriculum,
    Losses,
    Stage,
    StageStart,
    push_forward,
    pushed,
    with_noise,
)
from ups.train.validation import RolloutValidation, mean_over_tasks, open_validation, scored
from ups.trained.checkpoint import read_document


def make_baseline_stage(
    kind: str | None, config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> BaselineStage:
    """Open training and validation trajectories, measure the statistics, and build the model."""
    kind = own_kind(config) if kind is None else check_kinds([kind])[0]
    check_losses(config.training)
    trajectories, spec = open_baseline(kind, config, start=start)
    with start.phase("data_opening"):
        validation = open_validation(config)
    start.check_data(spec.to_json())
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        model = Baseline(spec).to(device)
    return BaselineStage(config, model, trajectories=trajectories, validation=validation, device=device)


def open_baseline(
    kind: str, config: RunConfig, *, start: StageStart = QUIET_START
) -> tuple[Trajectories, BaselineSpec]:
    """The training split of a run's one task, and what its baseline will be."""
    if len(config.data.tasks) != 1:
        raise ConfigError(
            f"a baseline is for one task, and {kind} was given several",
            kind="several_tasks",
            found=", ".join(config.data.tasks),
            hint="`ups train --stage` trains one for each",
        )
    (task,), training = config.data.tasks, config.training
    with start.phase("data_opening"):
        trajectories = open_trajectories(
            config.build, task, "train", source=training.field_source, stride=training.stride
        )
    with start.phase("statistics"):
        spec = make_spec(kind, trajectories, config)
    return trajectories, spec


make_fno_stage = partial(make_baseline_stage, "fno")
make_unet_stage = partial(make_baseline_stage, "unet")
make_fno_neuraloperator_stage = partial(make_baseline_stage, "fno_neuraloperator")
make_own_baseline_stage = partial(make_baseline_stage, None)


class BaselineStage(Stage):
    """See `ups.train.stage.Stage`."""

    model: Baseline
    compiled = ("advance",)
    gradients: Literal["all", "the same"] = "all"

    def __init__(
        self,
        config: RunConfig,
        model: Baseline,
        *,
        trajectories: Trajectories,
        validation: RolloutValidation,
        device: torch.device,
    ) -> None:
        self.facts = STAGES[stage_of(model.spec.kind)]
        if isinstance(model.network, OnPatches):  # nothing is known of which weights a step needs
            self.gradients = "the same"
        self.model, self._config, self._validation, self._device = model, config, validation, device
        settings, own = config.stage(self.name), config.baselines
        self._is_compiled = bool(settings.compile)
        self._data = {model.spec.task: trajectories.fields.identity}
        horizon = 1 if trajectories.info.steady else own.horizon or config.training.horizon
        windows = Windows(
            trajectories.fields,
            horizon=horizon,
            stride=config.training.stride,
            dt=trajectories.dt or 1.0,
        )
        data = window_data(
            {model.spec.task: windows},
            global_batch_size=batch_size_of(settings),
            seed=config.seed,
            parameters=model.spec.parameters,
            drops_last=True,
        )
        self.loader = data.loader(config, device, prepare=self._prepare)
        accum_steps = config.training.accum_steps
        schedule = Schedule.of(settings, num_batches=len(self.loader), accum_steps=accum_steps)
        share = config.operator.curriculum if own.curriculum is None else own.curriculum
        self.curriculum = Curriculum(horizon, share, schedule.num_batches)
        self._symmetries = Symmetries.of(
            laws_of(model.spec.task, config.own_laws),
            periodic=model.spec.grid.periodic,
            conditions=model.spec.parameters,
            has_source=not trajectories.info.steady and len(trajectories.info.grid.arrays) > 1,
        )
        self.path = config.checkpoint.dir / f"{self.name}.safetensors"

    def _prepare(self, batch: WindowBatch, number: int) -> WindowBatch:
        """As long as the curriculum says, with noise, augmented."""
        spec = self.model.spec
        level = 0.0 if spec.given_array != FIELDS else self._config.baselines.noise
        batch = with_noise(
            self.curriculum.cut(batch, number), level=level, std=spec.statistics[FIELDS]["std"]
        )
        if self._config.training.augment:
            batch = augment_windows(
                batch,
                symmetries=self._symmetries,
                tokens=(),
                is_latent=False,
            )
        return pushed(batch) if self._config.training.pushforward else batch

    def losses(self, forward: Callable[..., Tensor], batch: WindowBatch) -> Losses:
        """One-step and rollout errors of normalised fields, and whatever else has a weight."""
        states = batch.states.to(self._device, non_blocking=True)
        model, training = self.model, self._config.training
        given_BXC = model.normalise(states[:, 0], array=model.spec.given_array)
        truth_BKXC = model.normalise(states[:, 1:], array=FIELDS)
        parameters_BP = batch.parameters.to(self._device, non_blocking=True)
        step = partial(forward, parameters_BP=parameters_BP)
        if training.pushforward:
            given_BXC, truth_BKXC = push_forward(step, given_BXC, truth_BKXC, num=batch.pushed)
        given_BXC.requires_grad_(self._is_compiled)  # as in stage operator
        points, mean_C, std_C = (
            model.spec.grid.points,
            model.get_buffer("fields_mean"),
            model.get_buffer("fields_std"),
        )
        return rollout_losses(
            step(given_BXC, steps=truth_BKXC.shape[1]).flatten(2, -2),
            truth_BKXC.flatten(2, -2),
            weights=loss_weights(training),
            context=LossContext(
                batch.task,
                points,
                batch.dt.to(self._device, non_blocking=True),
                parameters_BP,
                lambda states_BKPC: states_BKPC.unflatten(2, points) * std_C + mean_C,
            ),
        )

    def validate(self) -> dict[str, float]:
        """nRMSE of rollouts."""
        return scored(self._validation.nrmse(self.called, ranks=self.ranks))

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write the model; what its training took is added at the end."""
        config = self._config.model_dump(mode="json")
        save_baseline(self.path, self.model, config=config, report=metrics, data=self._data, weights=weights)
        return self.path

    def exports(self) -> Mapping[Path, str]:
        """The model's file."""
        return {self.path: BASELINE}

    def sharded_parts(self) -> list[ShardedPart]:
        """The network, where its layers are ours."""
        if self.facts is FNO_NEURALOPERATOR:
            raise ConfigError(
                f"stage {self.name} can't be sharded: its layers are another package's",
                kind="not_shardable",
                expected="all of its parameters on every rank, as with DDP",
            )
        return [ShardedPart(self.model.network, ("advance",))]

    def data_identity(self) -> Mapping[str, Any]:
        """The specification: grid, and statistics of the training split."""
        return self.model.spec.to_json()

    def finish(self) -> dict[str, Any]:
        """Errors of what was exported beside persistence; the file gets what the training took."""
        model = load_baseline(self.path, device=str(self._device))
        effort = Effort(**self.ranks.first_does(lambda: vars(self._effort())))  # who has written the log
        if self.ranks.is_first:
            model.effort, document = effort, read_document(self.path, kind=BASELINE)
            said = {name: document[name] for name in ("config", "report")}
            save_baseline(self.path, model, data=self._data, **said)
        found = self._validation.report(model, ranks=self.ranks)
        return {
            "checkpoint": str(self.path),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "effort": vars(effort),
            "score": mean_over_tasks(found["nrmse"]),
            **found,
        }

    def _effort(self) -> Effort:
        """What the training's log says."""
        log = read_stage_log(log_path(self._config, self.name), self.name)
        assert log is not None, "a stage is finished after its steps"
        budget = self._config.stage(self.name).budget
        return Effort(
            limit="steps" if budget is None else budget.limit,
            allowed=log.steps if budget is None else budget.allowed,
            steps=log.steps,
            samples=log.samples,
            flops=log.flops,
            seconds=log.processor_s,
            step_ratio=None if budget is None else budget.step_ratio,
        )
