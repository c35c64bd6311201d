"""The peers' results as tables of `docs/results/performance.md` and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.report import write_docs, write_results
from benchmarks.peers.measure import Figures, PeerResult

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
    notes = list(dict.fromkeys(note for result in results for note in _notes(result)))
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def update_page(page: Path, text: str) -> None:
    """Replace the peers' tables of the page."""
    write_docs(page, text, begin=BEGIN, end=END)


def write_json(path: Path, results: Sequence[PeerResult], about: Mapping[str, Any]) -> None:
    """Everything that was measured, with machine and versions."""
    write_results(path, [asdict(result) for result in results], about)


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
    if size != _TARGET_SIZE or ours is None:
        return {}
    return {
        heading: [_verdict(ours, result, figure) for result in results]
        for heading, figure in _VERDICTS.items()
        if _has(ours, figure)
    }


def _verdict(ours: PeerResult, other: PeerResult, figure: str) -> str:
    target = _TARGETS[figure].get(other.name)
    if target is None or not _has(other, figure):
        return "" if target is None else "–"
    ratio = getattr(ours.figures, figure) / getattr(other.figures, figure)
    return f"{ratio:.3g}, {'met' if ratio >= target else 'missed'} (≥ {target:g})"


def _label(result: PeerResult) -> str:
    name = f"{result.name} {result.version}".strip()
    return f"**{name}**" if result.name == _OURS else name


def _has(result: PeerResult, figure: str) -> bool:
    return result.figures is not None and getattr(result.figures, figure) is not None


def _cell(result: PeerResult, figure: str, text: str) -> str:
    if result.figures is None:
        return "not installed" if result.reason.startswith("not installed") else "failed"
    return text.format(getattr(result.figures, figure)) if _has(result, figure) else "–"


def _notes(result: PeerResult) -> list[str]:
    figures = result.figures or Figures(notes=(result.reason,))
    is_missing = result.reason.startswith("not installed")
    where = result.name if is_missing else f"{result.name}, {result.size}"
    return [f"{where}: {note}" for note in figures.notes]
