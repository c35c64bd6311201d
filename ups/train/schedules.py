"""What changes while a stage trains: weights of inverse losses, points that the decoder is asked at.

Both are functions of the optimiser step alone, so a run that is continued goes on as if it had not stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ups.config import RunConfig, TrainingConfig
from ups.config.training import QuerySamplingConfig

INVERSE_LOSSES = frozenset(("decoder_inverse", "encoder_inverse"))


@dataclass(frozen=True)
class StageLength:
    """How long a stage trains.

    Attributes:
        steps_per_epoch: Optimiser steps of an epoch.
        epochs: Of the stage.
        accum_steps: Batches of an optimiser step.
    """

    steps_per_epoch: int
    epochs: int
    accum_steps: int

    @classmethod
    def of(cls, config: RunConfig, stage: str, *, batches_per_pass: int) -> StageLength:
        """Of a stage whose data give so many batches a pass."""
        settings, accum_steps = config.stage(stage), config.training.accum_steps
        steps_per_epoch = settings.steps_per_epoch or max(1, batches_per_pass // accum_steps)
        return cls(steps_per_epoch, settings.epochs, accum_steps)

    def step_of(self, number: int) -> int:
        """Optimiser steps before the batch of a number."""
        return number // self.accum_steps

    def epochs_before(self, number: int) -> float:
        """Epochs before the batch of a number."""
        return self.step_of(number) / self.steps_per_epoch

    def progress(self, number: int) -> float:
        """Share of the stage that is over before the batch of a number, 0 to 1."""
        return self.epochs_before(number) / self.epochs if self.epochs else 1.0


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
