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
    from matplotlib.figure import Figure

MAIN_ARRAY = "fields"
MAX_FRAMES = 6
MAX_CHANNELS = 8
SEQUENTIAL, DIVERGING = "viridis", "coolwarm"  # perceptually uniform, the latter as in Moreland 2009

_SPACE = ("z", "y", "x")
_MAX_PARAMETERS = 6  # in a title
_MAX_PIXELS = 2048  # along an axis; what is denser is thinned out
_ROBUST_PERCENTILES = (0.1, 99.9)  # a few wild values must not decide the colours
_HUGE = 1e300  # differences of such values don't overflow
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
Fields = list[
    tuple[str, npt.NDArray[Any]]
]  # label of a channel, and its values (T, Z, Y, X) or images of them


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
    image = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = draw_sample(store, sample=sample, array=array)
        figure.savefig(image, format=suffix, dpi=_DPI, metadata=_NO_DATE[suffix])
    replace_file(target, image.getvalue())


def sample_text(store: AnyStore, *, sample: int | None = None, array: str | None = None) -> str | None:
    """Return one sample of an array of text; None where there is a picture to draw, or the array isn't text.

    By default the first text, where the store has nothing else with a sample axis.
    """
    arrays = store.arrays
    texts = [name for name, spec in arrays.items() if spec.encoding == "utf-8"]
    if array is None and texts and all(spec.encoding is not None for spec in arrays.values()):
        array = texts[0]
    if array not in texts:
        return None
    text: str = store.gather([_sample_number(store, sample)], [array])[array][0]
    return text


def colours_of(values: Values) -> tuple[float, float, str]:
    """Choose limits and colour map: symmetric about zero where both signs matter, else the range.

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
    """Return the edges of cells that have these points in their middle, (n,) to (n + 1,); a single is 1 wide.

    Where points aren't evenly spaced, an edge lies halfway between two of them.
    """
    points = np.asarray(points, np.float64)
    if len(points) == 1:
        return np.array([points[0] - 0.5, points[0] + 0.5])
    between = (points[1:] + points[:-1]) / 2
    first, last = 1.5 * points[0] - 0.5 * points[1], 1.5 * points[-1] - 0.5 * points[-2]
    return np.array([first, *between, last])


@dataclass(frozen=True)
class _Axis:
    name: str
    points: npt.NDArray[np.float64]  # strictly monotonic
    unit: str | None = None  # "-" if none is known; None where only indices are known

    @property
    def label(self) -> str:
        return f"{self.name} (index)" if self.unit is None else f"{self.name} [{self.unit}]"

    def at(self, index: int) -> str:
        unit = f" {self.unit}" if self.unit not in (None, "-") else ""
        return f"{self.name} = {self.points[index]:.4g}{unit}"


def draw_sample(store: AnyStore, *, sample: int | None = None, array: str | None = None) -> Figure:
    """Draw one sample of one array with what the store says about it; see `save_preview`."""
    number = _sample_number(store, sample)
    arrays = {key: value for key, value in store.sample(number).items() if isinstance(value, np.ndarray)}
    name = _array_to_draw(store, arrays, array)
    values, dims = arrays[name], _dims(store, name)
    fields_dims = [dim for dim in dims if dim in (TIME_DIM, *_SPACE)]
    has_pixels = values.dtype == np.uint8 and values.ndim == 3 and values.shape[2] in (1, 3, 4)
    if has_pixels and fields_dims in ([], ["y", "x"]) and dims[2] not in _SPACE:
        return _draw_picture(values, _title(store, [name], number, arrays))
    if TIME_DIM in dims and "num_steps" in arrays and arrays["num_steps"].shape == ():
        valid = slice(max(1, int(arrays["num_steps"])))  # a shorter run is filled up behind it
        values = values[(slice(None),) * dims.index(TIME_DIM) + (valid,)]
    lengths = dict(zip(dims, values.shape, strict=True))
    units = _attribute(store, name, "units", dict) or {}
    axes = {
        dim: _axis_of(dim, lengths[dim], store.constants | arrays, units)
        for dim in (TIME_DIM, *_SPACE)
        if dim in dims and (dim in _SPACE or lengths[dim] > 1)
    }
    if not axes or not {*dims} <= {TIME_DIM, *_SPACE, "channel"}:  # its first axis over all others, or a line
        flat = values.reshape(1, len(values), -1) if values.ndim > 1 else values.reshape(1, -1)
        names = ["axis 0", "axis 1" if values.ndim == 2 else "other axes"]
        indices = [_Axis(*pair) for pair in zip(names, map(_counting, flat.shape[1:]), strict=False)]
        return _draw_grid([("value", flat)], indices, (6.4, 3.4), _title(store, [name], number, arrays))
    names = [*(_inputs(store, arrays, lengths, {name, *_SPACE}) if array is None else []), name]
    fields: Fields = []
    for key in names:
        field = _ordered(values if key == name else arrays[key], _dims(store, key))
        num, labels = field.shape[4], _attribute(store, key, "channels", list) or []
        if len(labels) != num:
            labels = [key] if num == 1 else [f"{key} {i}" for i in range(num)]
        fields += [
            (f"{label} [{units.get(str(label), '-')}]", field[..., i]) for i, label in enumerate(labels)
        ]
    title, fields = _title(store, names, number, arrays), fields[:MAX_CHANNELS]
    space = [axes[dim] for dim in _SPACE if dim in axes]
    if len(space) > 1:
        return _draw_frames(fields, axes.get(TIME_DIM), space, title)
    shape = [1, *(len(axis.points) for axis in axes.values())]
    images = [(label, field.reshape(shape)) for label, field in fields]
    return _draw_grid(images, [*axes.values()], (6.4, 0.8 + 2.4 * len(images)), title)


def _array_to_draw(store: AnyStore, arrays: Arrays, array: str | None) -> str:
    if array is None and not arrays:
        hint = "text and bytes aren't drawn"
        raise SpecError("it has no array that can be drawn", kind="arrays", hint=hint)
    name = array or (MAIN_ARRAY if MAIN_ARRAY in arrays else max(arrays, key=lambda key: arrays[key].nbytes))
    if name not in arrays:
        if name not in store:
            store[name]  # raises
        encoding = store.arrays[name].encoding if name in store.arrays else None
        problem = {None: "it has no sample axis", "bytes": "it is bytes", "utf-8": "it is text"}[encoding]
        raise SpecError(problem, path=store.path, array=name, hint="choose another array")
    if not arrays[name].size:
        shape = f"shape {arrays[name].shape}"
        raise SpecError("it has no elements", path=store.path, array=name, found=shape)
    return name


def _sample_number(store: AnyStore, sample: int | None) -> int:
    """Return the sample that is asked for; by default the first one that is committed."""
    if sample is not None:
        return sample
    committed = np.flatnonzero(store.committed)
    return int(committed[0]) if len(committed) else 0


def _dims(store: AnyStore, name: str) -> list[str]:
    return ["channel" if dim == "component" else dim for dim in store.dims[name][1:]]


def _inputs(store: AnyStore, arrays: Arrays, lengths: Mapping[str, int], others: set[str]) -> list[str]:
    """Find fields that decide a steady sample, such as Darcy's coefficient: constant ones on its points."""
    if lengths.get(TIME_DIM, 1) > 1:
        return []
    points = {dim: num for dim, num in lengths.items() if dim in _SPACE}
    on_points = []
    for key in arrays.keys() - others:  # coordinates are among them, each sample may have its own
        sizes = dict(zip(_dims(store, key), arrays[key].shape, strict=True))
        sizes.pop("channel", None)
        on_points += [key] if sizes == points else []
    return sorted(on_points)


def _ordered(values: npt.NDArray[Any], dims: list[str]) -> npt.NDArray[Any]:
    """Bring a sample into the order (T, Z, Y, X, C)."""
    order = (TIME_DIM, *_SPACE, "channel")
    missing = [axis for axis, dim in enumerate(order) if dim not in dims]
    return np.expand_dims(values.transpose([dims.index(dim) for dim in order if dim in dims]), missing)


def _axis_of(dim: str, num: int, arrays: Arrays, units: Mapping[str, Any]) -> _Axis:
    name = "t" if dim == TIME_DIM else dim
    coordinate = arrays.get(name)
    if coordinate is not None and coordinate.ndim == 1 and len(coordinate) >= num:
        points = coordinate[:num].astype(np.float64)
        steps = np.diff(points)
        if np.isfinite(points).all() and ((steps > 0).all() or (steps < 0).all()):
            return _Axis(name, points, str(units.get(name, "-")))
    return _Axis(name, _counting(num))


def _counting(num: int) -> npt.NDArray[np.float64]:
    return np.arange(num, dtype=np.float64)


def _attribute(store: AnyStore, name: str, key: str, kind: type) -> Any:
    """Return an attribute of the array, else of the store, if it is of the kind."""
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


def _draw_picture(pixels: npt.NDArray[Any], title: str) -> Figure:
    """Draw pixels in their own colours, the first row at the top; transparent ones over white."""
    num_rows, num_columns, num_channels = pixels.shape
    ratio = float(np.clip(num_columns / num_rows, 0.2, 5.0))
    width = 4.8 * min(1.0, ratio) ** 0.5
    figure = _new_figure(width, 0.6 + width / ratio, title)
    axes = figure.subplots()
    picture = pixels[:: _stride(num_rows), :: _stride(num_columns), 0 if num_channels == 1 else slice(None)]
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255)
    axes.set_axis_off()
    return figure


def _draw_frames(fields: Fields, time: _Axis | None, space: Sequence[_Axis], title: str) -> Figure:
    """Draw time steps from left to right, a row per channel; in 3D of the plane in the middle of z."""
    *depth, vertical, horizontal = space
    num_steps = len(time.points) if time else 1
    steps = np.unique(np.linspace(0, num_steps - 1, MAX_FRAMES).round().astype(int)).tolist()
    images = [(label, field[steps]) for label, field in fields]
    if depth:
        middle = len(depth[0].points) // 2
        images = [(label, image[:, middle]) for label, image in images]
        title += f" · plane {depth[0].at(middle)}"
    shape = (len(steps), len(vertical.points), len(horizontal.points))
    images = [(label, image.reshape(shape)) for label, image in images]
    ratio = 1.0  # width over height of a frame: the domain's own, unless that makes no picture
    if horizontal.unit == vertical.unit:
        across, up = (np.ptp(cell_edges(axis.points)) for axis in (horizontal, vertical))
        ratio = float(np.clip(across / up, 0.4, 2.5))
    width = min(2.0, 9.0 / len(steps)) if len(steps) > 1 else 3.6
    size = (1.4 + width * len(steps), 1.1 + ((width - 0.25) / ratio + 0.25) * len(fields))
    titles = [time.at(step) if time else "" for step in steps]
    return _draw_grid(images, [vertical, horizontal], size, title, titles=titles, ratio=ratio)


def _draw_grid(
    fields: Fields,
    axes: Sequence[_Axis],
    size: tuple[float, float],
    title: str,
    *,
    titles: Sequence[str] = ("",),
    ratio: float | None = None,
) -> Figure:
    """Draw a row per field, images side by side in one colour scale; a line where there is one axis only.

    Args:
        fields: Images of each, shape (number of titles, vertical, horizontal), or (1, horizontal).
        axes: The vertical one, if there is one, then the horizontal one.
        size: Width and height in inches.
        title: Of all.
        titles: Of the columns.
        ratio: Width over height of an image, where that matters.
    """
    *vertical, x = axes
    figure = _new_figure(*size, title)
    grid = figure.subplots(len(fields), len(titles), sharex=True, sharey=bool(vertical), squeeze=False)
    strides = [_stride(len(axis.points)) for axis in axes]
    points = [axis.points[::stride] for axis, stride in zip(axes, strides, strict=True)]
    for row, (label, values) in zip(grid, fields, strict=True):
        images = values[(slice(None), *(slice(None, None, stride) for stride in strides))].astype(np.float64)
        images[~np.isfinite(images)] = np.nan
        images = np.clip(images, -_HUGE, _HUGE)
        if not vertical:
            row[0].plot(points[0], images[0], ".-" if len(points[0]) < 100 else "-", lw=1)
            row[0].margins(x=0.01)
            row[0].grid(alpha=0.3)
            row[0].set_ylabel(label)
            continue
        low, high, colours = colours_of(images)
        options: dict[str, Any] = {"vmin": low, "vmax": high, "cmap": colours}
        up, across = map(cell_edges, points)
        for panel, image in zip(row, images, strict=True):
            panel.set_facecolor("0.6")  # NaN and Inf
            if all(map(_is_uniform, points)):
                extent = (across[0], across[-1], up[0], up[-1])
                mesh = panel.imshow(image, origin="lower", aspect="auto", extent=extent, **options)
            else:
                mesh = panel.pcolormesh(across, up, image, rasterized=True, **options)
        beyond = (bool((images < low).any()), bool((images > high).any()))
        extend = {(False, False): "neither", (True, False): "min", (False, True): "max"}.get(beyond, "both")
        options = {"label": label, "pad": 0.01, "aspect": 25, "extend": extend, "extendfrac": 0.03}
        figure.colorbar(mesh, ax=list(row), **options).ax.tick_params(labelsize=7)
        row[0].set_ylabel(vertical[0].label)
    for panel, text in zip(grid[0], titles, strict=True):
        panel.set_title(text)
    for panel in grid[-1]:
        panel.set_xlabel(x.label)
    if ratio is not None:
        for panel in grid.flat:
            panel.set_box_aspect(1 / ratio)
    return figure


def _new_figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(_CHARACTERS_PER_INCH * width)))
    return figure


def _is_uniform(points: Values) -> bool:
    steps = np.diff(points)
    return len(steps) == 0 or bool(np.allclose(steps, steps.mean(), rtol=0.02, atol=0))


def _stride(num: int) -> int:
    return -(-num // _MAX_PIXELS)
