"""The figures of an evaluation: of a task an example, errors against time, spectra; of the run its training.

Every model has one colour in all of them (`ups.eval.figure_style`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups.data.windows import Trajectories
from ups.eval.baseline_model import Baseline
from ups.eval.field_figures import Trajectory, fields_figure, points_along
from ups.eval.figure_style import ONE_COLUMN, TWO_COLUMNS, Drawing, line_of, log_ticks, with_unit
from ups.eval.forecasters import AnyForecaster, AutoencoderFloor, Persistence, Rollout, TrainingMean, predict
from ups.eval.intervals import Interval, as_columns
from ups.eval.metrics import masked
from ups.eval.scores import mean_from
from ups.eval.training_logs import StageLog
from ups.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ups.eval.report import Row

_MAX_MODELS = 4  # of an example, beside the truth
_NUM_MARKERS = 8  # along a line
BANDS = {  # of `ups.eval.metrics.BANDS`
    "low": "wave numbers 0 to 3",
    "mid": "wave numbers 4 to 11",
    "high": "wave numbers 12 and above",
}
_PARTS = ("#1B2A49", "#47618C", "#8FA6C4", "#D5DDE8")  # of a stage's time; no model has these colours

Values = npt.NDArray[np.floating[Any]]


def task_figures(
    rows: Sequence[Row],
    rollouts: Mapping[str, Rollout],
    forecasters: Mapping[str, AnyForecaster],
    trajectories: Trajectories,
) -> list[Drawing]:
    """Figures of a task."""
    task, labels = trajectories.info.task, {row.name: row.label for row in rows}
    energies = {"truth": next(iter(rollouts.values())).true_energy.numpy()}
    for name, rollout in rollouts.items():
        if bool(rollout.energy.isfinite().all()):  # one that blew up has no spectrum to draw
            energies[name] = rollout.energy.numpy()
    spectra = spectra_figure(f"{task}_spectra", energies, labels)
    of_time = errors_in_time(rows, trajectories)
    return [_example(forecasters, rollouts, trajectories, labels), *of_time[:1], spectra, *of_time[1:]]


def run_figures(logs: Sequence[StageLog], baselines: Sequence[Baseline]) -> list[Drawing]:
    """Figures of the training: curves, and what its time went to."""
    losses = {log.stage: log.loss for log in logs if len(log.loss[0]) > 1}
    models = {log.stage: STAGES[log.stage].row or log.stage for log in logs}
    for model in baselines:
        if model.log is not None and len(model.log.loss[0]) > 1:
            steps, values = model.log.loss
            label = f"{model.label}, {model.spec.task}"
            losses[label], models[label] = (steps, values), model.name
    scores = {log.stage: log.score for log in logs if log.score[0]}
    figures = []
    if losses:
        caption = "Training loss; the stages' losses differ, so only shapes compare"
        figures.append(curves_figure("training_loss", caption, losses, models, quantity="training loss"))
    if scores:
        caption = "Validation score of each stage (nRMSE)"
        figures.append(curves_figure("validation_score", caption, scores, models, quantity="nRMSE"))
    if logs:
        figures.append(stages_figure({log.stage: _parts(log) for log in logs}))
    return figures


def error_figure(
    name: str,
    caption: str,
    panels: Mapping[str, Mapping[str, Sequence[Interval]]],
    labels: Mapping[str, str],
    *,
    t: Values,
    metric: str,
    time: str = "t",
    within: tuple[float, float] = (0.0, math.inf),
) -> Drawing:
    """Errors against time with their intervals, a line a model.

    Args:
        name: Stem of the files.
        panels: By title of the panel and name of the model, an interval for each time.
        labels: For people, by the models' names.
        t: Time since the frame that was given, shape (T,).
        metric: Name of the error.
        time: Name of the time, with its unit.
        within: What the axis shows at most; what lies beyond is cut off.
    """
    models = list(dict.fromkeys(model for rows in panels.values() for model in rows))

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (title, rows) in zip(grid, panels.items(), strict=True):
            axes.set_yscale("log")
            for model in models:
                if model in rows:
                    steps = as_columns(rows[model])
                    _plot(axes, t, steps["mean"], model, labels[model])
                    axes.fill_between(
                        t, steps["low"], steps["high"], color=line_of(model)["color"], alpha=0.15, linewidth=0
                    )
            axes.set(xlabel=f"{time} since the given frame", title=title)
            axes.grid(visible=True)
        low, high = grid[0].get_ylim()
        grid[0].set(ylabel=metric, ylim=(max(low, within[0]), min(high, within[1])))
        log_ticks(grid[0].yaxis)
        _legend(figure, grid)

    return Drawing(name, caption, _size(len(panels), len(models)), draw)


def spectra_figure(name: str, spectra: Mapping[str, Values], labels: Mapping[str, str]) -> Drawing:
    """Energy by wave number at the end of the rollout, a line a model."""
    labels = {"truth": "truth", **labels}
    largest = max(float(energy[1:].max(initial=0.0)) for energy in spectra.values()) or 1.0
    shown = {model: np.where(energy > 0, energy, np.nan)[1:] for model, energy in spectra.items()}
    waves = np.arange(1, 1 + max(map(len, shown.values())))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlabel="wave number", ylabel="energy")
        for model, energy in shown.items():
            _plot(axes, waves, energy, model, labels[model])
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12 * largest))  # what lies below is rounding
        for axis in (axes.xaxis, axes.yaxis):
            log_ticks(axis)
        axes.grid(visible=True)
        _legend(figure, [axes])

    caption = "Energy by wave number of the last predicted frame, mean over trajectories"
    return Drawing(name, caption, _size(1, len(shown)), draw)


def curves_figure(
    name: str,
    caption: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    models: Mapping[str, str],
    *,
    quantity: str,
) -> Drawing:
    """What training went through."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(yscale="log", xlabel="optimiser step", ylabel=quantity)
        for label, (steps, values) in curves.items():
            _plot(axes, steps, values, models[label], label)
        log_ticks(axes.yaxis)
        axes.grid(visible=True)
        _legend(figure, [axes])

    return Drawing(name, caption, _size(1, len(curves)), draw)


def stages_figure(parts: Mapping[str, Mapping[str, float]]) -> Drawing:
    """What the time of each stage went to, a bar a stage."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        names = list(parts)
        left = np.zeros(len(names))
        for part, colour in zip(next(iter(parts.values())), _PARTS, strict=True):
            seconds = np.array([parts[name][part] for name in names])
            axes.barh(names, seconds, left=left, label=part, height=0.5, color=colour)
            left += seconds
        axes.invert_yaxis()
        axes.set(xlabel="seconds")
        _legend(figure, [axes])

    size = (ONE_COLUMN, 1.2 + 0.3 * len(parts))
    return Drawing("stage_seconds", "What the time of each stage went to", size, draw)


def _parts(log: StageLog) -> dict[str, float]:
    return {
        "startup": log.startup_s,
        "waiting for data": log.data_wait_s,
        "computing": log.train_s - log.data_wait_s,
        "validation, saving": max(0.0, log.seconds - log.startup_s - log.train_s),
    }


def _example(
    forecasters: Mapping[str, AnyForecaster],
    rollouts: Mapping[str, Rollout],
    trajectories: Trajectories,
    labels: Mapping[str, str],
) -> Drawing:
    """The trajectory whose nRMSE is the first model's median, so neither a lucky nor an unlucky one."""
    first = next(iter(forecasters))
    errors = rollouts[first].errors
    nrmse_B = np.ma.filled(mean_from(masked(errors["nrmse"], errors["undefined"]), 1), np.nan)  # sorted last
    number = int(np.argsort(nrmse_B)[(len(nrmse_B) - 1) // 2])
    batch, info = trajectories.read(np.array([number])), trajectories.info
    models = _exemplary(forecasters)
    frames = {"truth": batch.truth[0].numpy()}
    frames |= {name: predict(model, batch, trajectories)[0].numpy() for name, model in models.items()}
    times, given = trajectories.t, {}
    if info.steady:
        given = {trajectories.given_array: batch.given[0].numpy()[..., 0]}
    else:
        times = np.concatenate([[0.0], times])
        frames = {name: np.concatenate([batch.given.numpy(), some]) for name, some in frames.items()}
    quantity = next(iter(info.channels), "u")
    truth, *predictions = ((name, values[..., 0]) for name, values in frames.items())
    shown = Trajectory(
        truth[1],
        dict(predictions),
        labels,
        {"t": times, **points_along(info.coordinates, info.domain_lengths, points=info.grid.points)},
        quantity,
        given,
        info.units,
    )
    caption = (
        f"{quantity} of trajectory {number}, which the {labels[first]} predicts with its median nRMSE, "
        f"{nrmse_B[number]:.3g}"
    )
    return fields_figure(f"{info.task}_example", caption, shown)


def _exemplary(forecasters: Mapping[str, AnyForecaster]) -> dict[str, AnyForecaster]:
    """The first model and others of other colours: what has learned, and predicts."""
    plain = (AutoencoderFloor, Persistence, TrainingMean)
    chosen: dict[str, str] = {}
    for name, model in forecasters.items():
        if not chosen or not isinstance(model, plain):
            chosen.setdefault(line_of(name)["color"], name)
    return {name: forecasters[name] for name in list(chosen.values())[:_MAX_MODELS]}


def errors_in_time(rows: Sequence[Row], trajectories: Trajectories) -> list[Drawing]:
    """Errors of a task against time, of several steps; all that can be drawn of latents."""
    if trajectories.horizon == 1:
        return []
    task, labels = trajectories.info.task, {row.name: row.label for row in rows}
    time = with_unit("t", trajectories.info.units)
    steps = {row.name: row.scores.by_step["nrmse"] for row in rows}
    options: dict[str, Any] = {"t": trajectories.t, "time": time}
    has_intervals = all(step.is_known for step in next(iter(steps.values())))
    known = ", with 95 % intervals" if has_intervals else ""
    caption = f"nRMSE against time{known}"
    figures = [error_figure(f"{task}_error", caption, {"": steps}, labels, metric="nRMSE", **options)]
    bands = {
        title: {row.name: row.scores.by_step[name] for row in rows if name in row.scores.by_step}
        for name, title in ((f"frmse_{band}", title) for band, title in BANDS.items())
    }
    if bands := {title: steps for title, steps in bands.items() if steps}:
        caption = f"fRMSE against time by band of wave numbers{known}"
        figures.append(error_figure(f"{task}_bands", caption, bands, labels, metric="fRMSE", **options))
    return figures


def _plot(axes: Axes, x: Any, y: Any, model: str, label: str) -> None:
    every = max(1, len(x) // _NUM_MARKERS)
    axes.plot(x, y, label=label, markevery=every, **line_of(model))


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Below all panels, since lines may be anywhere in them; a line stands there once."""
    entries = {
        label: line for one in axes for line, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=_legend_columns(len(axes))
    )


def _legend_columns(num_panels: int) -> int:
    return 2 if num_panels == 1 else 4


def _size(num_panels: int, num_lines: int) -> tuple[float, float]:
    """Of panels side by side, with room for the legend."""
    width = ONE_COLUMN if num_panels == 1 else TWO_COLUMNS
    return width, 2.4 + 0.16 * -(-num_lines // _legend_columns(num_panels))
