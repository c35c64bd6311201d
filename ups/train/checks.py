"""What a run would refuse only after hours, refused before it begins; settings that change nothing. No torch.

As far as the configuration alone shows it, the models that it names, and the heads of the sources: stages
refuse the same when they are made, and `ups validate config` says it before a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from ups.config import RunConfig, StageConfig
from ups.config.checks import check_countable, check_joint, check_no_inverse_losses, check_optimizer
from ups.config.operator_size import corrector_size, operator_size
from ups.config.stage_keys import SWITCHED_BY, not_read
from ups.data.splits import check_has_dev, describe_fields
from ups.data.stores import StoreError, check_stores_replaceable, latent_folder
from ups.errors import ConfigError, ConfigWarning, UpsError, check_installed
from ups.eval.split_uses import daily_split
from ups.grid import GridSpec, cut_grid
from ups.log import quiet
from ups.models.operator_size import TOKEN_UNET
from ups.output import check_writable
from ups.section import Section
from ups.stages import (
    AUTOENCODER,
    CORRECTOR,
    CORRECTOR_MODEL,
    ENCODER_MODEL,
    JOINT,
    OPERATOR,
    OPERATOR_MODEL,
    PRIOR,
    STUDENT,
)
from ups.train.saved_state import state_path
from ups.trained.checkpoint import hash_tensors, hinting_where_missing, read_document
from ups.trained.specs import (
    SimulatorSpec,
    check_simulated_task,
    parse_simulator_spec,
    parse_specs,
)

# Modes of `training.cache_mode` in which the operator's stage encodes for itself and nothing is stored.
_WITHOUT_STORES = ("memory", "none")


def report_folder(config_path: Path | None) -> Path:
    """Where the report of a whole run goes."""
    return Path("reports") / (config_path.stem if config_path else "all")


def check_nothing_refused_later(config: RunConfig, *, report_folder: Path) -> None:
    """Refuse before hours of training what a stage, or the evaluation, would refuse after them.

    Args:
        report_folder: Where the evaluation writes.
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
    """Refuse a stage joint that can't make the encoder of the run."""
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
    """Refuse sizes that don't fit the grids of the tasks, and too few samples, before stores are built."""
    for task in config.data.tasks:
        if has_sizes(config):
            check_grid(config, describe_fields(config.build, task)[0].grid)
        if config.evaluation.enabled and config.evaluation.split in ("dev", "test"):
            check_has_dev(describe_fields(config.build, task, "val")[1], task, origin=config.data.root)


def has_sizes(config: RunConfig) -> bool:
    """Whether the configuration says how grids are cut, and not the encoder that is given."""
    return not config.uses_encoder or config.trains_encoder


def check_grid(config: RunConfig, grid: GridSpec) -> None:
    """Refuse patches and tokens that don't fit a grid."""
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


OTHER_OPERATOR = "other_operator"
HOW_TO_HAVE_OPERATOR, HOW_TO_HAVE_TEACHER = (
    f"train it with `ups train --stage {stage.name}`, or name one by {stage.makes[0].key}"
    for stage in (OPERATOR, CORRECTOR)
)
HOW_TO_HAVE_ENCODER = "train it with `--stage autoencoder`, or operator.state=fields does without"
_SHOWN = 12  # digits of a hash


def check_corrected_operator(config: RunConfig) -> None:
    """Refuse an operator that the run doesn't train itself and that isn't there, or isn't for its tasks."""
    path = config.corrected_operator_path
    if not config.trains_model(OPERATOR_MODEL):
        _check_tasks(
            config, parse_simulator_spec(_document(path, OPERATOR_MODEL.kind, HOW_TO_HAVE_OPERATOR), path)
        )


def check_teacher(config: RunConfig) -> None:
    """Refuse a teacher that isn't there and that the run doesn't train, or that corrects another operator."""
    path = config.teacher_path
    if config.trains_model(CORRECTOR_MODEL):
        return
    spec, corrector = parse_specs(_document(path, CORRECTOR_MODEL.kind, HOW_TO_HAVE_TEACHER), path)
    _check_tasks(config, spec)
    is_begun = state_path(config, OPERATOR.name).exists() or config.corrected_operator_path.exists()
    if config.trains_model(OPERATOR_MODEL) and not is_begun:
        raise ConfigError(
            "the teacher corrects another operator than the one that this run would train",
            kind=OTHER_OPERATOR,
            path=path,
            found=f"that of operator {corrector.operator_sha256[:_SHOWN]}",
            hint="name its operator by diffusion.operator, with stages.operator.epochs=0; or leave out "
            "training.distill_teacher, and train a corrector, too (stages.corrector)",
        )
    check_same_operator(config, corrector.operator_sha256)


def check_same_operator(config: RunConfig, of_teacher: str) -> None:
    """Refuse a teacher of another operator than the run's, where that is there."""
    path = config.corrected_operator_path
    if not path.exists() or (own := hash_tensors(path)) == of_teacher:
        return
    raise ConfigError(
        "the teacher corrects another operator than the run's",
        kind=OTHER_OPERATOR,
        path=config.teacher_path,
        expected=f"operator {own[:_SHOWN]}, as in {path}",
        found=of_teacher[:_SHOWN],
        hint=f"train the corrector again with `ups train --stage {CORRECTOR.name}`, name another one "
        "by training.distill_teacher, or the teacher's operator by diffusion.operator",
    )


def _document(path: Path, kind: str, hint: str) -> dict[str, object]:
    with hinting_where_missing(hint):
        return read_document(path, kind=kind)


def _check_tasks(config: RunConfig, spec: SimulatorSpec) -> None:
    for task in config.data.tasks:
        check_simulated_task(spec, task)


# How a latent operator is trained while encoder and decoder are frozen; joint training has its own losses.
_READ_BY_OPERATOR = {
    "operator": ("noise", "curriculum"),
    "training": ("lambda_relative", "lambda_spectral", "rollout_loss", "losses", "pushforward"),
}


def unused_settings(config: RunConfig, stage: str) -> Iterator[str]:
    """One sentence for each setting of a stage that has another value than its default and no effect."""
    settings = config.stages.get(stage)
    if settings is not None:
        where = f"stages.{stage}"
        for section, values in (("optimizer", settings.optimizer), ("scheduler", settings.scheduler)):
            for name in _changed(values, not_read(type(values), values.name)):
                yield f"{where}.{section}.{name} has no effect: {values.name} has no such setting"
        for name in _changed(settings, SWITCHED_BY.keys() & StageConfig.model_fields.keys()):
            is_own = getattr(settings, name) != getattr(config.training, name)  # a budget fills in the others
            if is_own and not getattr(config.stage(stage), switch := SWITCHED_BY[name]):
                yield f"{where}.{name} has no effect: {where}.{switch} is off"
    for name in _changed(config.training, SWITCHED_BY):
        switch = SWITCHED_BY[name]
        of_stages = (getattr(some, switch, False) for some in config.stages.values())
        if not (getattr(config.training, switch) or any(of_stages)):
            yield f"training.{name} has no effect: training.{switch} is off"
    if config.training.shard_size is not None and config.training.parallel != "hsdp":
        yield f"training.shard_size has no effect: training.parallel is {config.training.parallel}"
    if stage == AUTOENCODER.name and config.training.use_inverse_losses and not config.trains(JOINT):
        yield "training.use_inverse_losses has no effect: stage joint trains with them"
    if stage == JOINT.name:
        for section, names in _READ_BY_OPERATOR.items():
            for name in _changed(getattr(config, section), names):
                yield f"{section}.{name} has no effect in stage joint: stage operator reads it"
    if config.training.losses and stage != JOINT.name:
        for name in _changed(config.training, ("rollout_loss",)):
            yield f"training.{name} has no effect: training.losses has all losses"
    if stage == OPERATOR.name and config.training.horizon == 1:
        if config.operator.curriculum:
            yield "operator.curriculum has no effect: training.horizon is 1"
        if config.training.pushforward:
            yield "training.pushforward has no effect: training.horizon is 1"
    if stage == AUTOENCODER.name and not config.encoder.residual:
        for name in _changed(config.training, ("reconstruction_loss",)):
            yield f"training.{name} has no effect: encoder.residual is off, so nothing is trained"


def unused_in_one_stage(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what `--stage all` alone reads."""
    if config.evaluation.enabled:
        yield "evaluation.enabled has no effect: stage all evaluates, after training"


def unused_in_all_stages(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what the evaluation at the end of `--stage all` reads."""
    for name in ("baseline_flops", "baseline_samples", "baseline_seconds"):
        if getattr(config.evaluation, name) is not None and not config.evaluation.enabled:
            yield f"evaluation.{name} has no effect: evaluation.enabled is off"


def _changed(section: Section, names: Iterable[str]) -> Iterator[str]:
    fields = type(section).model_fields
    return (name for name in names if getattr(section, name) != fields[name].default)
