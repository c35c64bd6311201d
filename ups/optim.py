"""Optimisers and learning rates by name, and averages of a model's weights that can take their place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config import OptimizerConfig, SchedulerConfig
from ups.errors import ConfigError, needs

with needs("train"):
    import torch
    from torch import Tensor, nn

    from ups.distributed.sharding import shared_out
    from ups.trained.checkpoint import check_tensors

_THERE = ("adamw", "adam", "sgd")
_LR_FACTOR = "lr_factor"  # key of a group of PyTorch's optimisers


class WeightsCopy:
    """Copy of a model's trained parameters.

    Args:
        model: The model.
        device: Where the copy lies; by default beside each parameter.
    """

    def __init__(self, model: nn.Module, *, device: torch.device | str | None = None) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._copies = {
            name: p.detach().to(device or p.device, copy=True) for name, p in self._parameters.items()
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the copied weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def adopt(self) -> None:
        """Give the model the copied weights for good."""
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._copies[name])
            self._copies[name].copy_(kept)


class AveragedWeights(WeightsCopy):
    """Averaged copy of a model's trained parameters.

    Early on the average follows faster, by (1 + n) / (10 + n) after n updates, so that it forgets the random
    start.

    Args:
        model: The model.
        decay: Share of the old average that an update keeps.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model)
        self._decay = decay
        self.num_updates = 0

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by name."""
        return self._copies

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        decay = min(self._decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        current = [p.detach() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.averages.values()), current, 1 - decay)

    def restore(self, averages: Mapping[str, Tensor], *, num_updates: int, path: Path) -> None:
        """Continue from saved averages.

        Args:
            averages: By name, as `averages` has them, in whole form.
            num_updates: Updates that made them.
            path: Where they are from, for the error.

        Raises:
            OtherTensorsError: If names or shapes differ; nothing is changed then.
        """
        check_tensors(averages, self.averages, path=path, problem="its averages aren't those of the weights")
        self.num_updates = num_updates
        for name, average in self.averages.items():
            average.copy_(shared_out(averages[name], average))


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
