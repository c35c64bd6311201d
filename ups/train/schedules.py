"""How long a stage trains, and what changes meanwhile: weights of inverse losses, points that are asked at.

These are functions of the optimiser step alone, so a run that is continued goes on as if it had not stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ups.config import StageConfig, TrainingConfig
from ups.config.training import QuerySamplingConfig

INVERSE_LOSSES = frozenset(("decoder_inverse", "encoder_inverse"))


@dataclass(frozen=True)
class Schedule:
    """How long a stage is trained.

    Attributes:
        steps_per_epoch: Optimiser steps from one validation to the next; the last epoch may have fewer.
        total_steps: Optimiser steps in all.
        accum_steps: Batches of an optimiser step.
    """

    steps_per_epoch: int
    total_steps: int
    accum_steps: int = 1

    @classmethod
    def of(cls, settings: StageConfig, *, num_batches: int, accum_steps: int) -> Schedule:
        """What a stage's settings say, whose data give so many batches a pass."""
        whole_pass = max(1, num_batches // accum_steps)
        if settings.steps is not None:
            share = math.ceil(settings.steps / max(1, settings.epochs))
            steps_per_epoch = min(settings.steps_per_epoch or share, settings.steps)
            return cls(steps_per_epoch, settings.steps, accum_steps)
        steps_per_epoch = settings.steps_per_epoch or whole_pass
        return cls(steps_per_epoch, steps_per_epoch * settings.epochs, accum_steps)

    @property
    def epochs(self) -> int:
        """Epochs in all, the last one perhaps shorter."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def num_batches(self) -> int:
        """Batches in all."""
        return self.total_steps * self.accum_steps

    def step_of(self, number: int) -> int:
        """Optimiser steps before the batch of a number."""
        return number // self.accum_steps

    def epochs_before(self, number: int) -> float:
        """Epochs before the batch of a number."""
        return self.step_of(number) / self.steps_per_epoch

    def progress(self, number: int) -> float:
        """Share of the stage that is over before the batch of a number, 0 to 1."""
        epochs = self.total_steps / self.steps_per_epoch
        return self.epochs_before(number) / epochs if epochs else 1.0


def inverse_weights(training: TrainingConfig, epochs: float) -> dict[str, float]:
    """Weights of the inverse losses after so many epochs.

    They are 0 for `inverse_loss_warmup_epochs`, grow linearly for as many more, and stay; neither ever
    exceeds `inverse_loss_max_weight`.

    Returns:
        By the name of the loss. `lambda_inv_enc` weighs D(E(x)) against x, which undoes the encoder and is
        called "decoder_inverse" for what is trained to do it; `lambda_inv_dec` likewise "encoder_inverse".
    """
    warmup, highest = training.inverse_loss_warmup_epochs, training.inverse_loss_max_weight
    grown = 1.0 if warmup == 0 else min(1.0, max(0.0, epochs / warmup - 1.0))
    weights = {"decoder_inverse": training.lambda_inv_enc, "encoder_inverse": training.lambda_inv_dec}
    bound = float("inf") if highest is None else highest
    return {name: min(grown * weight, bound) for name, weight in weights.items()}


def num_queries(sampling: QuerySamplingConfig, *, progress: float, num_points: int) -> int:
    """Points of a grid that the decoder is asked at after a share of the stage, 1 to `num_points`."""
    end = min(sampling.num_queries or num_points, num_points)
    curriculum = sampling.curriculum
    if not curriculum.enabled:
        return end
    start = min(curriculum.start_queries or num_points, num_points)
    return round(start + (end - start) * min(1.0, progress / curriculum.share))


def total_queries(sampling: QuerySamplingConfig, *, num_steps: int, num_points: int) -> float:
    """Sum of `num_queries` over the steps of a stage, none of them rounded."""
    start, end = (num_queries(sampling, progress=at, num_points=num_points) for at in (0.0, 1.0))
    growing = sampling.curriculum.share * num_steps
    first = math.ceil(growing)  # step from which on there are `end` points
    return num_steps * end - (end - start) * (first - first * (first - 1) / (2 * growing))
