"""Fields of one trajectory as cells: truth, predictions and errors, on the same axes, in the same colours.

In 1D a panel is space and time; in 2D a frame, in 3D the plane in the middle of z. A trajectory of several
frames in 2D and 3D has a row for what it shows and a column for each time; all else has a column for each
model. Letters: T time steps, X the axes of the grid, V and H the vertical and the horizontal axis of a panel.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups.eval.figure_style import ONE_COLUMN, TWO_COLUMNS, Drawing, line_of, power_of_ten, with_unit
from ups.grid import axis_names, domain_lengths
from ups_store.check import cell_edges, colours_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_FRAMES = 4
_MAX_CELLS = 512  # along an axis; what is denser is thinned out
_ERROR_COLOURS, _DECADES = "magma", 3  # logarithmic, or the better model's errors are all one colour
_TITLE_CHARACTERS = 18
_NOT_FINITE = "0.6"
_ROOM_BESIDE, _ROOM_BETWEEN, _ROOM_BELOW = 1.6, 0.2, 0.45  # inches: for labels, titles and colour bars
_EXTEND = {
    (False, False): "neither",
    (True, False): "min",
    (False, True): "max",
    (True, True): "both",
}  # by whether values lie below and above the colours

Values = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One channel of one trajectory, true and as models predict it.

    Attributes:
        truth: Shape (T, X...), physical units, the frame that is given first; T is 1 of a steady task.
        predictions: The same shape, by the models' names.
        labels: For people, by the models' names.
        coordinates: Of the points, by axis: "t" first, then those of the grid in order.
        quantity: Name of the channel.
        given: What a steady solution is predicted from, by its name, shape (X...).
        units: By name of a channel or an axis, as far as they are known.
    """

    truth: Values
    predictions: Mapping[str, Values]
    labels: Mapping[str, str]
    coordinates: Mapping[str, Values]
    quantity: str
    given: Mapping[str, Values] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)

    def in_the_plane(self) -> tuple[Trajectory, str]:
        """The middle plane of a volume, and where that is, for people; anything else as it is, and ""."""
        if self.truth.ndim < 4:
            return self, ""
        middle = self.truth.shape[1] // 2
        coordinates = {axis: points for axis, points in self.coordinates.items() if axis != "z"}
        unit = f" {self.units['z']}" if "z" in self.units else ""
        plane = Trajectory(
            self.truth[:, middle],
            {name: values[:, middle] for name, values in self.predictions.items()},
            self.labels,
            coordinates,
            self.quantity,
            {name: values[middle] for name, values in self.given.items()},
            self.units,
        )
        return plane, f"the middle plane, z = {self.coordinates['z'][middle]:.4g}{unit}"


def points_along(
    coordinates: Mapping[str, Values], lengths: Mapping[str, float], *, points: Sequence[int]
) -> dict[str, Values]:
    """Where the points of a grid lie along each axis: as its source says, else the centres of equal cells."""
    axes = axis_names(len(points))
    domain = domain_lengths(lengths, ndim=len(points))
    return {
        axis: np.asarray(coordinates[axis], np.float64)
        if len(coordinates.get(axis, ())) == num
        else (np.arange(num) + 0.5) / num * length
        for axis, num, length in zip(axes, points, domain, strict=True)
    }


def fields_figure(name: str, caption: str, trajectory: Trajectory) -> Drawing:
    """Truth, prediction and absolute error of one trajectory.

    Args:
        name: Stem of the files.
        caption: What is shown; of a volume, which plane is added.
        trajectory: What is shown; with several frames in 2D and 3D the first model's prediction, and the
            error of all.
    """
    shown, plane = trajectory.in_the_plane()
    caption = f"{caption}; {plane}" if plane else caption
    if shown.truth.ndim == 2 and len(shown.truth) == 1:
        return _profiles(name, caption, shown)
    if shown.truth.ndim == 2:
        return _panels(name, caption, _by_model(shown), shown, vertical="t")
    if len(shown.truth) == 1:
        return _panels(name, caption, _by_model(shown), shown, vertical="y")
    return _panels(name, caption, _by_time(shown), shown, vertical="y")


@dataclass(frozen=True, eq=False)
class _Panel:
    """A panel of cells."""

    title: str
    values: Values  # (V, H)
    own_colours: tuple[float, float, str] | None = None  # with a colour bar below


@dataclass(frozen=True, eq=False)
class _Row:
    """Panels with one colour scale; None leaves a place empty."""

    panels: Sequence[_Panel | None]
    colours: tuple[float, float, str]
    bar: str  # label of the colour bar
    title: str = ""  # where the panels' own titles are times


def _by_model(shown: Trajectory) -> list[_Row]:
    """Truth and predictions; below them what was given, if it isn't a frame, and errors."""
    is_still = len(shown.truth) == 1
    truth = shown.truth[0] if is_still else shown.truth
    quantity = with_unit(shown.quantity, shown.units)
    upper = [_Panel("truth", truth)]
    lower: list[_Panel | None] = [
        _Panel(f"given: {name}", values, own_colours=colours_of(values))
        for name, values in shown.given.items()
    ]
    errors = []
    for name, frames in shown.predictions.items():
        label, values = shown.labels[name], frames[0] if is_still else frames
        upper.append(_Panel(label, values))
        errors.append(np.abs(values - truth))
        lower.append(_Panel("", errors[-1]))
    colours = _error_colours(errors, truth)
    lower = lower if shown.given else [None, *lower]
    return [_Row(upper, colours_of(truth), quantity), _Row(lower, colours, f"|error| of {quantity}")]


def _by_time(shown: Trajectory) -> list[_Row]:
    """Some of the predicted frames: the truth, the first model's prediction, and the error of every model."""
    steps = np.unique(np.linspace(1, len(shown.truth) - 1, _MAX_FRAMES).round().astype(int))
    quantity, t = with_unit(shown.quantity, shown.units), shown.coordinates["t"][steps]
    unit = f" {shown.units['t']}" if "t" in shown.units else ""
    truth = shown.truth[steps]

    def row(frames: Values, title: str, what: str, colours: tuple[float, float, str]) -> _Row:
        panels = [_Panel(f"t = {time:.3g}{unit}", values) for time, values in zip(t, frames, strict=True)]
        return _Row(panels, colours, what, title)

    own = colours_of(truth)
    first, prediction = next(iter(shown.predictions.items()))
    errors = {name: np.abs(frames[steps] - truth) for name, frames in shown.predictions.items()}
    of_errors = _error_colours(list(errors.values()), truth)
    return [
        row(truth, "truth", quantity, own),
        row(prediction[steps], shown.labels[first], quantity, own),
        *(
            row(values, shown.labels[name], f"|error| of {quantity}", of_errors)
            for name, values in errors.items()
        ),
    ]


def _error_colours(errors: Sequence[Values], truth: Values) -> tuple[float, float, str]:
    """Three decades up to the largest error; a model that blew up doesn't hide the others."""
    finite = np.concatenate([values[np.isfinite(values)] for values in errors])
    largest = float(finite.max()) if finite.size else 0.0
    high = min(largest, float(np.ptp(truth)) or largest) or 1.0
    return high / 10**_DECADES, high, _ERROR_COLOURS


def _panels(name: str, caption: str, rows: Sequence[_Row], shown: Trajectory, *, vertical: str) -> Drawing:
    y, x = (_thinned(shown.coordinates[axis]) for axis in (vertical, "x"))
    num_columns = max(len(row.panels) for row in rows)
    width = (TWO_COLUMNS - _ROOM_BESIDE) / num_columns
    ratio = (
        1.0 if vertical == "t" else float(np.clip(np.ptp(cell_edges(y)) / np.ptp(cell_edges(x)), 0.4, 2.5))
    )
    has_bar_below = any(panel is not None and panel.own_colours for row in rows for panel in row.panels)
    height = (width * ratio + _ROOM_BETWEEN) * len(rows) + _ROOM_BELOW * (2 if has_bar_below else 1)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(rows), num_columns, sharex=True, sharey=True, squeeze=False)
        for line, row in zip(grid, rows, strict=True):
            _draw_row(figure, line, row, x, y)
        _label_axes(grid, rows, with_unit("x", shown.units), with_unit(vertical, shown.units))
        for axes in grid.flat:
            axes.set_box_aspect(None if vertical == "t" else ratio)

    return Drawing(name, caption, (TWO_COLUMNS, height), draw)


def _draw_row(figure: Figure, line: Sequence[Axes], row: _Row, x: Values, y: Values) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    shared = []
    for axes, panel in zip_longest(line, row.panels):
        if panel is None:
            axes.set_axis_off()
            continue
        low, high, colours = panel.own_colours or row.colours
        cells = np.ma.masked_invalid(_cells(panel.values))
        is_error = colours == _ERROR_COLOURS
        axes.set_facecolor(_NOT_FINITE)
        mesh = axes.pcolormesh(
            cell_edges(x),
            cell_edges(y),
            np.maximum(cells, low) if is_error else cells,  # an error of 0 has no logarithm
            norm=LogNorm(low, high) if is_error else Normalize(low, high),
            cmap=colours,
            rasterized=True,
        )
        axes.set_title(textwrap.fill(panel.title, _TITLE_CHARACTERS))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if panel.own_colours:
            figure.colorbar(mesh, ax=axes, location="bottom", pad=0.02, aspect=15)
        else:
            shared.append((mesh, float(cells.min()) < low, float(cells.max()) > high))
    meshes, below, above = zip(*shared, strict=True)
    extend = _EXTEND[any(below), any(above)]
    form = power_of_ten if row.colours[2] == _ERROR_COLOURS else None
    figure.colorbar(meshes[0], ax=list(line), label=row.bar, pad=0.01, aspect=15, extend=extend, format=form)


def _label_axes(grid: npt.NDArray[Any], rows: Sequence[_Row], x: str, y: str) -> None:
    """Labels at the outer panels; where titles are times only those of the first row stay."""
    for line, row in zip(grid, rows, strict=True):
        drawn = [axes for axes in line if axes.axison]
        drawn[0].set_ylabel(f"{row.title}\n{y}" if row.title else y)
        drawn[0].tick_params(labelleft=True)
        if row.title and row is not rows[0]:
            for axes in drawn:
                axes.set_title("")
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel(x)
        lowest.tick_params(labelbottom=True)


def _profiles(name: str, caption: str, shown: Trajectory) -> Drawing:
    """A single frame in 1D: lines over x."""
    x, quantity = shown.coordinates["x"], with_unit(shown.quantity, shown.units)
    lines = {"truth": shown.truth[0], **{key: frames[0] for key, frames in shown.predictions.items()}}
    labels = {"truth": "truth", **shown.labels}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for key, values in lines.items():
            axes.plot(x, values, label=labels[key], **{**line_of(key), "marker": ""})
        for key, values in shown.given.items():
            axes.plot(x, values, label=f"given: {key}", color="0.6", linestyle=":")
        axes.set(xlabel=with_unit("x", shown.units), ylabel=quantity)
        axes.grid(visible=True)
        figure.legend(loc="outside lower center", ncols=2)

    return Drawing(name, caption, (ONE_COLUMN, 0.85 * ONE_COLUMN), draw)


def _cells(values: Values) -> Values:
    return values[:: _stride(len(values)), :: _stride(values.shape[1])]


def _thinned(points: Values) -> Values:
    return points[:: _stride(len(points))]


def _stride(num: int) -> int:
    return -(-num // _MAX_CELLS)
