"""Evaluating a trained operator beside everything that it has to be compared with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.data.fields import SPLITS, Split
from ups.data.trajectories import Trajectories
from ups.errors import ConfigError, did_you_mean
from ups.eval.baseline_model import Baseline
from ups.eval.comparison import Comparison, Entry, OtherOperator, TrainedRun, entries_of, make_comparison
from ups.eval.figures import errors_in_time, run_figures, task_figures
from ups.eval.intervals import Resamples
from ups.eval.report import Report, Row, TaskReport
from ups.eval.rollout import Rollout, roll_out
from ups.eval.scores import LATENT_METRICS, score
from ups.eval.training_logs import StageLog, data_wait_share, read_stage_logs
from ups.output import Note
from ups.trained.simulator import Simulator


def evaluate(
    config: RunConfig,
    simulator: Simulator,
    *,
    split: Split = "dev",
    horizon: int | None = None,
    baselines: Sequence[Baseline] = (),
    also: Sequence[OtherOperator] = (),
    logs: Sequence[StageLog] | None = None,
    other_seeds: Sequence[TrainedRun] = (),
    phases: Mapping[str, float] | None = None,
    note: Note = lambda text: None,
) -> Report:
    """Roll a simulator and its baselines out on a split, task by task.

    Args:
        config: Configuration of the run: which data, where logs lie, seed of the training and the resampling.
        simulator: In evaluation mode, on its device.
        split: "dev", "val", "test" or "train".
        horizon: Steps to predict; by default to the end of the shortest trajectory.
        baselines: Trained baselines of any of the tasks.
        also: Other operators, each `check_comparable` to the simulator.
        logs: Of the run's training; by default read from where the configuration has them.
        other_seeds: What was trained alike with other seeds; it joins the simulator's and baselines' rows.
        phases: Seconds of what happened before, by name, for the report.
        note: Called with what is being done.

    Raises:
        ConfigError: Kinds "other_grid", "other_task", and those of `open_trajectories`, such as "empty_split"
            and "horizon".
        ups_store.StoreError: If the data can't be read.
    """
    began = time.perf_counter()
    logs = read_stage_logs(config, note=note) if logs is None else logs
    runs = [TrainedRun(simulator, config.seed, baselines, logs), *other_seeds]
    others = entries_of(also, simulator)
    tasks = []
    for task in config.data.tasks:
        comparison = make_comparison(config, runs, task, split=split, horizon=horizon, others=others)
        tasks.append(_evaluate_task(comparison, config, split, note))
    return Report(
        title=f"{', '.join(config.data.tasks)}: evaluation on {split}",
        tasks=tasks,
        split=split,
        seconds=_seconds(phases or {}, runs, time.perf_counter() - began),
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
    known: dict[str, Split] = {name: name for name in SPLITS} | {"valid": "val"}
    if split not in known:
        hint = did_you_mean(split, known)
        raise ConfigError("--split", expected="dev, val, test or train", found=repr(split), hint=hint)
    return known[split]


def daily_split(split: str | None, configured: str, *, note: Note) -> Split:
    """The split of an evaluation that isn't `ups evaluate --split test`: never "test".

    Configurations of earlier versions name the test split, as every one did by default: they get "dev".

    Args:
        split: What the command line says.
        configured: `evaluation.split`.
        note: Called where the configuration names the test split.

    Raises:
        ConfigError: For a name that is no split; kind "test_split", if the command line names that.
    """
    wanted = check_split(split or configured)
    if wanted != "test":
        return wanted
    if split is not None:
        raise ConfigError(
            "the test split isn't for comparing while you work",
            kind="test_split",
            expected="--split dev, val or train",
            found="test",
            hint="`ups evaluate --split test` takes it, and counts how often it was used",
        )
    note("evaluation.split = test is taken as dev: only `ups evaluate --split test` uses the test split")
    return "dev"


def _evaluate_task(comparison: Comparison, config: RunConfig, split: Split, note: Note) -> TaskReport:
    trajectories, models = comparison.trajectories, {one.name: one.members[0] for one in comparison.entries}
    task, t = trajectories.info.task, torch.from_numpy(trajectories.t)
    resamples = Resamples(len(trajectories), seed=config.seed)
    rows: list[Row] = []
    rollouts: dict[str, Rollout] = {}
    for entry in comparison.entries:
        row, rollouts[entry.name] = _evaluate_entry(entry, comparison, resamples, t=t, note=note)
        is_contest = bool(rows) and not row.sees_truth
        rows.append(replace(row, paired=row.scores.paired(rows[0].scores)) if is_contest else row)
    if comparison.space == "fields":
        figures = task_figures(rows, rollouts, models, trajectories)
    else:
        figures = errors_in_time(rows, trajectories)
    return TaskReport(
        task=task,
        protocol=_protocol(trajectories, split, comparison.space),
        rows=rows,
        t=trajectories.t.tolist(),
        space=comparison.space,
        num_trajectories=len(trajectories),
        figures=figures,
    )


def _evaluate_entry(
    entry: Entry, comparison: Comparison, resamples: Resamples, *, t: Tensor, note: Note
) -> tuple[Row, Rollout]:
    """A row, and the rollout of its first seed for the pictures."""
    trajectories, rollouts = comparison.trajectories, []
    for number, member in enumerate(entry.members):
        of_seed = f" (seed {entry.seeds[number]})" if len(entry.members) > 1 else ""
        note(f"{trajectories.info.task}: {member.label}{of_seed}, {_shown_amount(trajectories)}")
        rollouts.append(roll_out(member, trajectories))
    errors = [rollout.errors for rollout in rollouts]
    scores = score(errors, t=t, resamples=resamples, row=entry.name)
    if comparison.space == "latent":
        scores = scores.of(LATENT_METRICS)
    seconds = sum(rollout.seconds for rollout in rollouts) / len(rollouts)
    return Row(entry.name, entry.label, scores, entry.note, seconds, entry.seeds), rollouts[0]


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
    phases: Mapping[str, float], runs: Sequence[TrainedRun], evaluation_s: float
) -> dict[str, float]:
    """Wall time of everything that is known of the run, all seeds together."""
    trained: dict[str, float] = {}
    for run in runs:
        for log in run.logs:
            trained[log.stage] = trained.get(log.stage, 0.0) + log.seconds
        for model in run.baselines:
            if model.log is not None:
                name = f"{model.name} {model.spec.task}"
                trained[name] = trained.get(name, 0.0) + model.log.seconds
    return {**phases, **trained, "evaluation": evaluation_s}
