"""Evaluating trained operators beside all that they have to be compared with, on the same trajectories."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.config import RunConfig
from ups.config.seeds import family_of
from ups.data.fields import Fields
from ups.data.origins import Origin, is_of_other_data, origin_of_checkpoint, origins_of_data
from ups.data.splits import Split, open_fields, open_latent_fields
from ups.data.stores import latent_folder
from ups.data.windows import Trajectories, open_latent_trajectories, open_trajectories
from ups.errors import ConfigError
from ups.eval.baseline_model import BASELINE
from ups.eval.ensemble_figures import ensemble_figures
from ups.eval.ensembles import Climate, EnsembleErrors, check_members, roll_out_members, score_ensemble
from ups.eval.equal_budgets import used_stages
from ups.eval.figures import errors_in_time, run_figures, task_figures
from ups.eval.forecasters import (
    AnyForecaster,
    AutoencoderFloor,
    CorrectedForecaster,
    LatentForecaster,
    OperatorForecaster,
    Persistence,
    PriorForecaster,
    Rollout,
    TrainingMean,
    has_members,
    kind_of,
    roll_out,
    shown_size,
)
from ups.eval.intervals import Resamples
from ups.eval.metrics import (
    FIELD_METRICS,
    LATENT_METRICS,
    OwnMetric,
    as_metric,
    own_metrics,
    pdebench_compat,
)
from ups.eval.physics import residual_floor, shown_floor
from ups.eval.reconstruction import spectrum_of_fields
from ups.eval.report import Report, Row, TaskReport
from ups.eval.runs import (
    Run,
    join_alike,
    open_others,
    open_runs,
    opened,
    operator_paths,
    with_companions,
)
from ups.eval.scores import score
from ups.eval.split_uses import check_split, count_test_uses, daily_split, record_test_use
from ups.eval.training_logs import data_wait_share
from ups.eval.ttc import conditioned
from ups.grid import directed_lengths
from ups.log import logger
from ups.models.operator_size import OperatorSize
from ups.output import check_writable
from ups.trained.simulator import Simulator
from ups.trained.specs import OPERATOR, PRIOR, SimulatorSpec
from ups_store.printable import counted

_LABELS = {"latent": "latent operator", "fields": "operator on fields"}

# The rows of a report in order: by name the forecaster of each seed, or of None where nothing is trained.
Rows = Mapping[str, Mapping[int | None, AnyForecaster]]


def evaluate_run(
    checkpoint: Path | None,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    seeds: Sequence[int] = (),
    split: str | None = None,
    horizon: int | None = None,
    members: int | None = None,
    seed: int = 0,
    also: Sequence[Path] = (),
    best: Path | None = None,
    phases: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Report:
    """Evaluate a run's operator, with all its seeds, beside the baselines that lie with it.

    The test split is evaluated only if `split` names it, and every time is counted.
    """
    runs = open_runs(checkpoint, config_path=config_path, overrides=overrides, seeds=seeds)
    config, folder = opened(runs[0])
    is_test = split is not None and check_split(split) == "test"
    which = "test" if is_test else daily_split(split, config.evaluation.split)
    if is_test:
        check_writable(folder)
    others, rivals = (
        open_others(paths, config, runs[0].operator) for paths in (also, [best] if best else [])
    )
    draws = (config.evaluation.members if members is None else members) is not None
    report = evaluate_opened(
        [with_companions(run, has_members=draws) for run in runs],
        split=which,
        horizon=horizon,
        members=members,
        seed=seed,
        also=others,
        best=rivals[0] if rivals else None,
        phases=phases,
        title=title,
    )
    if is_test:
        paths = [*(run.path for run in runs if run.path), *operator_paths([*also, *([best] if best else [])])]
        record_test_use(folder, config=config, checkpoints=paths)
    return replace(report, test_uses=count_test_uses(folder))


def evaluate_opened(
    runs: Sequence[Run], *, also: Sequence[Run] = (), title: str | None = None, **options: Any
) -> Report:
    """Evaluate what `open_runs` opened, which the first one's configuration says how; as `evaluate`."""
    config, folder = opened(runs[0])
    runs, others = join_alike(runs, also)
    report = evaluate(config, runs, also=others, **options)
    return replace(report, title=title or report.title, test_uses=count_test_uses(folder))


def evaluate(
    config: RunConfig,
    runs: Sequence[Run],
    *,
    split: Split = "dev",
    horizon: int | None = None,
    members: int | None = None,
    seed: int = 0,
    also: Sequence[Run] = (),
    best: Run | None = None,
    phases: Mapping[str, float] | None = None,
) -> Report:
    """Roll operators and what they are compared with out on a split, task by task.

    Args:
        config: Which data, horizon, members and metrics; the seed of the resampling.
        runs: Operators with what lies with them, trained alike but for the seed: one row.
        split: "dev", "val", "test" or "train".
        horizon: Steps to predict; by default as `evaluation.horizon` says.
        members: Of the ensembles of models that have members; by default as `evaluation.members` says, and
            without it nothing is scored as an ensemble.
        seed: Of the members' noise, the same for all models.
        also: Other operators, each `check_comparable` to the first run's.
        best: The best operator so far, likewise; a row of its own.
        phases: Seconds of what happened before, by name, for the report.
    """
    began = time.perf_counter()
    if len(seeds := [run.seed for run in runs]) > len({*seeds}):
        raise ConfigError(
            "runs of one row", kind="same_seed", expected="a seed of its own for each", found=seeds
        )
    members = config.evaluation.members if members is None else members
    if members is not None:
        check_members(members)
    own = own_metrics(config.evaluation.metrics)
    others = [*([best] if best else []), *also]
    origins, tasks = list(_checkpoints(runs, others)), []
    for task in config.data.tasks:
        is_latent = not runs[0].operator.spec.is_encoder_known
        trajectories, train = _open_task(config, runs[0].operator, task, split, horizon)
        origins += origins_of_data(
            trajectories.fields.identity, role=f"{split} split of {task}", path=trajectories.origin
        )
        warning = _of_other_data(train, config, runs, task, split)
        if warning:
            logger.warning(f"{task}: {warning}")
        rows = (
            _latent_rows(runs, trajectories, train)
            if is_latent
            else _field_rows(config, runs, trajectories, train, also, best)
        )
        report = _evaluate_task(config, rows, trajectories, split, members, seed, own, is_latent=is_latent)
        tasks.append(replace(report, protocol=" ".join(filter(None, (report.protocol, warning)))))
    logs = runs[0].logs
    seconds: dict[str, float] = defaultdict(float)
    for run in runs:  # all seeds together
        for stage in run.logs:
            seconds[stage.stage] += stage.seconds
        for model in run.baselines:
            if model.log is not None:
                seconds[f"{model.name} {model.spec.task}"] += model.log.seconds
    return Report(
        title=f"{', '.join(config.data.tasks)}: evaluation on {split}",
        tasks=tasks,
        split=split,
        seconds={**(phases or {}), **seconds, "evaluation": time.perf_counter() - began},
        stages=logs,
        data_wait_share=data_wait_share(logs),
        config=config.model_dump(mode="json"),
        figures=run_figures(logs, runs[0].baselines),
        made_from=origins,
    )


def _open_task(
    config: RunConfig, operator: Simulator, task: str, split: Split, horizon: int | None
) -> tuple[Trajectories, Fields]:
    """The trajectories of a task and split in the operator's space, and the training split as it is now."""
    spec = operator.spec
    if task not in spec.tasks:
        raise ConfigError(
            "the operator wasn't trained for this task",
            kind="other_task",
            expected=" or ".join(sorted(spec.tasks)),
            found=task,
        )
    horizon = config.evaluation.horizon if horizon is None else horizon
    options: dict[str, Any] = {
        "stride": spec.stride,
        "horizon": min(horizon, 1) if spec.tasks[task].steady and horizon is not None else horizon,
        "max_trajectories": config.evaluation.max_trajectories,
    }
    if not spec.is_encoder_known:
        trajectories = open_latent_trajectories(config, task, split, **options)
        return trajectories, open_latent_fields(config, task, "train")
    source = config.training.field_source
    trajectories = open_trajectories(config.build, task, split, source=source, **options)
    known, grid = spec.tasks[task].grid, trajectories.info.grid
    if grid != known:
        raise ConfigError(
            "fields on another grid than the operator's",
            kind="other_grid",
            path=trajectories.origin,
            expected=known.name,
            found=grid.name,
            hint="check data.reduce_space",
        )
    return trajectories, open_fields(config.build, task, "train", source=source)


# --- rows ----------------------------------------------------------------------------------------------


def _latent_rows(runs: Sequence[Run], trajectories: Trajectories, train: Fields) -> Rows:
    """On latents of an unknown encoder there are no baselines and no floor, as there are no fields."""
    rows: dict[str, dict[int | None, AnyForecaster]] = {
        "operator": {run.seed: LatentForecaster(run.operator, note=operator_note(run)) for run in runs}
    }
    if not trajectories.info.steady:
        rows["persistence"] = {None: Persistence()}
    return {**rows, "mean": {None: TrainingMean(train)}}


def _field_rows(
    config: RunConfig,
    runs: Sequence[Run],
    trajectories: Trajectories,
    train: Fields,
    also: Sequence[Run],
    best: Run | None,
) -> Rows:
    """Everything that an operator has to be compared with, in the order of the table."""
    info = trajectories.info
    rows: dict[str, dict[int | None, AnyForecaster]] = defaultdict(dict)

    def add(forecaster: AnyForecaster, seed: int | None = None) -> None:
        rows[forecaster.name][seed] = forecaster

    for run in runs:
        add(OperatorForecaster(run.operator, note=operator_note(run)), run.seed)
    lengths = directed_lengths(info.domain_lengths, info.coordinates)
    for run in runs:
        for steered in conditioned(run.operator, config, info.task, lengths=lengths):
            add(steered, run.seed)
    for run in runs:
        for corrected in run.corrected:
            add(CorrectedForecaster(corrected), run.seed)
    for run in runs:
        if run.prior is not None and info.task in run.prior.spec.tasks:
            add(PriorForecaster(run.prior), run.seed)
    if best is not None:  # by itself whatever its seed
        note = f"{best.path}; {operator_note(best)}"
        add(
            OperatorForecaster(best.operator, note=note, name="best", label="best operator so far"), best.seed
        )
    for name, label, run in _other_rows(also, runs[0].operator):
        add(
            OperatorForecaster(
                run.operator, note=f"{run.path}; {operator_note(run)}", name=name, label=label
            ),
            run.seed,
        )
    for run in runs:
        for model in run.baselines:
            if model.spec.task == info.task:
                add(model, run.seed)
    if not info.steady:
        add(Persistence())
    add(TrainingMean(train))
    dtype = getattr(torch, config.training.latent_cache_dtype)
    for run in {run.operator.spec.autoencoder_sha256: run for run in runs}.values():  # seeds may share one
        if (autoencoder := run.operator.autoencoder) is not None:
            add(
                AutoencoderFloor(
                    autoencoder, latent_dtype=dtype, spectrum=spectrum_of_fields(autoencoder, train)
                ),
                run.seed,
            )
    return rows


def _other_rows(others: Sequence[Run], operator: Simulator) -> Iterator[tuple[str, str, Run]]:
    """Name and label of each other operator's row, `operator_latent` or `operator_fields` by its states.

    What was trained alike with another seed joins a row; others are numbered from the second row of a kind
    on.
    """
    count: Counter[str] = Counter()
    families: list[tuple[str | None, set[int], str, str]] = []
    for run in others:
        family = None if run.config is None else family_of(run.config)
        for known, seeds, name, label in families:
            if family is not None and known == family and run.seed not in seeds:
                seeds.add(run.seed)
                yield name, label, run
                break
        else:
            states = run.operator.spec.states
            count[states] += 1
            number = f"{count[states]}" if count[states] > 1 else ""
            kind = f"other {_LABELS[states]}" if states == operator.spec.states else _LABELS[states]
            name, label = "_".join(filter(None, ("operator", states, number))), f"{kind} {number}".strip()
            families.append((family, {run.seed}, name, label))
            yield name, label, run


def operator_note(run: Run) -> str:
    """Say an operator's size, and what its training took, as far as logs know."""
    operator = run.operator
    parts = [f"operator {shown_size(operator.operator)}, {_architecture(operator.spec)}"]
    if operator.autoencoder is not None:
        parts.append(f"autoencoder {shown_size(operator.autoencoder)}")
    for stage in used_stages(run.logs):
        work = ""  # where an earlier version wrote the log
        if stage.flops:
            encoding = f" and {stage.preparation_flops:.3g} for encoding" if stage.preparation_flops else ""
            work = f", {stage.flops:.3g} FLOP{encoding}, {stage.processor_s:.0f} s of processor time"
        parts.append(
            f"{stage.stage} trained for {stage.seconds - stage.startup_s:.0f} s after "
            f"{stage.startup_s:.0f} s of startup, {stage.steps:,} steps, {stage.samples:,} samples{work}"
        )
    return "; ".join(parts)


def _architecture(spec: SimulatorSpec) -> str:
    """Its name; or levels, what mixes their tokens, and how far attention reaches in the finest."""
    if "name" in spec.operator:
        settings = ", ".join(f"{key} {value}" for key, value in spec.operator["config"].items())
        return " with ".join(filter(None, (spec.operator["name"], settings)))
    size = OperatorSize.from_json(spec.operator)
    mixers = [size.mixer(level) for level in range(len(size.depths))]
    kinds = [name for name, before in zip(mixers, [None, *mixers], strict=False) if name != before]
    levels = (
        f"{'one level' if len(mixers) == 1 else f'{len(mixers)} levels'} of {' over '.join(kinds)} blocks"
    )
    if mixers[0] not in ("attention", "hybrid"):
        return levels
    longest = max(length for task in spec.tasks.values() for length in task.tokens)
    is_whole = size.window >= longest
    return f"{levels} with {'one window over all tokens' if is_whole else f'windows of {size.window} tokens'}"


def _checkpoints(runs: Sequence[Run], others: Sequence[Run]) -> Iterator[Origin]:
    """What predicts, as far as it was loaded from a file."""
    for run in runs:
        of_seed = f" (seed {run.seed})" if len(runs) > 1 else ""
        models: list[tuple[Path | None, str, str]] = [(run.operator.path, "operator", OPERATOR)]
        models += [(each.path, kind_of(each), kind_of(each)) for each in run.corrected]
        models += [(run.prior.path, "prior", PRIOR)] if run.prior else []
        models += [(each.path, f"{each.name} of {each.spec.task}", BASELINE) for each in run.baselines]
        for path, role, kind in models:
            if path is not None:
                yield origin_of_checkpoint(path, role=f"{role}{of_seed}", kind=kind)
    for other in others:
        if other.operator.path is not None:
            yield origin_of_checkpoint(other.operator.path, role="other operator", kind=OPERATOR)


def _of_other_data(train: Fields, config: RunConfig, runs: Sequence[Run], task: str, split: Split) -> str:
    """Say where models weren't trained on the training split that there is now; empty if all were."""
    labels: dict[str, None] = {}
    for run in runs:
        baselines = [model for model in run.baselines if model.spec.task == task]
        for label, path in (
            ("operator", run.operator.path),
            *((model.label, model.path) for model in baselines),
        ):
            if path is not None and is_of_other_data(
                path, task, train=train.identity, latents=latent_folder(config)
            ):
                labels[label] = None
    if not labels:
        return ""
    return (
        f"{' and '.join(labels)} had other training data than the training split now holds, so {split} "
        f"may have trajectories that {'they were' if len(labels) > 1 else 'it was'} trained on."
    )


# --- one task ------------------------------------------------------------------------------------------


def _evaluate_task(
    config: RunConfig,
    forecasters: Rows,
    trajectories: Trajectories,
    split: Split,
    members: int | None,
    seed: int,
    own: Mapping[str, OwnMetric],
    *,
    is_latent: bool,
) -> TaskReport:
    task, resamples = trajectories.info.task, Resamples(len(trajectories), seed=config.seed)
    if is_latent and own:
        logger.warning(f"{task}: metrics of your own are of fields, and nothing decodes these latents")
        own = {}
    metrics = (
        LATENT_METRICS
        if is_latent
        else (*FIELD_METRICS, *(as_metric(name, function) for name, function in own.items()))
    )
    rows: list[Row] = []
    rollouts: dict[str, Rollout] = {}  # of the first seed, for the pictures
    for name, by_seed in forecasters.items():
        rolled = []
        for model_seed, model in by_seed.items():
            of_seed = f" (seed {model_seed})" if len(by_seed) > 1 else ""
            amount = f"{counted(trajectories.horizon, 'step')} of {counted(len(trajectories), 'trajectory')}"
            logger.info(f"{task}: {model.label}{of_seed}, {amount}")
            rolled.append(roll_out(model, trajectories, own=own))
        rollouts[name] = rolled[0]
        scores = score([each.errors for each in rolled], metrics, resamples=resamples, row=name)
        if not is_latent:
            compat = [pdebench_compat(each.errors) for each in rolled]
            means = {name: float(np.mean([values[name] for values in compat])) for name in compat[0]}
            scores = replace(scores, pdebench_compat={k: v for k, v in means.items() if k in scores.metrics})
        seconds = sum(each.seconds for each in rolled) / len(rolled)
        row = Row(
            name, _label(by_seed), scores, _note(by_seed), seconds, tuple(s for s in by_seed if s is not None)
        )
        if rows and not row.sees_truth:
            row = replace(row, paired=scores.paired(rows[0].scores))
        rows.append(row)
    first = {name: next(iter(by_seed.values())) for name, by_seed in forecasters.items()}
    if is_latent:
        figures = errors_in_time(rows, trajectories)
        if members is not None:
            logger.warning(f"{task}: no ensembles, as nothing decodes these latents")
    else:
        figures = task_figures(rows, rollouts, first, trajectories)
        if members is not None:
            rows, errors = _with_ensembles(rows, forecasters, trajectories, members, seed, resamples)
            figures += ensemble_figures(rows, errors, first, trajectories, seed=seed)
    undefined = next(iter(rollouts.values())).errors["undefined"]
    left_out = int(undefined.sum())
    protocol = _protocol(trajectories, split, is_latent=is_latent)
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
        space="latent" if is_latent else "fields",
        num_trajectories=len(trajectories),
        left_out=left_out,
        figures=figures,
    )


def _label(by_seed: Mapping[int | None, AnyForecaster]) -> str:
    """What a row is, without budgets that aren't the same for all seeds."""
    first, *others = [model.label for model in by_seed.values()]
    return first if {*others} <= {first} else f"{first.partition(' (')[0]} (a budget for each seed)"


def _note(by_seed: Mapping[int | None, AnyForecaster]) -> str:
    """What the reader has to know of a row, of each seed where that differs."""
    first, *others = [model.note for model in by_seed.values()]
    if {*others} <= {first}:
        return first
    return "; ".join(f"seed {seed}: {model.note}" for seed, model in by_seed.items())


def _with_ensembles(
    rows: Sequence[Row],
    forecasters: Rows,
    trajectories: Trajectories,
    members: int,
    seed: int,
    resamples: Resamples,
) -> tuple[list[Row], dict[str, EnsembleErrors]]:
    """Score rows as ensembles, too, paired with the first one; give numbers of first seeds for pictures."""
    climate, task = Climate.of(trajectories), trajectories.info.task
    draws = {name: all(map(has_members, by_seed.values())) for name, by_seed in forecasters.items()}
    if not any(draws.values()):
        logger.warning("no model has members, so all are scored as point forecasts")
    scored: list[Row] = []
    errors: dict[str, EnsembleErrors] = {}
    for row in rows:
        by_seed, rolled = forecasters[row.name], []
        for model_seed, model in by_seed.items():
            if draws[row.name]:
                of_seed = f" (seed {model_seed})" if len(by_seed) > 1 else ""
                logger.info(f"{task}: {members} members of {model.label}{of_seed}")
            num = members if draws[row.name] else None
            rolled.append(roll_out_members(model, trajectories, climate, members=num, seed=seed))
        errors[row.name] = rolled[0].errors
        seconds = sum(each.seconds for each in rolled) / len(rolled)
        ensemble = score_ensemble(
            [each.errors for each in rolled], resamples=resamples, row=row.name, seconds=seconds
        )
        if scored and not row.sees_truth and (first := scored[0].ensemble) is not None:
            ensemble = replace(ensemble, paired=ensemble.scores.paired(first.scores))
        scored.append(replace(row, ensemble=ensemble))
    return scored, errors


def _protocol(trajectories: Trajectories, split: Split, *, is_latent: bool) -> str:
    """What was given and what was predicted, for people."""
    info, num = trajectories.info, len(trajectories)
    points = " x ".join(map(str, info.grid.points))
    unit = "tokens" if is_latent else "points"
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
    if is_latent:
        return f"{text} Errors are of latents: nothing says what encoded them, so nothing can be decoded."
    parts = []  # how far the truth's mean moves: what `drift` would be for it
    for batch in trajectories.batches():
        space = tuple(range(1, batch.given.ndim - 1))
        start = batch.given.double()
        moved = (batch.truth[:, -1].double().mean(space) - start.mean(space)).abs()
        scale = start.square().mean(space).sqrt()
        parts.append((moved / scale)[scale > 0])
    drift = float(torch.cat(parts).mean())
    return f"{text} The mean of the truth drifts by {drift:.1g} of its root mean square."
