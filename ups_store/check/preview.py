"""One sample as a picture: space-time images in 1D, frames in 2D, of the mid-plane in 3D; images as they are.

Coordinates come from the store's constants (or per-sample arrays) `x`, `y`, `z`, `t`, channel names from the
attribute `channels`, units from the attribute `units`, a mapping from channel and coordinate names.
matplotlib is imported when a picture is drawn, and without its global state.

Axes: T time steps, Z Y X space, C channels.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError, needs
from ups_store.read.base import AnyStore
from ups_store.read.gather import TIME_DIM
from ups_store.system.files import replace_file
from ups_store.system.paths import path_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAIN_ARRAY = "fields"
MAX_FRAMES = 6
MAX_CHANNELS = 8
SEQUENTIAL, DIVERGING = "viridis", "coolwarm"  # perceptually uniform, the latter as in Moreland 2009

_SPACE = ("z", "y", "x")
_MAX_PARAMETERS = 6  # in a title
_MAX_PIXELS = 2048  # along an axis; what is denser is thinned out
_ROBUST_PERCENTILES = (0.1, 99.9)  # a few wild values must not decide the colours
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

Values = npt.NDArray[np.floating[Any]]
Arrays = Mapping[str, npt.NDArray[Any]]


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

    suffix = os.path.splitext(os.fsdecode(target))[1].lower().removeprefix(".")
    suffix = suffix if suffix in _NO_DATE else "png"
    labelled = label_sample(store, sample=sample, array=array)
    image = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        draw(labelled).savefig(image, format=suffix, dpi=_DPI, metadata=_NO_DATE[suffix])
    replace_file(target, image.getvalue())


def sample_text(store: AnyStore, *, sample: int | None = None, array: str | None = None) -> str | None:
    """One sample of an array of text; None where there is a picture to draw, or the array isn't text.

    By default the first text, where the store has nothing else with a sample axis.
    """
    arrays = store.arrays
    texts = [name for name, spec in arrays.items() if spec.encoding == "utf-8"]
    if array is None and texts and all(spec.encoding is not None for spec in arrays.values()):
        array = texts[0]
    if array not in texts:
        return None
    text: str = store.gather([_number(store, sample)], [array])[array][0]
    return text


def colours_of(values: Values) -> tuple[float, float, str]:
    """Limits and colour map: symmetric about zero where both signs matter, else the range.

    Args:
        values: What one colour scale is for, any shape; NaN and Inf are left out.

    Returns:
        Lowest and highest value of the scale, and the map's name in matplotlib.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0, SEQUENTIAL
    low, high = (float(limit) for limit in np.percentile(finite, _ROBUST_PERCENTILES))
    if min(-low, high) > 0.2 * max(-low, high):
        bound = max(-low, high)
        return -bound, bound, DIVERGING
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a constant: noise in its last digit is no picture
        margin = 0.05 * abs(low) or 1.0
        return low - margin, high + margin, SEQUENTIAL
    return low, high, SEQUENTIAL


def cell_edges(points: Values) -> npt.NDArray[np.float64]:
    """Edges of cells that have these points in their middle, (n,) to (n + 1,); a single one is 1 wide.

    Where points aren't evenly spaced, an edge lies halfway between two of them.
    """
    points = np.asarray(points, np.float64)
    if len(points) == 1:
        return np.array([points[0] - 0.5, points[0] + 0.5])
    between = (points[1:] + points[:-1]) / 2
    first, last = 1.5 * points[0] - 0.5 * points[1], 1.5 * points[-1] - 0.5 * points[-2]
    return np.array([first, *between, last])


# --- a sample with its axes in order, their coordinates, channel names and units --------------------------


@dataclass(frozen=True)
class Axis:
    """One axis of a picture: its unit is "-" if none is known, None where only indices are known."""

    name: str
    unit: str | None
    points: npt.NDArray[np.float64]  # strictly monotonic

    @property
    def label(self) -> str:
        """Label of the axis: "x [m]"."""
        return f"{self.name} (index)" if self.unit is None else f"{self.name} [{self.unit}]"

    @property
    def ends(self) -> tuple[float, float]:
        """Outer edges of the first and the last cell."""
        edges = cell_edges(self.points)
        return float(edges[0]), float(edges[-1])

    def at(self, index: int) -> str:
        """One point on it: "t = 0.25 s"."""
        unit = f" {self.unit}" if self.unit not in (None, "-") else ""
        return f"{self.name} = {self.points[index]:.4g}{unit}"

    def thinned(self) -> Axis:
        """Every so many of its points, as many as a picture can show."""
        return Axis(self.name, self.unit, self.points[:: _stride(len(self.points))])


@dataclass(frozen=True)
class LabelledSample:
    """One sample of an array.

    Attributes:
        values: Shape (T, Z, Y, X, C) with length 1 for axes that the array doesn't have; as in the store
            where there are neither axes nor channels: in a picture, uint8 of shape (H, W, C), and where the
            meaning of axes isn't known.
        axes: The axes that it has, by dimension, channels excepted; time only if it has several steps.
        channels: C labels.
        title: What it is, and its parameters.
        is_image: Whether it is a picture.
    """

    values: npt.NDArray[Any]
    axes: Mapping[str, Axis]
    channels: tuple[str, ...]
    title: str
    is_image: bool = False


def label_sample(store: AnyStore, *, sample: int | None = None, array: str | None = None) -> LabelledSample:
    """Take one sample of one array, with everything that the store says about it; see `save_preview`."""
    number = _number(store, sample)
    arrays = {key: value for key, value in store.sample(number).items() if isinstance(value, np.ndarray)}
    if array is None and not arrays:
        hint = "text and bytes aren't drawn"
        raise SpecError("it has no array that can be drawn", kind="arrays", hint=hint)
    name = array if array is not None else MAIN_ARRAY
    if array is None and name not in arrays:
        name = max(arrays, key=lambda name: arrays[name].nbytes)
    if name not in arrays:
        if name not in store:
            store[name]  # raises
        encoding = store.arrays[name].encoding if name in store.arrays else None
        problem = {None: "it has no sample axis", "bytes": "it is bytes", "utf-8": "it is text"}[encoding]
        raise SpecError(problem, path=store.path, array=name, hint="choose another array")
    values, dims = arrays[name], _dims(store, name)
    if not values.size:
        raise SpecError("it has no elements", path=store.path, array=name, found=f"shape {values.shape}")
    if _is_image(values, dims):
        return LabelledSample(values, {}, (), _title(store, [name], number, arrays), is_image=True)
    known = (TIME_DIM, *_SPACE, "channel")
    if not {*dims} <= {*known} or not {*dims} - {"channel"}:
        return LabelledSample(values, {}, (), _title(store, [name], number, arrays))
    names = [*(_inputs(store, name, arrays) if array is None else []), name]
    fields = [_ordered(arrays[one], _dims(store, one), known) for one in names]
    if TIME_DIM in dims and "num_steps" in arrays and arrays["num_steps"].shape == ():
        fields[-1] = fields[-1][: max(1, int(arrays["num_steps"]))]  # a shorter run is filled up behind it
    units = _attribute(store, name, "units", dict) or {}
    axes = {
        dim: _axis(dim, num, store.constants | arrays, units)
        for dim, num in zip((TIME_DIM, *_SPACE), fields[-1].shape[:4], strict=True)
        if dim in dims and (dim in _SPACE or num > 1)
    }
    channels: list[str] = []
    for one, field in zip(names, fields, strict=True):
        num, labels = field.shape[4], _attribute(store, one, "channels", list) or []
        if len(labels) != num:
            labels = [one] if num == 1 else [f"{one} {i}" for i in range(num)]
        channels += [f"{label} [{units.get(str(label), '-')}]" for label in labels]
    shown = fields[0]
    if len(fields) > 1:
        shown = np.concatenate([field.astype(np.float64) for field in fields], axis=4)
    return LabelledSample(shown, axes, tuple(channels), _title(store, names, number, arrays))


def _number(store: AnyStore, sample: int | None) -> int:
    """The sample that is asked for; by default the first one that is committed."""
    if sample is not None:
        return sample
    committed = np.flatnonzero(store.committed)
    return int(committed[0]) if len(committed) else 0


def _is_image(values: npt.NDArray[Any], dims: list[str]) -> bool:
    """Whether a sample is rows of pixels from the top, by its dtype and shape, and no field by its axes."""
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] not in (1, 3, 4):
        return False
    return [dim for dim in dims if dim in (TIME_DIM, *_SPACE)] in ([], ["y", "x"]) and dims[2] not in _SPACE


def _dims(store: AnyStore, name: str) -> list[str]:
    return ["channel" if dim == "component" else dim for dim in store.dims[name][1:]]


def _inputs(store: AnyStore, name: str, arrays: Arrays) -> list[str]:
    """Fields that decide a steady sample, such as Darcy's coefficient: constant ones on the same points."""
    lengths = dict(zip(_dims(store, name), arrays[name].shape, strict=True))
    if lengths.get(TIME_DIM, 1) > 1:
        return []
    space = {dim: lengths[dim] for dim in _SPACE if dim in lengths}
    inputs = []
    for other in arrays.keys() - {name, *_SPACE}:  # each sample may have coordinates of its own
        others = dict(zip(_dims(store, other), arrays[other].shape, strict=True))
        others.pop("channel", None)
        if others == space:
            inputs.append(other)
    return sorted(inputs)


def _ordered(values: npt.NDArray[Any], dims: list[str], known: Sequence[str]) -> npt.NDArray[Any]:
    """The sample as (T, Z, Y, X, C)."""
    missing = [axis for axis, dim in enumerate(known) if dim not in dims]
    return np.expand_dims(values.transpose([dims.index(dim) for dim in known if dim in dims]), missing)


def _axis(dim: str, num: int, arrays: Arrays, units: Mapping[str, Any]) -> Axis:
    name = "t" if dim == TIME_DIM else dim
    coordinate = arrays.get(name)
    if coordinate is not None and coordinate.ndim == 1 and len(coordinate) >= num:
        points = coordinate[:num].astype(np.float64)
        steps = np.diff(points)
        if np.isfinite(points).all() and ((steps > 0).all() or (steps < 0).all()):
            return Axis(name, str(units.get(name, "-")), points)
    return Axis(name, None, np.arange(num, dtype=np.float64))


def _attribute(store: AnyStore, name: str, key: str, kind: type) -> Any:
    """An attribute of the array, else of the store, if it is of the kind."""
    attrs = store.arrays[name].attrs or {}
    if key not in attrs and (name == MAIN_ARRAY or key == "units"):  # the store's channels are its fields'
        attrs = store.attrs
    value = attrs.get(key)
    return value if isinstance(value, kind) else None


def _title(store: AnyStore, names: list[str], sample: int, arrays: Arrays) -> str:
    task = " ".join(str(store.attrs[key]) for key in ("task", "split") if key in store.attrs)
    words = [task or store.path.name, ", ".join(names), f"sample {sample} of {len(store)}"]
    scalars = [key for key, value in arrays.items() if value.shape == () and key not in names]
    words += [f"{key} = {arrays[key].item():.6g}" for key in scalars[:_MAX_PARAMETERS]]
    if num_bad := sum(int(np.count_nonzero(~np.isfinite(arrays[name]))) for name in names):
        words.append(f"{num_bad:,} NaN or Inf")
    return " · ".join(words)


# --- pictures -------------------------------------------------------------------------------------------


def draw(sample: LabelledSample) -> Figure:
    """Draw a sample; a row for each of its first channels."""
    if sample.is_image:
        return _draw_picture(sample)
    if not sample.axes:
        return _draw_flat(sample)
    return _draw_frames(sample) if len({*_SPACE} & sample.axes.keys()) > 1 else _draw_rows(sample)


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
    *depth, vertical, horizontal = (sample.axes[dim] for dim in _SPACE if dim in sample.axes)
    steps = np.unique(np.linspace(0, len(sample.values) - 1, MAX_FRAMES).round().astype(int)).tolist()
    channels = sample.channels[:MAX_CHANNELS]
    ratio = 1.0  # width over height of a frame: the domain's own, unless that makes no picture
    if horizontal.unit == vertical.unit:
        widths = [abs(end - first) for first, end in (horizontal.ends, vertical.ends)]
        ratio = float(np.clip(widths[0] / widths[1], 0.4, 2.5))
    width = min(2.0, 9.0 / len(steps)) if len(steps) > 1 else 3.6
    size = (1.4 + width * len(steps), 1.1 + ((width - 0.25) / ratio + 0.25) * len(channels))
    middle = len(depth[0].points) // 2 if depth else 0
    plane = f" · plane {depth[0].at(middle)}" if depth else ""
    figure = _new_figure(*size, sample.title + plane)
    grid = figure.subplots(len(channels), len(steps), sharex=True, sharey=True, squeeze=False)
    shape = (len(vertical.points), len(horizontal.points))
    for c, (row, label) in enumerate(zip(grid, channels, strict=True)):
        frames = (sample.values[step, ..., c] for step in steps)
        images = [(frame[middle : middle + 1] if depth else frame).reshape(shape) for frame in frames]
        _draw_images(figure, row, images, horizontal, vertical, label)
        row[0].set_ylabel(vertical.label)
    for axes in grid.flat:
        axes.set_box_aspect(1 / ratio)
    for axes, step in zip(grid[0], steps, strict=True):
        axes.set_title(sample.axes[TIME_DIM].at(step) if TIME_DIM in sample.axes else "")
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
    x, y = horizontal.thinned(), vertical.thinned()
    thinned = np.stack([_drawable(image[::down, ::across]) for image in images])
    low, high, colours = colours_of(thinned)
    options: dict[str, Any] = {"vmin": low, "vmax": high, "cmap": colours}
    for axes, image in zip(row, thinned, strict=True):
        axes.set_facecolor("0.6")  # NaN and Inf
        mesh: Any
        if _is_uniform(x.points) and _is_uniform(y.points):
            extent = (*x.ends, *y.ends)
            mesh = axes.imshow(image, origin="lower", aspect="auto", extent=extent, **options)
        else:
            edges = (cell_edges(x.points), cell_edges(y.points))
            mesh = axes.pcolormesh(*edges, image, rasterized=True, **options)
    beyond = (bool((thinned < low).any()), bool((thinned > high).any()))
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max"}.get(beyond, "both")
    bar = figure.colorbar(
        mesh, ax=list(row), label=label, pad=0.01, aspect=25, extend=extend, extendfrac=0.03
    )
    bar.ax.tick_params(labelsize=7)


def _drawable(values: npt.NDArray[Any]) -> Values:
    """A copy as float64 with NaN for Inf, small enough for differences not to overflow."""
    copy = values.astype(np.float64)
    copy[~np.isfinite(copy)] = np.nan
    return np.clip(copy, -_HUGE, _HUGE)


def _is_uniform(points: Values) -> bool:
    steps = np.diff(points)
    return len(steps) == 0 or bool(np.allclose(steps, steps.mean(), rtol=0.02, atol=0))


def _stride(num: int) -> int:
    return -(-num // _MAX_PIXELS)
