"""The files of a report: JSON, CSV, one HTML page, and its figures for a paper.

The page holds its pictures, loads nothing, runs no script, and so opens from disk. `figures/` beside it has
every figure as SVG and PDF, with a CSV of what it draws; the page links to them.
"""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from urllib.parse import quote

from ups.data.origins import Origin
from ups.errors import OutputError
from ups.eval.figure_style import Drawing
from ups.eval.intervals import Interval, Paired
from ups.eval.report import Report, Row, TaskReport
from ups.eval.scores import COMPAT_BATCH_SIZE, MORE_IS_BETTER, NO_CONTEST
from ups.eval.training_logs import StageLog
from ups.locks import locked
from ups.log import quiet
from ups.output import json_document, with_nulls, write_together
from ups_store.printable import json_text, printable

_WRITING_S = 60.0  # how long another process may write a report of the same folder

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
  h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
  .scroll { overflow-x: auto; margin: 1rem 0; /* a shadow where there is more */
    background: linear-gradient(90deg, #fff 50%, #fff0) 0 / 2.4rem 100% no-repeat local,
      linear-gradient(270deg, #fff 50%, #fff0) 100% / 2.4rem 100% no-repeat local,
      linear-gradient(90deg, #0002, #0000) 0 / .7rem 100% no-repeat scroll,
      linear-gradient(270deg, #0002, #0000) 100% / .7rem 100% no-repeat scroll; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
  th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #eee; vertical-align: top; }
  th:first-child, td:first-child { text-align: left; min-width: 11rem; }
  th { border-bottom: 2px solid #999; min-width: 4.5rem; } .best { font-weight: 600; }
  .pair { white-space: nowrap; }
  .ci { color: #666; font-size: .85em; font-weight: 400; } td .ci { white-space: nowrap; display: block; }
  td:first-child .ci { white-space: normal; }
  .figures { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; margin: 1.5rem 0; }
  figure { margin: 0; flex: 1 1 20rem; max-width: 34rem; min-width: 0; }
  figure.wide { flex-basis: 100%; max-width: 100%; } figure.wide img { min-width: 36rem; }
  figure .scroll { margin: 0; } figure img { width: 100%; height: auto; display: block; }
  figcaption { color: #555; font-size: .92rem; margin-top: .4rem; } figcaption a { color: inherit; }
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

# The same of the table of ensembles.
_ENSEMBLE_HEADLINE = {
    "mean_nrmse": "nRMSE of the ensemble mean",
    "crps": "CRPS",
    "energy_score": "energy score",
    "spread_skill": "spread / skill",
    "band_high": "energy of the high band / the truth's",
}
_ENSEMBLES = (
    "CRPS and energy score are fair: what an ensemble of infinitely many such members would score. A "
    "point forecast is one that is sure: its CRPS is its mean absolute error, its energy score its root "
    "mean square error. All are relative to the root mean square of each channel over the split's truth. "
    "Spread over skill and ratios of energy are best at 1."
)

_TRAJECTORIES = {
    "train": "on the trajectories that models were trained on",
    "val": "on validation trajectories, by which the best weights were chosen",
    "dev": "on development trajectories, that no weights were trained on or chosen by, but perhaps settings",
    "test": "on trajectories that nothing was trained on or chosen by",
}

_FIGURES = "figures"  # folder
_NAME = re.compile(r"[\w-]+")  # of a figure


def to_html(report: Report) -> str:
    """One page with everything in it."""
    sections = [_task_section(task) for task in report.tasks]
    tables = _stages_table(report.stages) + _seconds_table(report.seconds)
    sections.append(_section("The run", tables + _figures(report.figures)))
    if report.made_from:
        sections.append(_section("Made from", _origins_table(report.made_from)))
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
        f"{what}, {_TRAJECTORIES[report.split]}. Brackets are 95 % intervals; the smallest error of those "
        f"that don't see the truth is bold, even if intervals leave open which is smaller. "
        f"{report.shown_test_uses}{waiting}"
    )


def _task_section(task: TaskReport) -> str:
    others = list(dict.fromkeys(name for row in task.rows for name in row.scores.metrics))
    others = [name for name in others if name not in _HEADLINE]
    headline = [name for name in _HEADLINE if any(name in row.scores.metrics for row in task.rows)]
    body = f"<p>{html.escape(task.protocol)}</p><p>{html.escape(task.confidence)}</p>"
    body += _errors_table(task.rows, {name: _HEADLINE[name] for name in headline})
    body += _paired_table(task.rows, {name: _HEADLINE.get(name, name) for name in [*headline, *others]})
    if others:
        table = _errors_table(task.rows, {name: name for name in others})
        body += _details("PDEBench's other metrics, over all trajectories at once", table)
    if any(row.scores.pdebench_compat for row in task.rows):
        title = f"PDEBench's metrics as its own evaluation averages them, batches of {COMPAT_BATCH_SIZE}"
        body += _details(title, _compat_table(task.rows))
    return _section(task.task, body + _ensembles(task.ensembles) + _figures(task.figures))


def _ensembles(rows: Sequence[Row]) -> str:
    """The table of ensembles, and what its scores mean."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row.scores.metrics))
    titles = {name: _ENSEMBLE_HEADLINE.get(name, name) for name in names}
    first = {name: title for name, title in _ENSEMBLE_HEADLINE.items() if name in titles}
    body = f"<h3>Ensembles</h3><p>{html.escape(_ENSEMBLES)}</p>{_errors_table(rows, first)}"
    body += _paired_table(rows, titles)
    others = {name: title for name, title in titles.items() if name not in first}
    return body + (_details("other scores of ensembles", _errors_table(rows, others)) if others else "")


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
    best = {name: set() if name in NO_CONTEST else _best(rows, name) for name in columns}
    lines = [
        [
            f"<td>{html.escape(row.label)}{_note('; '.join(filter(None, (row.shown_seeds, row.note))))}</td>",
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
        if metric in row.scores.metrics and not row.sees_truth
    }
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    choose = max if metric in MORE_IS_BETTER else min
    return {name for name, value in finite.items() if value == choose(finite.values())}


def _cell(value: Interval | None, *, is_best: bool) -> str:
    if value is None:
        return "<td>-</td>"
    return f"<td{' class=best' if is_best else ''}>{value.mean:.4g} {_ends(value)}</td>"


def _ends(value: Interval) -> str:
    return f'<span class="ci">[{value.low:.3g}, {value.high:.3g}]</span>' if value.is_known else ""


def _paired_table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Every row beside the first one: verdict, difference and ratio."""
    shown = {name: title for name, title in columns.items() if any(name in row.paired for row in rows)}
    lines = [
        [f"<td>{html.escape(row.label)}</td>", *(_paired_cell(row.paired.get(name)) for name in shown)]
        for row in rows
        if row.paired
    ]
    if not lines:
        return ""
    title = (
        f"<h3>Beside the {html.escape(rows[0].label)}, on the same trajectories</h3><p>The verdict, the "
        f"row's error minus the {html.escape(rows[0].label)}'s, and the one over the other. Each verdict "
        "stands alone: of twenty rows that don't differ, one is expected to look ahead or behind.</p>"
    )
    return title + _table(["", *map(html.escape, shown.values())], lines)


def _paired_cell(pair: Paired | None) -> str:
    if pair is None:
        return "<td>-</td>"
    lines = [html.escape(pair.verdict), f"{pair.difference.mean:+.3g} {_ends(pair.difference)}"]
    if math.isfinite(pair.ratio.mean):
        lines.append(f"{pair.ratio.mean:.3g}x {_ends(pair.ratio)}")
    return f"<td class=pair>{''.join(f'<div>{line}</div>' for line in lines)}</td>"


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


def _origins_table(origins: Sequence[Origin]) -> str:
    """What the report was made from; `ups lineage report.json` looks for it."""
    lines = []
    for origin in origins:
        place = "" if origin.path is None else _note(origin.path)
        digest = "not known" if origin.hash is None else f"<code>{html.escape(origin.hash)}</code>"
        cells = (f"{html.escape(origin.role)}{place}", origin.kind, f"{origin.hash_of}<br>{digest}")
        lines.append([f"<td>{cell}</td>" for cell in cells])
    return _table(["", "kind", "hash"], lines)


def _figures(figures: Sequence[Drawing]) -> str:
    return f'<div class="figures">{"".join(map(_figure, figures))}</div>' if figures else ""


def _figure(drawing: Drawing) -> str:
    caption = html.escape(drawing.caption, quote=True)
    picture = base64.b64encode(drawing.files["svg"]).decode()
    links = ", ".join(
        f'<a href="{html.escape(quote(_place(drawing, suffix)), quote=True)}">{suffix.upper()}</a>'
        for suffix in drawing.files
    )
    return (
        f"<figure{' class=wide' if drawing.is_wide else ''}>"
        f'<div class="scroll"><img alt="{caption}" src="data:image/svg+xml;base64,{picture}"></div>'
        f"<figcaption>{caption} ({links})</figcaption></figure>"
    )


def _place(drawing: Drawing, suffix: str) -> str:
    """Where a file of a figure lies, seen from the report."""
    return f"{_FIGURES}/{drawing.name}.{suffix}"


def write_report(folder: Path, report: Report) -> dict[str, Path]:
    """Write `report.json`, `report.csv`, `report.html` and `figures/`.

    Figures of the report that was there go where this one has none of the name.

    Returns:
        Where the three are, by suffix.

    Raises:
        MissingExtraError: If matplotlib isn't installed.
        OutputError: None of the files is changed then.
        UpsError: Kind "run_locked", if another process writes there and doesn't end.
    """
    texts = {
        "json": json_text(report.to_json(), indent=2, default=str) + "\n",
        "csv": report.to_csv(),
        "html": printable(to_html(report)),
    }
    paths = {suffix: folder / f"report.{suffix}" for suffix in texts}
    files = {
        folder / _place(drawing, suffix): content
        for drawing in report.drawings
        for suffix, content in drawing.files.items()
    }
    files |= {path: texts[suffix].encode() for suffix, path in paths.items()}
    stale = _figures_of_report(folder) - files.keys()
    with quiet(), locked(folder / ".lock", timeout_s=_WRITING_S):
        try:
            write_together(files)
            for path in stale:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError.of(error, folder) from error
    return paths


def _figures_of_report(folder: Path) -> set[Path]:
    """Files of the figures that the report in a folder names."""
    named = json_document(folder / "report.json").get("figures")
    names = [name for name in named if _NAME.fullmatch(name)] if isinstance(named, dict) else []
    return {folder / _FIGURES / f"{name}.{suffix}" for name in names for suffix in ("svg", "pdf", "csv")}
