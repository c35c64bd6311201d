"""A report of an evaluation: rows of errors beside their baselines, as JSON, as CSV, and in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ups.data.origins import MADE_FROM, Origin
from ups.data.splits import Split
from ups.eval.ensemble_scores import EnsembleScores
from ups.eval.figure_style import Drawing
from ups.eval.intervals import LEAST_TRAJECTORIES, Interval, Paired, as_columns
from ups.eval.scores import Scores
from ups.eval.training_logs import StageLog
from ups.output import csv_text, with_nulls
from ups_store.printable import counted

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
        lines: list[Sequence[Any]] = [(*_FIRST_COLUMNS, *_PAIRED_COLUMNS, "note")]
        for task in self.tasks:
            for prefix, rows in (("", task.rows), ("ensemble/", task.ensembles)):
                for row in rows:
                    for name, step, value in _lines(row):
                        t = "" if step == "" else task.t[int(step) - 1]
                        seeds = " ".join(map(str, row.seeds))
                        where = (task.task, task.space, row.name, seeds, f"{prefix}{name}", step, t)
                        line = (*where, *_ends(value), *_paired_columns(row, name, step), row.note)
                        lines.append(line)
        return csv_text(lines)


_VERDICTS = (
    "A row is ahead of the first one, or behind it, where the interval of their difference leaves out zero; "
    "where zero is in it, that can't be told, which doesn't mean that they are equally good."
)
_FIRST_COLUMNS = ("task", "space", "row", "seeds", "metric", "step", "t", "mean", "low", "high")
_PAIRED_COLUMNS = ("difference", "difference_low", "difference_high", "verdict")


def _ends(value: Interval) -> tuple[float, float, float]:
    return value.mean, value.low, value.high


def _paired_columns(row: Row, metric: str, step: int | str) -> tuple[float | str, ...]:
    """Beside the first row; empty where there is no such comparison, as of a single time step."""
    if step != "" or metric not in row.paired:
        return ("",) * len(_PAIRED_COLUMNS)
    pair = row.paired[metric]
    return *_ends(pair.difference), pair.verdict


def _lines(row: Row) -> Iterator[tuple[str, int | str, Interval]]:
    """Name, step (from 1; "" for all) and value of everything in a row."""
    for name, value in row.scores.metrics.items():
        yield name, "", value
    for name, number in row.scores.pdebench_compat.items():
        yield f"pdebench_compat/{name}", "", Interval(number, math.nan, math.nan)
    for name, steps in row.scores.by_step.items():
        for step, value in enumerate(steps, start=1):
            yield name, step, value


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
