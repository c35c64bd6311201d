"""What `ups validate optimizations` shows: a row a variant, and what the gates say."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ups.train.optimizations import Findings, Row, Verdict

_COLUMNS = (
    *("variant", "samples a step", "ms a step", "speed-up", "quartiles", "to equal loss"),
    *("warm-up", "memory", "loss", "nRMSE", "gates"),
)
_WORDS = {"speedup": "speed-up", "loss_difference": "loss", "nrmse_change": "nRMSE", "peak_gb": "memory"}


def show_findings(findings: Findings, console: Console) -> None:
    """Show a table, then a sentence that says whether the optimised configuration passes."""
    about = findings.about
    table = Table(*_COLUMNS, title=f"stage {about['stage']}, {about['steps']} steps, {about['date']}")
    for row in findings.rows:
        table.add_row(*map(Text, _cells(row)))
    console.print(table)
    console.print(f"{about['machine']}; memory: {about['memory']}", markup=False)
    last = findings.rows[-1]
    if findings.is_complete:
        missed = [_sentence(verdict) for verdict in last.gates if not verdict.is_passed]
        said = f"misses {', '.join(missed)}" if missed else "passes all gates"
        console.print(f"{last.name}: {said}", markup=False)
    console.print(f"fastest without harm: {findings.winner}", markup=False)


def _cells(row: Row) -> tuple[str, ...]:
    if row.failure is not None:
        return row.name, *[""] * (len(_COLUMNS) - 2), row.failure
    quartiles = "{:.2f} to {:.2f}".format(*row.quartiles) if row.quartiles else ""
    loss = _shown(row.loss, "{:.4g}") + _shown(row.loss_difference if row.gates else None, " ({:+.2g})")
    nrmse = _shown(row.nrmse, "{:.4g}") + _shown(row.nrmse_change if row.gates else None, " ({:+.2%})")
    missed = [_WORDS.get(verdict.gate, verdict.gate) for verdict in row.gates if not verdict.is_passed]
    return (
        row.name,
        str(row.rows),
        _shown(row.step_s and 1e3 * row.step_s, "{:.4g}"),
        _shown(row.speedup, "{:.3g}"),
        quartiles,
        _shown(row.loss_speedup if row.gates else None, "{:.3g}"),
        f"{row.warm_up_s:.3g} s",
        _shown(row.peak_gb, "{:.3g} GB"),
        loss,
        nrmse,
        f"misses {', '.join(missed)}" if missed else "passes" if row.gates else "",
    )


def _sentence(verdict: Verdict) -> str:
    found = "not measured" if verdict.found is None else f"{verdict.found:.3g}"
    return f"{_WORDS.get(verdict.gate, verdict.gate)} (limit {verdict.limit:g}, found {found})"


def _shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
