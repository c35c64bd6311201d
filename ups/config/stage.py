"""Configuration of one training stage: how long, which optimiser, which schedule."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from ups.config.section import Count, CountOrZero, Fraction, NotNegative, Positive, Section

# Names of PyTorch's classes, as older configurations have them.
_SCHEDULER_NAMES = {
    "cosineannealinglr": "cosine",
    "steplr": "step",
    "reducelronplateau": "plateau",
    "constantlr": "constant",
    "none": "constant",
}


class OptimizerConfig(Section):
    """Optimiser of a stage."""

    name: Literal["adamw", "adam", "sgd", "muon_hybrid"] = Field("adamw", description="kind")
    lr: Positive | None = Field(None, description="peak learning rate; by default training.lr")
    weight_decay: NotNegative = Field(0.0, description="decay of matrices; vectors have none")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), description="Adam's moments")
    eps: Positive = Field(1e-8, description="Adam's epsilon")
    momentum: Fraction = Field(0.9, description="of SGD")
    muon_momentum: Fraction = Field(0.95, description="of Muon's matrices")
    muon_ns_steps: Count = Field(5, description="Newton-Schulz iterations of Muon")
    muon_backend: str = Field("auto", description="implementation of Muon")

    @field_validator("name", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


class SchedulerConfig(Section):
    """Learning rate over optimiser steps, as a share of the peak."""

    name: Literal["constant", "cosine", "step", "plateau"] = Field("cosine", description="kind")
    warmup_steps: CountOrZero = Field(0, description="optimiser steps of linear warm-up")
    t_max: Count | None = Field(None, description="cosine: epochs until eta_min; by default the stage's")
    eta_min: NotNegative = Field(0.0, description="cosine: learning rate at the end")
    step_size: Count = Field(10, description="step: epochs from one reduction to the next")
    gamma: Positive = Field(0.5, description="step: factor of a reduction")
    factor: Positive = Field(0.5, description="plateau: factor of a reduction")
    patience: CountOrZero = Field(3, description="plateau: epochs without improvement that are tolerated")
    min_lr: NotNegative = Field(0.0, description="plateau: least learning rate")
    mode: Literal["min"] = Field("min", description="plateau: errors are minimised")

    @field_validator("name", mode="before")
    @classmethod
    def _own_name(cls, value: object) -> object:
        return _SCHEDULER_NAMES.get(value.lower(), value.lower()) if isinstance(value, str) else value


class StageConfig(Section):
    """One entry of `stages`."""

    epochs: CountOrZero = Field(10, description="passes over the training data; 0 leaves the stage out")
    steps_per_epoch: Count | None = Field(None, description="optimiser steps an epoch; by default all data")
    batch_size: Count | None = Field(None, description="by default training.batch_size")
    grad_clip: Positive | None = Field(None, description="by default training.grad_clip")
    ema_decay: Fraction | None = Field(None, description="by default training.ema_decay")
    patience: Count | None = Field(None, description="by default training.patience")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @field_validator("optimizer", "scheduler", mode="before")
    @classmethod
    def _absent_is_default(cls, value: Any) -> Any:
        return {} if value is None else value
