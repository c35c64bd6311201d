"""The table of a task: operators, and everything that they are compared with, on the same trajectories.

A row has every metric with its interval, over the whole rollout and by time step. Rows are the run's
operator, others such as the ablation that advances the fields, and baselines, with what each took to train,
so that budgets can be equal. Letters: B trajectories, T time steps, K wave numbers, C channels, R resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.config import RunConfig
from ups.data.fields import open_fields
from ups.data.latent_trajectories import open_latent_fields, open_latent_trajectories
from ups.data.trajectories import Trajectories, open_trajectories
from ups.errors import ConfigError
from ups.eval import metrics
from ups.eval.baseline_model import Baseline
from ups.eval.forecasters import (
    AutoencoderFloor,
    Forecaster,
    LatentForecaster,
    OperatorForecaster,
    Persistence,
    TrainingMean,
    shown_size,
)
from ups.eval.train_baseline import Budget
from ups.eval.training_logs import StageLog
from ups.eval.trajectory_errors import Interval, Resamples, TrajectoryErrors
from ups.trained.simulator import Simulator
from ups.trained.specs import SimulatorSpec

# PDEBench's own evaluation takes batches of 50.
COMPAT_BATCH_SIZE = 50
# What has a meaning where tokens are in the place of points.
LATENT_METRICS = ("nrmse", "vrmse", "relative_l2", "correlation", "correlation_time")
Values = npt.NDArray[np.float64]
_ORDER = (
    *("nrmse", "vrmse", "relative_l2", "correlation_time", "drift"),
    *("rmse", "crmse", "max_error", "brmse", "frmse_low", "frmse_mid", "frmse_high"),
)
_Steps = list[tuple[float, Values]]  # of each time step: the statistic, and its values in every resample (R,)
_LABELS = {"latent": "latent operator", "fields": "operator on fields"}
_ENCODERS = ("autoencoder", "joint")  # stages that leave an autoencoder, of which the last one's is used


@dataclass(frozen=True)
class Comparison:
    """Who predicts which trajectories.

    Attributes:
        trajectories: Of the split.
        operator: The first row.
        others: The other rows, in order.
        space: Whether states are fields, or latents that nothing can decode.
    """

    trajectories: Trajectories
    operator: Forecaster
    others: Sequence[Forecaster | AutoencoderFloor]
    space: Literal["fields", "latent"]


def make_comparison(
    config: RunConfig,
    simulator: Simulator,
    task: str,
    *,
    split: str,
    horizon: int | None,
    baselines: Sequence[Baseline],
    others: Sequence[Forecaster] = (),
    operator_note: str,
) -> Comparison:
    """Everything that an operator has to be compared with.

    Args:
        config: Configuration of the run.
        simulator: In evaluation mode.
        task: Name of the task.
        split: "train", "val" or "test".
        horizon: Steps to predict; None to the end. A steady task has one.
        baselines: Trained baselines of any of the tasks.
        others: Other operators, on fields that are known; left out where errors are of latents.
        operator_note: What the reader has to know of the operator.

    Raises:
        ConfigError: Kinds "other_task", "other_grid", and those of the trajectories.
        ups_store.StoreError: If the data can't be read.
    """
    if task not in simulator.spec.tasks:
        raise ConfigError(
            "the operator wasn't trained for this task",
            kind="other_task",
            expected=" or ".join(sorted(simulator.spec.tasks)),
            found=task,
        )
    is_steady = simulator.spec.tasks[task].steady
    wanted = min(horizon, 1) if is_steady and horizon is not None else horizon
    if not simulator.spec.is_encoder_known:
        return _compare_latents(config, simulator, task, split, wanted, operator_note)
    models = [*others, *(model for model in baselines if model.spec.task == task)]
    return _compare_fields(config, simulator, task, split, wanted, models, operator_note)


def _compare_fields(
    config: RunConfig,
    simulator: Simulator,
    task: str,
    split: str,
    horizon: int | None,
    models: Sequence[Forecaster],
    note: str,
) -> Comparison:
    source, stride = config.training.field_source, simulator.spec.time_stride
    trajectories = open_trajectories(config.build, task, split, source=source, stride=stride, horizon=horizon)
    _check_same_grid(simulator, trajectories)
    train = open_fields(config.build, task, "train", source=source)
    others: list[Forecaster | AutoencoderFloor] = [*models]
    others += [] if trajectories.info.steady else [Persistence()]
    others.append(TrainingMean(train))
    if simulator.autoencoder is not None:
        dtype = getattr(torch, config.training.latent_cache_dtype)
        others.append(AutoencoderFloor(simulator.autoencoder, latent_dtype=dtype))
    return Comparison(trajectories, OperatorForecaster(simulator, note=note), others, "fields")


def _compare_latents(
    config: RunConfig,
    simulator: Simulator,
    task: str,
    split: str,
    horizon: int | None,
    note: str,
) -> Comparison:
    """On latents of an unknown encoder: there are no baselines and no floor, as there are no fields."""
    stride = simulator.spec.time_stride
    trajectories = open_latent_trajectories(config, task, split, stride=stride, horizon=horizon)
    train = open_latent_fields(config, task, "train")
    others = [] if trajectories.info.steady else [Persistence()]
    operator = LatentForecaster(simulator, note=note)
    return Comparison(trajectories, operator, [*others, TrainingMean(train)], "latent")


def _check_same_grid(simulator: Simulator, trajectories: Trajectories) -> None:
    known, found = simulator.spec.tasks[trajectories.info.task].grid, trajectories.info.grid
    if found != known:
        raise ConfigError(
            "fields on another grid than the operator's",
            kind="other_grid",
            path=trajectories.origin,
            expected=known.name,
            found=found.name,
            hint="check data.reduce_space",
        )


@dataclass(frozen=True)
class Scores:
    """Errors of one model or baseline.

    Attributes:
        metrics: Over all predicted time steps and channels, by name.
        by_step: The same by time step, each of length T.
        pdebench_compat: PDEBench's metrics as its own evaluation averages them, in batches of 50.
    """

    metrics: Mapping[str, Interval]
    by_step: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    pdebench_compat: Mapping[str, float] = field(default_factory=dict)

    def of(self, names: Collection[str]) -> Scores:
        """Some of the metrics, without those that PDEBench averages."""
        metrics = {name: value for name, value in self.metrics.items() if name in names}
        return Scores(metrics, {name: steps for name, steps in self.by_step.items() if name in names})


def score(errors: TrajectoryErrors, *, t: Tensor, seed: int = 0) -> Scores:
    """Turn errors of trajectories into numbers with 95 % intervals.

    Args:
        errors: Of all trajectories of the split.
        t: Time of each predicted frame since the given one, shape (T,).
        seed: Of the resampling; rows of one table share it, so they are resampled alike.

    Returns:
        Metrics `nrmse`, `vrmse`, `relative_l2`, `correlation_time`, `drift` (of the last step), `rmse`,
        `crmse`, `max_error`, `brmse`, `frmse_low`, `frmse_mid`, `frmse_high`; no band without wave numbers.
    """
    resamples = Resamples(len(errors), seed=seed)
    means = {"nrmse": errors.nrmse, "vrmse": errors.vrmse, "rmse": errors.rmse, "brmse": errors.brmse}
    by_step = {name: resamples.of_means(value.mean(2).numpy()) for name, value in means.items()}
    by_step["drift"] = resamples.of_means(errors.drift.mean(2).numpy())
    by_step["correlation"] = resamples.of_means(errors.correlation.numpy())
    of_roots = _of_roots(errors, resamples)
    found = {
        **{name: resamples.of_mean(value.flatten(1).mean(1).numpy()) for name, value in means.items()},
        "relative_l2": resamples.of_mean(errors.relative_l2.numpy()),
        "correlation_time": resamples.of_mean(errors.correlation_time(t).numpy()),
        "drift": by_step["drift"][-1],
        "max_error": resamples.of_maximum(errors.max_error.flatten(1).amax(1).numpy()),
        **{name: _overall(steps, resamples) for name, steps in of_roots.items()},
    }
    for name, steps in of_roots.items():
        by_step[name] = [resamples.interval(float(value), resampled) for value, resampled in steps]
    compat = metrics.summary(errors.pdebench_compat(COMPAT_BATCH_SIZE))
    return Scores(
        metrics={name: found[name] for name in _ORDER if name in found},
        by_step=by_step,
        pdebench_compat={name: value for name, value in compat.items() if name in found},
    )


def _of_roots(errors: TrajectoryErrors, resamples: Resamples) -> dict[str, _Steps]:
    """The metrics whose mean over trajectories stands inside a square root."""
    num_wave_numbers = errors.shells.shape[2]
    bands = {name: ends for name, ends in metrics.BANDS.items() if ends[0] < num_wave_numbers}
    exact = errors.pdebench()
    steps: dict[str, _Steps] = {name: [] for name in ("crmse", *(f"frmse_{band}" for band in bands))}
    for step in range(errors.rmse.shape[1]):  # one by one: all resamples of all shells may not fit
        square_BC = errors.mean_error[:, step].square().numpy()
        resampled = np.sqrt(resamples.means(square_BC)).mean(1)
        steps["crmse"].append((exact["crmse"][step].mean().item(), resampled))
        shells_BKC = errors.shells[:, step].numpy()
        roots = np.sqrt(resamples.means(shells_BKC.reshape(len(errors), -1)))
        amplitude_RKC = roots.reshape(-1, *shells_BKC.shape[1:])
        for band, ends in bands.items():
            value = exact[f"frmse_{band}"][step].mean().item()
            steps[f"frmse_{band}"].append((value, amplitude_RKC[:, slice(*ends)].mean((1, 2))))
    return steps


def _overall(steps: _Steps, resamples: Resamples) -> Interval:
    values, resampled = zip(*steps, strict=True)
    return resamples.interval(float(np.mean(values)), np.mean(resampled, axis=0))


@dataclass(frozen=True)
class OtherOperator:
    """An operator beside the one that a run has trained.

    Attributes:
        simulator: In evaluation mode, on the device of the run's own.
        path: Its checkpoint.
        logs: Of its training, as far as they are known.
    """

    simulator: Simulator
    path: Path
    logs: Sequence[StageLog] = ()


def forecasters_of(others: Sequence[OtherOperator], own: Simulator) -> list[OperatorForecaster]:
    """Their rows, `operator_latent` or `operator_fields` by their states, numbered from the second on."""
    count: Counter[str] = Counter()
    rows = []
    for other in others:
        states = other.simulator.spec.states
        count[states] += 1
        number = "" if count[states] == 1 else str(count[states])
        what = f"other {_LABELS[states]}" if states == own.spec.states else _LABELS[states]
        rows.append(
            OperatorForecaster(
                other.simulator,
                note=f"{other.path}; {operator_note(other.simulator, other.logs)}",
                name="_".join(filter(None, ("operator", states, number))),
                label=" ".join(filter(None, (what, number))),
            )
        )
    return rows


def operator_note(simulator: Simulator, logs: Sequence[StageLog]) -> str:
    """Sizes, and what the training took, as far as logs say."""
    parts = [f"operator {shown_size(simulator.operator)}, {_architecture(simulator.spec)}"]
    if simulator.autoencoder is not None:
        parts.append(f"autoencoder {shown_size(simulator.autoencoder)}")
    parts += [
        f"{log.stage} trained for {log.seconds - log.startup_s:.0f} s after {log.startup_s:.0f} s of "
        f"startup, {log.steps:,} steps, {log.samples:,} samples"
        for log in logs
    ]
    return "; ".join(parts)


def _architecture(spec: SimulatorSpec) -> str:
    """Levels, and how far attention reaches in the finest."""
    num, window = len(spec.operator["depths"]), int(spec.operator["window"])
    longest = max(length for task in spec.tasks.values() for length in task.tokens)
    levels = "one level" if num == 1 else f"{num} levels"
    reach = "one window over all tokens" if window >= longest else f"windows of {window} tokens"
    return f"{levels} with {reach}"


def check_comparable(other: OtherOperator, config: RunConfig, own: Simulator) -> None:
    """Refuse an operator that doesn't predict what a run's own does.

    Args:
        other: The operator.
        config: Configuration of the run, with the tasks that are evaluated.
        own: Of the run.

    Raises:
        ConfigError: Kinds "unknown_encoder", "other_task", "other_grid", "other_stride".
    """
    theirs, path = other.simulator.spec, other.path
    if not (own.spec.is_encoder_known and theirs.is_encoder_known):
        problem = "operators are compared as fields, and nothing decodes latents of an unknown encoder"
        raise ConfigError(problem, kind="unknown_encoder", path=path)
    for task in config.data.tasks:
        if task not in theirs.tasks:
            problem, known = "the operator wasn't trained for this task", " or ".join(sorted(theirs.tasks))
            raise ConfigError(problem, kind="other_task", path=path, expected=known, found=task)
        if task in own.spec.tasks:  # else the run itself is refused
            _check_same_frames(task, theirs, own.spec, path)


def _check_same_frames(task: str, theirs: SimulatorSpec, own: SimulatorSpec, path: Path) -> None:
    expected, found = own.tasks[task].grid, theirs.tasks[task].grid
    if found != expected:
        problem = f"the operator is for another grid of {task}"
        raise ConfigError(problem, kind="other_grid", path=path, expected=expected.name, found=found.name)
    if theirs.time_stride != own.time_stride and not own.tasks[task].steady:
        raise ConfigError(
            "the operator takes another time stride",
            kind="other_stride",
            path=path,
            expected=own.time_stride,
            found=theirs.time_stride,
        )


def equal_budgets(
    logs: Sequence[StageLog],
    *,
    num_tasks: int,
    seconds: float | None = None,
    samples: int | None = None,
) -> list[Budget]:
    """Wall time and samples of each baseline of each task.

    Wall time is that of the stages that made the operator, its autoencoder's included, from the first
    optimiser step on; samples are the windows that the operator was trained on, in stage operator or, without
    one, in stage joint. A run on several tasks had that much for all of them, so a baseline of one task gets
    its share.

    Args:
        logs: Of the operator's run.
        num_tasks: Tasks of the run.
        seconds: Wall time instead of the logs'.
        samples: Windows instead of the logs'.

    Raises:
        ConfigError: Kind "no_log", if there is no log of the operator and a budget isn't given.
    """
    used = _used(logs)
    operator = next((log for log in reversed(used) if log.stage != "autoencoder"), None)
    if operator is None and (seconds is None or samples is None):
        raise ConfigError(
            "no training log says what the operator's training took",
            kind="no_log",
            expected="operator.jsonl or joint.jsonl in checkpoint.dir",
            hint="say --budget-seconds and --budget-samples",
        )
    if seconds is None:
        seconds = sum(log.seconds - log.startup_s for log in used) / num_tasks
    if samples is None:
        assert operator is not None
        samples = max(1, operator.samples // num_tasks)
    return [Budget(seconds=round(seconds, 1)), Budget(samples=samples)]


def _used(logs: Sequence[StageLog]) -> list[StageLog]:
    """Logs of one autoencoder and of what came after it: another one's time made nothing that is used."""
    encoders = [log for log in logs if log.stage in _ENCODERS]
    last = max(encoders, key=lambda log: log.trained_at, default=None)
    return [log for log in logs if log is last or log.stage not in _ENCODERS]
