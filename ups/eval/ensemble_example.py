"""Members of one trajectory for pictures: as bands of quantiles (a fan) and one by one (spaghetti).

Both show the first channel along a line through the middle of the domain, at the end of the rollout, and
against time at the point of that line where members differ most in the end. Letters: T time steps, M members,
X points of the line, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.windows import Trajectories
from ups.eval.ensembles import seed_of
from ups.eval.field_figures import points_along
from ups.eval.figure_style import ONE_COLUMN, TWO_COLUMNS, Column, Drawing, line_of, with_unit
from ups.eval.forecasters import EnsembleForecaster
from ups.eval.rollout import start_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BANDS = ((0, 4, 0.18), (1, 3, 0.35))  # quantiles at both edges, and how opaque
_MOST_MEMBERS = 20  # that are drawn one by one
_HEIGHT = 1.75  # inches of a panel

Values = npt.NDArray[np.float64]


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
    """Roll the members of one trajectory out again.

    Args:
        models: By name of the row.
        trajectories: Of the split.
        number: Of the trajectory in it.
        members: M.
        seed: As in `roll_out_members`, so that they are those that were measured.
    """
    batch, info = trajectories.read(np.array([number])), trajectories.info
    start, own = start_of(batch, trajectories), seed_of(seed, int(batch.samples[0]))
    parts = {
        name: [*_along_line(model.forecast_members(start, trajectories.horizon, members=members, seed=own))]
        for name, model in models.items()
    }
    places = points_along(info.coordinates, info.domain_lengths, points=info.grid.points)
    return EnsembleExample(
        number=number,
        quantity=with_unit(next(iter(info.channels), "u"), info.units),
        t=trajectories.t,
        x=np.asarray(places["x"], np.float64),
        axes=(with_unit("t", info.units), with_unit("x", info.units)),
        truth=np.stack([_line(frame)[0] for frame in batch.truth.transpose(0, 1)]),
        quantiles={name: np.stack([quantiles for quantiles, _ in steps]) for name, steps in parts.items()},
        members={name: np.stack([some for _, some in steps]) for name, steps in parts.items()},
    )


def _along_line(steps: Iterator[Tensor]) -> Iterator[tuple[Values, Values]]:
    """Quantiles (Q, X) and the first members (M, X) of each time step."""
    for members in steps:
        line_MX = _line(members[0])
        yield np.quantile(line_MX, QUANTILES, axis=0), line_MX[:_MOST_MEMBERS]


def _line(fields: Tensor) -> Values:
    """The first channel along the last axis, in the middle of the others: (M, X..., C) to (M, X)."""
    values = fields[..., 0]
    while values.ndim > 2:
        values = values[:, values.shape[1] // 2]
    return np.asarray(values.to("cpu", torch.float64).numpy())


def fan_figure(name: str, example: EnsembleExample, labels: Mapping[str, str]) -> Drawing:
    """Bands that hold 50 and 90 % of the members, their median, and the truth.

    Args:
        name: Stem of the files.
        labels: For people, by the models' names.
    """

    def lines(axes: Axes, x: Values, values_QX: Values, model: str) -> None:
        colour = line_of(model)["color"]
        for low, high, opacity in _BANDS:
            axes.fill_between(x, values_QX[low], values_QX[high], color=colour, alpha=opacity, linewidth=0)
        axes.plot(x, values_QX[2], color=colour, label=f"{labels[model]}, median")

    of = [f"{quantile:.0%} quantile" for quantile in QUANTILES]
    caption = f"Bands of 50 and 90 % of the members, and their median; {_shown(example)}"
    return _drawing(name, caption, example, example.quantiles, lines, labels, of)


def spaghetti_figure(name: str, example: EnsembleExample, labels: Mapping[str, str]) -> Drawing:
    """Members one by one, and the truth; arguments are those of `fan_figure`."""

    def lines(axes: Axes, x: Values, values_MX: Values, model: str) -> None:
        colour = line_of(model)["color"]
        for number, values_X in enumerate(values_MX):
            label = None if number else f"{labels[model]}, members"
            axes.plot(x, values_X, color=colour, alpha=0.5, linewidth=0.6, label=label)

    num = max(len(members[0]) for members in example.members.values())
    of = [f"member {number}" for number in range(1, num + 1)]
    caption = f"{num} members one by one; {_shown(example)}"
    return _drawing(name, caption, example, example.members, lines, labels, of)


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
    of: Sequence[str],
) -> Drawing:
    """A row of panels for each model: against time, if there are several frames, and along the line."""
    cuts = _cuts(example)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(values), len(cuts), sharex="col", sharey=True, squeeze=False)
        for axes, (label, _, _) in zip(grid[-1], cuts, strict=True):
            axes.set_xlabel(label)
        for row, (model, values_TNX) in zip(grid, values.items(), strict=True):
            for axes, (_, x, at) in zip(row, cuts, strict=True):
                lines(axes, x, _cut(values_TNX, at), model)
                truth = _cut(example.truth[:, None], at)[0]
                axes.plot(x, truth, label="truth", **{**line_of("truth"), "linewidth": 1.0})
                axes.grid(visible=True)
            row[0].set_ylabel(example.quantity)
        entries = {
            label: line
            for row in grid
            for line, label in zip(*row[0].get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2 * len(cuts))

    size = (TWO_COLUMNS if len(cuts) > 1 else ONE_COLUMN, _HEIGHT * len(values) + 0.6)
    return Drawing(name, caption, size, draw, _table(example, values, labels, of, cuts))


_Place = int | None  # a point of the line, for all times; None for the whole line at the last one


def _cuts(example: EnsembleExample) -> list[tuple[str, Values, _Place]]:
    """What panels show: name and places of their horizontal axis, and where."""
    time, x = example.axes
    along: list[tuple[str, Values, _Place]] = [(x, example.x, None)]
    return [(time, example.t, example.point), *along] if len(example.t) > 1 else along


def _cut(values_TNX: Values, at: _Place) -> Values:
    """Lines of a panel, shape (N, its points)."""
    return values_TNX[-1] if at is None else values_TNX[:, :, at].T


def _table(
    example: EnsembleExample,
    values: Mapping[str, Values],
    labels: Mapping[str, str],
    of: Sequence[str],
    cuts: Sequence[tuple[str, Values, Any]],
) -> dict[str, Column]:
    """Panels below each other: time and place of every value."""
    columns: dict[str, list[Values]] = {axis: [] for axis in example.axes}
    for _, places, at in cuts:
        is_line = at is None
        columns[example.axes[0]].append(np.full(len(places), example.t[-1]) if is_line else places)
        columns[example.axes[1]].append(places if is_line else np.full(len(places), example.x[at]))
        columns.setdefault(f"{example.quantity}: truth", []).append(_cut(example.truth[:, None], at)[0])
        for model, values_TNX in values.items():
            for title, line in zip(of, _cut(values_TNX, at), strict=False):
                columns.setdefault(f"{example.quantity}: {labels[model]}, {title}", []).append(line)
    return {title: np.concatenate(parts) for title, parts in columns.items()}
