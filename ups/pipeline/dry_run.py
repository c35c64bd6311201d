"""`ups dry-run`: what a run would build, reuse and train, and what that takes; nothing of it is written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ups.config import RunConfig, load_config
from ups.data.splits import open_split
from ups.data.stores import latent_build
from ups.device import choose_device
from ups.errors import CheckpointError, UpsError, needs
from ups.log import logger, quiet
from ups.pipeline.config_checks import check_config
from ups.pipeline.machine_checks import wanted_stores
from ups.pipeline.plan import BUILT, Plan, StagePlan, StorePlan
from ups.pipeline.plan_baselines import PlannedBaseline, plan_baselines
from ups.pipeline.planned_ranks import PlannedRanks
from ups.pipeline.planned_steps import total_steps
from ups.pipeline.report import Checks
from ups.pipeline.scratch import Scratch, scratch_folder
from ups.pipeline.sources import TaskSources, find_tasks
from ups.stages import ENCODER_MODEL, STAGES, Model
from ups.train.checks import builds_fields, builds_latents
from ups.train.meter import SMALLER, is_out_of_memory
from ups.train.saved_state import SavedState, state_path
from ups_store.build import BuildConfig, DigestCache, Readers, explain
from ups_store.console import format_nbytes
from ups_store.errors import DiskFullError, MemoryLimitError, StoreError

with needs("train"):
    import torch

NUM_STEPS = 5  # of each stage that are timed


def dry_run(
    config_path: Path | None,
    overrides: Sequence[str] = (),
    *,
    price_per_hour: float | None = None,
    num_steps: int = NUM_STEPS,
) -> Plan:
    """Say what a run would do and what it takes; nothing of the run is written.

    Sources whose digests aren't known are read where there is a store to compare with, as by the build.

    Args:
        config_path: YAML file, or the name of a shipped one.
        price_per_hour: Of the machine, in any currency.
        num_steps: Real steps of each stage that are timed; 0 makes none.
    """
    began = time.perf_counter()
    report = check_config(config_path, overrides)
    if report.problems:
        return Plan(report.checks, report.seconds)
    checks = Checks()
    with quiet():
        config = load_config(config_path, overrides=overrides)
        device = choose_device(config.training.device)
    if config.training.device.startswith("cuda") and device.type == "cpu":
        checks.warn("hardware", f"there is no {config.training.device}; the CPU is used instead")
    ranks = PlannedRanks.of(config)
    baselines = plan_baselines(config)
    _check_ranks(ranks, device, checks)
    with Readers(config.reading, note=logger.info) as readers:
        tasks = find_tasks(config, readers)
        stages = _plan_stages(config, tasks, ranks)
        stores = _plan_stores(config, stages, tasks, readers, checks)
    stages += [baseline.plan for baseline in baselines.values()]
    if num_steps:
        given: dict[str, Any] = {"config_path": config_path, "overrides": overrides, "tasks": tasks}
        given |= {"ranks": ranks}
        measuring = partial(_measure, baselines=baselines, checks=checks, device=device, num_steps=num_steps)
        stages = _with_measured(config, stages, given, checks, measuring, device=device)
    plan = Plan((), 0.0, tuple(stores), tuple(stages), _name_of(device), price_per_hour, ranks)
    _check_disk(config, plan, checks)
    return replace(plan, checks=(*report.checks, *checks.lines), seconds=time.perf_counter() - began)


def _check_ranks(ranks: PlannedRanks, device: torch.device, checks: Checks) -> None:
    """Say so if there are fewer GPUs than ranks: another machine may be meant."""
    num = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.num > 1 and num < ranks.num:
        checks.warn("hardware", f"the run has {ranks.num} ranks, and this machine {num} GPUs for them")


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _plan_stages(config: RunConfig, tasks: Mapping[str, TaskSources], ranks: PlannedRanks) -> list[StagePlan]:
    """What becomes of each stage, by its training state; its data are compared when it is made."""
    plans: list[StagePlan] = []
    for name in config.trained_stages:
        steps = total_steps(config, name, tasks, ranks)
        plan = _plan_stage(config, name, steps)
        needed = {model for model in config.models_for(STAGES[name]) if not config.is_given(model)}
        before = next(
            (one for one in plans if needed & {*STAGES[one.name].makes} and one.action != "keep"), None
        )
        if before is not None and plan.action in ("continue", "keep"):
            plan = StagePlan(name, "train again", f"stage {before.name} is trained before", steps=steps)
        plans.append(plan)
    return plans


def _plan_stage(config: RunConfig, name: str, steps: int | None) -> StagePlan:
    path = state_path(config, name)
    if not path.exists():
        return StagePlan(name, "train", "there is no training state", steps=steps)
    try:
        state = SavedState.read(path)
        state.check_config(config, stage=name)
    except CheckpointError as error:
        return StagePlan(name, "train again", error.problem, steps=steps)
    done = int(state.document["position"]["step"])
    if steps is not None and done >= steps:
        return StagePlan(name, "keep", f"{done:,} steps are made", done=done, steps=steps)
    return StagePlan(name, "continue", f"after step {done:,}", done=done, steps=steps)


def _plan_stores(
    config: RunConfig,
    stages: Sequence[StagePlan],
    tasks: Mapping[str, TaskSources],
    readers: Readers,
    checks: Checks,
) -> list[StorePlan]:
    """What becomes of each store."""
    plans: list[StorePlan] = []
    if builds_fields(config):
        plans += _explained(config.build, "fields", tasks, readers, checks)
    if not builds_latents(config):
        return plans
    makers = (stage for stage in stages if ENCODER_MODEL in STAGES[stage.name].makes)
    trained = next((stage for stage in makers if stage.action != "keep"), None)
    if trained is None:
        build = latent_build(config, autoencoder_path=config.autoencoder_path, device="cpu")
        return plans + _explained(build, "latents", tasks, readers, checks)
    reason = f"after stage {trained.name}"
    for store in wanted_stores(config, tasks):
        action = "build" if store.place is None else "rebuild"
        plans.append(
            StorePlan(store.task, store.split, "latents", action, reason, str(store.path), store.nbytes)
        )
    return plans


def _explained(
    build: BuildConfig, holds: str, tasks: Mapping[str, TaskSources], readers: Readers, checks: Checks
) -> list[StorePlan]:
    digests = DigestCache(build.cache.dir, save=False, readers=readers)
    plans = []
    for name, task in tasks.items():
        for split in build.data.split:
            if split not in task.builds:
                continue
            try:
                found = explain(open_split(build, name, split, readers=readers, digests=digests))
            except (UpsError, StoreError) as error:
                checks.refuse("stores", error)
                continue
            path, nbytes = str(found.plan["path"]), int(found.plan["nbytes"])
            plans.append(StorePlan(name, split, holds, found.action, found.reason, path, nbytes))
            if found.action == "refuse":
                problem = StoreError(f"the build would stop: {found.reason}", path=path, kind="refused")
                checks.refuse("stores", problem)
    return plans


def _with_measured(
    config: RunConfig,
    stages: Sequence[StagePlan],
    given: Mapping[str, Any],
    checks: Checks,
    measure: Callable[[Scratch, StagePlan], StagePlan],
    *,
    device: torch.device,
) -> list[StagePlan]:
    """The stages with what their steps take; one that can't be measured is a warning."""
    kept = {stage.name for stage in stages if stage.action == "keep"}
    models = _models_of_run(config, {stage.name for stage in stages} - kept)
    measured: list[StagePlan] = []
    with scratch_folder() as folder:
        scratch = Scratch(config, folder=folder, models=models, **given)
        if not checks.passes("data", scratch.build_fields):
            return list(stages)
        for stage in stages:
            if stage.name in kept:
                measured.append(stage)
                continue
            logger.info(f"stage {stage.name}: steps on {_name_of(device)}")
            measured.append(measure(scratch, stage))
    return measured


def _models_of_run(config: RunConfig, trained: Collection[str]) -> dict[Model, Path]:
    """Models that stages are given and that aren't to be trained, so that they needn't be stood in for."""
    made = {model for name, stage in STAGES.items() if name in trained for model in stage.makes}
    needed = {model for stage in STAGES.values() for model in stage.needs}
    models = {model for model in needed if config.is_given(model) or model not in made}
    # An encoder that isn't there is made for the measurement; what is to be corrected is there, or checked.
    models -= set() if config.autoencoder_path.exists() else {ENCODER_MODEL}
    return {model: config.path_of(model).absolute() for model in models}


def _measure(
    scratch: Scratch,
    stage: StagePlan,
    *,
    baselines: Mapping[str, PlannedBaseline],
    checks: Checks,
    device: torch.device,
    num_steps: int,
) -> StagePlan:
    try:
        baseline = baselines.get(stage.name)
        name, own = baseline.in_run(scratch.config) if baseline else (stage.name, scratch.config)
        if name in STAGES and STAGES[name].reads_states and own.uses_encoder:
            scratch.build_latents(device)
        found = scratch.measure(name, own, device=device, num_steps=num_steps)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"stage {stage.name} doesn't fit into the memory of {_name_of(device)}"
        found_text = str(error).partition("\n")[0]
        checks.refuse("hardware", MemoryLimitError(problem, found=found_text, hint=SMALLER))
        return stage
    except (UpsError, StoreError) as error:
        checks.warn("stages", f"stage {stage.name} isn't measured: {scratch.with_own_paths(str(error))}")
        return stage
    return replace(stage, steps=stage.steps if found.steps is None else found.steps, measured=found)


def _check_disk(config: RunConfig, plan: Plan, checks: Checks) -> None:
    """Whether each file system has room for what would be written there."""
    written: list[tuple[Path, int]] = [
        (Path(store.path).absolute().parent, store.nbytes) for store in plan.stores if store.action in BUILT
    ]
    folder = config.checkpoint.dir.absolute()
    written += [(folder, stage.measured.saved_bytes) for stage in plan.stages if stage.measured]
    needed: dict[int, tuple[Path, int]] = {}
    for path, nbytes in written:
        there = next(place for place in (path, *path.parents) if place.exists())
        device = there.stat().st_dev
        needed[device] = there, needed.get(device, (there, 0))[1] + nbytes
    for there, nbytes in needed.values():
        free = shutil.disk_usage(there).free
        if nbytes > free:
            expected, found = format_nbytes(nbytes), f"{format_nbytes(free)} free"
            hint = "free some space, or put stores and checkpoints elsewhere"
            error = DiskFullError(
                "no room for the run", path=there, expected=expected, found=found, hint=hint
            )
            checks.refuse("disk", error)
