"""`python -m benchmarks.models.budgets`: as many samples, as much time, kept when it is run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_models_benchmark import TINY, all_scores

from benchmarks.models import budgets, table
from benchmarks.models.budgets import LIMITS


@pytest.mark.slow
def test_others_have_the_samples_of_fno_or_its_time_and_nothing_is_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / TINY.name / "run.yaml"
    ratios = tmp_path / "ratios"
    found = budgets.scores_of(TINY, ["operator"], [0], tmp_path)
    steps = found["samples"]["fno"][0]["steps"]
    assert found["samples"]["operator"][0]["steps"] == steps
    (kept,) = ratios.iterdir()
    ratio = json.loads(kept.read_text())
    assert ratio > 0
    assert budgets.ratio_of_times(TINY, "operator", config, tmp_path) == ratio
    assert found["seconds"]["operator"][0]["steps"] == round(steps / ratio)
    assert found["seconds"]["fno"] == found["samples"]["fno"]
    monkeypatch.setattr(budgets, "train_and_score", lambda *args, **options: pytest.fail("trained again"))
    assert budgets.scores_of(TINY, ["operator"], [0], tmp_path) == found


def test_table_has_a_row_for_each_limit_and_says_who_is_ahead() -> None:
    rows, scores = {}, {}
    for limit, level in zip(LIMITS, (0.05, 0.2), strict=True):
        scores[TINY.name, limit] = all_scores(operator=level, fno=0.1)
        rows[limit] = list(table.rows_of(TINY, scores[TINY.name, limit]))
    text = budgets.markdown(rows, scores)
    first, second = (line for line in text.splitlines() if line.startswith("| burgers"))
    assert "equal samples" in first
    assert "**ahead**" in first
    assert "equal processor time" in second
    assert "| behind |" in second
    assert "Equal samples, the operator beside FNO, 3 rows: ahead on 3" in text
    assert "beside U-Net" not in text
