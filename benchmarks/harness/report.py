"""Results for the terminal, as the table and the chart of `docs/results/performance.md`, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.harness.measure import RATE, TIME, Comparison, Limit

BEGIN, END = "<!-- table: written by benchmarks/harness/run.py -->\n", "<!-- end of table -->"
BEGIN_TRAINING = "<!-- training: written by benchmarks/harness/run.py -->\n"
END_TRAINING = "<!-- end of training -->"
COLUMNS = ("what", "with", "result", "quartiles", "processor", "ours", "reference", "target", "verdict")
_WORDS = {"sample_bytes": "bytes a sample", "num_samples": "samples", "batch_mib": "MiB a batch",
          "num_threads": "threads", "copies_a_step": "copies a step",
          "output": "output", "method": "method"}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One measured number.

    Attributes:
        benchmark: asv's name of it.
        title: What was measured.
        parameters: Values of the parameters, by name.
        value: The number; None where it couldn't be measured.
        unit: Its unit.
        at_most: Target, where less is better.
        at_least: Target, where more is better.
        comparison: What a ratio is made of.
        failure: Why there is no number.
    """

    benchmark: str
    title: str
    parameters: dict[str, Any]
    value: float | None
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    comparison: Comparison | None = None
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
        with_ = ", ".join(_parameter(name, value) for name, value in self.parameters.items())
        target = f"≤ {self.at_most:g}" if self.at_most is not None else ""
        target = f"≥ {self.at_least:g}" if self.at_least is not None else target
        verdict = {None: "", True: "met", False: "missed"}[self.is_met]
        number = self.failure or "" if self.value is None else f"{self.value:.3g} {self.unit}"
        return self.title, with_, number, *_details(self), target, verdict


def limit_of(limit: Limit | None, parameters: Sequence[Any]) -> float | None:
    """The target for these parameters."""
    return limit.get(parameters[0]) if isinstance(limit, Mapping) else limit


def _parameter(name: str, value: Any) -> str:
    number = f"{value:,}" if isinstance(value, int) else value
    return (
        f"{_WORDS.get(name, name)} {value}"
        if isinstance(value, str)
        else f"{number} {_WORDS.get(name, name)}"
    )


def _details(result: Result) -> tuple[str, str, str, str]:
    """Quartiles, the ratio of processor times, and the two sides as rates or times."""
    found = result.comparison
    if found is None:
        return "", "", "", ""
    low, high = found.quartiles if result.unit != RATE else (1 / found.quartiles[1], 1 / found.quartiles[0])
    quartiles = f"{low:.2f} to {high:.2f}" if result.unit in (TIME, RATE) else ""
    sides = _side(found.ours_s, found.nbytes), _side(found.reference_s, found.nbytes)
    return quartiles, _processor(result.unit, found), *sides


def _processor(unit: str, found: Comparison) -> str:
    if found.processor_ratio is None or unit not in (TIME, RATE):
        return ""
    return f"{found.processor_ratio if unit == TIME else 1 / found.processor_ratio:.3g}"


def _side(seconds: float, nbytes: int) -> str:
    if nbytes:
        return f"{nbytes / seconds / 1e9:.2f} GB/s"
    return f"{1e3 * seconds:.3g} ms"


def table(results: Sequence[Result]) -> Table:
    """For the terminal."""
    shown = Table(*COLUMNS, title="Speed, ours beside a reference in one run")
    for result in results:
        style = {None: "", True: "green", False: "bold red"}[result.is_met]
        *cells, verdict = result.cells
        shown.add_row(*map(escape, cells), f"[{style}]{verdict}[/]" if style else verdict)
    return shown


def markdown(
    results: Sequence[Result],
    about: Mapping[str, Any],
    elsewhere: Mapping[int, Sequence[object]] | None = None,
) -> str:
    """For the documentation.

    Args:
        results: The rows.
        about: Date, mode and machine.
        elsewhere: By the place of a row, what says that other machines miss its target.
    """
    machine, missed = about["machine"], elsewhere or {}
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    lines = [
        f"{about['date']}, `--{about['mode']}`: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['caches']}, {machine['memory_gib']} GiB, {machine['kernel']}, {machine['file_system']}, "
        f"load {machine['load']} at the start; Python {machine['python']}, {packages}; "
        f"batches copied by {machine['copies']}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for place, result in enumerate(results):
        *cells, verdict = result.cells
        others = [str(one) for one in missed.get(place, ())]
        row = [*cells, "; ".join(["met here" if others and result.is_met else verdict, *others])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


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
