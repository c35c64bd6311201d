"""The figures of a task's ensembles: scores against time, ranks, reliability, and members of an example.

Models have the colours that they have in all figures (`ups.eval.figure_style`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ups.data.windows import Trajectories
from ups.eval.ensemble_example import fan_figure, make_example, spaghetti_figure
from ups.eval.ensemble_metrics import expected_rank_shares
from ups.eval.ensemble_scores import EnsembleScores
from ups.eval.ensembles import EnsembleErrors
from ups.eval.figure_style import ONE_COLUMN, TWO_COLUMNS, Column, Drawing, line_of, log_ticks, with_unit
from ups.eval.figures import BANDS, error_figure, interval_columns
from ups.eval.forecasters import AutoencoderFloor, Forecaster, has_members
from ups.eval.intervals import Interval, as_columns
from ups.eval.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_MODELS = 3  # of an example
_SCORES = {"crps": "CRPS", "energy_score": "energy score"}
_BANDS = {f"band_{band}": title for band, title in BANDS.items()}
_RATIOS = (1e-3, 1e3)  # of energies that are drawn
_PANEL_HEIGHT = 2.3


def ensemble_figures(
    rows: Sequence[Row],
    errors: Mapping[str, EnsembleErrors],
    models: Mapping[str, Forecaster | AutoencoderFloor],
    trajectories: Trajectories,
    *,
    seed: int,
) -> list[Drawing]:
    """Figures of a task."""
    task, labels = trajectories.info.task, {row.name: row.label for row in rows}
    scores = {row.name: row.ensemble for row in rows if row.ensemble is not None}
    ensembles = {name: found for name, found in scores.items() if not found.is_point}
    time = with_unit("t", trajectories.info.units)
    drawings = _in_time(task, scores, labels, trajectories, time) if trajectories.horizon > 1 else []
    if not ensembles:
        return drawings
    if trajectories.horizon > 1:
        drawings.append(
            spread_skill_figure(f"{task}_spread_skill", ensembles, labels, t=trajectories.t, time=time)
        )
    drawings.append(ranks_figure(f"{task}_ranks", ensembles, labels))
    drawings.append(reliability_figure(f"{task}_reliability", ensembles, labels))
    shown = {name: model for name in ensembles if has_members(model := models[name])}
    shown = dict(list(shown.items())[:_MOST_MODELS])
    first = errors[next(iter(shown))]
    score_B = first.energy_score.mean(1).numpy()
    number = int(np.argsort(score_B)[(len(score_B) - 1) // 2])
    example = make_example(shown, trajectories, number=number, members=first.num_members, seed=seed)
    drawings.append(fan_figure(f"{task}_fan", example, labels))
    return [*drawings, spaghetti_figure(f"{task}_spaghetti", example, labels)]


def _in_time(
    task: str,
    scores: Mapping[str, EnsembleScores],
    labels: Mapping[str, str],
    trajectories: Trajectories,
    time: str,
) -> list[Drawing]:
    """Scores and energies of bands of all rows, point forecasts too, against time."""

    def panels(titles: Mapping[str, str]) -> dict[str, dict[str, Sequence[Interval]]]:
        found: dict[str, dict[str, Sequence[Interval]]] = {}
        for key, title in titles.items():
            if measured := {name: own.scores for name, own in scores.items() if key in own.scores.metrics}:
                found[title] = {name: own.by_step[key] for name, own in measured.items()}
        return found

    t = trajectories.t
    caption = "CRPS and energy score against time, relative to the truth's root mean square"
    figures = [error_figure(f"{task}_crps", caption, panels(_SCORES), labels, t=t, metric="score", time=time)]
    if bands := panels(_BANDS):
        caption = "Energy of members in bands of wave numbers over the truth's, against time; 1 is right"
        name, metric = f"{task}_band_energies", "energy / the truth's"
        figures.append(
            error_figure(name, caption, bands, labels, t=t, metric=metric, time=time, within=_RATIOS)
        )
    return figures


def spread_skill_figure(
    name: str,
    ensembles: Mapping[str, EnsembleScores],
    labels: Mapping[str, str],
    *,
    t: Column,
    time: str = "t",
) -> Drawing:
    """Spread beside the error of the ensemble mean, and their ratio, against time.

    Args:
        name: Stem of the files.
        ensembles: By the models' names.
        labels: For people, by the models' names.
        t: Time since the frame that was given, shape (T,).
        time: Name of the time, with its unit.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharex=True)
        for model, found in ensembles.items():
            steps, line = found.scores.by_step, line_of(model)
            plain = {"color": line["color"], "marker": ""}
            left.plot(t, _means(steps["skill"]), label=f"{labels[model]}, skill", **plain)
            left.plot(t, _means(steps["spread"]), label=f"{labels[model]}, spread", linestyle="--", **plain)
            ratio = as_columns(steps["spread_skill"])
            right.plot(t, ratio["mean"], **plain)
            right.fill_between(t, ratio["low"], ratio["high"], color=line["color"], alpha=0.15, linewidth=0)
        right.axhline(1.0, color="black", linewidth=0.8)
        left.set(yscale="log", xlabel=f"{time} since the given frame", ylabel="relative root mean square")
        log_ticks(left.yaxis)
        right.set(xlabel=f"{time} since the given frame", ylabel="spread / skill")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.grid(visible=True)
        figure.legend(loc="outside lower center", ncols=4)

    table: dict[str, Column] = {f"{time} since the given frame": t}
    for model, found in ensembles.items():
        for key in ("skill", "spread", "spread_skill"):
            table |= interval_columns(f"{key}, {labels[model]}", found.scores.by_step[key])
    caption = (
        "Skill (root mean square error of the ensemble mean), spread, and their ratio against time, "
        "corrected for the number of members; an ensemble like the truth has 1"
    )
    return Drawing(name, caption, (TWO_COLUMNS, _PANEL_HEIGHT + 0.2), draw, table)


def ranks_figure(name: str, ensembles: Mapping[str, EnsembleScores], labels: Mapping[str, str]) -> Drawing:
    """Rank histograms, a panel a model; arguments are those of `spread_skill_figure`."""
    places = {model: _bin_edges(found.num_members) for model, found in ensembles.items()}

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(ensembles), sharey=True, squeeze=False)[0]
        for axes, (model, found) in zip(grid, ensembles.items(), strict=True):
            edges, shares = places[model], as_columns(found.ranks)
            bars = {"width": np.diff(edges), "align": "edge", "color": line_of(model)["color"], "alpha": 0.6}
            axes.bar(edges[:-1], shares["mean"], **bars)
            middles = (edges[:-1] + edges[1:]) / 2
            axes.vlines(middles, shares["low"], shares["high"], color="0.2", linewidth=0.8)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set(xlabel="members below the truth / all", title=labels[model], xlim=(0, 1))
        grid[0].set_ylabel("frequency / expected")

    lengths = [len(found.ranks) for found in ensembles.values()]
    all_ranks = [rank for found in ensembles.values() for rank in found.ranks]
    table: dict[str, Column] = {
        "model": np.repeat([labels[model] for model in ensembles], lengths),
        "from": np.concatenate([edges[:-1] for edges in places.values()]),
        "to": np.concatenate([edges[1:] for edges in places.values()]),
        **interval_columns("frequency / expected", all_ranks),
    }
    caption = (
        "Rank histograms: how many members lie below the truth, over all points, channels and time steps; "
        "even if the truth is like a member, a U with too little spread, a dome with too much, a slope with "
        "a bias"
    )
    return Drawing(name, caption, _size(len(ensembles)), draw, table)


def reliability_figure(
    name: str, ensembles: Mapping[str, EnsembleScores], labels: Mapping[str, str]
) -> Drawing:
    """Reliability diagrams, a panel a threshold; arguments are those of `spread_skill_figure`."""
    quantiles = [each.quantile for each in next(iter(ensembles.values())).reliability]

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(quantiles), sharex=True, sharey=True, squeeze=False)[0]
        for number, (axes, quantile) in enumerate(zip(grid, quantiles, strict=True)):
            axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
            for model, found in ensembles.items():
                each = found.reliability[number]
                ends = as_columns(each.frequency)
                axes.plot(each.probability, ends["mean"], label=labels[model], **line_of(model))
                colour = line_of(model)["color"]
                axes.fill_between(each.probability, ends["low"], ends["high"], color=colour, alpha=0.15)
            axes.set(xlabel="forecast probability", title=f"above the truth's {quantile:.0%} quantile")
            axes.grid(visible=True)
        grid[0].set_ylabel("observed frequency")
        lines, names = grid[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=4)

    found = [(model, each) for model, scores in ensembles.items() for each in scores.reliability]
    lengths = [len(each.probability) for _, each in found]
    table: dict[str, Column] = {
        "model": np.repeat([labels[model] for model, _ in found], lengths),
        "quantile": np.repeat([each.quantile for _, each in found], lengths),
        "forecast probability": np.concatenate([each.probability for _, each in found]),
        "share of forecasts": np.concatenate([each.share for _, each in found]),
        **interval_columns("observed frequency", [one for _, each in found for one in each.frequency]),
    }
    caption = "Reliability: how often a threshold was exceeded, by the share of members that exceed it"
    return Drawing(name, caption, (TWO_COLUMNS, _PANEL_HEIGHT + 0.3), draw, table)


def _bin_edges(num_members: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([[0.0], np.cumsum(expected_rank_shares(num_members))])


def _means(steps: Sequence[Interval]) -> list[float]:
    return [step.mean for step in steps]


def _size(num_panels: int) -> tuple[float, float]:
    return (ONE_COLUMN if num_panels == 1 else TWO_COLUMNS, _PANEL_HEIGHT)
