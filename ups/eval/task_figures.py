"""The pictures of a task: an example, errors against time, bands of wave numbers, spectra; and of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.data.trajectories import Trajectories
from ups.eval.baseline_model import Baseline
from ups.eval.figures import curves_figure, error_figure, fields_figure, spectra_figure, stages_figure
from ups.eval.forecasters import Forecaster
from ups.eval.intervals import Interval
from ups.eval.report import Row
from ups.eval.rollout import Rollout, predict
from ups.eval.training_logs import StageLog
from ups.grid import domain_lengths

_BANDS = {
    "frmse_low": "wave numbers 0 to 3",
    "frmse_mid": "4 to 11",
    "frmse_high": "12 and above",
}

Values = npt.NDArray[np.floating[Any]]


def task_figures(
    rows: Sequence[Row], rollouts: Mapping[str, Rollout], forecaster: Forecaster, trajectories: Trajectories
) -> dict[str, bytes]:
    """Pictures of a task, PNG by caption.

    Args:
        rows: Of the table.
        rollouts: By name of the row.
        forecaster: Whose prediction is drawn; one of the rows.
        trajectories: Of the split.
    """
    figures = dict([_example(forecaster, rollouts[forecaster.name], trajectories)])
    if trajectories.horizon > 1:
        figures |= _errors_in_time(rows, forecaster, trajectories.t)
    figures["Energy by wave number of the last predicted frame, mean over trajectories"] = spectra_figure(
        _spectra(rows, rollouts), title="last predicted frame"
    )
    return figures


def latent_figures(
    rows: Sequence[Row], rollouts: Mapping[str, Rollout], forecaster: Forecaster, trajectories: Trajectories
) -> dict[str, bytes]:
    """Of latents there is only the error against time; arguments as `task_figures`."""
    return _errors_in_time(rows, forecaster, trajectories.t) if trajectories.horizon > 1 else {}


def run_figures(logs: Sequence[StageLog], baselines: Sequence[Baseline]) -> dict[str, bytes]:
    """Pictures of the training: curves, and what its time went to."""
    losses = {log.stage: log.loss for log in logs if len(log.loss[0]) > 1}
    for model in baselines:
        if model.effort is not None and len(model.effort.curve) > 1:
            steps, values = zip(*model.effort.curve, strict=True)
            losses[f"{model.label}, {model.spec.task}"] = (steps, values)
    scores = {log.stage: log.score for log in logs if log.score[0]}
    figures = {}
    if losses:
        figures["Training loss; the stages' losses differ, so only shapes compare"] = curves_figure(
            losses, label="training loss"
        )
    if scores:
        figures["Validation score of each stage (nRMSE)"] = curves_figure(scores, label="validation score")
    if logs:
        figures["What the time of each stage went to"] = stages_figure(
            {log.stage: _parts(log) for log in logs}
        )
    return figures


def _parts(log: StageLog) -> dict[str, float]:
    return {
        "startup": log.startup_s,
        "waiting for data": log.data_wait_s,
        "computing": log.train_s - log.data_wait_s,
        "validation, saving": max(0.0, log.seconds - log.startup_s - log.train_s),
    }


def _example(forecaster: Forecaster, rollout: Rollout, trajectories: Trajectories) -> tuple[str, bytes]:
    """The trajectory whose nRMSE is the median, so neither a lucky nor an unlucky one."""
    nrmse_B = rollout.errors.nrmse.flatten(1).mean(1).numpy()
    number = int(np.argsort(nrmse_B)[(len(nrmse_B) - 1) // 2])
    batch = trajectories.read(np.array([number]))
    prediction = predict(forecaster, batch, trajectories)
    times = trajectories.t
    frames = [batch.truth[0].numpy(), prediction[0].numpy()]
    if not trajectories.info.steady:
        times = np.concatenate([[0.0], times])
        frames = [np.concatenate([batch.given.numpy(), values]) for values in frames]
    lengths = domain_lengths(trajectories.info.domain_lengths, ndim=trajectories.info.grid.ndim)
    truth, predicted = (values[..., 0] for values in frames)
    quantity = next(iter(trajectories.info.channels), "u")
    picture = fields_figure(truth, predicted, t=times, extent=lengths[-2:], quantity=quantity)
    caption = (
        f"{forecaster.label}: {quantity} of trajectory {number}, whose nRMSE of {nrmse_B[number]:.3g} is the "
        "median"
    )
    return caption, picture


def _errors_in_time(rows: Sequence[Row], forecaster: Forecaster, t: Values) -> dict[str, bytes]:
    labels = _labels(rows)
    steps = {labels[row.name]: row.scores.by_step["nrmse"] for row in rows}
    own = next(row for row in rows if row.name == forecaster.name).scores.by_step
    bands = {label: _means(own[name]) for name, label in _BANDS.items() if name in own}
    figures = {
        "nRMSE against time, with 95 % intervals": error_figure(
            {label: _means(values) for label, values in steps.items()},
            t=t,
            metric="nRMSE",
            intervals={label: _ends(values) for label, values in steps.items()},
        )
    }
    if bands:
        caption = f"fRMSE of the {forecaster.label} against time, by band of wave numbers"
        figures[caption] = error_figure(bands, t=t, metric="fRMSE")
    return figures


def _spectra(rows: Sequence[Row], rollouts: Mapping[str, Rollout]) -> dict[str, Values]:
    labels = _labels(rows)
    truth: Tensor = next(iter(rollouts.values())).true_energy
    found = {"truth": truth.numpy()}
    for name, rollout in rollouts.items():
        if bool(rollout.energy.isfinite().all()):  # one that blew up has no spectrum to draw
            found[labels[name]] = rollout.energy.numpy()
    return found


def _labels(rows: Sequence[Row]) -> dict[str, str]:
    return {row.name: row.label for row in rows}


def _means(steps: Sequence[Interval]) -> Values:
    return np.array([step.mean for step in steps])


def _ends(steps: Sequence[Interval]) -> tuple[Values, Values]:
    return np.array([step.low for step in steps]), np.array([step.high for step in steps])
