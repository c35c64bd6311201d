"""`ups compare` after a training: budgets from its logs, equal times measured in turns, kept afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from operator_runs import configure, own_copy, shared_run

from ups.eval.baseline_model import load_baseline
from ups.eval.equal_budgets import used_stages
from ups.eval.report import Report
from ups.eval.runs import baseline_path
from ups.eval.training_logs import read_stage_logs
from ups.train.compare import compare_run
from ups.train.run import run_stage

SHORT = ["data.tasks=[burgers1d]", "stages.operator.epochs=1", "stages.operator.steps_per_epoch=6"]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_copy(shared_run(tmp_path_factory), tmp_path, monkeypatch)


def compare(run: Path, *by: str) -> Report:
    given = {"config_path": run / "run.yaml", "overrides": SHORT, "split": "val", "kinds": ["fno"]}
    return compare_run(None, **given, by=by, amounts={})


def test_baselines_have_what_the_operator_and_its_autoencoder_took(run: Path, notes: list[str]) -> None:
    config = configure(run, *SHORT)
    run_stage("operator", config)
    autoencoder, operator = logs = used_stages(read_stage_logs(config))
    assert used_stages([*logs, dataclasses.replace(operator, stage="corrector")]) == logs  # not its work
    assert operator.flops > 0
    assert operator.preparation_flops > 0
    report = compare(run, "flops", "seconds")
    rows = {row.name: row for row in report.tasks[0].rows}
    assert list(rows)[:3] == ["operator", "fno_flops", "fno"]
    assert "for encoding" in rows["operator"].note

    by_flops = load_baseline(baseline_path(config, "fno", "burgers1d", "flops")).effort
    assert by_flops is not None
    allowed = autoencoder.flops + operator.flops + operator.preparation_flops
    step = by_flops.flops / by_flops.steps
    assert by_flops.allowed == pytest.approx(allowed)
    assert allowed - step < by_flops.flops <= allowed

    by_time = load_baseline(baseline_path(config, "fno", "burgers1d", "seconds")).effort
    assert by_time is not None
    assert by_time.step_ratio is not None
    # At least the operator's own steps' worth: those of the autoencoder are added.
    assert by_time.steps >= int(operator.steps / by_time.step_ratio)
    assert "times one of the operator's" in rows["fno"].note
    assert "a step takes" in rows["fno"].note

    compare(run, "seconds")
    again = load_baseline(baseline_path(config, "fno", "burgers1d", "seconds")).effort
    assert again == by_time  # nothing was measured or trained again
    assert sum("timed in turns" in note for note in notes) == 1
