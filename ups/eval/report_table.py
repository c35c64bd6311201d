"""A report as a table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ups.eval.intervals import Interval
from ups.eval.report import Report

# What fits beside the labels into 80 columns; the report has the others.
_COLUMNS = {"nrmse": "nRMSE", "vrmse": "VRMSE", "correlation_time": "corr. > 0.8 until"}


def show_evaluation(report: Report, console: Console) -> None:
    """Print the headline metrics of every task."""
    for task in report.tasks:
        columns = [name for name in _COLUMNS if any(name in row.scores.metrics for row in task.rows)]
        title = task.task if task.space == "fields" else f"{task.task} (errors of latents, not of fields)"
        table = Table(title=title, title_justify="left", show_lines=True)
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(_COLUMNS[name])
        for row in task.rows:
            values = (row.scores.metrics.get(name) for name in columns)
            table.add_row(row.label, *(_shown(value) for value in values))
        console.print(table)
        for row in task.rows:
            if row.note:
                console.print(f"{row.label}: {row.note}", style="dim", markup=False)
        console.print(task.protocol, style="dim", markup=False)


def _shown(value: Interval | None) -> str:
    """The value over its interval, so that columns stay narrow."""
    return "-" if value is None else f"{value.mean:.3g}\n[dim]{value.low:.2g} to {value.high:.2g}[/dim]"
