"""The figures of a task's ensembles: scores against time, ranks, reliability, and members of an example.

The example shows the members of one trajectory as bands of quantiles (a fan) and one by one (spaghetti): the
first channel along a line through the middle of the domain, at the end of the rollout, and against time at
the point of that line where members differ most in the end. Models have the colours that they have in all
figures (`ups.eval.figure_style`). Letters: T time steps, M members, X points of the line, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ups.data.windows import Trajectories
from ups.eval.ensembles import EnsembleErrors, EnsembleScores, expected_rank_shares, seed_of
from ups.eval.field_figures import points_along
from ups.eval.figure_style import ONE_COLUMN, TWO_COLUMNS, Drawing, line_of, log_ticks, with_unit
from ups.eval.figures import BANDS, error_figure
from ups.eval.forecasters import AnyForecaster, EnsembleForecaster, has_members, start_of
from ups.eval.intervals import Interval, Values, as_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ups.eval.report import Row

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SHADES = ((0, 4, 0.18), (1, 3, 0.35))  # quantiles at both edges, and how opaque
_MOST_MEMBERS = 20  # that are drawn one by one
_MOST_MODELS = 3  # of an example
_SCORES = {"crps": "CRPS", "energy_score": "energy score"}
_BANDS = {f"band_{band}": title for band, title in BANDS.items()}
_RATIOS = (1e-3, 1e3)  # of energies that are drawn
_PANEL_HEIGHT, _EXAMPLE_HEIGHT = 2.3, 1.75  # inches


def ensemble_figures(
    rows: Sequence[Row],
    errors: Mapping[str, EnsembleErrors],
    models: Mapping[str, AnyForecaster],
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
    t: Values,
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

    caption = (
        "Skill (root mean square error of the ensemble mean), spread, and their ratio against time, "
        "corrected for the number of members; an ensemble like the truth has 1"
    )
    return Drawing(name, caption, (TWO_COLUMNS, _PANEL_HEIGHT + 0.2), draw)


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

    caption = (
        "Rank histograms: how many members lie below the truth, over all points, channels and time steps; "
        "even if the truth is like a member, a U with too little spread, a dome with too much, a slope with "
        "a bias"
    )
    return Drawing(name, caption, _size(len(ensembles)), draw)


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

    caption = "Reliability: how often a threshold was exceeded, by the share of members that exceed it"
    return Drawing(name, caption, (TWO_COLUMNS, _PANEL_HEIGHT + 0.3), draw)


def _bin_edges(num_members: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([[0.0], np.cumsum(expected_rank_shares(num_members))])


def _means(steps: Sequence[Interval]) -> list[float]:
    return [step.mean for step in steps]


def _size(num_panels: int) -> tuple[float, float]:
    return (ONE_COLUMN if num_panels == 1 else TWO_COLUMNS, _PANEL_HEIGHT)


# --- an example ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EnsembleExample:
    """One channel of one trajectory along a line, true and as members of several models predict it.

    Attributes:
        number: Of the trajectory in its split.
        quantity: Name of the channel, with its unit.
        t: Time of each predicted frame since the given one, shape (T,).
        x: Places of the points of the line, shape (X,).
        axes: What time and place are called, with their units.
        truth: Shape (T, X).
        quantiles: `QUANTILES` of the members, by name of the model, shape (T, Q, X).
        members: The first 20 of them, shape (T, M, X).
    """

    number: int
    quantity: str
    t: Values
    x: Values
    axes: tuple[str, str]
    truth: Values
    quantiles: Mapping[str, Values]
    members: Mapping[str, Values]

    @property
    def point(self) -> int:
        """Of the line: where the first model's outer quantiles are farthest apart in the end."""
        last_QX = next(iter(self.quantiles.values()))[-1]
        return int(np.argmax(last_QX[-1] - last_QX[0]))


def make_example(
    models: Mapping[str, EnsembleForecaster],
    trajectories: Trajectories,
    *,
    number: int,
    members: int,
    seed: int,
) -> EnsembleExample:
    """Roll the members of one trajectory out again."""
    batch, info = trajectories.read(np.array([number])), trajectories.info
    start, own = start_of(batch, trajectories), seed_of(seed, int(batch.samples[0]))
    quantiles, shown = {}, {}
    for name, model in models.items():
        steps = model.forecast_members(start, trajectories.horizon, members=members, seed=own)
        lines = [_line(step[0]) for step in steps]  # (M, X) of each time step
        quantiles[name] = np.stack([np.quantile(line_MX, QUANTILES, axis=0) for line_MX in lines])
        shown[name] = np.stack([line_MX[:_MOST_MEMBERS] for line_MX in lines])
    places = points_along(info.coordinates, info.domain_lengths, points=info.grid.points)
    return EnsembleExample(
        number=number,
        quantity=with_unit(next(iter(info.channels), "u"), info.units),
        t=trajectories.t,
        x=np.asarray(places["x"], np.float64),
        axes=(with_unit("t", info.units), with_unit("x", info.units)),
        truth=np.stack([_line(frame)[0] for frame in batch.truth.transpose(0, 1)]),
        quantiles=quantiles,
        members=shown,
    )


def _line(fields: Tensor) -> Values:
    """The first channel along the last axis, in the middle of the others: (M, X..., C) to (M, X)."""
    values = fields[..., 0]
    while values.ndim > 2:
        values = values[:, values.shape[1] // 2]
    return np.asarray(values.to("cpu", torch.float64).numpy())


def fan_figure(name: str, example: EnsembleExample, labels: Mapping[str, str]) -> Drawing:
    """Bands that hold 50 and 90 % of the members, their median, and the truth."""

    def lines(axes: Axes, x: Values, values_QX: Values, model: str) -> None:
        colour = line_of(model)["color"]
        for low, high, opacity in _SHADES:
            axes.fill_between(x, values_QX[low], values_QX[high], color=colour, alpha=opacity, linewidth=0)
        axes.plot(x, values_QX[2], color=colour, label=f"{labels[model]}, median")

    caption = f"Bands of 50 and 90 % of the members, and their median; {_shown(example)}"
    return _drawing(name, caption, example, example.quantiles, lines, labels)


def spaghetti_figure(name: str, example: EnsembleExample, labels: Mapping[str, str]) -> Drawing:
    """Members one by one, and the truth; arguments are those of `fan_figure`."""

    def lines(axes: Axes, x: Values, values_MX: Values, model: str) -> None:
        colour = line_of(model)["color"]
        for number, values_X in enumerate(values_MX):
            label = None if number else f"{labels[model]}, members"
            axes.plot(x, values_X, color=colour, alpha=0.5, linewidth=0.6, label=label)

    num = max(len(members[0]) for members in example.members.values())
    caption = f"{num} members one by one; {_shown(example)}"
    return _drawing(name, caption, example, example.members, lines, labels)


def _shown(example: EnsembleExample) -> str:
    where = f"{example.axes[1].partition(' [')[0]} = {example.x[example.point]:.3g}"
    over_time = f", against time at {where}, where members differ most," if len(example.t) > 1 else ""
    return (
        f"{example.quantity} of trajectory {example.number}, the one of the median energy score{over_time} "
        f"and along the middle of the domain{' at the end' if len(example.t) > 1 else ''}"
    )


def _drawing(
    name: str,
    caption: str,
    example: EnsembleExample,
    values: Mapping[str, Values],
    lines: Callable[[Axes, Values, Values, str], None],
    labels: Mapping[str, str],
) -> Drawing:
    """A row of panels for each model: against time, if there are several frames, and along the line."""
    time, place = example.axes
    along: tuple[str, Values, Callable[[Values], Values]] = (
        place,
        example.x,
        lambda values_TNX: values_TNX[-1],
    )
    cuts = [along]
    if len(example.t) > 1:
        cuts.insert(0, (time, example.t, lambda values_TNX: values_TNX[:, :, example.point].T))

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(values), len(cuts), sharex="col", sharey=True, squeeze=False)
        for axes, (label, _, _) in zip(grid[-1], cuts, strict=True):
            axes.set_xlabel(label)
        for row, (model, values_TNX) in zip(grid, values.items(), strict=True):
            for axes, (_, x, cut) in zip(row, cuts, strict=True):
                lines(axes, x, cut(values_TNX), model)
                truth = cut(example.truth[:, None])[0]
                axes.plot(x, truth, label="truth", **{**line_of("truth"), "linewidth": 1.0})
                axes.grid(visible=True)
            row[0].set_ylabel(example.quantity)
        entries = {
            label: line
            for row in grid
            for line, label in zip(*row[0].get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2 * len(cuts))

    size = (TWO_COLUMNS if len(cuts) > 1 else ONE_COLUMN, _EXAMPLE_HEIGHT * len(values) + 0.6)
    return Drawing(name, caption, size, draw)
