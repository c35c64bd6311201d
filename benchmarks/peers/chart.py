"""The chart of the peers: a random batch over memcpy and a shuffled epoch, for every size; log axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.peers.measure import PeerResult

_OURS, _PEER, _LIMIT, _TEXT = "#3b6ea5", "#b0b7bf", "#6b8f71", "#333333"
_PANELS = (
    ("batch_over_memcpy", "random batch, time over memcpy (less is better)", "{:.3g}"),
    ("epoch", "shuffled epoch, samples/s (more is better)", "{:,.0f}"),
)


def draw(path: Path, results: Sequence[PeerResult]) -> None:
    """Draw a row of panels per size; who has no figure is named with a dash."""
    sizes = list(dict.fromkeys(result.size for result in results))
    num_peers = max(sum(result.size == size for result in results) for size in sizes)
    height = (0.6 + 0.24 * num_peers) * len(sizes)
    figure, panels = plt.subplots(len(sizes), 2, figsize=(12, height), layout="constrained", squeeze=False)
    for row, size in zip(panels, sizes, strict=True):
        of_size = [result for result in results if result.size == size]
        for axes, (name, title, text) in zip(row, _PANELS, strict=True):
            _bars(axes, of_size, name, text)
            axes.set_title(f"{size} a sample: {title}", fontsize=9, color=_TEXT, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Axes, results: Sequence[PeerResult], name: str, text: str) -> None:
    values = [getattr(result.figures, name, None) for result in results]
    places = range(len(results))
    known = [(place, value) for place, value in zip(places, values, strict=True) if value]
    axes.set_xscale("log")
    if known:
        lowest, highest = min(value for _, value in known), max(value for _, value in known)
        axes.set_xlim(lowest / 2, highest * 4)
        colors = [_color(results[place]) for place, _ in known]
        bars = axes.barh([place for place, _ in known], [v for _, v in known], height=0.7, color=colors)
        axes.bar_label(bars, [text.format(v) for _, v in known], padding=3, fontsize=8, color=_TEXT)
    for place, value in zip(places, values, strict=True):
        if not value:
            axes.text(0.01, place, "–", transform=axes.get_yaxis_transform(), va="center", color=_TEXT)
    axes.set_yticks(places, [result.name for result in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.tick_params(axis="y", left=False, colors=_TEXT)
    axes.tick_params(axis="x", labelsize=8, colors=_TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _color(result: PeerResult) -> str:
    if result.name == "ups_store":
        return _OURS
    return _LIMIT if result.name.startswith("memcpy") else _PEER
