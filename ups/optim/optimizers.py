"""Optimisers by name, and what they train in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ups.config import OptimizerConfig
from ups.config.checks import check_optimizer
from ups.errors import ConfigError
from ups.optim.muon import NUM_MATRICES, MuonHybrid
from ups.optim.torchao_optimizers import AdamW8bit, OffloadedAdamW

_LR_FACTOR = "lr_factor"  # key of a group of PyTorch's optimisers


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


def make_optimizer(
    groups: Sequence[ParameterGroup], config: OptimizerConfig, *, hidden: Mapping[str, int] | None = None
) -> torch.optim.Optimizer:
    """Make an optimiser by its name.

    Args:
        groups: What is trained.
        config: Kind and settings, with `lr` filled in.
        hidden: What of it Muon takes, as `muon_matrices` says it.

    Raises:
        ConfigError: As `check_optimizer`; kind "not_fused", if it is to be fused and can't be; kind
            "no_matrices", if there is nothing for Muon; kind "not_real", if there are complex parameters, and
            "not_shardable", if they are shared out, for those of torchao.
        MissingExtraError: As `check_optimizer`.
    """
    check_optimizer(config)
    assert config.lr is not None
    trained = [p for group in groups for p in group.parameters.values()]
    how = _implementation(config, trained)
    if config.name == "muon_hybrid":
        return _make_muon_hybrid(groups, config, hidden or {}, how)
    tables = [_table(group) for group in groups]
    if config.name == "adamw8bit" or config.cpu_offload:
        return _make_of_torchao(tables, config, trained)
    if config.name == "sgd":
        return torch.optim.SGD(tables, lr=config.lr, momentum=config.momentum, **how)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(tables, lr=config.lr, betas=config.betas, eps=config.eps, **how)


def _make_muon_hybrid(
    groups: Sequence[ParameterGroup],
    config: OptimizerConfig,
    hidden: Mapping[str, int],
    how: dict[str, Any],
) -> MuonHybrid:
    tables = []
    for group in groups:
        for num in sorted({hidden.get(name, 0) for name in group.parameters}):
            chosen = {name: p for name, p in group.parameters.items() if hidden.get(name, 0) == num}
            table = _table(replace(group, parameters=chosen))
            tables.append({**table, NUM_MATRICES: num} if num else table)
    if not any(NUM_MATRICES in table for table in tables):
        raise ConfigError(
            "optimizer.name = muon_hybrid: the model has no hidden matrices that are trained",
            kind="no_matrices",
            hint="take adamw",
        )
    muon = {
        "momentum": config.muon_momentum,
        "ns_steps": config.muon_ns_steps,
        "adjust_lr_fn": config.muon_adjust_lr,
    }
    adamw = {"betas": config.betas, "eps": config.eps, **how}
    return MuonHybrid(tables, muon={"lr": config.lr, **muon}, adamw={"lr": config.lr, **adamw})


def _make_of_torchao(
    tables: list[dict[str, Any]], config: OptimizerConfig, trained: list[nn.Parameter]
) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if any(isinstance(parameter, DTensor) for parameter in trained):
        raise ConfigError(
            f"optimizer.name = {config.name}: torchao's states aren't shared out over ranks",
            kind="not_shardable",
            expected="all of the parameters on every rank, as with DDP",
            hint="take adamw without cpu_offload",
        )
    if config.cpu_offload:
        return OffloadedAdamW(tables, **settings)
    if not all(parameter.is_floating_point() for parameter in trained):
        raise ConfigError(
            "optimizer.name = adamw8bit: the model has parameters that aren't real",
            kind="not_real",
            hint="take adamw",
        )
    return AdamW8bit(tables, **settings)


def _table(group: ParameterGroup) -> dict[str, Any]:
    """A group as PyTorch's optimisers take it."""
    return {
        "params": list(group.parameters.values()),
        "weight_decay": group.weight_decay,
        _LR_FACTOR: group.lr_factor,
    }


def _implementation(config: OptimizerConfig, trained: list[nn.Parameter]) -> dict[str, Any]:
    """`fused` and `foreach` of PyTorch's optimisers, where None leaves it to them."""
    can_be_fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
    if config.implementation == "auto":
        return {"fused": None if config.name == "sgd" else can_be_fused or None, "foreach": None}
    if config.implementation == "fused" and not can_be_fused:
        raise ConfigError(
            "optimizer.implementation = fused: it can't be",
            kind="not_fused",
            expected="real parameters on a CPU or a CUDA device",
            hint="take auto",
        )
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the schedule's learning rate, times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_LR_FACTOR, 1.0)
