"""`ups validate config`: everything that would end a run or waste it, found before it begins.

The heads of the sources are read, no sample. What stages and runs refuse themselves comes from where they
look it up, `ups.train.checks` and `ups.config`; all of it is said at once.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ups.config import RunConfig
from ups.config.checks import check_latent_size
from ups.config.loading import load_leniently
from ups.config.operator_size import operator_size
from ups.data.fields import laws_of_fields, too_short
from ups.data.held_out import check_enough, check_lead_times
from ups.data.splits import check_has_dev, check_room
from ups.errors import CheckpointError, ConfigWarning, MissingExtraError, check_installed
from ups.laws import check_priors, laws_of
from ups.log import quiet
from ups.models.operator_size import TOKEN_UNET
from ups.output import check_writable
from ups.pipeline.machine_checks import FIELD_STORES, LATENTS, check_caches, check_machine
from ups.pipeline.planned import PlannedRanks
from ups.pipeline.report import Checks, Report, warnings_of
from ups.pipeline.run import open_run
from ups.pipeline.sources import TRAINED, TaskSources, find_tasks, quick_readers
from ups.stages import BASELINES, JOINT, OPERATOR, STAGES
from ups.train.checks import (
    check_encoder,
    check_grid,
    check_steady_task,
    has_given_encoder,
    has_sizes,
    later_checks,
    report_folder,
    unused_in_all_stages,
    unused_settings,
)
from ups.train.saved_state import SavedState, state_path
from ups.train.switches import check_switches
from ups.train.tracking import is_wandb_there
from ups.trained.checkpoint import read_document
from ups.trained.specs import AUTOENCODER, check_task, parse_spec
from ups_store.printable import counted

GROUPS = (
    *("configuration", "architecture", "data", "hardware", "hyperparameters", "checkpoints"),
    *("W&B", "TensorBoard", "stages", "evaluation", LATENTS, FIELD_STORES, "preloading"),
)
_ODD_LR = 0.1


def check_config(config_path: Path | None, overrides: Sequence[str] = ()) -> Report:
    """Check a run's configuration, and what it needs of this machine.

    Args:
        config_path: YAML file, or the name of a shipped one.

    Returns:
        A line for each check; nothing is raised for what is wrong.
    """
    began, checks = time.perf_counter(), Checks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        loaded = load_leniently(config_path, overrides=overrides)
    for text in warnings_of(caught):
        checks.warn("configuration", text)
    checks.refuse("configuration", *loaded.problems)
    if not loaded.problems:
        checks.ok("configuration", f"{config_path or 'overrides'}: all keys and values are known")
        with quiet():
            checks.passes("evaluation", lambda: open_run(config_path, overrides))
    config = loaded.config  # with defaults instead of what is wrong
    if config is not None:
        folder, stages = report_folder(config_path), config.trained_stages
        checks.passes("stages", lambda: check_encoder(config))
        is_data_right = not any(key.startswith("data") for key in loaded.left_out)
        with quick_readers(config) as readers:
            tasks = find_tasks(config, readers) if is_data_right else {}
            grids = {name: task.info.grid for name, task in tasks.items() if task.info is not None}
            for group, check in later_checks(config, report_folder=folder):
                checks.passes(group, check)
            _check_architecture(config, tasks, checks)
            for name, task in tasks.items():
                _check_task(config, name, task, checks)
            for name in stages:
                _check_hyperparameters(config, name, checks)
            _check_stages(config, tasks, checks)
            _check_checkpoints(config, checks)
            _check_records(config, folder, checks)
            if not checks.has_problem("architecture") and grids.keys() == set(config.data.tasks):
                check_machine(config, stages, grids, checks)
            else:
                checks.warn(
                    "hardware", "memory isn't estimated: sizes and grids aren't known, or don't agree"
                )
            check_caches(config, tasks, readers, checks)
    return Report(checks.all_of(GROUPS), time.perf_counter() - began)


def _check_architecture(config: RunConfig, tasks: Mapping[str, TaskSources], checks: Checks) -> None:
    """Check patches and tokens against the grids, and say how large the operator is."""
    group, patch_size = "architecture", config.encoder.patch_size
    for name, task in tasks.items():
        if task.info is not None and has_sizes(config):
            points = " x ".join(map(str, task.info.grid.points))
            if checks.passes(group, partial(check_grid, config, task.info.grid)):
                checks.ok(group, f"{name}: {points} points fit encoder.patch_size = {patch_size}")
    if checks.has_problem(group) or not (config.trains(OPERATOR) or config.trains(JOINT)):
        return
    latent, operator = config.latent, config.operator
    state = f"latents of {latent.tokens} x {latent.dim}" if operator.state == "latent" else "fields"
    if operator.name != TOKEN_UNET:
        keys = ", ".join(f"{key} {value}" for key, value in operator.config.items())
        checks.ok(group, f"operator on {state}: {operator.name}, {keys}")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        size = operator_size(operator)
    for text in warnings_of(caught):
        checks.warn(group, text)
    depths = ", ".join(map(str, size.depths))
    checks.ok(group, f"operator on {state}: width {size.width}, blocks {depths}, {', '.join(size.mixers)}")


def _check_task(config: RunConfig, name: str, task: TaskSources, checks: Checks) -> None:
    """Check that a task's data are there, and enough of them for what is trained and evaluated."""
    group, training, root = "data", config.training, config.data.root
    for split, error in task.problems():
        if split in TRAINED:
            checks.refuse(group, error)
        elif not checks.has_said(str(error)):
            checks.warn(group, f"{name} {split}: {error}")
    splits = [*task.builds, *task.stores.keys() - task.builds.keys()]
    if not splits:
        return
    samples = ", ".join(f"{split} {task.num_samples(split)}" for split in splits)
    if task.builds:
        checks.ok(group, f"{name}: samples of {samples}")
    else:
        checks.warn(group, f"{name}: samples of {samples}, from their field stores: there are no sources")
    if config.evaluation.enabled and config.evaluation.split in ("dev", "test"):
        checks.passes(group, partial(check_has_dev, task.num_samples("val"), name, origin=root))
    stages = [STAGES[stage] for stage in config.trained_stages]
    if task.info is not None and not task.info.steady:
        if task.num_times <= training.horizon * training.stride and stages:
            longest = task.num_times
            checks.refuse(group, too_short(training.horizon, training.stride, path=root, longest=longest))
        if any(stage.learns == "residuals" for stage in stages):
            lead_times, horizon = config.diffusion.lead_times, (task.num_times - 1) // training.stride
            checks.passes(group, partial(check_lead_times, lead_times, horizon=horizon, task=name))
    if any(stage.items == "residuals" for stage in stages) and "val" in splits:
        num = (task.num_samples("val") + 1) // 2  # the others are "dev"
        checks.passes(group, partial(check_enough, num, config.diffusion.residual_share, task=name))
    if any(stage.items == "frames" for stage in stages) and training.field_source != "store":
        for split in TRAINED:
            if split in task.builds and split not in task.stores:
                checks.passes(group, partial(check_room, task.builds[split]))


def _check_hyperparameters(config: RunConfig, name: str, checks: Checks) -> None:
    """Check a stage's switches, learning rate and warm-up."""
    group, settings = "hyperparameters", config.stage(name)
    import torch  # not before a mistake in the configuration is said

    device = "cuda" if config.training.device != "cpu" and torch.cuda.is_available() else "cpu"
    ranks = PlannedRanks.of(config).num
    checks.passes(group, partial(check_switches, config, name, device=device, num_ranks=ranks))
    for text in unused_settings(config, name):
        checks.warn(group, text)
    lr, warmup_steps = settings.optimizer.lr, settings.scheduler.warmup_steps
    if lr is not None and lr > _ODD_LR:
        checks.warn(group, f"stage {name}: a learning rate of {lr:g} is unusually large")
    steps = settings.steps or settings.epochs * (settings.steps_per_epoch or 0)
    if 0 < steps <= warmup_steps and (settings.steps or settings.budget is None):
        text = f"stages.{name}.scheduler.warmup_steps = {warmup_steps} of {steps} steps"
        checks.warn(group, f"{text}: the learning rate never reaches its peak")
    if not checks.has_problem(group):
        batch = f"batch {settings.batch_size or settings.global_batch_size} x {config.training.accum_steps}"
        checks.ok(group, f"stage {name}: {settings.optimizer.name}, learning rate {lr:g}, {batch}")


def _check_stages(config: RunConfig, tasks: Mapping[str, TaskSources], checks: Checks) -> None:
    """Say which stages are trained and how long, and check what they need of the tasks."""
    group, names = "stages", config.trained_stages
    for text in unused_in_all_stages(config):
        checks.warn(group, text)
    lengths = []
    for name in names:
        settings = config.stage(name)
        budget = counted(settings.epochs, "epoch") if settings.budget is None else str(settings.budget)
        lengths.append(f"{name} ({budget if settings.steps is None else counted(settings.steps, 'step')})")
    if not names:
        checks.warn(group, "no stage has epochs: nothing would be trained")
    elif not checks.has_problem(group):
        checks.ok(group, " -> ".join(lengths))
    infos = {name: task.info for name, task in tasks.items() if task.info is not None}
    learned = {STAGES[name].learns for name in names}
    if infos.keys() == set(config.data.tasks):
        if "solutions" in learned:
            steady = [name for name, info in infos.items() if info.steady]
            checks.passes(group, lambda: check_steady_task(config, found=steady))
        weights = config.training.physics_priors.weights
        if weights and "steps" in learned:
            laws = {name: laws_of_fields(info, config.own_laws) for name, info in infos.items()}
            checks.passes(group, lambda: check_priors(weights, laws))
    for name in config.stages.keys() & set(BASELINES):
        checks.ok(group, f"{name}: a baseline, trained by `ups train --stage {name}`")


def _check_checkpoints(config: RunConfig, checks: Checks) -> None:
    """Check where checkpoints go, what stages continue from, and an encoder that is given."""
    group, folder, pipeline = "checkpoints", config.checkpoint.dir, config.pipeline
    if checks.passes(group, partial(check_writable, folder)):
        checks.ok(group, f"{folder}: can be written")
    for other in (pipeline.dir, pipeline.report_dir, pipeline.best_dir):  # that of checkpoints has the rest
        if other is not None:
            checks.passes(group, partial(check_writable, other))
    for stage in config.trained_stages:
        path = state_path(config, stage)
        if not path.exists():
            checks.ok(group, f"stage {stage} begins from scratch")
            continue
        try:
            state = SavedState.read(path)
            state.check_config(config, stage=stage)
        except CheckpointError as error:
            if error.kind in ("other_config", "too_old") and SavedState.read(path).is_over:
                checks.warn(group, f"stage {stage} would be trained again: {error}")
            else:
                checks.refuse(group, error)
        else:
            checks.ok(group, f"stage {stage} continues after step {state.document['position']['step']}")
    if has_given_encoder(config):
        path = config.autoencoder_path
        with checks.collecting(group):
            spec = parse_spec(read_document(path, kind=AUTOENCODER), path)
            for task in config.data.tasks:
                check_task(spec, task, path)
            check_latent_size(config, (spec.num_tokens, spec.latent_dim), path)
            checks.ok(group, f"{path}: an autoencoder of these tasks and sizes")


def _check_records(config: RunConfig, folder: Path, checks: Checks) -> None:
    """Check Weights & Biases, TensorBoard and the evaluation, as far as they are wanted."""
    wandb = config.logging.wandb
    if not wandb.enabled:
        checks.ok("W&B", "off: logging.wandb.enabled = false")
    elif not is_wandb_there():
        checks.warn("W&B", f"nothing goes there: {MissingExtraError.of('wandb', extra='wandb')}")
    else:
        mode = os.environ.get("WANDB_MODE", "online")
        has_key = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
        if mode not in ("offline", "disabled") and not has_key:
            text = "no WANDB_API_KEY and no ~/.netrc: run `wandb login`, or set WANDB_MODE=offline"
            checks.warn("W&B", text)
        project = wandb.project or os.environ.get("WANDB_PROJECT")
        if project is None:
            checks.warn("W&B", "logging.wandb.project isn't set: runs go to `uncategorized`")
        checks.ok("W&B", f"{mode}, project {project or 'uncategorized'}")
    group = "TensorBoard"
    if not config.logging.tensorboard.enabled:
        checks.ok(group, "off: logging.tensorboard.enabled = false")
    elif checks.passes(group, lambda: check_installed("tensorboard", extra="tensorboard")):
        checks.ok(group, "events can be written")
    group = "evaluation"
    if not config.evaluation.enabled:
        checks.ok(group, "off: evaluation.enabled = false")
    elif not checks.has_problem(group):  # that it can be is checked with what stages refuse
        checks.ok(group, f"on {config.evaluation.split}, to {folder}")
    for task in config.data.tasks if config.ttc.enabled else ():
        laws = laws_of(task, config.own_laws)
        if laws.equation is None and not laws.conserved:
            checks.warn(group, f"ttc.enabled, but no law of {task} is known: say it under laws.{task}")
