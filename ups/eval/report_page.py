"""The files of a report: JSON, CSV, and one HTML page.

The page holds its pictures, loads nothing, runs no script, and so opens from disk.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from string import Template

from ups.errors import OutputError
from ups.eval.comparison import COMPAT_BATCH_SIZE
from ups.eval.report import Report, Row, TaskReport
from ups.eval.training_logs import StageLog
from ups.eval.trajectory_errors import Interval
from ups.output import appears_whole, with_nulls
from ups_store.printable import json_text, printable

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; }
  h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
  .scroll { overflow-x: auto; margin: 1rem 0; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
  th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #eee; vertical-align: top; }
  th:first-child, td:first-child { text-align: left; min-width: 11rem; }
  th { border-bottom: 2px solid #999; } .best { font-weight: 600; }
  .ci { color: #666; font-size: .85em; font-weight: 400; } td .ci { white-space: nowrap; display: block; }
  td:first-child .ci { white-space: normal; }
  figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #555; }
  details { margin: 1rem 0; } summary { cursor: pointer; color: #555; }
  pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85rem; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$summary</p>
$sections
</body>
</html>
"""
)

# Metrics of the first table, and what its columns are called; the others follow in a table of their own.
_HEADLINE = {
    "nrmse": "nRMSE",
    "vrmse": "VRMSE",
    "relative_l2": "relative L2",
    "correlation_time": "time until correlation < 0.8",
    "drift": "drift of the mean at the end",
}

_MORE_IS_BETTER = frozenset({"correlation_time"})
_NO_CONTEST = frozenset({"drift"})  # what doesn't move doesn't drift

_TRAJECTORIES = {
    "train": "on the trajectories that models were trained on",
    "val": "on validation trajectories, by which the best weights were chosen",
    "test": "on trajectories that nothing was trained on or chosen by",
}

_NO_COMPETITOR = "_floor"  # end of the names of rows that see the truth


def to_html(report: Report) -> str:
    """One page with everything in it."""
    sections = [_task_section(task) for task in report.tasks]
    tables = _stages_table(report.stages) + _seconds_table(report.seconds)
    sections.append(_section("The run", tables + _figures(report.figures)))
    config = html.escape(json_text(with_nulls(report.config), indent=2, default=str))
    sections.append(_section("Configuration", _details("resolved configuration", f"<pre>{config}</pre>")))
    return _PAGE.substitute(
        title=html.escape(report.title), summary=html.escape(_summary(report)), sections="\n".join(sections)
    )


def _summary(report: Report) -> str:
    waits = report.data_wait_share
    waiting = "" if waits is None else f" Training waited for data {waits:.1%} of its time."
    spaces = {task.space for task in report.tasks}
    what = "All errors are of decoded, de-normalised fields"
    if spaces == {"latent"}:
        what = "All errors are of latents: what encoded them isn't known, so nothing can be decoded"
    elif "latent" in spaces:
        what = "Errors are of decoded, de-normalised fields unless a task says that they are of latents"
    return (
        f"{what}, {_TRAJECTORIES[report.split]}; brackets are 95 % bootstrap intervals over trajectories; "
        f"the smallest error of those that don't see the truth is bold.{waiting}"
    )


def _task_section(task: TaskReport) -> str:
    others = list(dict.fromkeys(name for row in task.rows for name in row.scores.metrics))
    others = [name for name in others if name not in _HEADLINE]
    headline = [name for name in _HEADLINE if any(name in row.scores.metrics for row in task.rows)]
    body = f"<p>{html.escape(task.protocol)}</p>"
    body += _errors_table(task.rows, {name: _HEADLINE[name] for name in headline})
    if others:
        table = _errors_table(task.rows, {name: name for name in others})
        body += _details("PDEBench's other metrics, over all trajectories at once", table)
    if any(row.scores.pdebench_compat for row in task.rows):
        title = f"PDEBench's metrics as its own evaluation averages them, batches of {COMPAT_BATCH_SIZE}"
        body += _details(title, _compat_table(task.rows))
    return _section(task.task, body + _figures(task.figures))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; heads and cells are HTML, cells with their `<td>`."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    rows = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _errors_table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    best = {name: set() if name in _NO_CONTEST else _best(rows, name) for name in columns}
    lines = [
        [
            f"<td>{html.escape(row.label)}{_note(row.note)}</td>",
            *(_cell(row.scores.metrics.get(name), is_best=row.name in best[name]) for name in columns),
        ]
        for row in rows
    ]
    return _table(["", *map(html.escape, columns.values())], lines)


def _best(rows: Sequence[Row], metric: str) -> set[str]:
    """Names of the best row and of those with the same value; rows that see the truth don't compete."""
    values = {
        row.name: row.scores.metrics[metric].mean
        for row in rows
        if metric in row.scores.metrics and not row.name.endswith(_NO_COMPETITOR)
    }
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    choose = max if metric in _MORE_IS_BETTER else min
    return {name for name, value in finite.items() if value == choose(finite.values())}


def _cell(value: Interval | None, *, is_best: bool) -> str:
    if value is None:
        return "<td>-</td>"
    interval = f'<span class="ci">[{value.low:.3g}, {value.high:.3g}]</span>'
    return f"<td{' class=best' if is_best else ''}>{value.mean:.4g} {interval}</td>"


def _compat_table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.scores.pdebench_compat))
    lines = []
    for row in rows:
        numbers = (row.scores.pdebench_compat.get(name, math.nan) for name in names)
        lines.append([f"<td>{html.escape(row.label)}</td>", *(f"<td>{value:.4g}</td>" for value in numbers)])
    return _table(["", *map(html.escape, names)], lines)


def _note(note: str) -> str:
    return f'<br><span class="ci">{html.escape(note)}</span>' if note else ""


def _stages_table(stages: Sequence[StageLog]) -> str:
    head = ["stage", "wall time", "of it until the first step", "waiting for data", "steps", "samples"]
    lines = [
        [
            f"<td>{html.escape(log.stage)}</td>",
            f"<td>{log.seconds:.1f} s</td>",
            f"<td>{log.startup_s:.1f} s</td>",
            f"<td>{log.data_wait_s:.2f} s, {log.data_wait_share:.1%} of the steps' time</td>",
            f"<td>{log.steps:,}</td>",
            f"<td>{log.samples:,}</td>",
        ]
        for log in stages
    ]
    return _table(head, lines) if lines else ""


def _seconds_table(seconds: Mapping[str, float]) -> str:
    lines = [[f"<td>{html.escape(name)}</td>", f"<td>{value:.1f} s</td>"] for name, value in seconds.items()]
    return _table(["phase, startup included", "wall time"], lines) if lines else ""


def _figures(figures: Mapping[str, bytes]) -> str:
    return "".join(
        f'<figure><img alt="{html.escape(caption, quote=True)}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in figures.items()
    )


def write_report(folder: Path, report: Report) -> dict[str, Path]:
    """Write `report.json`, `report.csv` and `report.html`; returns where they are, by suffix.

    Raises:
        OutputError: None of them is changed then.
    """
    texts = {
        "json": json_text(report.to_json(), indent=2, default=str) + "\n",
        "csv": report.to_csv(),
        "html": printable(to_html(report)),
    }
    paths = {suffix: folder / f"report.{suffix}" for suffix in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as whole:  # all are written before the first appears
            for suffix, path in paths.items():
                whole.enter_context(appears_whole(path)).write_bytes(texts[suffix].encode())
    except OSError as error:
        raise OutputError.of(error, folder) from error
    return paths
