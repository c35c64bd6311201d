"""Results for the terminal, as the table and the chart of `docs/results/performance.md`, and as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.harness import machine
from benchmarks.harness.measure import RATE, TIME, Comparison, Limit

RESULTS = Path(__file__).resolve().parents[1] / "results"
BEGIN, END = "<!-- table: written by benchmarks/harness/run.py -->\n", "<!-- end of table -->"
BEGIN_TRAINING = "<!-- training: written by benchmarks/harness/run.py -->\n"
END_TRAINING = "<!-- end of training -->"
COLUMNS = ("what", "with", "result", "quartiles", "processor", "ours", "reference", "target", "verdict")
_WORDS = {"sample_bytes": "bytes a sample", "num_samples": "samples", "batch_mib": "MiB a batch",
          "num_threads": "threads", "copies_a_step": "copies a step",
          "output": "output", "method": "method"}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One measured number, or why there is none."""

    benchmark: str  # asv's name of it
    title: str
    parameters: dict[str, Any]
    value: float | None  # None where it couldn't be measured
    unit: str
    at_most: float | None = None  # target, where less is better
    at_least: float | None = None  # target, where more is better
    comparison: Comparison | None = None  # what a ratio is made of
    failure: str | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none, or no number."""
        return None if self.value is None else self.is_met_by(self.value)

    def is_met_by(self, value: float) -> bool | None:
        """Whether such a value would meet the target; None where there is none."""
        if self.at_most is not None:
            return value <= self.at_most
        return None if self.at_least is None else value >= self.at_least

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of a row, by `COLUMNS`."""
        target = f"≤ {self.at_most:g}" if self.at_most is not None else ""
        target = f"≥ {self.at_least:g}" if self.at_least is not None else target
        verdict = {None: "", True: "met", False: "missed"}[self.is_met]
        number = self.failure or "" if self.value is None else f"{self.value:.3g} {self.unit}"
        given = []
        for name, value in self.parameters.items():
            word = _WORDS.get(name, name)
            text = f"{value:,}" if isinstance(value, int) else str(value)
            given.append(f"{word} {value}" if isinstance(value, str) else f"{text} {word}")
        return self.title, ", ".join(given), number, *self._details, target, verdict

    @property
    def _details(self) -> tuple[str, str, str, str]:
        """Quartiles, the ratio of processor times, and the two sides as rates or times."""
        pairs = self.comparison
        if pairs is None:
            return "", "", "", ""
        nbytes, quartiles, processor = pairs.nbytes, "", ""
        ours, theirs = (
            f"{nbytes / seconds / 1e9:.2f} GB/s" if nbytes else f"{1e3 * seconds:.3g} ms"
            for seconds in (pairs.ours_s, pairs.reference_s)
        )
        if self.unit in (TIME, RATE):
            low, high = pairs.quartiles
            low, high = (low, high) if self.unit == TIME else (1 / high, 1 / low)
            quartiles = f"{low:.2f} to {high:.2f}"
            if (ratio := pairs.processor_ratio) is not None:
                processor = f"{ratio if self.unit == TIME else 1 / ratio:.3g}"
        return quartiles, processor, ours, theirs


def limit_of(limit: Limit | None, parameters: Sequence[Any]) -> float | None:
    """The target for these parameters."""
    return limit.get(parameters[0]) if isinstance(limit, Mapping) else limit


def table(results: Sequence[Result]) -> Table:
    """For the terminal."""
    shown = Table(*COLUMNS, title="Speed, ours beside a reference in one run")
    for result in results:
        style = {None: "", True: "green", False: "bold red"}[result.is_met]
        *cells, verdict = result.cells
        shown.add_row(*map(escape, cells), f"[{style}]{verdict}[/]" if style else verdict)
    return shown


def markdown(
    results: Sequence[Result], about: Mapping[str, Any], elsewhere: Mapping[int, Sequence[str]] | None = None
) -> str:
    """For the documentation.

    Args:
        results: The rows.
        about: Date, mode and machine.
        elsewhere: By the place of a row, what says that other machines miss its target.
    """
    hardware, missed = about["machine"], elsewhere or {}
    packages = ", ".join(f"{name} {number}" for name, number in hardware["packages"].items())
    lines = [
        f"{about['date']}, `--{about['mode']}`: {hardware['cpu']}, {hardware['cores']} cores, "
        f"{hardware['caches']}, {hardware['memory_gib']} GiB, {hardware['kernel']}, "
        f"{hardware['file_system']}, load {hardware['load']} at the start; "
        f"Python {hardware['python']}, {packages}; batches copied by {hardware['copies']}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for place, result in enumerate(results):
        *cells, verdict = result.cells
        others = missed.get(place, ())
        row = [*cells, "; ".join(["met here" if others and result.is_met else verdict, *others])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def describe(mode: str = "", *, folder: Path | None = None) -> dict[str, Any]:
    """Date, mode and machine of a result; the file system is that of the folder."""
    hardware = machine.describe(folder or Path(tempfile.gettempdir()))
    modes = {"mode": mode} if mode else {}
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", **modes, "machine": hardware}


def write_docs(page: Path, text: str, *, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between two markers of the page."""
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page}: expected the lines {begin.strip()!r} and {end!r}")
    page.write_text(before + begin + text + end + after)


def write_json(path: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """Everything that was measured, with machine and versions."""
    write_results(path, [asdict(result) | {"is_met": result.is_met} for result in results], about)


def write_results(path: Path, results: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write a JSON document, a line per result, so that two days can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(result)}" for result in results)
    path.write_text(f'{head},\n "results": [\n{rows}\n ]\n}}\n')
