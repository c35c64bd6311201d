"""Evaluating a trained operator beside everything that it has to be compared with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ups.config import RunConfig
from ups.data.trajectories import Trajectories
from ups.errors import ConfigError, did_you_mean
from ups.eval.baseline_model import Baseline
from ups.eval.comparison import (
    LATENT_METRICS,
    Comparison,
    OtherOperator,
    forecasters_of,
    make_comparison,
    operator_note,
    score,
)
from ups.eval.figures import latent_figures, run_figures, task_figures
from ups.eval.report import Report, Row, TaskReport
from ups.eval.rollout import Rollout, roll_out
from ups.eval.training_logs import StageLog, data_wait_share, read_stage_logs
from ups.output import Note
from ups.trained.simulator import Simulator

Split = Literal["train", "val", "test"]


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
    for task in config.data.tasks:
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
        title=f"{', '.join(config.data.tasks)}: evaluation on {split}",
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
        hint = did_you_mean(split, known)
        raise ConfigError("--split", expected="train, val or test", found=repr(split), hint=hint)
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
