"""What other machines measured: a target is met only where the latest result of each of them meets it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import kind
from benchmarks.harness.report import Result

Key = tuple[str, tuple[tuple[str, Any], ...]]  # title and parameters; names of modules may change


def missed_elsewhere(
    results: Sequence[Result], folder: Path, machine: Mapping[str, Any]
) -> dict[int, list[str]]:
    """Say by the place of a row here, the machines whose latest result misses the row's target.

    Args:
        results: What was measured here.
        folder: Of the JSON files of all runs.
        machine: This one, as `machine.describe` gives it; its own older results don't count.
    """
    missed: dict[int, list[str]] = {}
    for document in _latest_of_each(folder, but=kind(dict(machine))):
        values = {_key(row): row["value"] for row in document["results"] if row["value"] is not None}
        cpu, date = document["machine"]["cpu"], document["date"]
        for place, result in enumerate(results):
            value = values.get(_key(vars(result)))
            if value is not None and result.is_met_by(value) is False:
                missed.setdefault(place, []).append(f"missed on {cpu}: {value:.3g} ({date})")
    return missed


def _latest_of_each(folder: Path, *, but: str) -> Iterator[dict[str, Any]]:
    """The newest result of each other machine; stores and training are results of their own."""
    latest: dict[tuple[str, bool], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):  # names begin with the date
        document: dict[str, Any] = json.loads(path.read_text())
        is_of_these = "results" in document and not {"peers", "gpu"} & {*path.stem.split("-")}
        if is_of_these and (name := kind(document["machine"])) != but:
            latest[name, path.stem.endswith("-train")] = document
    yield from latest.values()


def _key(row: Mapping[str, Any]) -> Key:
    return row["title"], tuple(sorted(row["parameters"].items()))
