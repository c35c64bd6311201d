"""Evaluating a trained operator beside everything that it has to be compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.data.origins import Origin, is_of_other_data, origin_of_checkpoint, origins_of_data
from ups.data.splits import Split
from ups.data.stores import latent_folder
from ups.data.windows import Trajectories
from ups.eval.baseline_model import BASELINE, Baseline
from ups.eval.comparison import (
    ComparedModel,
    Comparison,
    OtherOperator,
    TrainedRun,
    entries_of,
    entry_of_best,
    make_comparison,
)
from ups.eval.ensemble_figures import ensemble_figures
from ups.eval.ensemble_files import kind_of
from ups.eval.ensemble_rows import EnsembleRequest, with_ensembles
from ups.eval.figures import errors_in_time, run_figures, task_figures
from ups.eval.intervals import Resamples
from ups.eval.physics import residual_floor, shown_floor
from ups.eval.report import Report, Row, TaskReport
from ups.eval.rollout import Rollout, roll_out
from ups.eval.scores import LATENT_METRICS, score
from ups.eval.training_logs import StageLog, data_wait_share, read_stage_logs
from ups.log import logger
from ups.trained.corrected import CorrectedSimulator
from ups.trained.prior import SteadyPrior
from ups.trained.simulator import Simulator
from ups.trained.specs import OPERATOR, PRIOR
from ups_store.printable import counted


def evaluate(
    config: RunConfig,
    simulator: Simulator,
    *,
    split: Split = "dev",
    horizon: int | None = None,
    members: int | None = None,
    seed: int = 0,
    baselines: Sequence[Baseline] = (),
    corrected: Sequence[CorrectedSimulator] = (),
    prior: SteadyPrior | None = None,
    also: Sequence[OtherOperator] = (),
    best: OtherOperator | None = None,
    logs: Sequence[StageLog] | None = None,
    other_seeds: Sequence[TrainedRun] = (),
    phases: Mapping[str, float] | None = None,
) -> Report:
    """Roll a simulator and its baselines out on a split, task by task.

    Args:
        config: Configuration of the run: which data, where logs lie, seed of the training and the resampling.
        simulator: In evaluation mode, on its device.
        split: "dev", "val", "test" or "train".
        horizon: Steps to predict; by default as `evaluation.horizon` says.
        members: Of the ensembles of models that have members; by default as `evaluation.members` says, and
            without it nothing is scored as an ensemble.
        seed: Of the members' noise, the same for all models.
        baselines: Trained baselines of any of the tasks.
        corrected: The simulator with its corrector, and with a student.
        prior: Of steady solutions, for a row on tasks that it knows.
        also: Other operators, each `check_comparable` to the simulator.
        best: The best operator so far, likewise; a row of its own.
        logs: Of the run's training; by default read from where the configuration has them.
        other_seeds: What was trained alike with other seeds; it joins the simulator's and baselines' rows.
        phases: Seconds of what happened before, by name, for the report.

    Raises:
        ConfigError: Kinds "members", "other_grid", "other_task", and those of `open_trajectories`, such as
            "empty_split" and "horizon".
        ups_store.StoreError: If the data can't be read.
    """
    began = time.perf_counter()
    horizon = config.evaluation.horizon if horizon is None else horizon
    members = config.evaluation.members if members is None else members
    wanted = None if members is None else EnsembleRequest(members, seed)
    logs = read_stage_logs(config) if logs is None else logs
    runs = [TrainedRun(simulator, config.seed, baselines, logs, corrected, prior), *other_seeds]
    others = [*([entry_of_best(best)] if best else []), *entries_of(also, simulator)]
    origins, tasks = list(_checkpoints(runs, [*([best] if best else []), *also])), []
    for task in config.data.tasks:
        comparison = make_comparison(config, runs, task, split=split, horizon=horizon, others=others)
        fields = comparison.trajectories.fields
        origins += origins_of_data(fields.identity, role=f"{split} split of {task}", path=fields.origin)
        warning = _of_other_data(comparison, config, runs, split)
        if warning:
            logger.warning(f"{task}: {warning}")
        report = _evaluate_task(comparison, config, split, wanted)
        tasks.append(replace(report, protocol=" ".join(filter(None, (report.protocol, warning)))))
    return Report(
        title=f"{', '.join(config.data.tasks)}: evaluation on {split}",
        tasks=tasks,
        split=split,
        seconds=_seconds(phases or {}, runs, time.perf_counter() - began),
        stages=logs,
        data_wait_share=data_wait_share(logs),
        config=config.model_dump(mode="json"),
        figures=run_figures(logs, baselines),
        made_from=origins,
    )


def _of_other_data(
    comparison: Comparison, config: RunConfig, runs: Sequence[TrainedRun], split: Split
) -> str:
    """What to say where models weren't trained on the training split that there is now."""
    task, found = comparison.trajectories.info.task, []
    for run in runs:
        for label, model in (("operator", run.simulator), *((model.label, model) for model in run.baselines)):
            is_of_task = not isinstance(model, Baseline) or model.spec.task == task
            if model.path is None or not is_of_task:
                continue
            now = comparison.train.identity
            if is_of_other_data(model.path, task, train=now, latents=latent_folder(config)):
                found.append(label)
    if not found:
        return ""
    return (
        f"{' and '.join(dict.fromkeys(found))} had other training data than the training split now holds, so "
        f"{split} may have trajectories that {'they were' if found[1:] else 'it was'} trained on."
    )


def _checkpoints(runs: Sequence[TrainedRun], others: Sequence[OtherOperator]) -> Iterator[Origin]:
    """What predicts, as far as it was loaded from a file."""
    for run in runs:
        of_seed = f" (seed {run.seed})" if len(runs) > 1 else ""
        if run.simulator.path is not None:
            role = f"operator{of_seed}"
            yield origin_of_checkpoint(run.simulator.path, role=role, kind=OPERATOR)
        for each in run.corrected:
            if each.path is not None:
                yield origin_of_checkpoint(each.path, role=f"{kind_of(each)}{of_seed}", kind=kind_of(each))
        if run.prior is not None and run.prior.path is not None:
            yield origin_of_checkpoint(run.prior.path, role=f"prior{of_seed}", kind=PRIOR)
        for model in run.baselines:
            if model.path is not None:
                role = f"{model.name} of {model.spec.task}{of_seed}"
                yield origin_of_checkpoint(model.path, role=role, kind=BASELINE)
    for other in others:
        if other.simulator.path is not None:
            yield origin_of_checkpoint(other.simulator.path, role="other operator", kind=OPERATOR)


def _evaluate_task(
    comparison: Comparison,
    config: RunConfig,
    split: Split,
    wanted: EnsembleRequest | None,
) -> TaskReport:
    trajectories, models = comparison.trajectories, {one.name: one.members[0] for one in comparison.entries}
    task, t = trajectories.info.task, torch.from_numpy(trajectories.t)
    resamples = Resamples(len(trajectories), seed=config.seed)
    rows: list[Row] = []
    rollouts: dict[str, Rollout] = {}
    for entry in comparison.entries:
        row, rollouts[entry.name] = _evaluate_entry(entry, comparison, resamples, t=t)
        is_contest = bool(rows) and not row.sees_truth
        rows.append(replace(row, paired=row.scores.paired(rows[0].scores)) if is_contest else row)
    if comparison.space == "fields":
        figures = task_figures(rows, rollouts, models, trajectories)
    else:
        figures = errors_in_time(rows, trajectories)
    if wanted is not None and comparison.space == "latent":
        logger.warning(f"{task}: no ensembles, as nothing decodes these latents")
    elif wanted is not None:
        rows, errors = with_ensembles(rows, comparison, wanted, resamples=resamples)
        figures += ensemble_figures(rows, errors, models, trajectories, seed=wanted.seed)
    undefined = next(iter(rollouts.values())).errors.undefined
    protocol, left_out = _protocol(trajectories, split, comparison.space), int(undefined.sum())
    if left_out:
        protocol += (
            f" The truth is zero throughout in {left_out:,} of {undefined.numel():,} frames and channels, "
            "which nRMSE leaves out."
        )
    if not trajectories.info.steady and "residual" in config.training.physics_priors.weights:
        protocol += f" {shown_floor(residual_floor(config, trajectories.fields))}"
    return TaskReport(
        task=task,
        protocol=protocol,
        rows=rows,
        t=trajectories.t.tolist(),
        space=comparison.space,
        num_trajectories=len(trajectories),
        left_out=left_out,
        figures=figures,
    )


def _evaluate_entry(
    entry: ComparedModel,
    comparison: Comparison,
    resamples: Resamples,
    *,
    t: Tensor,
) -> tuple[Row, Rollout]:
    """A row, and the rollout of its first seed for the pictures."""
    trajectories, rollouts = comparison.trajectories, []
    for number, member in enumerate(entry.members):
        of_seed = f" (seed {entry.seeds[number]})" if len(entry.members) > 1 else ""
        logger.info(f"{trajectories.info.task}: {member.label}{of_seed}, {_shown_amount(trajectories)}")
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
    return f"{counted(steps, 'step')} of {counted(num, 'trajectory')}"


def _protocol(trajectories: Trajectories, split: Split, space: Literal["fields", "latent"]) -> str:
    """What was given and what was predicted, for people."""
    info, num = trajectories.info, len(trajectories)
    points = " x ".join(map(str, info.grid.points))
    unit = "points" if space == "fields" else "tokens"
    where = (
        f"{counted(num, 'trajectory')} of {split}, {points} {unit}, from {Path(trajectories.origin).name}."
    )
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
        scale = start.square().mean(space).sqrt()
        parts.append((moved / scale)[scale > 0])
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
