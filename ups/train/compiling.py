"""Compilation that reports its failure and goes on without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ups.config import TrainingConfig


def forward_of(
    model: nn.Module, config: TrainingConfig, *, note: Callable[[str], None]
) -> Callable[..., Any]:
    """How a model is called: compiled where the configuration says so."""
    return compiled_or_eager(model, mode=config.compile_mode, note=note) if config.compile else model


def compiled_or_eager(model: nn.Module, *, mode: str, note: Callable[[str], None]) -> Callable[..., Any]:
    """Compile a model; if the compiler fails, say so and call the model as it is from then on.

    Compilation happens in the first calls, so that is where it fails.

    Args:
        model: The model; its parameters stay its own.
        mode: As `torch.compile` has it.
        note: Told about a failure.
    """
    from torch._dynamo.exc import TorchDynamoException  # seconds, so only for who compiles

    compiled = torch.compile(model, mode=mode)
    chosen: list[Callable[..., Any]] = [compiled]

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return chosen[0](*args, **kwargs)
        except TorchDynamoException as error:
            if chosen[0] is model:
                raise
            reason = str(error).strip().splitlines()[0]
            note(f"torch.compile failed, going on without: {type(error).__name__}: {reason}")
            chosen[0] = model
            return model(*args, **kwargs)

    return forward
