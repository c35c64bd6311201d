"""The peers' results as tables of `docs/performance.md` and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Figures
from benchmarks.peers.measure import PeerResult
from benchmarks.report import write_docs

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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "results": [asdict(result) for result in results]}, indent=2) + "\n")


def _table(size: str, results: Sequence[PeerResult]) -> list[str]:
    columns = {name: column for name, column in _COLUMNS.items() if any(_has(r, column[0]) for r in results)}
    rows = ["| " + " | ".join([_label(r), *(_cell(r, *c) for c in columns.values())]) + " |" for r in results]
    head = f"| {size} a sample | " + " | ".join(columns) + " |"
    return ["", head, "|---|" + "---:|" * len(columns), *rows]


def _label(result: PeerResult) -> str:
    name = f"{result.name} {result.version}".strip()
    return f"**{name}**" if result.name == "ups_store" else name


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
