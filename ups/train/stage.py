"""What the trainer asks of a stage: `Stage`; and the stages by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ups.config import RunConfig
from ups.errors import ConfigError

Losses = dict[str, Tensor]


class Stage(Protocol):
    """One thing to train: its model, data, losses and validation.

    Attributes:
        name: As in the configuration.
        model: What is trained, on its device.
        batches_per_pass: Batches in one pass through the training data.
    """

    name: str
    model: nn.Module
    batches_per_pass: int

    def batch(self, number: int) -> Any:
        """Training batch of a number, a function of the seed and the number alone; has a length."""
        ...

    def losses(self, forward: Callable[..., Any], batch: Any) -> Losses:
        """Named losses of a batch, scalars, whose sum is minimised; `forward` calls the model."""
        ...

    def validate(self) -> dict[str, float]:
        """Metrics on the validation split; `score` is what counts, less is better."""
        ...

    def export(self, metrics: dict[str, float]) -> Path:
        """Write the model as others use it; called whenever the score is the best so far."""
        ...

    def finish(self) -> dict[str, Any]:
        """Report on what was exported last, as JSON values, once training is over."""
        ...


# Module and function that makes the stage from (config, device). Later stages are added here.
_STAGES = {"autoencoder": ("ups.train.autoencoder", "make_autoencoder_stage")}


def make_stage(name: str, config: RunConfig, *, device: torch.device) -> Stage:
    """Make a stage by its name.

    Raises:
        ConfigError: Kind "unknown_stage".
    """
    if name not in _STAGES:
        expected = f"one of {', '.join(_STAGES)}"
        raise ConfigError("no such stage", kind="unknown_stage", expected=expected, found=repr(name))
    module, function = _STAGES[name]
    stage: Stage = getattr(import_module(module), function)(config, device=device)
    return stage
