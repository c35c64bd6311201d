"""How figures look, and the files that they become: SVG and PDF for a paper, CSV of their lines.

Colours belong to models and are the same in all figures, as the table below has them; they are told apart
by people who don't see all colours (Okabe and Ito 2008), and lines differ by dash and marker as well. The
same values give the same bytes.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ups.errors import needs
from ups.output import csv_text
from ups.stages import AUTOENCODER, CORRECTOR, FNO, FNO_NEURALOPERATOR, JOINT, OPERATOR, STUDENT, UNET

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

ONE_COLUMN, TWO_COLUMNS = 3.35, 6.9  # inches, of most journals
_DPI = 300  # of a PNG, and of the images within an SVG or a PDF
_STYLE: dict[Any, Any] = {
    **{"font.family": "DejaVu Sans", "font.size": 8, "text.usetex": False},  # comes with matplotlib
    "text.parse_math": False,  # names from a file are text, never markup
    **{"axes.titlesize": 8, "axes.labelsize": 8, "axes.linewidth": 0.6, "axes.axisbelow": True},
    **{"xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False},
    **{"xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.2, "lines.markersize": 3.5},
    **{"grid.alpha": 0.3, "grid.linewidth": 0.5},
    **{"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "ups"},  # journals refuse fonts of type 3
}
_NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
IMAGES = tuple(_NO_DATE)  # suffixes of pictures

# Colour, dash and marker by model; its other budgets and copies have the same colour and another dash.
_MODELS = {
    "truth": ("#000000", "-", ""),
    str(OPERATOR.row): ("#0072B2", "-", "o"),
    "operator_fields": ("#56B4E9", "-", "s"),
    "operator_latent": ("#332288", "-", "s"),
    JOINT.name: ("#332288", "-", "o"),
    str(CORRECTOR.row): ("#882255", "-", "X"),
    str(STUDENT.row): ("#999933", "-", "h"),
    FNO.name: ("#D55E00", "-", "^"),
    FNO_NEURALOPERATOR.name: ("#E69F00", "-", "v"),
    UNET.name: ("#009E73", "-", "D"),
    AUTOENCODER.name: ("#CC79A7", "-", "P"),
    "autoencoder_floor": ("#CC79A7", "-.", ""),
    "persistence": ("#737373", "--", ""),
    "mean": ("#A6A6A6", ":", ""),
}
_OTHERS = ("#AA4499", "#44AA99", "#661100")  # of models that the table doesn't have
_DASHES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_VARIANTS = {"samples": 0, "flops": 1, "seconds": 2}


def line_of(model: str) -> dict[str, Any]:
    """How the line of a model looks, as arguments of `Axes.plot`.

    Args:
        model: Name of its row in a report, such as "operator", "fno_samples" or "unet_2".
    """
    known = max((name for name in _MODELS if f"{model}_".startswith(f"{name}_")), key=len, default="")
    variant = model.removeprefix(known).strip("_")
    if not known:
        colour, dash, marker = _OTHERS[zlib.crc32(model.encode()) % len(_OTHERS)], "-", "X"
    else:
        colour, dash, marker = _MODELS[known]
    line = {"color": colour, "linestyle": dash, "marker": marker, "markeredgewidth": 0.8}
    if known and variant:
        number = _VARIANTS.get(variant, zlib.crc32(variant.encode()))
        line |= {"linestyle": _DASHES[number % len(_DASHES)], "markerfacecolor": "white"}
    return line


def with_unit(name: str, units: Mapping[str, str]) -> str:
    """A quantity as axes and tables name it: "u [m/s]", or "u" where nothing says its unit."""
    return f"{name} [{units[name]}]" if name in units else name


def power_of_ten(value: float, position: int | None = None) -> str:
    """A tick of a logarithmic axis without markup: 10⁻³; nothing between powers."""
    exponent = math.log10(value)
    is_whole = abs(exponent - round(exponent)) < 1e-6
    return "10" + str(round(exponent)).translate(_RAISED) if is_whole else ""


def log_ticks(axis: Axis) -> None:
    """Let a logarithmic axis be labelled without markup: its powers, or, within a decade, some numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(5))  # 1, 2 and 5 times a power may be one number, or none
        axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:.3g}"))
    else:
        axis.set_major_formatter(FuncFormatter(power_of_ten))
    axis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True)
class Drawing:
    """A figure, drawn when one of its files is wanted.

    Attributes:
        name: Stem of its files: letters, digits, "_" and "-".
        caption: What it shows.
        size: Width and height in inches.
        draw: Draws into an empty figure of that size, laid out by "constrained".
    """

    name: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Figure], None] = field(repr=False, compare=False)

    @property
    def is_wide(self) -> bool:
        """Whether it takes two columns of a paper."""
        return self.size[0] > ONE_COLUMN

    def images(self, *suffixes: str) -> dict[str, bytes]:
        """The picture by suffix, of `IMAGES`; text in an SVG is paths, so that it looks alike everywhere."""
        return self._rendered(*suffixes)[0]

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """What stands beside a report, by suffix: SVG, PDF, and of a figure with lines a CSV of them."""
        images, lines = self._rendered("svg", "pdf")
        return {**images, "csv": csv_text([_CSV_COLUMNS, *lines]).encode()} if lines else images

    def _rendered(self, *suffixes: str) -> tuple[dict[str, bytes], list[tuple[str, ...]]]:
        with needs("plot"):
            import matplotlib
            from matplotlib.figure import Figure

        images = {suffix: io.BytesIO() for suffix in suffixes}
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # it is laid out, which takes longest
            for suffix, image in images.items():
                figure.savefig(image, format=suffix, dpi=_DPI, metadata=_NO_DATE[suffix])
        return {suffix: image.getvalue() for suffix, image in images.items()}, list(_points(figure))


_CSV_COLUMNS = ("panel", "line", "x", "y")


def _points(figure: Figure) -> Iterator[tuple[str, ...]]:
    """The points of all lines, with the digits that numbers need to be themselves; empty if not finite."""
    for axes in figure.axes:
        names = (
            axes.get_title(),
            axes.get_ylabel(),
            f"over {axes.get_xlabel()}" if axes.get_xlabel() else "",
        )
        panel, label = " ".join(filter(None, names)), ""
        for line in axes.lines:
            if line.get_transform() != axes.transData:  # across the panel, such as a line at 1
                continue
            if not str(line.get_label()).startswith("_"):  # lines without a label are of the one before
                label = str(line.get_label())
            for point in np.asarray(line.get_xydata(), np.float64).tolist():
                x, y = (repr(value) if math.isfinite(value) else "" for value in point)
                yield panel, label, x, y
