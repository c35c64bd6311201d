"""A report of an evaluation: rows of errors beside their baselines, as JSON, CSV and one HTML file.

The HTML file holds its pictures, loads nothing, runs no script, and so opens from disk and in ten years.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from ups.checkpoint import write_atomically
from ups.eval.intervals import Interval

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
  h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #eee; }
  th:first-child, td:first-child { text-align: left; }
  th { border-bottom: 2px solid #999; } .ci { color: #666; font-size: .85em; } .best { font-weight: 600; }
  figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #555; }
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


@dataclass(frozen=True)
class Row:
    """One model or baseline of one task.

    Attributes:
        name: Stable name: "operator", "persistence", "mean", "autoencoder_floor", "fno", "unet", ...
        label: For people.
        metrics: By name, such as `nrmse`.
        note: What the reader has to know, such as the budget of a baseline.
    """

    name: str
    label: str
    metrics: Mapping[str, Interval]
    note: str = ""


@dataclass(frozen=True)
class TaskReport:
    """What was found for one task.

    Attributes:
        task: Its name.
        protocol: Which frames were given, which predicted, of how many trajectories.
        rows: In the order of the table.
        figures: PNG files by caption.
    """

    task: str
    protocol: str
    rows: Sequence[Row]
    figures: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that an evaluation found.

    Attributes:
        title: Heading.
        tasks: One report a task.
        seconds: Wall time by phase.
        data_wait_share: Share of the training's time that it waited for data, 0 to 1.
        config: The resolved configuration.
        figures: PNG files of the run by caption, such as training curves.
    """

    title: str
    tasks: Sequence[TaskReport]
    seconds: Mapping[str, float] = field(default_factory=dict)
    data_wait_share: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, bytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `rows` are those of the first task, `tasks` has all."""
        tasks = {
            task.task: {"protocol": task.protocol, "rows": {row.name: _row_json(row) for row in task.rows}}
            for task in self.tasks
        }
        first = self.tasks[0].task if self.tasks else None
        return {
            "title": self.title,
            "rows": tasks[first]["rows"] if first else {},
            "tasks": tasks,
            "seconds": dict(self.seconds),
            "data_wait_share": self.data_wait_share,
            "config": dict(self.config),
        }

    def to_csv(self) -> str:
        """A line per task, row and metric."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["task", "row", "metric", "mean", "low", "high", "note"])
        for task in self.tasks:
            for row in task.rows:
                for metric, value in row.metrics.items():
                    writer.writerow(
                        [task.task, row.name, metric, value.mean, value.low, value.high, row.note]
                    )
        return text.getvalue()

    def to_html(self) -> str:
        """One page with everything in it."""
        sections = [_task_section(task) for task in self.tasks]
        sections += [_section("The run", _seconds_table(self.seconds) + _figures(self.figures))]
        config = html.escape(json.dumps(self.config, indent=2, default=str))
        sections += [_section("Configuration", f"<pre>{config}</pre>")]
        return _PAGE.substitute(
            title=html.escape(self.title), summary=html.escape(self._summary()), sections="\n".join(sections)
        )

    def _summary(self) -> str:
        waits = self.data_wait_share
        waiting = "" if waits is None else f" Training waited for data {waits:.1%} of its time."
        return (
            "All errors are of decoded, de-normalised fields on trajectories that nothing was trained on; "
            f"brackets are 95 % bootstrap intervals over trajectories.{waiting}"
        )


def write_report(folder: Path, report: Report) -> dict[str, Path]:
    """Write `report.json`, `report.csv` and `report.html`; returns where they are, by suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "json": json.dumps(report.to_json(), indent=2, default=str) + "\n",
        "csv": report.to_csv(),
        "html": report.to_html(),
    }
    paths = {suffix: folder / f"report.{suffix}" for suffix in texts}
    for suffix, text in texts.items():
        write_atomically(paths[suffix], text.encode())
    return paths


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "note": row.note,
        **{name: asdict(value) for name, value in row.metrics.items()},
    }


def _task_section(task: TaskReport) -> str:
    body = f"<p>{html.escape(task.protocol)}</p>{_errors_table(task.rows)}{_figures(task.figures)}"
    return _section(task.task, body)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def _errors_table(rows: Sequence[Row]) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    best = {name: _best(rows, name) for name in metrics}
    head = "".join(f"<th>{html.escape(name)}</th>" for name in metrics)
    lines = [
        f"<tr><td>{html.escape(row.label)}{_note(row.note)}</td>"
        + "".join(_cell(row.metrics.get(name), is_best=row.name == best[name]) for name in metrics)
        + "</tr>"
        for row in rows
    ]
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _best(rows: Sequence[Row], metric: str) -> str | None:
    """Name of the row with the smallest error; the floor and the like don't compete."""
    competing = [row for row in rows if metric in row.metrics and not row.name.endswith("_floor")]
    return min(competing, key=lambda row: row.metrics[metric].mean).name if competing else None


def _cell(value: Interval | None, *, is_best: bool) -> str:
    if value is None:
        return "<td>-</td>"
    interval = f'<span class="ci">[{value.low:.3g}, {value.high:.3g}]</span>'
    return f"<td{' class=best' if is_best else ''}>{value.mean:.4g} {interval}</td>"


def _note(note: str) -> str:
    return f'<br><span class="ci">{html.escape(note)}</span>' if note else ""


def _seconds_table(seconds: Mapping[str, float]) -> str:
    if not seconds:
        return ""
    lines = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{value:.1f} s</td></tr>" for name, value in seconds.items()
    )
    return f"<table><thead><tr><th>phase</th><th>time</th></tr></thead><tbody>{lines}</tbody></table>"


def _figures(figures: Mapping[str, bytes]) -> str:
    return "".join(
        f'<figure><img alt="{html.escape(caption, quote=True)}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in figures.items()
    )
