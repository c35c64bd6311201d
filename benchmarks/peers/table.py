"""The peers' results as tables and a chart of `docs/results/performance.md` and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import PeerResult

BEGIN, END = "<!-- peers: written by benchmarks/peers/run.py -->\n", "<!-- end of peers -->"

_COLUMNS = {  # heading: figure, format
    "write, MB/s": ("write_mb_per_s", "{:,.0f}"),
    "files": ("num_files", "{:,}"),
    "size / payload": ("size_over_payload", "{:.3f}"),
    "open, ms": ("open_ms", "{:.3g}"),
    "batch / memcpy": ("batch_over_memcpy", "{:.3g}"),
    "windows / memcpy": ("windows_over_memcpy", "{:.3g}"),
    "epoch, samples/s": ("epoch", "{:,.0f}"),
    "2 workers, samples/s": ("epoch_2_workers", "{:,.0f}"),
    "cold epoch, samples/s": ("cold_epoch", "{:,.0f}"),
    "PSS / payload, 8 processes": ("pss_over_payload", "{:.2f}"),
    "preload, s": ("preload_s", "{:.2g}"),
}
_OURS = "ups_store"
_VERDICTS = {"ours / it, epoch": "epoch", "ours / it, 2 workers": "epoch_2_workers"}  # heading: figure
_TARGET_SIZE = "100 KB"
_TARGETS = {  # by figure and peer: how many times as fast ours is to be at that size, at least
    "epoch": {"np.memmap": 0.95, "folder of .pt": 20.0, "HDF5": 5.0, "LitData": 8.0, "WebDataset": 15.0},
    "epoch_2_workers": {"np.memmap": 1.0},
}


def markdown(results: Sequence[PeerResult], about: Mapping[str, Any]) -> str:
    """A table per size, then what was left out and why."""
    machine = about["machine"]
    lines = [
        f"{about['date']}, `--{about['mode']}`: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['kernel']}, {machine['file_system']}, "
        f"load {machine['load']} at the start; Python {machine['python']}.",
    ]
    for size in dict.fromkeys(result.size for result in results):
        lines += _table(size, [result for result in results if result.size == size])
    notes: dict[str, None] = {}
    for result in results:
        is_missing = result.reason.startswith("not installed")
        where = result.name if is_missing else f"{result.name}, {result.size}"
        texts = result.figures.notes if result.figures else (result.reason,)
        notes |= dict.fromkeys(f"{where}: {text}" for text in texts)
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _table(size: str, results: Sequence[PeerResult]) -> list[str]:
    columns = {name: column for name, column in _COLUMNS.items() if any(_has(r, column[0]) for r in results)}
    verdicts = _verdicts(size, results)
    headings = [f"{size} a sample", *columns, *verdicts]
    rows = [
        [_label(r), *(_cell(r, *c) for c in columns.values()), *(texts[i] for texts in verdicts.values())]
        for i, r in enumerate(results)
    ]
    head, *lines = ("| " + " | ".join(row) + " |" for row in (headings, *rows))
    return ["", head, "|---|" + "---:|" * (len(headings) - 1), *lines]


def _verdicts(size: str, results: Sequence[PeerResult]) -> dict[str, list[str]]:
    """Ours over each peer's that there is a target for, by heading; nothing where ours wasn't measured."""
    ours = next((result for result in results if result.name == _OURS), None)
    verdicts: dict[str, list[str]] = {}
    for heading, figure in _VERDICTS.items():
        if size != _TARGET_SIZE or ours is None or not _has(ours, figure):
            continue
        for other in results:
            target, text = _TARGETS[figure].get(other.name), ""
            if target is not None and _has(other, figure):
                ratio = getattr(ours.figures, figure) / getattr(other.figures, figure)
                text = f"{ratio:.3g}, {'met' if ratio >= target else 'missed'} (≥ {target:g})"
            verdicts.setdefault(heading, []).append(text or ("" if target is None else "–"))
    return verdicts


def _label(result: PeerResult) -> str:
    name = f"{result.name} {result.version}".strip()
    return f"**{name}**" if result.name == _OURS else name


def _has(result: PeerResult, figure: str) -> bool:
    return result.figures is not None and getattr(result.figures, figure) is not None


def _cell(result: PeerResult, figure: str, text: str) -> str:
    if result.figures is None:
        return "not installed" if result.reason.startswith("not installed") else "failed"
    return text.format(getattr(result.figures, figure)) if _has(result, figure) else "–"


# --- the chart: a random batch over memcpy and a shuffled epoch, for every size; log axes ---

_TEXT, _COLORS = "#333333", {_OURS: "#3b6ea5", "memcpy": "#6b8f71"}
_PANELS = (
    ("batch_over_memcpy", "random batch, time over memcpy (less is better)", "{:.3g}"),
    ("epoch", "shuffled epoch, samples/s (more is better)", "{:,.0f}"),
)


def draw(path: Path, results: Sequence[PeerResult]) -> None:
    """Draw a row of panels per size; who has no figure is named with a dash."""
    import matplotlib.pyplot as plt

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


def _bars(axes: Any, results: Sequence[PeerResult], name: str, text: str) -> None:
    values = [getattr(result.figures, name, None) for result in results]
    places = range(len(results))
    known = [(place, value) for place, value in zip(places, values, strict=True) if value]
    axes.set_xscale("log")
    if known:
        lowest, highest = min(value for _, value in known), max(value for _, value in known)
        axes.set_xlim(lowest / 2, highest * 4)
        colors = [_COLORS.get(results[place].name.partition(" ")[0], "#b0b7bf") for place, _ in known]
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
