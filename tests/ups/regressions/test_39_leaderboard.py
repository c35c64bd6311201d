"""A file that is no record of a run doesn't stop the table of the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ups.pipeline.leaderboard import read_rows
from ups.pipeline.metadata import FILE, KIND

NUMBER = "1" + "0" * 400


def record(**changes: object) -> dict[str, object]:
    metrics = {"nrmse": {"mean": 0.1, "low": None, "high": None}}
    results = {"full-eval": {"tasks": {"burgers1d": metrics}}}
    known = {"kind": KIND, "results": results, "seconds": 1.0, "cost": None, "gates": {}, "promotion": {}}
    return {**known, "seed": 0, "code": {}, "written_at": "2026-11-27", **changes}


@pytest.mark.parametrize("defect", ["deep", "number", "cost", "seeds", "fifo", "list"])
def test_run_is_listed_beside_a_file_that_is_no_record(tmp_path: Path, defect: str, notes: list[str]) -> None:
    for name in ("good", "odd"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / FILE).write_text(json.dumps(record()))
    odd = tmp_path / "odd" / FILE
    texts = {
        "deep": "[" * 200_000,
        "number": json.dumps(record(seconds="N")).replace('"N"', NUMBER),
        "cost": json.dumps(record(cost="N")).replace('"N"', NUMBER),
        "seeds": json.dumps(record(seeds=[float("inf")])),
        "list": "[]",
    }
    if defect == "fifo":
        os.mkfifo(odd)
    else:
        odd.write_text(texts[defect])
    (row,) = read_rows(tmp_path, metric="nrmse")
    assert row.run == str(tmp_path / "good")
    assert len(notes) == (defect != "fifo")
