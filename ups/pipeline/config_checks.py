"""`ups validate config`: everything that would end a run or waste it, found before it begins; no torch.

The heads of the sources are read, no sample. What stages and runs refuse themselves comes from where they
look it up, `ups.train.checks` and `ups.config`; all of it is said at once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ups.config import RunConfig
from ups.config.loading import Loaded, load_leniently
from ups.config.operator_size import operator_size
from ups.data.fields import laws_of_fields, too_short
from ups.data.held_out import check_enough, check_lead_times
from ups.data.splits import check_has_dev, check_room
from ups.errors import ConfigWarning
from ups.grid import GridSpec
from ups.laws import check_priors
from ups.log import quiet
from ups.models.operator_size import TOKEN_UNET
from ups.pipeline.machine_checks import (
    FIELD_STORES,
    LATENTS,
    check_caches,
    check_machine,
    visible_gpus,
)
from ups.pipeline.planned_ranks import PlannedRanks
from ups.pipeline.report import Checks, Report, warnings_of
from ups.pipeline.run import open_run
from ups.pipeline.run_checks import check_checkpoints, check_evaluation, check_events, check_wandb
from ups.pipeline.sources import TRAINED, TaskSources, find_tasks, quick_readers
from ups.stages import BASELINES, JOINT, OPERATOR, STAGES
from ups.train.checks import (
    check_encoder,
    check_grid,
    check_steady_task,
    has_sizes,
    later_checks,
    report_folder,
    unused_in_all_stages,
    unused_settings,
)
from ups.train.switches import check_switches
from ups_store.printable import counted

GROUPS = (
    *("configuration", "architecture", "data", "hardware", "hyperparameters", "checkpoints"),
    *("W&B", "TensorBoard", "stages", "evaluation", LATENTS, FIELD_STORES, "preloading"),
)
_ODD_LR = 0.1


@dataclass(frozen=True)
class Known:
    """What the groups of checks share.

    Attributes:
        config: With defaults instead of what is wrong.
        stages: Names of the stages that would be trained, in their order.
        tasks: Their sources; empty where `data` itself is wrong.
    """

    config: RunConfig
    stages: tuple[str, ...]
    tasks: Mapping[str, TaskSources]

    @property
    def grids(self) -> dict[str, GridSpec]:
        """Of the tasks about which something is known."""
        return {name: task.info.grid for name, task in self.tasks.items() if task.info is not None}


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
    if loaded.config is not None:
        _check_loaded(loaded, config_path, checks)
    return Report(checks.all_of(GROUPS), time.perf_counter() - began)


def _check_loaded(loaded: Loaded, config_path: Path | None, checks: Checks) -> None:
    config = loaded.config
    assert config is not None
    checks.passes("stages", lambda: check_encoder(config))
    is_data_right = not any(key.startswith("data") for key in loaded.left_out)
    with quick_readers(config) as readers:
        tasks = find_tasks(config, readers) if is_data_right else {}
        known = Known(config, config.trained_stages, tasks)
        _check_later(config, report_folder(config_path), checks)
        _check_architecture(known, checks)
        _check_data(known, checks)
        _check_hyperparameters(known, checks)
        _check_stages(known, checks)
        check_checkpoints(config, known.stages, checks)
        check_wandb(config, checks)
        check_events(config, checks)
        check_evaluation(config, report_folder(config_path), checks)
        if not checks.has_problem("architecture") and known.grids.keys() == set(config.data.tasks):
            check_machine(config, known.stages, known.grids, checks)
        else:
            checks.warn("hardware", "memory isn't estimated: sizes and grids aren't known, or don't agree")
        check_caches(config, known.tasks, readers, checks)


def _check_later(config: RunConfig, folder: Path, checks: Checks) -> None:
    """What stages refuse by the configuration alone."""
    for group, check in later_checks(config, report_folder=folder):
        checks.passes(group, check)


def _check_architecture(known: Known, checks: Checks) -> None:
    config, latent = known.config, known.config.latent
    if has_sizes(config):
        for task, grid in known.grids.items():
            points = " x ".join(map(str, grid.points))
            if checks.passes("architecture", lambda grid=grid: check_grid(config, grid)):  # type: ignore[misc]
                checks.ok(
                    "architecture",
                    f"{task}: {points} points fit encoder.patch_size = {config.encoder.patch_size}",
                )
    if checks.has_problem("architecture") or not (config.trains(OPERATOR) or config.trains(JOINT)):
        return
    state = f"latents of {latent.tokens} x {latent.dim}" if config.operator.state == "latent" else "fields"
    if config.operator.name != TOKEN_UNET:
        said = ", ".join(f"{key} {value}" for key, value in config.operator.config.items())
        checks.ok("architecture", f"operator on {state}: {config.operator.name}, {said}")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        size = operator_size(config.operator)
    for text in warnings_of(caught):
        checks.warn("architecture", text)
    depths = ", ".join(map(str, size.depths))
    checks.ok(
        "architecture", f"operator on {state}: width {size.width}, blocks {depths}, {', '.join(size.mixers)}"
    )


def _check_data(known: Known, checks: Checks) -> None:
    config = known.config
    for name, task in known.tasks.items():
        for split, error in task.problems():
            if split in TRAINED:
                checks.refuse("data", error)
            elif not checks.has_said(str(error)):
                checks.warn("data", f"{name} {split}: {error}")
        shown = [
            f"{split} {task.num_samples(split)}"
            for split in (*task.builds, *task.stores.keys() - task.builds.keys())
        ]
        if not shown:
            continue
        origin = "" if task.builds else ", from their field stores: there are no sources"
        (checks.ok if task.builds else checks.warn)("data", f"{name}: samples of {', '.join(shown)}{origin}")
        if config.evaluation.enabled and config.evaluation.split in ("dev", "test"):
            num = task.num_samples("val")
            checks.passes("data", partial(check_has_dev, num, name, origin=config.data.root))
        span = config.training.horizon * config.training.stride
        if task.info is not None and not task.info.steady and task.num_times <= span and known.stages:
            path = config.data.root
            checks.refuse(
                "data",
                too_short(config.training.horizon, config.training.stride, path=path, longest=task.num_times),
            )
        is_transient = task.info is not None and not task.info.steady
        stages = [STAGES[stage] for stage in known.stages]
        if any(stage.learns == "residuals" for stage in stages) and is_transient:
            lead_times, horizon = config.diffusion.lead_times, (task.num_times - 1) // config.training.stride
            checks.passes("data", partial(check_lead_times, lead_times, horizon=horizon, task=name))
        if any(stage.items == "residuals" for stage in stages) and "val" in (*task.builds, *task.stores):
            num = (task.num_samples("val") + 1) // 2  # the others are "dev"
            share = config.diffusion.residual_share
            checks.passes("data", partial(check_enough, num, share, task=name))
        if any(stage.items == "frames" for stage in stages) and config.training.field_source != "store":
            for split in TRAINED:
                if split in task.builds and split not in task.stores:
                    checks.passes("data", lambda build=task.builds[split]: check_room(build))  # type: ignore[misc]


def _check_hyperparameters(known: Known, checks: Checks) -> None:
    config, num_ranks = known.config, PlannedRanks.of(known.config).num
    device = "cuda" if config.training.device != "cpu" and visible_gpus() else "cpu"
    for name in known.stages:
        check = partial(check_switches, config, name, device=device, num_ranks=num_ranks)
        checks.passes("hyperparameters", check)
        for text in unused_settings(config, name):
            checks.warn("hyperparameters", text)
        settings = config.stage(name)
        lr, scheduler = settings.optimizer.lr, settings.scheduler
        if lr is not None and lr > _ODD_LR:
            checks.warn("hyperparameters", f"stage {name}: a learning rate of {lr:g} is unusually large")
        steps = settings.steps or settings.epochs * (settings.steps_per_epoch or 0)
        if 0 < steps <= scheduler.warmup_steps and (settings.steps or settings.budget is None):
            text = f"stages.{name}.scheduler.warmup_steps = {scheduler.warmup_steps} of {steps} steps"
            checks.warn("hyperparameters", f"{text}: the learning rate never reaches its peak")
        size = settings.batch_size or settings.global_batch_size
        sized = f"batch {size} x {config.training.accum_steps}"
        if not checks.has_problem("hyperparameters"):
            checks.ok(
                "hyperparameters", f"stage {name}: {settings.optimizer.name}, learning rate {lr:g}, {sized}"
            )


def _check_stages(known: Known, checks: Checks) -> None:
    config = known.config
    for text in unused_in_all_stages(config):
        checks.warn("stages", text)
    if not known.stages:
        checks.warn("stages", "no stage has epochs: nothing would be trained")
    elif not checks.has_problem("stages"):
        checks.ok("stages", " -> ".join(f"{name} ({_length(config, name)})" for name in known.stages))
    infos = {name: task.info for name, task in known.tasks.items() if task.info is not None}
    stages = [STAGES[stage] for stage in known.stages]
    if any(stage.learns == "solutions" for stage in stages) and infos.keys() == set(config.data.tasks):
        steady = [name for name, info in infos.items() if info.steady]
        checks.passes("stages", lambda: check_steady_task(config, found=steady))
    weights = config.training.physics_priors.weights
    if (
        weights
        and any(stage.learns == "steps" for stage in stages)
        and infos.keys() == set(config.data.tasks)
    ):
        laws = {name: laws_of_fields(info, config.own_laws) for name, info in infos.items()}
        checks.passes("stages", lambda: check_priors(weights, laws))
    for name in config.stages.keys() & set(BASELINES):
        checks.ok("stages", f"{name}: a baseline, trained by `ups train --stage {name}`")


def _length(config: RunConfig, name: str) -> str:
    settings = config.stage(name)
    if settings.steps is not None:
        return counted(settings.steps, "step")
    return str(settings.budget) if settings.budget is not None else counted(settings.epochs, "epoch")
