"""`ups compare`: baselines trained with what a run's operator took, and all of them evaluated beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.config.stages import BUDGETS, BudgetConfig, Limit
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError
from ups.eval.baseline_model import BASELINE, check_kinds, load_baseline, stage_of
from ups.eval.equal_budgets import encoding_seconds, equal_budgets, used_stages
from ups.eval.evaluate import evaluate_opened
from ups.eval.report import Report
from ups.eval.runs import baseline_path, open_others, open_runs, opened
from ups.eval.split_uses import daily_split
from ups.eval.training_logs import StageLog, read_stage_logs
from ups.log import logger, quiet
from ups.losses import check_losses
from ups.models.operators import dotted_name
from ups.train.budget import ROUNDS, ratio_of, step_seconds, without_preparing
from ups.train.stage import Stage, StageStart, make_stage
from ups.train.train_baselines import config_of_baseline, obtain_baseline
from ups.trained.checkpoint import read_document
from ups_store.launch import ONLY_ONCE, check_shared


def compare_run(
    checkpoint: Path | None,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    seeds: Sequence[int] = (),
    split: str | None = None,
    kinds: Sequence[str] | None = None,
    by: Sequence[str] | None = None,
    amounts: Mapping[Limit, float | None],
    also: Sequence[Path] = (),
    restart: bool = False,
) -> Report:
    """Train baselines with as much as a run's operator took, and evaluate all beside it."""
    check_shared(hint=ONLY_ONCE)
    wanted, limits = check_kinds(kinds), check_limits(by)
    runs = open_runs(checkpoint, config_path=config_path, overrides=overrides, seeds=seeds)
    configs = [opened(run)[0] for run in runs]
    if config_path is None:  # the checkpoint's, whose code is that of others
        check_losses(configs[0].training, allow_code=())
        dotted_name(configs[0].operator.name, allow_code=())
    others = open_others(also, configs[0], runs[0].operator)
    which = daily_split(split, configs[0].evaluation.split)
    tasks, all_logs = configs[0].data.tasks, [read_stage_logs(config) for config in configs]
    given = {limit: amount for limit, amount in amounts.items() if amount is not None}
    budgets = [equal_budgets(logs, num_tasks=len(tasks), by=limits, given=given) for logs in all_logs]
    trained = []
    for run, config, own_budgets, logs in zip(runs, configs, budgets, all_logs, strict=True):
        measured = [budget for budget in own_budgets if budget.limit == "seconds" and "seconds" not in given]
        paths = []
        for task, budget in itertools.product(tasks, own_budgets):
            fair = _equal_times(config, wanted, task, budget, logs, restart) if budget in measured else {}
            for kind in wanted:
                own, steps = fair.get(kind, (budget, None))
                options: dict[str, Any] = {"budget": own, "steps": steps, "restart": restart}
                paths.append(obtain_baseline(config, kind, task, **options))
        baselines = [load_baseline(path, device=str(run.operator.device)) for path in paths]
        trained.append(replace(run, baselines=baselines, logs=logs))
    each = f"a {' and at a '.join(map(str, budgets[0]))}"
    if len(runs) > 1:
        each = "the budgets of the operator of the same seed"
    title = f"{', '.join(tasks)}: at {each} for each baseline"
    return evaluate_opened(trained, also=others, split=which, title=title)


def check_limits(by: Sequence[str] | None) -> list[Limit]:
    """What budgets count; all that there are by default."""
    if unknown := [name for name in by or () if name not in BUDGETS]:
        raise ConfigError("--by", expected=" or ".join(BUDGETS), found=repr(unknown[0]))
    return [limit for limit in BUDGETS if not by or limit in by]


def _equal_times(
    config: RunConfig,
    kinds: Sequence[str],
    task: str,
    budget: BudgetConfig,
    logs: Sequence[StageLog],
    restart: bool,
) -> dict[str, tuple[BudgetConfig, int]]:
    """The budget of seconds of each baseline with what it was measured to be, and its steps.

    What was measured before for the same budget stays, so that nothing is trained again.
    """
    known = {} if restart else {kind: _measured_before(config, kind, task, budget) for kind in kinds}
    missing = [kind for kind in kinds if known.get(kind) is None]
    found = {kind: before for kind, before in known.items() if before is not None}
    if missing:
        logger.info(f"{task}: steps of the operator's stages and of the baselines are timed in turns")
        found |= measure_equal_times(config, missing, task, budget, logs)
    for kind, (own, steps) in found.items():
        logger.info(
            f"{task}: {kind} takes {own.step_ratio:.3g} times as long a step as the operator: {steps:,} steps"
        )
    return found


def measure_equal_times(
    config: RunConfig, kinds: Sequence[str], task: str, budget: BudgetConfig, logs: Sequence[StageLog]
) -> dict[str, tuple[BudgetConfig, int]]:
    """How many steps of each baseline take as long as the training of the operator did.

    Steps of all stages are timed in turns, so no clock of the past is compared with one of now.

    Returns:
        By kind the budget, with the ratio of a baseline's step to one of the operator's, and the steps.
    """
    used = [log for log in used_stages(logs) if log.steps]
    with ExitStack() as stack:
        stages = [(log.stage, without_preparing(config)) for log in used]
        of_kinds = [(kind, config_of_baseline(config, kind, task)) for kind in kinds]
        stages += [(stage_of(kind), without_preparing(own)) for kind, own in of_kinds]
        made: list[tuple[Stage, RunConfig]] = []
        with quiet():  # said when they were trained, or will be
            device = choose_device(config.training.device)
            for name, own in stages:
                stage = make_stage(name, own, device=device, start=StageStart())
                stack.callback(stage.close)
                made.append((stage, own))
        seconds = step_seconds(made, device=device, rounds=ROUNDS)
    # The operator's last stage is the unit; an autoencoder's steps, and encoding, count as so many of it.
    steps_of = dict(zip((log.stage for log in used), seconds, strict=False))
    of_operator = steps_of[used[-1].stage]
    units = sum(log.steps * ratio_of(steps_of[log.stage], of_operator) for log in used)
    units *= 1 + encoding_seconds(used) / sum(log.processor_s for log in used)
    share = units / len(config.data.tasks)
    found: dict[str, tuple[BudgetConfig, int]] = {}
    for kind, own_seconds in zip(kinds, seconds[len(used) :], strict=True):
        ratio = ratio_of(own_seconds, of_operator)
        found[kind] = budget.model_copy(update={"step_ratio": ratio}), max(1, int(share / ratio))
    return found


def _measured_before(
    config: RunConfig, kind: str, task: str, budget: BudgetConfig
) -> tuple[BudgetConfig, int] | None:
    """What a budget of seconds became in a baseline that is there."""
    try:
        document: dict[str, Any] = read_document(
            baseline_path(config, kind, task, budget.limit), kind=BASELINE
        )
        stage = document["config"]["stages"][stage_of(kind)]
        saved = BudgetConfig.model_validate(stage["budget"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
    is_same = saved.seconds == budget.seconds and saved.step_ratio is not None and stage["steps"]
    return (saved, int(stage["steps"])) if is_same else None
