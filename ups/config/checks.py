"""What values of a configuration can't go together with each other, or with what is installed; no torch.

Stages refuse it when they are made, runs before their first stage, and `ups validate config` before a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from ups.config.architecture import DecoderConfig, EncoderConfig
from ups.config.run import RunConfig
from ups.config.stages import OptimizerConfig
from ups.errors import ConfigError, check_installed
from ups.stages import JOINT, STUDENT

_FIRST_WITH_MUON = (2, 9)  # of torch


def misfits(config: RunConfig) -> Iterator[ConfigError]:
    """Values of several keys that contradict each other, each right by itself."""
    parts: dict[str, EncoderConfig | DecoderConfig] = {"encoder": config.encoder, "decoder": config.decoder}
    for name, part in parts.items():
        if part.width % part.num_heads:
            problem = f"{name}.width = {part.width} isn't a multiple of num_heads = {part.num_heads}"
            yield ConfigError(problem, hint=f"change {name}.width or {name}.num_heads")
    for name, stage in config.stages.items():
        if stage.method is not None and name != STUDENT.name:
            problem = f"stages.{name}.method = {stage.method} has no meaning"
            yield ConfigError(problem, hint=f"only stages.{STUDENT.name} has a method")


def check_optimizer(config: OptimizerConfig, *, stage: str | None = None) -> None:
    """Refuse an optimiser that can't be had here; needs no parameters, so it is refused before the work.

    Args:
        config: Kind and settings.
        stage: Whose it is, for the key that is named.
    """
    if config.name == "adamw8bit" or config.cpu_offload:
        check_installed("torchao", extra="torchao")
    found = version("torch")
    if config.name == "muon_hybrid" and _numbers(found) < _FIRST_WITH_MUON:
        where = "" if stage is None else f"stages.{stage}."
        raise ConfigError(
            f"{where}optimizer.name = {config.name}: this PyTorch has no Muon",
            kind="old_torch",
            expected=f"torch {'.'.join(map(str, _FIRST_WITH_MUON))} or later",
            found=found,
            hint="upgrade torch, or take adamw",
        )


def _numbers(found: str) -> tuple[int, ...]:
    """The first two numbers of a version, such as (2, 9) of "2.9.0+cu128"."""
    return tuple(map(int, re.findall(r"\d+", found)[:2]))


def check_countable(stage: str) -> None:
    """Refuse a budget of operations or samples for steps that cost differently."""
    if stage == JOINT.name:
        problem = "stage joint has steps of two kinds, so no budget of operations becomes a number of them"
        raise ConfigError(problem, kind="budget", expected="stages.joint.steps")


def check_latent_size(config: RunConfig, found: tuple[int, int], path: Path) -> None:
    """Refuse an autoencoder with another number of tokens and channels than the configured one."""
    wanted = config.latent.tokens, config.latent.dim
    if found != wanted:
        raise ConfigError(
            "latent.tokens, latent.dim",
            kind="latent_size",
            path=path,
            expected=f"{wanted[0]} tokens x {wanted[1]} channels, as configured",
            found=f"{found[0]} x {found[1]} in the checkpoint",
            hint="train the autoencoder again, or configure the size that it has",
        )


def check_joint(config: RunConfig) -> None:
    """Refuse a configuration with which stage joint would leave nothing of use."""
    if not config.training.use_inverse_losses:
        raise ConfigError(
            "without inverse losses stage joint leaves an autoencoder that doesn't restore its fields",
            kind="no_inverse_losses",
            expected="training.use_inverse_losses=true",
        )
    if config.operator.state != "latent":
        raise ConfigError(
            "stage joint trains an operator on latents",
            kind="no_latents",
            expected="operator.state=latent",
            found=config.operator.state,
        )


def check_no_inverse_losses(config: RunConfig) -> None:
    """Refuse what would train nothing; a run that has a stage `joint` means that one."""
    if config.training.use_inverse_losses and not config.trains(JOINT):
        raise ConfigError(
            "inverse losses train encoder and decoder, and these are frozen in stage operator",
            kind="inverse_losses_frozen",
            hint="say stages.joint.epochs in place of stages.autoencoder.epochs, which trains them, or "
            "training.use_inverse_losses=false",
        )
