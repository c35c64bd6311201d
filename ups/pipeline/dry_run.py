"""`ups dry-run`: what a run would build, reuse and train, and what that takes; nothing of it is written."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ups.config import RunConfig, load_config
from ups.config.stages import BudgetConfig
from ups.data.splits import open_split
from ups.data.stores import latent_build
from ups.device import choose_device
from ups.errors import CheckpointError, UpsError, needs
from ups.eval.baseline_model import BASELINE, DEFAULT_KINDS
from ups.eval.equal_budgets import parse_budgets
from ups.eval.runs import baseline_path
from ups.log import logger, quiet
from ups.pipeline.config_checks import check_config
from ups.pipeline.machine_checks import wanted_stores
from ups.pipeline.planned import PlannedRanks, total_steps
from ups.pipeline.report import Checks, Report, show_checks
from ups.pipeline.scratch import Measured, Scratch, scratch_folder
from ups.pipeline.sources import TaskSources, find_tasks
from ups.stages import ENCODER_MODEL, STAGES
from ups.train.checks import builds_fields, builds_latents
from ups.train.meter import SMALLER, is_out_of_memory
from ups.train.saved_state import SavedState, differing_keys, state_path
from ups.train.train_baselines import config_of_baseline
from ups.trained.checkpoint import read_document
from ups_store.build import BuildConfig, DigestCache, Readers, explain
from ups_store.console import format_nbytes
from ups_store.errors import DiskFullError, MemoryLimitError, StoreError

with needs("train"):
    import torch

if TYPE_CHECKING:
    from rich.console import Console

NUM_STEPS = 5  # of each stage that are timed
_BUILT = ("build", "rebuild", "continue", "repack")
Action = Literal["train", "train again", "continue", "keep"]


@dataclass(frozen=True)
class StorePlan:
    """What would become of a store.

    Attributes:
        task: Its task.
        split: Its split.
        holds: "fields" or "latents".
        action: As `ups_store.build.Explanation.action`.
        reason: Why.
        path: Where it lies, or would.
        nbytes: Its size, of latents whose encoder isn't there yet an estimate.
    """

    task: str
    split: str
    holds: str
    action: str
    reason: str
    path: str
    nbytes: int


@dataclass(frozen=True)
class StagePlan:
    """What would become of a stage.

    Attributes:
        name: Of the stage.
        action: "train", "train again" (another configuration, or another encoder), "continue", "keep".
        reason: Why.
        done: Optimiser steps that are made already.
        steps: In all; None where nothing says it.
        measured: What its steps take here; None where none were made.
    """

    name: str
    action: Action
    reason: str
    done: int = 0
    steps: int | None = None
    measured: Measured | None = None

    @property
    def seconds(self) -> float | None:
        """Of the steps that are left; validation and exports aside."""
        if self.action == "keep":
            return 0.0
        if self.measured is None or self.steps is None:
            return None
        return self.measured.first_step_s + max(0, self.steps - self.done - 1) * self.measured.step_s


@dataclass(frozen=True)
class Plan(Report):
    """What a run would do, beside what `check_config` found.

    Attributes:
        stores: In the order of their builds.
        stages: In the order of their training.
        device: Where they would be trained.
        price_per_hour: Of the machine; None where it isn't known.
        ranks: That train together.
    """

    stores: tuple[StorePlan, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    device: str = ""
    price_per_hour: float | None = None
    ranks: PlannedRanks = field(default=PlannedRanks())

    @property
    def training_seconds(self) -> float | None:
        """Of all steps that are left; None if one stage's aren't known."""
        seconds = [stage.seconds for stage in self.stages]
        known = [one for one in seconds if one is not None]
        return sum(known) if len(known) == len(seconds) else None

    @property
    def cost(self) -> float | None:
        """Of these, in the unit of the price."""
        if self.price_per_hour is None or self.training_seconds is None:
            return None
        return self.training_seconds / 3600 * self.price_per_hour

    @property
    def memory_bytes(self) -> int:
        """Peak of all stages that were measured."""
        return max((stage.measured.memory_bytes for stage in self.stages if stage.measured), default=0)

    @property
    def disk_bytes(self) -> int:
        """Of stores that would be built and of checkpoints."""
        stores = sum(store.nbytes for store in self.stores if store.action in _BUILT)
        return stores + sum(stage.measured.saved_bytes for stage in self.stages if stage.measured)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        totals = ("training_seconds", "cost", "memory_bytes", "disk_bytes")
        return {
            **super().to_json(),
            "device": self.device,
            "ranks": asdict(self.ranks),
            "stores": [asdict(store) for store in self.stores],
            "stages": [{**asdict(stage), "seconds": stage.seconds} for stage in self.stages],
            "price_per_hour": self.price_per_hour,
            **{name: getattr(self, name) for name in totals},
        }

    def show(self, console: Console) -> None:
        """Write what is odd, what would be done, and what it takes."""
        show_checks([check for check in self.checks if check.mark != "ok"], console)
        for store in self.stores:
            title, size = f"{store.task} {store.split} ({store.holds})", format_nbytes(store.nbytes)
            line = f"store  {title}: {store.action}: {store.reason}, {size}, {store.path}"
            console.print(line, soft_wrap=True)
        for stage in self.stages:
            line = f"stage  {stage.name}: {stage.action}: {stage.reason}"
            if stage.measured is not None and stage.seconds is not None:
                left, each = (stage.steps or 0) - stage.done, f"{1000 * stage.measured.step_s:.1f} ms"
                memory = format_nbytes(stage.measured.memory_bytes)
                line += f"; {left:,} steps of {each}: {duration(stage.seconds)}, memory {memory}"
            console.print(line, soft_wrap=True)
        if self.stages:
            seconds, is_alone = self.training_seconds, self.ranks.num == 1
            taken = "unknown" if seconds is None else duration(seconds)
            if self.cost is not None:
                taken += f", costs {self.cost:.2f} at {self.price_per_hour:g} an hour"
            exchange, each = ("", "") if is_alone else (", and what ranks exchange,", " of each rank")
            memory = f"{format_nbytes(self.memory_bytes)} at most" if self.memory_bytes else "not measured"
            console.print(
                f"total  on {self.ranks.shown(self.device)}: steps take {taken} (validation and"
                f" builds{exchange} not counted); memory{each} {memory};"
                f" disk {format_nbytes(self.disk_bytes)}",
                soft_wrap=True,
            )
        console.print(self.summary)


def duration(seconds: float) -> str:
    """For people: "41 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.num > 1 and num_gpus < ranks.num:  # another machine may be meant
        checks.warn("hardware", f"the run has {ranks.num} ranks, and this machine {num_gpus} GPUs for them")
    baselines = plan_baselines(config)
    with Readers(config.reading, note=logger.info) as readers:
        tasks = find_tasks(config, readers)
        stages = _plan_stages(config, tasks, ranks)
        stores = _plan_stores(config, stages, tasks, readers, checks)
    stages += [baseline.plan for baseline in baselines.values()]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if num_steps:
        trained = {stage.name for stage in stages if stage.action != "keep"}
        with scratch_folder() as folder:
            scratch = Scratch(
                config,
                config_path=config_path,
                overrides=overrides,
                tasks=tasks,
                folder=folder,
                trained=trained,
                ranks=ranks,
            )
            if checks.passes("data", scratch.build_fields):
                for number, stage in enumerate(stages):
                    if stage.name in trained:
                        logger.info(f"stage {stage.name}: steps on {name}")
                        baseline = baselines.get(stage.name)
                        stages[number] = _measured(
                            scratch, stage, baseline, checks, device=device, on=name, num_steps=num_steps
                        )
    plan = Plan((), 0.0, tuple(stores), tuple(stages), name, price_per_hour, ranks)
    _check_disk(config, plan, checks)
    return replace(plan, checks=(*report.checks, *checks.lines), seconds=time.perf_counter() - began)


def _plan_stages(config: RunConfig, tasks: Mapping[str, TaskSources], ranks: PlannedRanks) -> list[StagePlan]:
    """What becomes of each stage, by its training state; its data are compared when it is made."""
    plans: list[StagePlan] = []
    for name in config.trained_stages:
        steps, path = total_steps(config, name, tasks, ranks), state_path(config, name)
        plan = StagePlan(name, "train", "there is no training state", steps=steps)
        if path.exists():
            try:
                state = SavedState.read(path)
                state.check_config(config, stage=name)
            except CheckpointError as error:
                plan = StagePlan(name, "train again", error.problem, steps=steps)
            else:
                done = int(state.document["position"]["step"])
                is_over = steps is not None and done >= steps
                action: Action = "keep" if is_over else "continue"
                reason = f"{done:,} steps are made" if is_over else f"after step {done:,}"
                plan = StagePlan(name, action, reason, done=done, steps=steps)
        needed = {model for model in config.models_for(STAGES[name]) if not config.is_given(model)}
        makers = (one for one in plans if needed & {*STAGES[one.name].makes})
        before = next((one for one in makers if one.action != "keep"), None)
        if before is not None and plan.action in ("continue", "keep"):
            plan = StagePlan(name, "train again", f"stage {before.name} is trained before", steps=steps)
        plans.append(plan)
    return plans


@dataclass(frozen=True)
class PlannedBaseline:
    """A baseline that the evaluation asks for, and what would become of it."""

    kind: str
    task: str
    budget: BudgetConfig
    plan: StagePlan


def plan_baselines(config: RunConfig) -> dict[str, PlannedBaseline]:
    """Plan one for each task, kind and budget, by their names; its data are compared when it is made."""
    evaluation = config.evaluation
    budgets = parse_budgets(
        flops=evaluation.baseline_flops,
        samples=evaluation.baseline_samples,
        seconds=evaluation.baseline_seconds,
    )
    planned = {}
    for task, budget, kind in itertools.product(config.data.tasks, budgets, DEFAULT_KINDS):
        name = f"{kind} ({task}, {budget})"
        plan = StagePlan(name, "train", "there is none yet")
        try:
            document = read_document(baseline_path(config, kind, task, budget.limit), kind=BASELINE)
        except CheckpointError:
            planned[name] = PlannedBaseline(kind, task, budget, plan)
            continue
        steps = document["config"]["stages"].get(kind, {}).get("steps")
        own = config_of_baseline(config, kind, task, budget=budget, steps=steps)
        differing = differing_keys(document["config"], own, stage=kind)
        if document["effort"] is None:
            plan = StagePlan(name, "train again", "it is untrained")
        elif differing:
            plan = StagePlan(name, "train again", differing[0])
        else:
            plan = StagePlan(name, "keep", "it was trained alike", done=steps or 0, steps=steps)
        planned[name] = PlannedBaseline(kind, task, budget, plan)
    return planned


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
    for store in wanted_stores(config, tasks):
        action, path = "build" if store.place is None else "rebuild", str(store.path)
        reason = f"after stage {trained.name}"
        plans.append(StorePlan(store.task, store.split, "latents", action, reason, path, store.nbytes))
    return plans


def _explained(
    build: BuildConfig, holds: str, tasks: Mapping[str, TaskSources], readers: Readers, checks: Checks
) -> list[StorePlan]:
    """What a build would do about each store."""
    digests = DigestCache(build.cache.dir, save=False, readers=readers)
    plans = []
    for name, task in tasks.items():
        for split in build.data.split:
            if split not in task.builds:
                continue
            try:
                known = explain(open_split(build, name, split, readers=readers, digests=digests))
            except (UpsError, StoreError) as error:
                checks.refuse("stores", error)
                continue
            path, nbytes = str(known.plan["path"]), int(known.plan["nbytes"])
            plans.append(StorePlan(name, split, holds, known.action, known.reason, path, nbytes))
            if known.action == "refuse":
                problem = StoreError(f"the build would stop: {known.reason}", path=path, kind="refused")
                checks.refuse("stores", problem)
    return plans


def _measured(
    scratch: Scratch,
    stage: StagePlan,
    baseline: PlannedBaseline | None,
    checks: Checks,
    *,
    device: torch.device,
    on: str,
    num_steps: int,
) -> StagePlan:
    """The stage with what its steps take; one that can't be measured is a warning."""
    try:
        name, config = stage.name, scratch.config
        if baseline is not None:
            name, budget = baseline.kind, baseline.budget
            config = config_of_baseline(config, name, baseline.task, budget=budget)
        if name in STAGES and STAGES[name].reads_states and config.uses_encoder:
            scratch.build_latents(device)
        measured = scratch.measure(name, config, device=device, num_steps=num_steps)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"stage {stage.name} doesn't fit into the memory of {on}"
        shown = str(error).partition("\n")[0]
        checks.refuse("hardware", MemoryLimitError(problem, found=shown, hint=SMALLER))
        return stage
    except (UpsError, StoreError) as error:
        checks.warn("stages", f"stage {stage.name} isn't measured: {scratch.with_own_paths(str(error))}")
        return stage
    return replace(stage, steps=stage.steps if measured.steps is None else measured.steps, measured=measured)


def _check_disk(config: RunConfig, plan: Plan, checks: Checks) -> None:
    """Check that each file system has room for what would be written there."""
    written: list[tuple[Path, int]] = [
        (Path(store.path).absolute().parent, store.nbytes) for store in plan.stores if store.action in _BUILT
    ]
    folder = config.checkpoint.dir.absolute()
    written += [(folder, stage.measured.saved_bytes) for stage in plan.stages if stage.measured]
    needed: dict[int, tuple[Path, int]] = {}
    for path, nbytes in written:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        device = there.stat().st_dev
        needed[device] = there, needed.get(device, (there, 0))[1] + nbytes
    for there, nbytes in needed.values():
        free = shutil.disk_usage(there).free
        if nbytes > free:
            error = DiskFullError(
                "no room for the run",
                path=there,
                expected=format_nbytes(nbytes),
                found=f"{format_nbytes(free)} free",
                hint="free some space, or put stores and checkpoints elsewhere",
            )
            checks.refuse("disk", error)
