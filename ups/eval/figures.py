"""Pictures of an evaluation, as PNG bytes; matplotlib without its global state.

Of a task: an example, errors against time, bands of wave numbers, spectra; of the run: its losses.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.data.trajectories import Trajectories
from ups.errors import needs
from ups.eval.baseline_model import Baseline
from ups.eval.forecasters import Forecaster
from ups.eval.report import Row
from ups.eval.rollout import Rollout, predict
from ups.eval.training_logs import StageLog
from ups.eval.trajectory_errors import Interval
from ups.grid import domain_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DPI = 110

_FIELD_COLOURS, _ERROR_COLOURS = "RdBu_r", "magma"

_STYLE: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 9, "axes.grid": False}
_MAX_FRAMES = 4

Values = npt.NDArray[np.floating[Any]]

_BANDS = {
    "frmse_low": "wave numbers 0 to 3",
    "frmse_mid": "4 to 11",
    "frmse_high": "12 and above",
}


def fields_figure(
    truth_TX: Values, prediction_TX: Values, *, t: Values, extent: Sequence[float], quantity: str
) -> bytes:
    """Truth, prediction and error of one trajectory: space-time images in 1D, frames in 2D and 3D.

    Args:
        truth_TX: One channel, shape (T, X), (T, Y, X) or (T, Z, Y, X), physical units. Of volumes the middle
            plane is shown.
        prediction_TX: The same shape.
        t: Time of every frame, shape (T,).
        extent: Length of the domain along each axis that is shown, in the order of the axes.
        quantity: What is shown, with its unit if it has one.
    """
    if truth_TX.ndim == 4:
        truth_TX, prediction_TX = (frames[:, frames.shape[1] // 2] for frames in (truth_TX, prediction_TX))
    draw = _space_time if truth_TX.ndim == 2 else _frames
    return _png(lambda figure: draw(figure, truth_TX, prediction_TX, t, extent, quantity), size=(9.5, 3.2))


def error_figure(
    errors: Mapping[str, Values],
    *,
    t: Values,
    metric: str,
    intervals: Mapping[str, tuple[Values, Values]] | None = None,
) -> bytes:
    """Error against time, one line a row.

    Args:
        errors: By label, shape (T,).
        t: Time since the last frame that was given, shape (T,).
        metric: Name of the error.
        intervals: Low and high ends by label, each (T,), drawn as bands.
    """
    bands = intervals or {}

    def draw(axes: Axes) -> None:
        for label, values in errors.items():
            (line,) = axes.plot(t, values, label=label)
            if label in bands:
                axes.fill_between(t, *bands[label], color=line.get_color(), alpha=0.2, linewidth=0)

    return _lines(draw, xlabel="time since the given frame", ylabel=metric)


def spectra_figure(spectra: Mapping[str, Values], *, title: str) -> bytes:
    """Energy by wave number, one line a row.

    Args:
        spectra: By label, shape (K,), wave numbers from 0 on.
        title: Which frame of which trajectories.
    """

    def draw(axes: Axes) -> None:
        for label, energy in spectra.items():
            positive = np.maximum(energy[1:], np.finfo(np.float64).tiny)
            axes.plot(np.arange(1, len(energy)), positive, label=label)
        largest = max(float(energy[1:].max()) for energy in spectra.values())
        axes.set_ylim(bottom=1e-12 * largest)  # what lies below is rounding

    return _lines(draw, xlabel="wave number", ylabel="energy", xscale="log", title=title)


def curves_figure(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, label: str) -> bytes:
    """Training curves: optimiser steps and values by name; the label names the values."""

    def draw(axes: Axes) -> None:
        for name, (steps, values) in curves.items():
            axes.plot(steps, values, label=name, marker="." if len(steps) < 40 else None)

    return _lines(draw, xlabel="optimiser step", ylabel=label)


def _lines(draw: Callable[[Axes], None], **texts: str) -> bytes:
    """Lines on a logarithmic axis, the legend beside them, as they may be anywhere."""

    def draw_all(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_yscale("log")
        draw(axes)
        axes.set(**texts)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return _png(draw_all, size=(8.5, 3.6))


def stages_figure(parts: Mapping[str, Mapping[str, float]]) -> bytes:
    """What the time of each stage went to, a bar a stage.

    Args:
        parts: Seconds by stage and part; every stage has the same parts.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        names = list(parts)
        left = np.zeros(len(names))
        for part in next(iter(parts.values())):
            seconds = np.array([parts[name][part] for name in names])
            axes.barh(names, seconds, left=left, label=part, height=0.5)
            left += seconds
        axes.invert_yaxis()
        axes.set(xlabel="seconds")
        axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _png(draw, size=(8.5, 1.2 + 0.5 * len(parts)))


def _space_time(
    figure: Figure, truth: Values, prediction: Values, t: Values, extent: Sequence[float], quantity: str
) -> None:
    end = float(t[-1]) if t[-1] > t[0] else float(t[0]) + 1.0  # a single frame is a stripe
    box = (0.0, float(extent[0]), float(t[0]), end)
    shown = {"truth": truth, "prediction": prediction}
    low, high = _limits(truth)
    columns = figure.subplots(1, 3, sharey=True)
    for axes, (title, values) in zip(columns, shown.items(), strict=False):
        image = axes.imshow(
            values, origin="lower", aspect="auto", extent=box, vmin=low, vmax=high, cmap=_FIELD_COLOURS
        )
        axes.set(title=title, xlabel="x")
        figure.colorbar(image, ax=axes, label=quantity if title == "prediction" else None)
    error = np.abs(prediction - truth)
    image = columns[2].imshow(error, origin="lower", aspect="auto", extent=box, cmap=_ERROR_COLOURS)
    columns[2].set(title="|error|", xlabel="x")
    figure.colorbar(image, ax=columns[2])
    columns[0].set_ylabel("t")


def _frames(
    figure: Figure, truth: Values, prediction: Values, t: Values, extent: Sequence[float], quantity: str
) -> None:
    chosen = np.unique(np.linspace(0, len(truth) - 1, min(_MAX_FRAMES, len(truth))).astype(int))
    figure.set_size_inches(2.3 * len(chosen) + 0.8, 6.6)
    box = (0.0, float(extent[1]), 0.0, float(extent[0]))
    low, high = _limits(truth)
    error = np.abs(prediction - truth)
    rows = {
        "truth": (truth, low, high, _FIELD_COLOURS),
        "prediction": (prediction, low, high, _FIELD_COLOURS),
        "|error|": (error, 0.0, float(error.max()) or 1.0, _ERROR_COLOURS),
    }
    grid = figure.subplots(3, len(chosen), sharex=True, sharey=True, squeeze=False)
    for line, (title, (values, bottom, top, colours)) in zip(grid, rows.items(), strict=True):
        for axes, frame in zip(line, chosen, strict=True):
            image = axes.imshow(
                values[frame], origin="lower", extent=box, vmin=bottom, vmax=top, cmap=colours
            )
        line[0].set_ylabel(f"{title}\ny")
        figure.colorbar(image, ax=list(line), label=quantity if title != "|error|" else None)
    for axes, frame in zip(grid[0], chosen, strict=True):
        axes.set_title(f"t = {float(t[frame]):.3g}")
    for axes in grid[-1]:
        axes.set_xlabel("x")


def _limits(values: Values) -> tuple[float, float]:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if low < 0 < high:  # white is zero
        high = max(-low, high)
        low = -high
    return low, high if high > low else low + 1.0


def _png(draw: Callable[[Figure], None], *, size: tuple[float, float]) -> bytes:
    with needs("plot"):
        import matplotlib
        from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=_DPI)
    return image.getvalue()


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
