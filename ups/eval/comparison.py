"""An operator and everything that it is compared with in the table of a task, on the same trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ups.config import RunConfig
from ups.data.fields import open_fields
from ups.data.latent_trajectories import open_latent_fields, open_latent_trajectories
from ups.data.trajectories import Trajectories, open_trajectories
from ups.errors import ConfigError
from ups.eval.baseline_model import Baseline
from ups.eval.forecasters import (
    AutoencoderFloor,
    Forecaster,
    LatentForecaster,
    OperatorForecaster,
    Persistence,
    TrainingMean,
)
from ups.trained.simulator import Simulator


@dataclass(frozen=True)
class Comparison:
    """Who predicts which trajectories.

    Attributes:
        trajectories: Of the split.
        operator: The first row.
        others: The other rows, in order.
        space: Whether states are fields, or latents that nothing can decode.
    """

    trajectories: Trajectories
    operator: Forecaster
    others: Sequence[Forecaster | AutoencoderFloor]
    space: Literal["fields", "latent"]


def make_comparison(
    config: RunConfig,
    simulator: Simulator,
    task: str,
    *,
    split: str,
    horizon: int | None,
    baselines: Sequence[Baseline],
    others: Sequence[Forecaster] = (),
    operator_note: str,
) -> Comparison:
    """Everything that an operator has to be compared with.

    Args:
        config: Configuration of the run.
        simulator: In evaluation mode.
        task: Name of the task.
        split: "train", "val" or "test".
        horizon: Steps to predict; None to the end. A steady task has one.
        baselines: Trained baselines of any of the tasks.
        others: Other operators, on fields that are known; left out where errors are of latents.
        operator_note: What the reader has to know of the operator.

    Raises:
        ConfigError: Kinds "other_task", "other_grid", and those of the trajectories.
        ups_store.StoreError: If the data can't be read.
    """
    if task not in simulator.spec.tasks:
        raise ConfigError(
            "the operator wasn't trained for this task",
            kind="other_task",
            expected=" or ".join(sorted(simulator.spec.tasks)),
            found=task,
        )
    is_steady = simulator.spec.tasks[task].steady
    wanted = min(horizon, 1) if is_steady and horizon is not None else horizon
    if not simulator.spec.is_encoder_known:
        return _compare_latents(config, simulator, task, split, wanted, operator_note)
    models = [*others, *(model for model in baselines if model.spec.task == task)]
    return _compare_fields(config, simulator, task, split, wanted, models, operator_note)


def _compare_fields(
    config: RunConfig,
    simulator: Simulator,
    task: str,
    split: str,
    horizon: int | None,
    models: Sequence[Forecaster],
    note: str,
) -> Comparison:
    source, stride = config.training.field_source, simulator.spec.time_stride
    trajectories = open_trajectories(config.build, task, split, source=source, stride=stride, horizon=horizon)
    _expect_same_grid(simulator, trajectories)
    train = open_fields(config.build, task, "train", source=source)
    others: list[Forecaster | AutoencoderFloor] = [*models]
    others += [] if trajectories.info.steady else [Persistence()]
    others.append(TrainingMean(train))
    if simulator.autoencoder is not None:
        dtype = getattr(torch, config.training.latent_cache_dtype)
        others.append(AutoencoderFloor(simulator.autoencoder, latent_dtype=dtype))
    return Comparison(trajectories, OperatorForecaster(simulator, note=note), others, "fields")


def _compare_latents(
    config: RunConfig,
    simulator: Simulator,
    task: str,
    split: str,
    horizon: int | None,
    note: str,
) -> Comparison:
    """On latents of an unknown encoder: there are no baselines and no floor, as there are no fields."""
    stride = simulator.spec.time_stride
    trajectories = open_latent_trajectories(config, task, split, stride=stride, horizon=horizon)
    train = open_latent_fields(config, task, "train")
    others = [] if trajectories.info.steady else [Persistence()]
    operator = LatentForecaster(simulator, note=note)
    return Comparison(trajectories, operator, [*others, TrainingMean(train)], "latent")


def _expect_same_grid(simulator: Simulator, trajectories: Trajectories) -> None:
    known, found = simulator.spec.tasks[trajectories.info.task].grid, trajectories.info.grid
    if found != known:
        raise ConfigError(
            "fields on another grid than the operator's",
            kind="other_grid",
            path=trajectories.origin,
            expected=known.name,
            found=found.name,
            hint="check data.reduce_space",
        )
