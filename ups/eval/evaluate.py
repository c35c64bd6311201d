"""Evaluating a trained operator beside everything that it has to be compared with.

What the commands of evaluation share: a trained simulator with its configuration, flags, the report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import typer
from rich.console import Console

from ups.cli.commands import resolve_config
from ups.config import RunConfig
from ups.data.trajectories import Trajectories
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError
from ups.eval.baseline_model import DEFAULT_KINDS, LABELS, Baseline, Kind, check_neuraloperator
from ups.eval.comparison import (
    LATENT_METRICS,
    Comparison,
    OtherOperator,
    check_comparable,
    forecasters_of,
    make_comparison,
    operator_note,
    score,
)
from ups.eval.figures import latent_figures, run_figures, task_figures
from ups.eval.report import Report, Row, TaskReport, show_evaluation
from ups.eval.report_page import write_report
from ups.eval.rollout import Rollout, roll_out
from ups.eval.training_logs import StageLog, data_wait_share, read_stage_logs
from ups.output import Note
from ups.trained.checkpoint import read_document
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import OPERATOR, OPERATOR_FILE

Split = Literal["train", "val", "test"]

_TRAIN_IT = "train it with `python scripts/train.py --stage operator`"


def evaluate(
    config: RunConfig,
    simulator: Simulator,
    *,
    split: Split = "test",
    horizon: int | None = None,
    baselines: Sequence[Baseline] = (),
    also: Sequence[OtherOperator] = (),
    logs: Sequence[StageLog] | None = None,
    phases: Mapping[str, float] | None = None,
    note: Note = lambda text: None,
) -> Report:
    """Roll a simulator and its baselines out on a split, task by task.

    Args:
        config: Configuration of the run: which data, where logs lie, seed of the resampling.
        simulator: In evaluation mode, on its device.
        split: "train", "val" or "test".
        horizon: Steps to predict; by default to the end of the shortest trajectory.
        baselines: Trained baselines of any of the tasks.
        also: Other operators, each `check_comparable` to the simulator.
        logs: Of the run's training; by default read from where the configuration has them.
        phases: Seconds of what happened before, by name, for the report.
        note: Told what is being done.

    Raises:
        ConfigError: Kinds "other_grid", "other_task", and those of `open_trajectories`, such as "empty_split"
            and "horizon".
        ups_store.StoreError: If the data can't be read.
    """
    began = time.perf_counter()
    logs = read_stage_logs(config, note=note) if logs is None else logs
    own_note, others = operator_note(simulator, logs), forecasters_of(also, simulator)
    tasks = []
    for task in config.data.task:
        comparison = make_comparison(
            config,
            simulator,
            task,
            split=split,
            horizon=horizon,
            baselines=baselines,
            others=others,
            operator_note=own_note,
        )
        tasks.append(_evaluate_task(comparison, config, split, note))
    return Report(
        title=f"{', '.join(config.data.task)}: evaluation on {split}",
        tasks=tasks,
        split=split,
        seconds=_seconds(phases or {}, logs, baselines, time.perf_counter() - began),
        stages=logs,
        data_wait_share=data_wait_share(logs),
        config=config.model_dump(mode="json"),
        figures=run_figures(logs, baselines),
    )


def check_split(split: str) -> Split:
    """One of the splits; "valid" is "val", as for the build.

    Raises:
        ConfigError: For another name.
    """
    known: dict[str, Split] = {"train": "train", "val": "val", "valid": "val", "test": "test"}
    if split not in known:
        raise ConfigError("--split", expected="train, val or test", found=repr(split))
    return known[split]


def _evaluate_task(comparison: Comparison, config: RunConfig, split: Split, note: Note) -> TaskReport:
    trajectories = comparison.trajectories
    task, t = trajectories.info.task, torch.from_numpy(trajectories.t)
    rows: list[Row] = []
    rollouts: dict[str, Rollout] = {}
    for forecaster in (comparison.operator, *comparison.others):
        note(f"{task}: {forecaster.label}, {_shown_amount(trajectories)}")
        rollout = roll_out(forecaster, trajectories)
        rollouts[forecaster.name] = rollout
        scores = score(rollout.errors, t=t, seed=config.seed)
        if comparison.space == "latent":
            scores = scores.of(LATENT_METRICS)
        rows.append(Row(forecaster.name, forecaster.label, scores, forecaster.note, rollout.seconds))
    draw = task_figures if comparison.space == "fields" else latent_figures
    return TaskReport(
        task=task,
        protocol=_protocol(trajectories, split, comparison.space),
        rows=rows,
        t=trajectories.t.tolist(),
        space=comparison.space,
        figures=draw(rows, rollouts, comparison.operator, trajectories),
    )


def _shown_amount(trajectories: Trajectories) -> str:
    """How much is predicted, for people."""
    num, steps = len(trajectories), trajectories.horizon
    return f"{steps} step{'s'[: steps > 1]} of {num} trajector{'ies' if num > 1 else 'y'}"


def _protocol(trajectories: Trajectories, split: Split, space: Literal["fields", "latent"]) -> str:
    """What was given and what was predicted, for people."""
    info, num = trajectories.info, len(trajectories)
    points = " x ".join(map(str, info.grid.points))
    unit = "points" if space == "fields" else "tokens"
    where = f"{num} trajectories of {split}, {points} {unit}, from {Path(trajectories.origin).name}."
    if info.steady:
        return (
            f"The solution is predicted from {trajectories.given_array} in one step; there is no persistence "
            f"of a steady task. {where}"
        )
    text = (
        "One frame is given (PDEBench gives ten; a Markov operator needs one), and "
        f"{trajectories.horizon} are predicted one after the other, {trajectories.dt:.4g} apart. {where}"
    )
    if space == "latent":
        return f"{text} Errors are of latents: nothing says what encoded them, so nothing can be decoded."
    return f"{text} The mean of the truth drifts by {_true_drift(trajectories):.1g} of its root mean square."


def _true_drift(trajectories: Trajectories) -> float:
    """Mean over trajectories and channels of how far the truth's mean moves: what `drift` would be for it."""
    parts = []
    for batch in trajectories.batches():
        space = tuple(range(1, batch.given.ndim - 1))
        start = batch.given.double()
        moved = (batch.truth[:, -1].double().mean(space) - start.mean(space)).abs()
        parts.append(moved / start.square().mean(space).sqrt())
    return float(torch.cat(parts).mean())


def _seconds(
    phases: Mapping[str, float], logs: Sequence[StageLog], baselines: Sequence[Baseline], evaluation_s: float
) -> dict[str, float]:
    """Wall time of everything that is known of the run."""
    trained = {log.stage: log.seconds for log in logs}
    for model in baselines:
        if model.effort is not None:
            trained[f"{model.name} {model.spec.task}"] = model.effort.seconds
    return {**phases, **trained, "evaluation": evaluation_s}


def config_of(checkpoint: Path, overrides: Sequence[str], *, note: Note) -> RunConfig:
    """The configuration that an operator's checkpoint was made with, with overrides.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
        ConfigError: If it is no configuration of today, or an override is wrong.
    """
    with _hinting():
        document = read_document(checkpoint, kind=OPERATOR)
    where = f"the configuration in {checkpoint}"
    return resolve_config(dict(document["config"]), overrides, note=note, name=where)


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
    if checkpoint is None:
        config = resolve_config(config_path, overrides, note=note)
        path, hint = config.checkpoint.dir / OPERATOR_FILE, f"{_TRAIN_IT}, or say --checkpoint FILE"
        return config, _load(path, device=_device(config, note), hint=hint)
    if config_path is None:
        config = config_of(checkpoint, overrides, note=note)
    else:
        config = resolve_config(config_path, overrides, note=note)
    return config, _load(checkpoint, device=_device(config, note))


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
        other = OtherOperator(_load(path, device=str(simulator.device)), path, _logs_of(path, note))
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


def _device(config: RunConfig, note: Note) -> str:
    return str(choose_device(config.training.device, note=note))


def _load(path: Path, *, device: str, hint: str = _TRAIN_IT) -> Simulator:
    with _hinting(hint):
        return load_simulator(path, device=device)


@contextmanager
def _hinting(hint: str = _TRAIN_IT) -> Iterator[None]:
    """Inside, a missing checkpoint says how to get one."""
    try:
        yield
    except CheckpointError as error:
        if error.kind == "missing" and error.hint is None:
            error.hint = hint
        raise


def check_kinds(kinds: Sequence[str] | None) -> list[Kind]:
    """Kinds of baselines; those that need no other package by default.

    Raises:
        ConfigError: For another name.
        MissingExtraError: If its package isn't installed.
    """
    known: dict[str, Kind] = {kind: kind for kind in LABELS}
    if unknown := [kind for kind in kinds or () if kind not in known]:
        raise ConfigError("--kind", expected=" or ".join(known), found=repr(unknown[0]))
    wanted = [known[kind] for kind in kinds or DEFAULT_KINDS]
    if "fno_neuraloperator" in wanted:
        check_neuraloperator()
    return wanted


def parse_numbers(flag: str, given: Sequence[str]) -> dict[str, float]:
    """Numbers by name from `name=number`.

    Raises:
        ConfigError: For anything else; names the flag.
    """
    found: dict[str, float] = {}
    for one in given:
        name, _, number = one.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(flag, expected="name=number", found=repr(one))
    return found


def publish(report: Report, folder: Path, *, as_json: bool, note: Note) -> None:
    """Write a report; on stdout are its table and where its files lie, or all of it as JSON.

    Args:
        report: What was found.
        folder: Where `report.json`, `report.csv` and `report.html` go.
        as_json: Whether stdout is for a program: then `note` says where the files lie.
        note: Told what is no result.

    Raises:
        OutputError: None of the files is changed then.
    """
    paths = write_report(folder, report)
    if as_json:
        typer.echo(json.dumps(report.to_json(), default=str))
    else:
        show_evaluation(report, Console(soft_wrap=True, highlight=False))
    for path in paths.values():
        (note if as_json else typer.echo)(str(path))
