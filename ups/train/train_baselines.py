"""Training the baselines of a run, one for each task: as long as their stage says, or within a budget.

Each has a folder, a state and a log of its own, so that it is continued, or kept, as any stage is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ups.config import RunConfig, load_config
from ups.config.architecture import OwnBaselineConfig
from ups.config.seeds import with_seeds
from ups.config.stages import BudgetConfig
from ups.errors import CheckpointError, ConfigError, DivergedError
from ups.eval.baseline_model import (
    BASELINE,
    DEFAULT_KINDS,
    LABELS,
    check_kinds,
    load_baseline,
    own_kind,
    stage_of,
)
from ups.eval.equal_budgets import equal_budgets, parse_budgets
from ups.eval.runs import baseline_path
from ups.eval.training_logs import read_stage_logs
from ups.log import logger
from ups.models.operators import dotted_name
from ups.output import check_writable
from ups.stages import OWN_BASELINE
from ups.train.baseline import open_baseline
from ups.train.budget import with_steps
from ups.train.distributed import joined_ranks
from ups.train.run import run_stage, train_unless_valid
from ups.train.saved_state import differing_keys
from ups.trained.checkpoint import read_document
from ups.trained.specs import OPERATOR, OPERATOR_FILE, parse_simulator_spec
from ups_store.launch import ONLY_ONCE, check_shared


def config_of_baseline(
    config: RunConfig, kind: str, task: str, *, budget: BudgetConfig | None = None, steps: int | None = None
) -> RunConfig:
    """The configuration of one baseline: one task, a folder of its own, and its budget."""
    name, baselines = stage_of(kind), config.baselines
    stage = config.stage(name)  # also what it takes from the operator's, which a continuation compares
    budget = budget or stage.budget
    folder = baseline_path(config, kind, task, "steps" if budget is None else budget.limit).parent
    own: dict[str, Any] = {
        "data": config.data.model_copy(update={"tasks": (task,)}),
        "checkpoint": config.checkpoint.model_copy(update={"dir": folder}),
        "training": config.training.model_copy(update={"log_path": None}),
    }
    if name == OWN_BASELINE.name:  # one of several may be the one that the configuration sizes
        own["baselines"] = baselines.model_copy(update={"own": _own_baseline(baselines.own, kind)})
    if budget is not None:
        changed = {"budget": budget, "steps": steps, "steps_per_epoch": None, "patience": None}
        stage = stage.model_copy(update=changed)
    return config.model_copy(update=own | {"stages": {**config.stages, name: stage}})


def _own_baseline(configured: OwnBaselineConfig, kind: str) -> OwnBaselineConfig:
    """Keys of one's own as the configuration has them, if it names this kind; else the defaults."""
    config: dict[str, Any] = {}
    with suppress(CheckpointError):  # the name is a checkpoint's, and of code that nobody asked for
        if configured.name is not None and dotted_name(configured.name, allow_code=()) == kind:
            config = configured.config
    return OwnBaselineConfig(name=kind, config=config)


def train_stage_of_baselines(
    name: str, config: RunConfig, *, restart: bool = False, began: float | None = None
) -> dict[str, Any]:
    """Train a stage of baselines on every task of a run, as its stage says; under `torchrun` on all ranks.

    Returns:
        {"stage": name, "stages": reports of `run_stage` by task}.
    """
    kind = own_kind(config) if name == OWN_BASELINE.name else check_kinds([name])[0]
    reports: dict[str, Any] = {}
    with joined_ranks(config.training.device, timeout_s=config.training.rank_timeout_s):
        for task in config.data.tasks:
            of_task = config_of_baseline(config, kind, task)
            reports[task] = run_stage(name, of_task, restart=restart, began=began)
            began = None  # the start of the process is the first one's
    return {"stage": name, "stages": reports}


def obtain_baseline(
    config: RunConfig,
    kind: str,
    task: str,
    *,
    budget: BudgetConfig,
    steps: int | None = None,
    restart: bool = False,
) -> Path:
    """Train a baseline within a budget, unless one was trained alike, and give its file; a collective."""
    own = config_of_baseline(config, kind, task, budget=budget, steps=steps)
    path, training = baseline_path(config, kind, task, budget.limit), config.training
    with joined_ranks(training.device, timeout_s=training.rank_timeout_s) as (ranks, _):
        if not restart and ranks.first_does(lambda: is_trained_alike(path, own, kind)):
            logger.info(f"{path} is there already, trained alike")
            return path
        check_writable(path.parent)
        logger.info(f"{task}: {LABELS.get(kind, kind)}, {budget}")
        train_unless_valid(stage_of(kind), own, restart=restart)
    return path


def is_trained_alike(path: Path, config: RunConfig, kind: str) -> bool:
    """Whether a file holds what this configuration's training would end with; reads all training data."""
    try:
        document = read_document(path, kind=BASELINE)
    except CheckpointError:
        return False
    name = stage_of(kind)
    stage = document["config"]["stages"].get(name, {})
    if config.stage(name).steps is None and stage.get("steps"):
        config = with_steps(config, name, stage["steps"])  # what its budget became
    if document["effort"] is None or differing_keys(document["config"], config, stage=name):
        return False
    _, spec = open_baseline(kind, config)
    return bool(document["spec"] == spec.as_stored())


def train_configured_baselines(config: RunConfig, *, restart: bool) -> None:
    """Train FNO and U-Net of every task within the budgets in `evaluation`, as `obtain_baseline` does.

    None beside an operator whose errors are of latents, as a baseline's aren't. One that there can't be,
    such as for three axes, or that diverges, is named and left out: the operator has been trained by now, and
    is reported on without it.
    """
    evaluation = config.evaluation
    budgets = parse_budgets(
        flops=evaluation.baseline_flops,
        samples=evaluation.baseline_samples,
        seconds=evaluation.baseline_seconds,
    )
    path = config.checkpoint.dir / OPERATOR_FILE
    if not parse_simulator_spec(read_document(path, kind=OPERATOR), path).is_encoder_known:
        return
    for task, budget, kind in itertools.product(config.data.tasks, budgets, DEFAULT_KINDS):
        try:
            obtain_baseline(config, kind, task, budget=budget, restart=restart)
        except (ConfigError, DivergedError) as error:
            logger.info(f"{task}: {LABELS[kind]} is left out: {error}")


def train_baselines_of_run(
    config_path: Path | None,
    *,
    overrides: Sequence[str],
    seeds: Sequence[int] = (),
    kinds: Sequence[str] | None = None,
    amounts: Mapping[str, float | None],
    restart: bool = False,
) -> dict[str, dict[str, Any]]:
    """Train each kind of baseline on each task of a run, and give what its training took, by its path.

    Without an amount a baseline gets as many operations as the training of the run's operator took.
    """
    check_shared(hint=ONLY_ONCE)
    wanted, budgets = check_kinds(kinds), parse_budgets(**amounts)
    config = load_config(config_path, overrides=overrides)
    trained: dict[str, dict[str, Any]] = {}
    for own in with_seeds(config, seeds, config_path=config_path, overrides=overrides):
        logs, num_tasks = read_stage_logs(own), len(own.data.tasks)
        some = budgets or equal_budgets(logs, num_tasks=num_tasks, by=("flops",))
        for task, budget, kind in itertools.product(own.data.tasks, some, wanted):
            path = obtain_baseline(own, kind, task, budget=budget, restart=restart)
            model = load_baseline(path)
            logger.info(f"{task} {model.label}: {model.note}")
            assert model.effort is not None
            trained[str(path)] = asdict(model.effort)
    return trained
