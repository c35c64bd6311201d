"""A table of runs by a metric, out of their `metadata.json`: value, interval, time and cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ups.errors import ConfigError
from ups.log import logger
from ups.output import csv_text
from ups.pipeline.metadata import FILE, KIND

# Of a file of something else, one nested too deeply, or with a number too large.
_NO_RECORD = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
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
    """All runs below a folder, the smallest value first on each task.

    Args:
        folder: Where to look.
        metric: Name of a metric in reports.
        price_per_hour: Of the machine, for runs that don't know theirs.

    Raises:
        ConfigError: If no run was evaluated by the metric; says which metrics there are.
    """
    found, metrics = [], set[str]()
    for path in sorted(path for path in folder.rglob(FILE) if path.is_file()):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.get("kind") != KIND:
                continue
            found += list(_places(path, document, metric, price_per_hour, metrics))
        # Whatever a file is, the others are listed: one may be nested too deeply, or hold a number too large.
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            logger.warning(f"{path} is left out: it can't be read ({error})")
    if not found:
        expected = ", ".join(sorted(metrics)) or f"folders with {FILE} of runs that were evaluated"
        raise ConfigError(f"no run below {folder} has {metric}", expected=expected)
    return sorted(found, key=lambda row: (row.task, math.isnan(row.mean), row.mean, row.run))


def _places(
    path: Path, document: Mapping[str, Any], metric: str, price: float | None, metrics: set[str]
) -> Iterator[LeaderboardRow]:
    results = document["results"]
    evaluation = next((name for name in _EVALUATIONS if name in results), None)
    if evaluation is None:
        return
    seconds, cost = float(document["seconds"]), None if document["cost"] is None else float(document["cost"])
    if cost is None and price is not None:
        cost = seconds / 3600 * price
    for task, values in results[evaluation]["tasks"].items():
        metrics |= {*values}
        if metric not in values:
            continue
        mean, low, high = (_number(values[metric][end]) for end in ("mean", "low", "high"))
        yield LeaderboardRow(
            task=task,
            run=str(path.parent),
            evaluation=evaluation,
            metric=metric,
            mean=mean,
            low=low,
            high=high,
            gates=_gates(document["gates"]),
            promoted=bool(document["promotion"].get("promoted")),
            seconds=seconds,
            cost=cost,
            seeds=tuple(map(int, document.get("seeds") or [document["seed"]])),
            commit=str(document["code"].get("commit") or ""),
            written_at=str(document["written_at"]),
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _gates(gates: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> str:
    missed = [one["what"] for found in gates.values() for one in found or () if not one["passed"]]
    return f"missed: {', '.join(missed)}" if missed else "passed" if any(gates.values()) else ""


def to_csv(rows: Sequence[LeaderboardRow]) -> str:
    """A line a run and task; what is no number is empty."""
    head = [field.name for field in fields(LeaderboardRow)]
    return csv_text([head, *(map(_cell, asdict(row).values()) for row in rows)])


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
