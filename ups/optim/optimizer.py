"""Optimisers by name: AdamW, Adam, SGD."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ups.config import OptimizerConfig
from ups.errors import ConfigError

_THERE = ("adamw", "adam", "sgd")


def expect_optimizer(config: OptimizerConfig, *, stage: str | None = None) -> None:
    """Refuse an optimiser that isn't there yet; needs no parameters, so it can be told before the work.

    Args:
        config: Kind and settings.
        stage: Whose it is, for the key that is named.

    Raises:
        ConfigError: Kind "not_yet".
    """
    if config.name not in _THERE:
        where = "" if stage is None else f"stages.{stage}."
        raise ConfigError(
            f"{where}optimizer.name = {config.name}: it isn't there yet",
            kind="not_yet",
            expected="adamw, adam or sgd",
        )


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Make a stage's optimiser: decay acts on matrices, not on vectors such as biases.

    Args:
        named_parameters: What is trained.
        config: Kind and settings, with `lr` filled in.

    Raises:
        ConfigError: As `expect_optimizer`.
    """
    expect_optimizer(config)
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    assert config.lr is not None
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=_can_be_fused(trained))


def _can_be_fused(parameters: list[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
