"""What a run would refuse only after hours, refused before it begins; no torch.

As far as the configuration alone shows it, and the heads of the sources: `ups validate config` says the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from ups.config import RunConfig
from ups.config.checks import check_countable, check_joint, check_no_inverse_losses, check_optimizer
from ups.config.corrector_size import corrector_size
from ups.config.operator_size import operator_size
from ups.data.splits import check_has_dev, describe_fields
from ups.data.stores import StoreError, check_stores_replaceable, latent_folder
from ups.errors import ConfigError, ConfigWarning, UpsError, check_installed
from ups.eval.split_uses import daily_split
from ups.grid import GridSpec, cut_grid
from ups.log import quiet
from ups.models.operator_size import TOKEN_UNET
from ups.output import check_writable
from ups.stages import CORRECTOR, ENCODER_MODEL, JOINT, OPERATOR, PRIOR, STUDENT
from ups.train.given_models import check_corrected_operator, check_teacher

# Modes of `training.cache_mode` in which the operator's stage encodes for itself and nothing is stored.
_WITHOUT_STORES = ("memory", "none")


def report_folder(config_path: Path | None) -> Path:
    """Where the report of a whole run goes."""
    return Path("reports") / (config_path.stem if config_path else "all")


def check_nothing_refused_later(config: RunConfig, *, report_folder: Path) -> None:
    """Refuse before hours of training what a stage, or the evaluation, would refuse after them.

    Args:
        report_folder: Where the evaluation writes.

    Raises:
        UpsError: All that is refused, in one error.
        MissingExtraError: If a package isn't installed that a whole run needs.
    """
    refused = [
        error for _, check in later_checks(config, report_folder=report_folder) for error in tried(check)
    ]
    if refused:
        raise ConfigError.joined(refused)


def later_checks(config: RunConfig, *, report_folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a stage, or the evaluation, checks by the configuration alone: by what each is about.

    Args:
        report_folder: Where the evaluation writes.
    """
    yield "configuration", lambda: check_installed("safetensors", "scipy", extra="train")
    yield "configuration", lambda: check_installed("matplotlib", extra="plot")
    if config.evaluation.enabled:
        yield "evaluation", lambda: _check_split(config)
        yield "evaluation", lambda: check_writable(report_folder)
    if config.evaluation.metrics:  # of an evaluation later, too
        yield "evaluation", lambda: _check_metrics(config)
    if config.training.field_source == "store" and config.operator.state == "latent":
        yield "stages", lambda: _check_own_folders(config, "training.field_source=store")
    builds = {"fields": builds_fields(config), "latents": builds_latents(config)}
    yield "checkpoints", lambda: check_stores_replaceable(config, **builds)
    if config.trains(OPERATOR):
        yield "stages", lambda: check_no_inverse_losses(config)
    if config.trains(OPERATOR) or config.trains(JOINT):
        yield "architecture", lambda: _check_operator_size(config)
    if config.training.losses:
        yield "hyperparameters", lambda: _check_losses(config)
    if config.trains(PRIOR):
        yield "stages", lambda: check_steady_task(config)
    if config.trains(CORRECTOR) or config.trains(PRIOR):
        yield "architecture", lambda: corrector_size(config)
    if config.trains(CORRECTOR):
        yield "checkpoints", lambda: check_corrected_operator(config)
    if config.trains(STUDENT):
        yield "checkpoints", lambda: check_teacher(config)
    for name in config.trained_stages:
        settings = config.stage(name)
        yield "hyperparameters", partial(check_optimizer, settings.optimizer, stage=name)
        if settings.budget is not None and settings.budget.seconds is None and settings.steps is None:
            yield "hyperparameters", partial(check_countable, name)


def tried(check: Callable[[], object]) -> Iterator[UpsError | StoreError]:
    """The error of a check, if it has one."""
    try:
        check()
    except (UpsError, StoreError) as error:
        yield error


def _check_losses(config: RunConfig) -> None:
    from ups.losses import check_losses  # which needs torch

    check_losses(config.training)


def _check_metrics(config: RunConfig) -> None:
    from ups.eval.metrics import own_metrics  # which needs torch

    own_metrics(config.evaluation.metrics)


def _check_split(config: RunConfig) -> None:
    with quiet():
        daily_split(None, config.evaluation.split)


def _check_operator_size(config: RunConfig) -> None:
    with warnings.catch_warnings():  # said when the operator is made
        warnings.simplefilter("ignore", ConfigWarning)
        if config.operator.name == TOKEN_UNET:
            operator_size(config.operator)
        else:
            from ups.models.operators import dotted_name  # with torch

            dotted_name(config.operator.name)


def builds_fields(config: RunConfig) -> bool:
    """Whether something is trained on stores of fields."""
    return config.trains(JOINT) or not config.uses_encoder or config.training.field_source == "store"


def builds_latents(config: RunConfig) -> bool:
    """Whether the operator is trained on stores of latents."""
    return config.uses_encoder and config.training.cache_mode not in _WITHOUT_STORES


def check_encoder(config: RunConfig) -> None:
    """Refuse a stage joint that can't make the encoder of the run.

    Raises:
        ConfigError: Kind "same_folder", if stage joint's field stores and the latent stores had one path;
            "given_encoder", if stage joint would train another one than `latent.checkpoint`; and those of
            stage joint.
    """
    if config.trains(JOINT):
        check_joint(config)
        _check_no_given_encoder(config)
        _check_own_folders(config, "stage joint")


def is_steady_task(config: RunConfig, task: str) -> bool:
    """Whether a task may be steady, by what is known without its files."""
    return config.build.get_task(task).steady is not False


def check_steady_task(config: RunConfig, *, found: Collection[str] | None = None) -> None:
    """Refuse a prior of steady solutions where no task has any.

    Args:
        found: Tasks whose files say that they are steady; None where these aren't looked at.

    Raises:
        ConfigError: Kind "no_steady_task".
    """
    steady = [task for task in config.data.tasks if is_steady_task(config, task)] if found is None else found
    if not steady:
        raise ConfigError(
            f"stage {PRIOR.name} learns solutions of steady tasks",
            kind="no_steady_task",
            expected="one such as darcy2d among data.tasks",
            found=", ".join(config.data.tasks),
            hint=f"say stages.{PRIOR.name}.epochs=0",
        )


def check_sizes(config: RunConfig) -> None:
    """Refuse sizes that don't fit the grids of the tasks, and too few samples, before stores are built.

    Raises:
        ConfigError: As `cut_grid`, `check_has_dev`, and `describe_fields`.
        ups_store.SourceError: If the sources are missing or can't be read.
    """
    for task in config.data.tasks:
        if has_sizes(config):
            check_grid(config, describe_fields(config.build, task)[0].grid)
        if config.evaluation.enabled and config.evaluation.split in ("dev", "test"):
            check_has_dev(describe_fields(config.build, task, "val")[1], task, origin=config.data.root)


def has_sizes(config: RunConfig) -> bool:
    """Whether the configuration says how grids are cut, and not the encoder that is given."""
    return not config.uses_encoder or config.trains_encoder


def check_grid(config: RunConfig, grid: GridSpec) -> None:
    """Refuse patches and tokens that don't fit a grid.

    Raises:
        ConfigError: As `cut_grid`.
    """
    num_tokens = config.latent.tokens if config.uses_encoder else None
    cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=num_tokens)


def _check_own_folders(config: RunConfig, reader: str) -> None:
    if latent_folder(config) == config.cache.dir:
        raise ConfigError(
            f"{reader} reads stores of fields, which stores of latents would replace",
            kind="same_folder",
            expected="another training.latent_cache_dir than cache.dir",
            found=str(config.cache.dir),
        )


def has_given_encoder(config: RunConfig) -> bool:
    """Whether latents are those of another autoencoder than the one that this run would train."""
    return config.uses_encoder and config.is_given(ENCODER_MODEL)


def _check_no_given_encoder(config: RunConfig) -> None:
    if has_given_encoder(config):
        raise ConfigError(
            "stage joint trains an autoencoder, but latents are to be those of another one",
            kind="given_encoder",
            expected="stages.joint.epochs=0, or no latent.checkpoint",
            found=f"latent.checkpoint = {config.latent.checkpoint}",
        )
