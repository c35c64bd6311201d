"""How a model is called in training: compiled where the configuration says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ups.config import TrainingConfig
from ups.device import compiled_or_eager
from ups.output import Note


def forward_of(model: nn.Module, config: TrainingConfig, *, note: Note) -> Callable[..., Any]:
    """How a model is called: compiled where the configuration says so."""
    return compiled_or_eager(model, note=note, mode=config.compile_mode) if config.compile else model
