"""Optimisers by name, and what they train in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ups.config import OptimizerConfig
from ups.errors import ConfigError

_THERE = ("adamw", "adam", "sgd")
_LR_FACTOR = "lr_factor"  # key of a group of PyTorch's optimisers


def check_optimizer(config: OptimizerConfig, *, stage: str | None = None) -> None:
    """Refuse an optimiser that isn't there yet; needs no parameters, so it is refused before the work.

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


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that an optimiser treats alike.

    Attributes:
        parameters: By name.
        weight_decay: Of these.
        lr_factor: Their learning rate over that of the schedule.
    """

    parameters: Mapping[str, nn.Parameter]
    weight_decay: float
    lr_factor: float = 1.0


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[ParameterGroup]:
    """What is trained of a model: decay acts on matrices, not on vectors such as biases."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim >= 2}
    vectors = {name: p for name, p in trained.items() if p.ndim < 2}
    groups = ParameterGroup(matrices, weight_decay), ParameterGroup(vectors, 0.0)
    return [group for group in groups if group.parameters]


def make_optimizer(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make an optimiser by its name.

    Args:
        groups: What is trained.
        config: Kind and settings, with `lr` filled in.

    Raises:
        ConfigError: As `check_optimizer`.
    """
    check_optimizer(config)
    assert config.lr is not None
    tables: list[dict[str, Any]] = [
        {
            "params": list(group.parameters.values()),
            "weight_decay": group.weight_decay,
            _LR_FACTOR: group.lr_factor,
        }
        for group in groups
    ]
    if config.name == "sgd":
        return torch.optim.SGD(tables, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    trained = [p for group in groups for p in group.parameters.values()]
    return kind(tables, lr=config.lr, betas=config.betas, eps=config.eps, fused=_can_be_fused(trained))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the schedule's learning rate, times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_LR_FACTOR, 1.0)


def _can_be_fused(parameters: list[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
