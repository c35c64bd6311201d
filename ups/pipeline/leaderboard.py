"""A table of runs by a metric, out of their `metadata.json`: value, interval, time and cost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ups.errors import ConfigError
from ups.log import logger
from ups.output import csv_text
from ups.pipeline.metadata import FILE, KIND

# Of a file of something else, one nested too deeply, or with a number too large.
_NO_RECORD = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
_EVALUATIONS = ("full-eval", "small-eval")  # the first that a run has


@dataclass(frozen=True)
class LeaderboardRow:
    """One run on one task.

    Attributes:
        task: The task.
        run: Its folder.
        evaluation: "full-eval", or "small-eval" where a run came no further.
        metric: Which one.
        mean: Its mean; NaN where it is no finite number.
        low: Lower end of its 95 % interval; NaN where there is none.
        high: Upper end of it.
        gates: "passed", or those that were missed.
        promoted: Whether its operator became the best one.
        seconds: Of all nodes.
        cost: At the price that was known, or is given.
        seeds: Of the training; the interval of several is over them, too.
        commit: Of the code.
        written_at: When its record was written, ISO 8601.
    """

    task: str
    run: str
    evaluation: str
    metric: str
    mean: float
    low: float
    high: float
    gates: str
    promoted: bool
    seconds: float
    cost: float | None
    seeds: tuple[int, ...]
    commit: str
    written_at: str


def read_rows(folder: Path, *, metric: str, price_per_hour: float | None = None) -> list[LeaderboardRow]:
    """Read all runs below a folder, the smallest value first on each task.

    Args:
        folder: Where to look.
        metric: Name of a metric in reports.
        price_per_hour: Of the machine, for runs that don't know theirs.
    """
    rows, metrics = list[LeaderboardRow](), set[str]()
    for path in sorted(path for path in folder.rglob(FILE) if path.is_file()):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.get("kind") == KIND:
                rows += _rows_of(document, path.parent, metric, price_per_hour, metrics)
        except _NO_RECORD as error:  # whatever a file is, the others are listed
            logger.warning(f"{path} is left out: it can't be read ({error})")
    if not rows:
        expected = ", ".join(sorted(metrics)) or f"folders with {FILE} of runs that were evaluated"
        raise ConfigError(f"no run below {folder} has {metric}", expected=expected)
    return sorted(rows, key=lambda row: (row.task, math.isnan(row.mean), row.mean, row.run))


def _rows_of(
    document: Any, folder: Path, metric: str, price: float | None, metrics: set[str]
) -> list[LeaderboardRow]:
    """A row for each task of a run's record; `metrics` gets the names of all that it has."""
    evaluation = next((name for name in _EVALUATIONS if name in document["results"]), None)
    if evaluation is None:
        return []
    seconds, cost, rows = float(document["seconds"]), document["cost"], list[LeaderboardRow]()
    verdicts = [one for gate in document["gates"].values() for one in gate or ()]
    missed = ", ".join(one["what"] for one in verdicts if not one["passed"])
    passed = "passed" if any(document["gates"].values()) else ""
    for task, values in document["results"][evaluation]["tasks"].items():
        metrics |= {*values}
        if metric not in values:
            continue
        ends = (values[metric][end] for end in ("mean", "low", "high"))
        mean, low, high = (math.nan if end is None else float(end) for end in ends)
        rows.append(
            LeaderboardRow(
                task=task,
                run=str(folder),
                evaluation=evaluation,
                metric=metric,
                mean=mean,
                low=low,
                high=high,
                gates=f"missed: {missed}" if missed else passed,
                promoted=bool(document["promotion"].get("promoted")),
                seconds=seconds,
                cost=float(cost) if cost is not None else None if price is None else seconds / 3600 * price,
                seeds=tuple(map(int, document.get("seeds") or [document["seed"]])),
                commit=str(document["code"].get("commit") or ""),
                written_at=str(document["written_at"]),
            )
        )
    return rows


def to_csv(rows: Sequence[LeaderboardRow]) -> str:
    """A line a run and task; what is no number is empty."""
    lines: list[list[Any]] = [[field.name for field in fields(LeaderboardRow)]]
    for row in rows:
        values = {**asdict(row), "seeds": " ".join(map(str, row.seeds))}
        lines.append(
            [
                "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
                for value in values.values()
            ]
        )
    return csv_text(lines)
