"""A report of an evaluation: rows of errors beside their baselines, as JSON, CSV, a page, and in a terminal.

The page (`page.html.j2`) holds its pictures, and `figures/` beside it has every figure as SVG and PDF, and
a CSV of its lines.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ups.data.origins import MADE_FROM, Origin
from ups.data.splits import Split
from ups.errors import OutputError
from ups.eval.ensembles import EnsembleScores
from ups.eval.figure_style import Drawing
from ups.eval.intervals import LEAST_TRAJECTORIES, Interval, Paired, as_columns
from ups.eval.metrics import COMPAT_BATCH_SIZE
from ups.eval.scores import Scores
from ups.eval.training_logs import StageLog
from ups.locks import locked
from ups.log import quiet
from ups.output import csv_text, json_document, with_nulls, write_together
from ups_store.printable import counted, json_text, printable

_WRITING_S = 60.0  # how long another process may write a report of the same folder
_TRAJECTORIES = {
    "train": "on the trajectories that models were trained on",
    "val": "on validation trajectories, by which the best weights were chosen",
    "dev": "on development trajectories, that no weights were trained on or chosen by, but perhaps settings",
    "test": "on trajectories that nothing was trained on or chosen by",
}

# What fits beside the labels into 80 columns; the report has the others.
_COLUMNS = {"nrmse": "nRMSE", "correlation_time": "corr. > 0.8 until"}
_ENSEMBLE_COLUMNS = {"crps": "CRPS", "energy_score": "energy score", "spread_skill": "spread / skill"}


@dataclass(frozen=True)
class Row:
    """One model or baseline of one task.

    Attributes:
        name: Stable name: "operator", "persistence", "mean", "autoencoder_floor", "fno", "unet", ...
        label: For people.
        scores: Its errors.
        note: What the reader has to know, such as the budget of a baseline.
        seconds: Wall time of predicting all trajectories, once.
        seeds: With which it was trained; empty for what isn't trained.
        paired: By metric, beside the table's first row; empty for that row and for one that sees the truth.
        ensemble: Scores of its members, or of its forecasts as ensembles of one; None where none were asked.
    """

    name: str
    label: str
    scores: Scores
    note: str = ""
    seconds: float | None = None
    seeds: Sequence[int] = ()
    paired: Mapping[str, Paired] = field(default_factory=dict)
    ensemble: EnsembleScores | None = None

    @property
    def of_ensemble(self) -> Row:
        """The same model in the table of ensembles; there has to be an `ensemble`."""
        own = self.ensemble
        assert own is not None
        note = "a point forecast" if own.is_point else f"{own.num_members} members, seed {own.seed}"
        return replace(
            self, scores=own.scores, paired=own.paired, seconds=own.seconds, note=note, ensemble=None
        )

    @property
    def sees_truth(self) -> bool:
        """Whether it is given what the others have to predict, and so doesn't compete."""
        return self.name.endswith("_floor")

    @property
    def shown_seeds(self) -> str:
        """With how many seeds it was trained, for people."""
        return f"{len(self.seeds)} seed{'s'[: len(self.seeds) > 1]}" if self.seeds else ""

    def to_json(self) -> dict[str, Any]:
        """JSON values: every metric beside label and note, then what is by time step."""
        scores = self.scores
        ensemble = {} if self.ensemble is None else {"ensemble": self.ensemble.to_json()}
        return {
            "label": self.label,
            "note": self.note,
            "seconds": self.seconds,
            "seeds": list(self.seeds),
            **{name: asdict(value) for name, value in scores.metrics.items()},
            "paired": {name: asdict(pair) for name, pair in self.paired.items()},
            "by_seed": {name: list(values) for name, values in scores.by_seed.items()},
            "pdebench_compat": dict(scores.pdebench_compat),
            "by_step": {name: as_columns(steps) for name, steps in scores.by_step.items()},
            **ensemble,
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
        num_trajectories: Of the split.
        left_out: True frames that are zero throughout in a channel, by channel, which `nrmse` leaves out.
        figures: What is drawn of it.
    """

    task: str
    protocol: str
    rows: Sequence[Row]
    t: Sequence[float] = ()
    space: Literal["fields", "latent"] = "fields"
    num_trajectories: int = 0
    left_out: int = 0
    figures: Sequence[Drawing] = ()

    @property
    def ensembles(self) -> list[Row]:
        """The table of ensembles; empty where none were asked for."""
        return [row.of_ensemble for row in self.rows if row.ensemble is not None]

    @property
    def confidence(self) -> str:
        """What intervals and verdicts are about, for people."""
        has_pairs = any(row.paired for row in self.rows)
        if self.num_trajectories < LEAST_TRAJECTORIES:
            untold = " So which of two rows is ahead can't be told." if has_pairs else ""
            return (
                f"No intervals and no verdicts: {counted(self.num_trajectories, 'trajectory')}, fewer than "
                f"{LEAST_TRAJECTORIES}, can't show how much trajectories differ.{untold}"
            )
        seeds = max((len(row.seeds) for row in self.rows), default=0)
        over, verdicts = f"{self.num_trajectories} trajectories", f" {_VERDICTS}" if has_pairs else ""
        if seeds > 1:
            return f"Intervals are of 95 %, over training seeds (up to {seeds} a row) and {over}.{verdicts}"
        return (
            f"Intervals are of 95 %, over {over}. Models were trained with one seed, so intervals and "
            f"verdicts are about these trainings; another training may end otherwise.{verdicts}"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values; figures aside."""
        return {
            "protocol": self.protocol,
            "confidence": self.confidence,
            "num_trajectories": self.num_trajectories,
            "nrmse_left_out": self.left_out,
            "space": self.space,
            "t": list(self.t),
            "rows": {row.name: row.to_json() for row in self.rows},
        }


@dataclass(frozen=True)
class Report:
    """Everything that an evaluation found.

    Attributes:
        title: Heading.
        tasks: One report a task.
        split: "dev", "val", "test" or "train".
        seconds: Wall time by phase.
        stages: What the training logs say.
        data_wait_share: Share of the training's time that it waited for data, 0 to 1.
        config: The resolved configuration.
        figures: What is drawn of the run, such as training curves.
        test_uses: How often the run was evaluated on the test split, this time included; None if unknown.
        made_from: Checkpoints that predicted, and data that they predicted.
    """

    title: str
    tasks: Sequence[TaskReport]
    split: Split = "dev"
    seconds: Mapping[str, float] = field(default_factory=dict)
    stages: Sequence[StageLog] = ()
    data_wait_share: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Drawing] = ()
    test_uses: int | None = None
    made_from: Sequence[Origin] = ()

    @property
    def shown_test_uses(self) -> str:
        """How often the test split was used, for people."""
        if self.test_uses is None:
            return ""
        if self.test_uses == 0:
            return "The test split hasn't been used so far."
        times = "once" if self.test_uses == 1 else f"{self.test_uses} times"
        return f"The test split was used {times} so far."

    @property
    def summary(self) -> str:
        """What all numbers are of, for people."""
        waits, spaces = self.data_wait_share, {task.space for task in self.tasks}
        subject = "All errors are of decoded, de-normalised fields"
        if spaces == {"latent"}:
            subject = "All errors are of latents: what encoded them isn't known, so nothing can be decoded"
        elif "latent" in spaces:
            subject = (
                "Errors are of decoded, de-normalised fields unless a task says that they are of latents"
            )
        waiting = "" if waits is None else f" Training waited for data {waits:.1%} of its time."
        return (
            f"{subject}, {_TRAJECTORIES[self.split]}. Brackets are 95 % intervals; the smallest error of "
            f"those that don't see the truth is bold, even if intervals leave open which is smaller. "
            f"{self.shown_test_uses}{waiting}"
        )

    @property
    def drawings(self) -> list[Drawing]:
        """All figures, those of the tasks first."""
        return [*(drawing for task in self.tasks for drawing in task.figures), *self.figures]

    def to_json(self) -> dict[str, Any]:
        """JSON values; `rows` are those of the first task, `tasks` has all; what is no number is null."""
        tasks = {task.task: task.to_json() for task in self.tasks}
        first: dict[str, Any] = next(iter(tasks.values()), {"rows": {}})
        values = {
            "title": self.title,
            "split": self.split,
            "test_uses": self.test_uses,
            "rows": first["rows"],
            "tasks": tasks,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "stages": {log.stage: log.to_json() for log in self.stages},
            "data_wait_share": self.data_wait_share,
            "figures": {drawing.name: drawing.caption for drawing in self.drawings},
            MADE_FROM: [origin.to_json() for origin in self.made_from],
            "config": dict(self.config),
        }
        return dict(with_nulls(values))

    def to_csv(self) -> str:
        """A line per task, row, metric and time step; `step` is empty where all steps are meant."""
        return csv_text(
            [
                _CSV_COLUMNS,
                *(
                    line
                    for task in self.tasks
                    for prefix, rows in (("", task.rows), ("ensemble/", task.ensembles))
                    for row in rows
                    for line in _csv_lines(task, row, prefix)
                ),
            ]
        )


_VERDICTS = (
    "A row is ahead of the first one, or behind it, where the interval of their difference leaves out zero; "
    "where zero is in it, that can't be told, which doesn't mean that they are equally good."
)
_CSV_COLUMNS = (
    *("task", "space", "row", "seeds", "metric", "step", "t", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "verdict", "note"),
)


def _csv_lines(task: TaskReport, row: Row, prefix: str) -> Iterator[tuple[Any, ...]]:
    """Everything in a row; steps are counted from 1, and only what is of all steps is compared."""
    about, seeds = (task.task, task.space, row.name), " ".join(map(str, row.seeds))
    for name, value in row.scores.metrics.items():
        compared: tuple[float | str, ...] = ("",) * 4
        if (pair := row.paired.get(name)) is not None:
            compared = (pair.difference.mean, pair.difference.low, pair.difference.high, pair.verdict)
        ends = (value.mean, value.low, value.high)
        yield (*about, seeds, f"{prefix}{name}", "", "", *ends, *compared, row.note)
    nothing = ("",) * 4
    for name, number in row.scores.pdebench_compat.items():
        metric = f"{prefix}pdebench_compat/{name}"
        yield (*about, seeds, metric, "", "", number, math.nan, math.nan, *nothing, row.note)
    for name, steps in row.scores.by_step.items():
        for step, (t, value) in enumerate(zip(task.t, steps, strict=True), start=1):
            ends = (value.mean, value.low, value.high)
            yield (*about, seeds, f"{prefix}{name}", step, t, *ends, *nothing, row.note)


# --- files ---------------------------------------------------------------------------------------------


def to_html(report: Report) -> str:
    """Fill the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.globals |= {
        "best": _best,
        "columns": _columns,
        "paired_columns": _paired_columns,
        "compat_batch_size": COMPAT_BATCH_SIZE,
    }
    config = json_text(with_nulls(report.config), indent=2, default=str)
    return environment.get_template("page.html.j2").render(report=report, config=config)


def _columns(rows: Sequence[Row], *, with_title: bool | None = None) -> dict[str, str]:
    """Titles of the rows' metrics by name: of all, or of those that have a title, or that have none."""
    about = {name: metric for row in rows for name, metric in row.scores.about.items()}
    names = dict.fromkeys(name for row in rows for name in row.scores.metrics)
    titles = {name: about[name].title if name in about else None for name in names}
    return {
        name: title or name
        for name, title in titles.items()
        if with_title is None or (title is not None) == with_title
    }


def _paired_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Titles of the metrics by which rows are compared with the first one, those that have a title first."""
    titles = _columns(rows, with_title=True) | _columns(rows, with_title=False)
    return {name: title for name, title in titles.items() if any(name in row.paired for row in rows)}


def _best(rows: Sequence[Row], name: str) -> set[str]:
    """Names of the best row and of those with the same value; rows that see the truth don't compete."""
    competing = [row for row in rows if name in row.scores.metrics and not row.sees_truth]
    values = {row.name: row.scores.metrics[name].mean for row in competing}
    finite = {row: value for row, value in values.items() if math.isfinite(value)}
    better = competing[0].scores.better(name) if competing else None
    if better is None or not finite:
        return set()
    least = (max if better == "more" else min)(finite.values())
    return {row for row, value in finite.items() if value == least}


def write_report(folder: Path, report: Report) -> dict[str, Path]:
    """Write `report.json`, `report.csv`, `report.html` and `figures/`.

    Figures of the report that was there go where this one has none of the name.

    Returns:
        Where the three are, by suffix.
    """
    texts = {
        "json": json_text(report.to_json(), indent=2, default=str) + "\n",
        "csv": report.to_csv(),
        "html": printable(to_html(report)),
    }
    paths = {suffix: folder / f"report.{suffix}" for suffix in texts}
    files = {
        folder / "figures" / f"{drawing.name}.{suffix}": content
        for drawing in report.drawings
        for suffix, content in drawing.files.items()
    }
    files |= {path: texts[suffix].encode() for suffix, path in paths.items()}
    named = json_document(folder / "report.json").get("figures")
    old = {
        folder / "figures" / f"{name}.{suffix}"
        for name in (named if isinstance(named, dict) else ())
        if re.fullmatch(r"[\w-]+", name)
        for suffix in ("svg", "pdf", "csv")
    }
    with quiet(), locked(folder / ".lock", timeout_s=_WRITING_S):
        try:
            write_together(files)
            for path in old - files.keys():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError.of(error, folder) from error
    return paths


# --- the terminal --------------------------------------------------------------------------------------


def show_evaluation(report: Report, console: Console) -> None:
    """Print the headline metrics of every task."""
    for task in report.tasks:
        title = task.task if task.space == "fields" else f"{task.task} (errors of latents, not of fields)"
        _show_rows(task.rows, _COLUMNS, title, console)
        if task.ensembles:
            _show_rows(task.ensembles, _ENSEMBLE_COLUMNS, f"{task.task}: ensembles", console)
        console.print(f"{task.protocol} {task.confidence}", style="dim", markup=False)
    if report.shown_test_uses:
        console.print(report.shown_test_uses, style="dim", markup=False)


def _show_rows(rows: Sequence[Row], titles: Mapping[str, str], title: str, console: Console) -> None:
    """A table, with the verdict on the first of its metrics, and notes below."""
    columns = {
        name: shown for name, shown in titles.items() if any(name in row.scores.metrics for row in rows)
    }
    judged = next(iter(titles))
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("", no_wrap=True)
    for shown in columns.values():
        table.add_column(shown)
    has_pairs = any(row.paired for row in rows)
    if has_pairs:
        table.add_column(f"{titles[judged]} beside the {rows[0].label}'s")
    for row in rows:
        label = Text.assemble(row.label, *[("\n" + seeds, "dim") for seeds in [row.shown_seeds] if seeds])
        cells = [_shown(row.scores.metrics.get(name)) for name in columns]
        cells += [_shown_pair(row.paired.get(judged))] if has_pairs else []
        table.add_row(label, *cells)
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.label}: {row.note}", style="dim", markup=False)


def _shown(value: Interval | None) -> Text:
    """The value over its interval, so that columns stay narrow."""
    if value is None:
        return Text("-")
    ends = [(f"\n{value.low:.2g} to {value.high:.2g}", "dim")] if value.is_known else []
    return Text.assemble(f"{value.mean:.3g}", *ends)


def _shown_pair(pair: Paired | None) -> Text:
    """The verdict over the ratio."""
    if pair is None:
        return Text("")
    ratio = pair.ratio
    ends = f", {ratio.low:.3g} to {ratio.high:.3g}" if ratio.is_known else ""
    return Text.assemble(pair.verdict, (f"\n{ratio.mean:.3g}x{ends}", "dim"))
