"""One sample as a picture: space-time images in 1D, frames in 2D, of the mid-plane in 3D; images as they are.

matplotlib is imported when a picture is drawn, and without its global state.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups_store.check.cells import cell_edges, colours_of
from ups_store.check.labelled_sample import Axis, LabelledSample, label_sample
from ups_store.errors import needs
from ups_store.read.base import AnyStore
from ups_store.read.gather import TIME_DIM
from ups_store.system.paths import path_of
from ups_store.system.replacement import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_FRAMES = 6
MAX_CHANNELS = 8
_MAX_PIXELS = 2048  # along an axis; what is denser is thinned out
_HUGE = 1e300
_DPI = 150
_CHARACTERS_PER_INCH = 13
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "text.usetex": False,
    "text.parse_math": False,  # names from a file are text, never markup
    **{"svg.hashsalt": "ups", "pdf.fonttype": 42},  # journals refuse fonts of type 3
}

_NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
PICTURES = tuple(_NO_DATE)  # suffixes

Values = npt.NDArray[np.float64]


def save_preview(
    store: AnyStore, out: str | os.PathLike[str], *, sample: int | None = None, array: str | None = None
) -> None:
    """Write a picture of one sample, replacing a file that is there.

    Args:
        store: May be unfinished.
        out: File to write: SVG or PDF if it is named so, else PNG. The same values give the same bytes.
        sample: Sample number; by default the first one that is committed.
        array: Array name; by default "fields" if there is one, else the largest, and of a steady sample the
            fields that decide it, such as Darcy's coefficient, before it.
    Raises:
        SampleIndexError: If there is no such sample.
        NotCommittedError: If it isn't committed yet.
        ArrayNotFoundError: If there is no such array.
        SpecError: If the array has no sample axis, or no elements.
        DiskFullError: If the file system has no room for the picture.
    """
    target = path_of(out)  # before drawing
    with needs("plot"):
        import matplotlib

    form = os.path.splitext(os.fsdecode(target))[1].lower().removeprefix(".")
    form = form if form in PICTURES else "png"
    labelled = label_sample(store, sample=sample, array=array)
    image = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        draw(labelled).savefig(image, format=form, dpi=_DPI, metadata=_NO_DATE[form])
    replace_file(target, image.getvalue())


def draw(sample: LabelledSample) -> Figure:
    """Draw a sample; a row for each of its first channels."""
    if sample.is_image:
        return _draw_picture(sample)
    if sample.is_flat:
        return _draw_flat(sample)
    return _draw_frames(sample) if len(sample.space) > 1 else _draw_rows(sample)


def _draw_picture(sample: LabelledSample) -> Figure:
    """Pixels in their own colours, the first row at the top; transparent ones over white."""
    num_rows, num_columns, num_channels = sample.values.shape
    down, across = _stride(num_rows), _stride(num_columns)
    pixels = sample.values[::down, ::across, 0 if num_channels == 1 else slice(None)]
    ratio = float(np.clip(num_columns / num_rows, 0.2, 5.0))
    width = 4.8 * min(1.0, ratio) ** 0.5
    figure = _new_figure(width, 0.6 + width / ratio, sample.title)
    axes = figure.subplots()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255)
    axes.set_axis_off()
    return figure


def _draw_rows(sample: LabelledSample) -> Figure:
    """A space-time image per channel, or a line where there is one axis only."""
    channels = sample.channels[:MAX_CHANNELS]
    figure = _new_figure(6.4, 0.8 + 2.4 * len(channels), sample.title)
    rows = figure.subplots(len(channels), 1, sharex=True, squeeze=False)[:, 0]
    *vertical, horizontal = sample.axes.values()
    for c, (axes, label) in enumerate(zip(rows, channels, strict=True)):
        values = sample.values[..., c].reshape([len(axis.points) for axis in sample.axes.values()])
        if vertical:
            _draw_images(figure, [axes], [values], horizontal, vertical[0], label)
            axes.set_ylabel(vertical[0].label)
        else:
            _draw_line(axes, horizontal.points, values)
            axes.set_ylabel(label)
    rows[-1].set_xlabel(horizontal.label)
    return figure


def _draw_frames(sample: LabelledSample) -> Figure:
    """Time steps from left to right, a row per channel; in 3D of the plane in the middle of z."""
    vertical, horizontal = (sample.axes[dim] for dim in sample.space[-2:])
    steps = np.unique(np.linspace(0, len(sample.values) - 1, MAX_FRAMES).round().astype(int))
    channels = sample.channels[:MAX_CHANNELS]
    ratio = _aspect(horizontal, vertical)
    width = min(2.0, 9.0 / len(steps)) if len(steps) > 1 else 3.6
    size = (1.4 + width * len(steps), 1.1 + ((width - 0.25) / ratio + 0.25) * len(channels))
    figure = _new_figure(*size, sample.title + _plane_title(sample))
    grid = figure.subplots(len(channels), len(steps), sharex=True, sharey=True, squeeze=False)
    for c, (row, label) in enumerate(zip(grid, channels, strict=True)):
        images = [_plane(sample, int(step), c) for step in steps]
        _draw_images(figure, row, images, horizontal, vertical, label)
        row[0].set_ylabel(vertical.label)
    for axes in grid.flat:
        axes.set_box_aspect(1 / ratio)
    for axes, step in zip(grid[0], steps, strict=True):
        axes.set_title(sample.axes[TIME_DIM].at(int(step)) if TIME_DIM in sample.axes else "")
    for axes in grid[-1]:
        axes.set_xlabel(horizontal.label)
    return figure


def _draw_flat(sample: LabelledSample) -> Figure:
    """A sample with unknown axes: its first axis over all others, or a line."""
    values = sample.values.reshape(len(sample.values), -1) if sample.values.ndim > 1 else sample.values
    figure = _new_figure(6.4, 3.4, sample.title)
    axes = figure.subplots()
    if values.ndim == 2:
        down, across = (
            Axis(f"axis {i}", None, np.arange(n, dtype=float)) for i, n in enumerate(values.shape)
        )
        _draw_images(figure, [axes], [values], across, down, "value")
        axes.set_ylabel(down.label)
        axes.set_xlabel("axis 1 (index)" if sample.values.ndim == 2 else "other axes (index)")
    else:
        _draw_line(axes, np.arange(values.size, dtype=float), np.atleast_1d(values))
        axes.set_xlabel("index")
        axes.set_ylabel("value")
    return figure


def _new_figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(_CHARACTERS_PER_INCH * width)))
    return figure


def _draw_line(axes: Axes, points: Values, values: npt.NDArray[Any]) -> None:
    step = _stride(len(points))
    axes.plot(points[::step], _drawable(values[::step]), ".-" if len(points) < 100 else "-", lw=1)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)


def _draw_images(
    figure: Figure,
    row: Sequence[Axes],
    images: Sequence[npt.NDArray[Any]],
    horizontal: Axis,
    vertical: Axis,
    label: str,
) -> None:
    """Images of one quantity side by side, shape (vertical, horizontal) each, with one colour scale."""
    down, across = _stride(len(vertical.points)), _stride(len(horizontal.points))
    x, y = horizontal.points[::across], vertical.points[::down]
    thinned = np.stack([_drawable(image[::down, ::across]) for image in images])
    low, high, colours = colours_of(thinned)
    for axes, image in zip(row, thinned, strict=True):
        axes.set_facecolor("0.6")  # NaN and Inf
        mesh = _draw_image(axes, x, y, image, vmin=low, vmax=high, cmap=colours)
    extend = _extend(thinned, low, high)
    bar = figure.colorbar(
        mesh, ax=list(row), label=label, pad=0.01, aspect=25, extend=extend, extendfrac=0.03
    )
    bar.ax.tick_params(labelsize=7)


def _draw_image(axes: Axes, x: Values, y: Values, image: Values, **colours: Any) -> Any:
    if _is_uniform(x) and _is_uniform(y):
        extent = (*_ends(x), *_ends(y))
        return axes.imshow(image, origin="lower", aspect="auto", extent=extent, **colours)
    return axes.pcolormesh(cell_edges(x), cell_edges(y), image, rasterized=True, **colours)


def _drawable(values: npt.NDArray[Any]) -> Values:
    """A copy as float64 with NaN for Inf, small enough for differences not to overflow."""
    copy = values.astype(np.float64)
    copy[~np.isfinite(copy)] = np.nan
    return np.clip(copy, -_HUGE, _HUGE)


def _extend(values: Values, low: float, high: float) -> str:
    """Which ends of the colour bar have values beyond them."""
    below, above = bool((values < low).any()), bool((values > high).any())
    return {(False, False): "neither", (True, False): "min", (False, True): "max"}.get((below, above), "both")


def _plane(sample: LabelledSample, step: int, channel: int) -> npt.NDArray[Any]:
    """Values of one time step and channel over the last two dimensions in space, shape (V, H)."""
    space: npt.NDArray[Any] = sample.values[step, ..., channel]
    if len(sample.space) == 3:
        space = space[len(space) // 2 : len(space) // 2 + 1]
    lengths = [len(sample.axes[dim].points) for dim in sample.space[-2:]]
    return space.reshape(lengths)


def _plane_title(sample: LabelledSample) -> str:
    if len(sample.space) < 3:
        return ""
    z = sample.axes["z"]
    return f" · plane {z.at(len(z.points) // 2)}"


def _aspect(horizontal: Axis, vertical: Axis) -> float:
    """Width over height of a frame: the domain's own, unless that makes no picture."""
    spans = [abs(ends[1] - ends[0]) for ends in map(_ends, (horizontal.points, vertical.points))]
    same_unit = horizontal.unit == vertical.unit
    return float(np.clip(spans[0] / spans[1], 0.4, 2.5)) if same_unit else 1.0


def _ends(points: Values) -> tuple[float, float]:
    """Outer edges of the first and the last cell."""
    edges = cell_edges(points)
    return float(edges[0]), float(edges[-1])


def _is_uniform(points: Values) -> bool:
    steps = np.diff(points)
    return len(steps) == 0 or bool(np.allclose(steps, steps.mean(), rtol=0.02, atol=0))


def _stride(num: int) -> int:
    return -(-num // _MAX_PIXELS)
