"""The chart of `docs/results/performance.md`: ours as a share of the reference's speed, with the targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.harness.measure import RATE, TIME
from benchmarks.harness.report import Result

_BAR, _TARGET, _TEXT = "#3b6ea5", "#c0392b", "#333333"
_LEFT_OUT = ("GatherMethods", "Import", "OpenManyOverFew", "Sweep")  # not an operation against its best case


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw the ratios; nothing is drawn where there are none."""
    ratios = [r for r in results if r.unit in (TIME, RATE) and r.value is not None]
    shown = [r for r in ratios if not any(name in r.benchmark for name in _LEFT_OUT)]
    if not shown:
        return
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.34 * len(shown)), layout="constrained")
    speeds = [_speed(result.value, result.unit) for result in shown if result.value is not None]
    places = range(len(shown))
    bars = axes.barh(places, speeds, height=0.62, color=_BAR)
    axes.bar_label(bars, [f"{speed:.2f}" for speed in speeds], padding=4, color=_TEXT, fontsize=9)
    for place, result in zip(places, shown, strict=True):
        _mark_target(axes, place, result)
    axes.set_yticks(places, [_label(result) for result in shown], fontsize=9)
    _style(axes, max(speeds))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_sweep(path: Path, results: Sequence[Result]) -> None:
    """Draw ratios of time by the size of a sample, a line for each number; nothing where there are none."""
    shown = [result for result in results if result.value is not None and result.comparison is not None]
    if not shown:
        return
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for number, title in enumerate(dict.fromkeys(result.title for result in shown)):
        line = [result for result in shown if result.title == title]
        sizes = [result.parameters["sample_bytes"] for result in line]
        axes.plot(
            sizes, [result.value for result in line], "o-", color=(_BAR, "#7f9f3b")[number % 2], label=title
        )
        low, high = zip(*(result.comparison.quartiles for result in line if result.comparison), strict=True)
        axes.fill_between(sizes, low, high, color=(_BAR, "#7f9f3b")[number % 2], alpha=0.15, linewidth=0)
    axes.axhline(1, color=_TEXT, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="bytes a sample", ylabel="time, reference = 1", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _speed(value: float, unit: str) -> float:
    return 1 / value if unit == TIME else value


def _label(result: Result) -> str:
    what, parameters = result.cells[:2]
    return f"{what}\n{parameters}" if parameters else what


def _mark_target(axes: Axes, place: int, result: Result) -> None:
    limit = result.at_most if result.unit == TIME else result.at_least
    if limit is not None:
        at = _speed(limit, result.unit)
        axes.plot([at, at], [place - 0.4, place + 0.4], color=_TARGET, linewidth=2, solid_capstyle="butt")


def _style(axes: Axes, highest: float) -> None:
    axes.axvline(1, color=_TEXT, linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(1, highest))
    axes.set_xlabel("speed, reference = 1; red: target")
    axes.tick_params(left=False, colors=_TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
