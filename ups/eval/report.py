"""A report of an evaluation: rows of errors beside their baselines, as JSON, as CSV, and in a terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ups.eval.comparison import Scores
from ups.eval.training_logs import StageLog
from ups.eval.trajectory_errors import Interval
from ups.output import with_nulls

# What fits beside the labels into 80 columns; the report has the others.
_COLUMNS = {"nrmse": "nRMSE", "vrmse": "VRMSE", "correlation_time": "corr. > 0.8 until"}


@dataclass(frozen=True)
class Row:
    """One model or baseline of one task.

    Attributes:
        name: Stable name: "operator", "persistence", "mean", "autoencoder_floor", "fno", "unet", ...
        label: For people.
        scores: Its errors.
        note: What the reader has to know, such as the budget of a baseline.
        seconds: Wall time of predicting all trajectories.
    """

    name: str
    label: str
    scores: Scores
    note: str = ""
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values: every metric beside label and note, then what is by time step."""
        scores = self.scores
        return {
            "label": self.label,
            "note": self.note,
            "seconds": self.seconds,
            **{name: asdict(value) for name, value in scores.metrics.items()},
            "pdebench_compat": dict(scores.pdebench_compat),
            "by_step": {name: _columns(steps) for name, steps in scores.by_step.items()},
        }


@dataclass(frozen=True)
class TaskReport:
    """What was found for one task.

    Attributes:
        task: Its name.
        protocol: Which frames were given, which predicted, of how many trajectories.
        rows: In the order of the table.
        t: Time of each predicted frame since the given one.
        space: What errors are measured in; "latent" where nothing can decode.
        figures: PNG files by caption.
    """

    task: str
    protocol: str
    rows: Sequence[Row]
    t: Sequence[float] = ()
    space: Literal["fields", "latent"] = "fields"
    figures: Mapping[str, bytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values; figures aside."""
        rows = {row.name: row.to_json() for row in self.rows}
        return {"protocol": self.protocol, "space": self.space, "t": list(self.t), "rows": rows}


@dataclass(frozen=True)
class Report:
    """Everything that an evaluation found.

    Attributes:
        title: Heading.
        tasks: One report a task.
        split: "train", "val" or "test".
        seconds: Wall time by phase.
        stages: What the training logs say.
        data_wait_share: Share of the training's time that it waited for data, 0 to 1.
        config: The resolved configuration.
        figures: PNG files of the run by caption, such as training curves.
    """

    title: str
    tasks: Sequence[TaskReport]
    split: Literal["train", "val", "test"] = "test"
    seconds: Mapping[str, float] = field(default_factory=dict)
    stages: Sequence[StageLog] = ()
    data_wait_share: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, bytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `rows` are those of the first task, `tasks` has all; what is no number is null."""
        tasks = {task.task: task.to_json() for task in self.tasks}
        first: dict[str, Any] = next(iter(tasks.values()), {"rows": {}})
        values = {
            "title": self.title,
            "split": self.split,
            "rows": first["rows"],
            "tasks": tasks,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "stages": {log.stage: log.to_json() for log in self.stages},
            "data_wait_share": self.data_wait_share,
            "config": dict(self.config),
        }
        return dict(with_nulls(values))

    def to_csv(self) -> str:
        """A line per task, row, metric and time step; `step` is empty where all steps are meant."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["task", "space", "row", "metric", "step", "t", "mean", "low", "high", "note"])
        for task in self.tasks:
            for row in task.rows:
                for name, step, value in _lines(row):
                    t = "" if step == "" else task.t[int(step) - 1]
                    interval = (value.mean, value.low, value.high)
                    writer.writerow([task.task, task.space, row.name, name, step, t, *interval, row.note])
        return text.getvalue()


def _lines(row: Row) -> Iterator[tuple[str, int | str, Interval]]:
    """Name, step (from 1; "" for all) and value of everything in a row."""
    for name, value in row.scores.metrics.items():
        yield name, "", value
    for name, number in row.scores.pdebench_compat.items():
        yield f"pdebench_compat/{name}", "", Interval(number, math.nan, math.nan)
    for name, steps in row.scores.by_step.items():
        for step, value in enumerate(steps, start=1):
            yield name, step, value


def _columns(steps: Sequence[Interval]) -> dict[str, list[float]]:
    return {part: [getattr(step, part) for step in steps] for part in ("mean", "low", "high")}


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


def _shown(value: Interval | None) -> Text:
    """The value over its interval, so that columns stay narrow."""
    if value is None:
        return Text("-")
    return Text.assemble(f"{value.mean:.3g}\n", (f"{value.low:.2g} to {value.high:.2g}", "dim"))
