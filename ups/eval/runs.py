"""Evaluating what a run has trained: operator and configuration are opened, baselines trained or found.

`ups evaluate`, `ups compare` and `ups train-baselines` each call one function of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ups.config import RunConfig, load_config
from ups.device import choose_device
from ups.errors import ConfigError
from ups.eval.baseline_model import check_kinds
from ups.eval.comparison import OtherOperator, check_comparable, equal_budgets
from ups.eval.evaluate import check_split, evaluate
from ups.eval.report import Report
from ups.eval.train_baseline import Budget, baseline_path, find_baselines, obtain_baseline
from ups.eval.training_logs import StageLog, read_stage_logs
from ups.output import Note
from ups.trained.checkpoint import missing_checkpoint, read_document
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import OPERATOR, OPERATOR_FILE
from ups_store.launch import ONLY_ONCE, check_shared


def evaluate_run(
    checkpoint: Path | None,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    split: str | None = None,
    horizon: int | None = None,
    also: Sequence[Path] = (),
    phases: Mapping[str, float] | None = None,
    title: str | None = None,
    note: Note,
) -> Report:
    """Evaluate a run's operator beside the baselines that lie with it.

    Args:
        checkpoint: As `open_run`.
        config_path: As `open_run`.
        overrides: As `open_run`.
        split: By default `evaluation.split`.
        horizon: Steps to predict; by default to the end of the shortest trajectory.
        also: Checkpoints of other operators of the same tasks.
        phases: Seconds of what happened before, by name, for the report.
        title: Heading of the report.
        note: Takes warnings, and what is being done.

    Raises:
        UpsError: As `open_run`, `open_others` and `evaluate`.
        ups_store.StoreError: If the data can't be read.
    """
    config, simulator = open_run(checkpoint, config_path=config_path, overrides=overrides, note=note)
    report = evaluate(
        config,
        simulator,
        also=open_others(also, config, simulator, note=note),
        split=check_split(split or config.evaluation.split),
        horizon=horizon,
        baselines=find_baselines(config, simulator, note=note),
        phases=phases,
        note=note,
    )
    return replace(report, title=title) if title else report


def compare_run(
    checkpoint: Path | None,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    split: str | None = None,
    kinds: Sequence[str] | None = None,
    seconds: float | None = None,
    samples: int | None = None,
    also: Sequence[Path] = (),
    restart: bool = False,
    note: Note,
) -> Report:
    """Train baselines with a run's wall time and with its samples, and evaluate all beside its operator.

    Args:
        checkpoint: As `open_run`.
        config_path: As `open_run`.
        overrides: As `open_run`.
        split: By default `evaluation.split`.
        kinds: Of baselines, see `check_kinds`.
        seconds: Wall time of each; by default what the run's training took, by its logs.
        samples: Windows that each sees; by default those of the run's training.
        also: Checkpoints of other operators of the same tasks.
        restart: Whether baselines that are there are trained again.
        note: Takes warnings, and what is being done.

    Raises:
        UpsError: As `evaluate_run`; kind "budget" where logs say nothing and no budget is given.
        ups_store.StoreError: If the data can't be read.
    """
    check_shared(hint=ONLY_ONCE)
    wanted = check_kinds(kinds)
    config, simulator = open_run(checkpoint, config_path=config_path, overrides=overrides, note=note)
    others = open_others(also, config, simulator, note=note)
    which = check_split(split or config.evaluation.split)
    tasks, logs = config.data.tasks, read_stage_logs(config, note=note)
    budgets = equal_budgets(logs, num_tasks=len(tasks), seconds=seconds, samples=samples)
    baselines = [
        obtain_baseline(
            config, kind, task, budget=budget, device=simulator.device, restart=restart, note=note
        )
        for task in tasks
        for budget in budgets
        for kind in wanted
    ]
    report = evaluate(config, simulator, split=which, baselines=baselines, also=others, logs=logs, note=note)
    title = f"{', '.join(tasks)}: at a {' and at a '.join(map(str, budgets))} for each baseline"
    return replace(report, title=title)


def train_baselines_of_run(
    config_path: Path | None,
    *,
    overrides: Sequence[str],
    kinds: Sequence[str] | None = None,
    seconds: float | None = None,
    samples: int | None = None,
    restart: bool = False,
    note: Note,
) -> dict[str, dict[str, Any]]:
    """Train each kind of baseline on each task of a run.

    Args:
        config_path: YAML file of the operator's run.
        overrides: `key=value`.
        kinds: Of baselines, see `check_kinds`.
        seconds: Wall time of each; or `samples`.
        samples: Windows that each sees.
        restart: Whether baselines that are there are trained again.
        note: Takes warnings, and what is being done.

    Returns:
        What its training took, by the path of each baseline.

    Raises:
        ConfigError: If the configuration, a kind or the budget is wrong, or each of several processes that a
            scheduler started would train the same.
        UpsError: If a file can't be written, or training diverges.
        ups_store.StoreError: If the data can't be read.
    """
    check_shared(hint=ONLY_ONCE)
    budget, wanted = Budget(seconds, samples), check_kinds(kinds)
    config = load_config(config_path, overrides=overrides, note=note)
    device = choose_device(config.training.device, note=note)
    trained: dict[str, dict[str, Any]] = {}
    for task in config.data.tasks:
        for kind in wanted:
            model = obtain_baseline(
                config, kind, task, budget=budget, device=device, restart=restart, note=note
            )
            note(f"{task} {model.label}: {model.note}")
            assert model.effort is not None
            effort = {key: value for key, value in asdict(model.effort).items() if key != "curve"}
            trained[str(baseline_path(config, kind, task, budget.limit))] = effort
    return trained


def config_of(checkpoint: Path, overrides: Sequence[str], *, note: Note) -> RunConfig:
    """The configuration that an operator's checkpoint was made with, with overrides.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
        ConfigError: If it is no configuration of today, or an override is wrong.
    """
    document = read_document(checkpoint, kind=OPERATOR)
    where = f"the configuration in {checkpoint}"
    return load_config(dict(document["config"]), overrides=overrides, name=where, note=note)


def open_run(
    checkpoint: Path | None, *, config_path: Path | None, overrides: Sequence[str], note: Note
) -> tuple[RunConfig, Simulator]:
    """A trained simulator and the configuration to use it with.

    Args:
        checkpoint: The operator's file; by default `operator.safetensors` in the configuration's
            `checkpoint.dir`.
        config_path: YAML file; by default the configuration that the checkpoint was made with.
        overrides: `key=value`.
        note: Told warnings.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ConfigError: If neither is given, or the configuration is wrong.
    """
    if checkpoint is None and config_path is None:
        raise ConfigError("which operator?", expected="--config FILE or --checkpoint FILE")
    if checkpoint is not None and config_path is None:
        config = config_of(checkpoint, overrides, note=note)
    else:
        config = load_config(config_path, overrides=overrides, note=note)
    path = checkpoint or config.checkpoint.dir / OPERATOR_FILE
    device = choose_device(config.training.device, note=note)
    if checkpoint is None and not path.exists():
        raise missing_checkpoint(path, hint="train it with `ups train`, or say --checkpoint FILE")
    return config, load_simulator(path, device=str(device))


def open_others(
    paths: Sequence[Path], config: RunConfig, simulator: Simulator, *, note: Note
) -> list[OtherOperator]:
    """Other operators that are to stand in the table of a run.

    One whose configuration is none any more is a row all the same, without what its training took.

    Args:
        paths: Their checkpoints.
        config: Configuration of the run.
        simulator: Of the run.
        note: Told warnings.

    Raises:
        CheckpointError: If one is missing or damaged.
        ConfigError: As `check_comparable`.
    """
    found = []
    for path in paths:
        theirs = load_simulator(path, device=str(simulator.device))
        other = OtherOperator(theirs, path, _logs_of(path, note))
        check_comparable(other, config, simulator)
        found.append(other)
    return found


def _logs_of(path: Path, note: Note) -> list[StageLog]:
    """Of the run that made a checkpoint, if it lies where that run has left it."""
    try:
        config = config_of(path, (), note=lambda text: note(f"{path}: {text}"))
    except ConfigError as error:  # of an earlier version; it says no more than where its logs are
        note(f"warning: what its training took isn't known: {error}")
        return []
    own = config.checkpoint.dir / OPERATOR_FILE
    return read_stage_logs(config, note=note) if path.resolve() == own.resolve() else []
