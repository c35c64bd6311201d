"""Learning rates by name."""

from __future__ import annotations

import math
from typing import Any

from ups.config import SchedulerConfig


class LearningRate:
    """Learning rate of every step; apart from the plateau kind a function of the step alone.

    Args:
        config: Kind and settings.
        peak: Learning rate after warm-up.
        steps_per_epoch: Optimiser steps of an epoch.
        total_steps: Optimiser steps of the stage, the default length of a cosine.
    """

    def __init__(
        self, config: SchedulerConfig, *, peak: float, steps_per_epoch: int, total_steps: int
    ) -> None:
        self._config, self._peak, self._steps_per_epoch = config, peak, steps_per_epoch
        self._num_steps = config.t_max * steps_per_epoch if config.t_max else total_steps
        self._factor = 1.0
        self._best = math.inf
        self._bad_epochs = 0

    def at(self, step: int) -> float:
        """Learning rate of an optimiser step, counted from 0."""
        warmup = self._config.warmup_steps
        if step < warmup:
            return self._peak * (step + 1) / warmup
        return self._after_warmup(step)

    def _after_warmup(self, step: int) -> float:
        config = self._config
        if config.name == "cosine":
            warmup = min(config.warmup_steps, self._num_steps - 1)
            progress = min(1.0, (step - warmup) / (self._num_steps - warmup))
            return config.eta_min + (self._peak - config.eta_min) * 0.5 * (1 + math.cos(math.pi * progress))
        if config.name == "step":
            return self._peak * config.gamma ** (step // self._steps_per_epoch // config.step_size)
        return max(config.min_lr, self._peak * self._factor) if config.name == "plateau" else self._peak

    def end_epoch(self, score: float) -> None:
        """Take the validation error of an epoch; only the plateau kind uses it."""
        if score < self._best:
            self._best, self._bad_epochs = score, 0
            return
        self._bad_epochs += 1
        if self._bad_epochs > self._config.patience:
            self._factor, self._bad_epochs = self._factor * self._config.factor, 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        return {"factor": self._factor, "best": self._best, "bad_epochs": self._bad_epochs}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._factor, self._best, self._bad_epochs = state["factor"], state["best"], state["bad_epochs"]
