"""A report of an evaluation in the run at Weights & Biases: numbers, table, figures, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_report import report
from wandb_runs import Standin

from ups.config.run import WandbConfig
from ups.data.origins import Origin
from ups.eval.report import Report, write_report
from ups.train.tracking import WandbContext, context_path, send_report

ORIGIN = Origin("operator", "operator", "operator.safetensors", "weights", "ab12")


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    return Standin.installed(tmp_path, monkeypatch)


def report_of(folder: Path) -> Report:
    config = {"logging": {"wandb": {"enabled": True}}, "checkpoint": {"dir": str(folder)}}
    return replace(report(), config=config, made_from=[ORIGIN])


def test_report_lands_in_the_run_of_the_training(tmp_path: Path, wandb: Standin, notes: list[str]) -> None:
    context = WandbContext.of(WandbConfig(project="waves"), "abc")
    replace(context, step=5).write(context_path(tmp_path))
    found = report_of(tmp_path)
    files = write_report(tmp_path / "small-eval", found)
    send_report(found, files, name="small-eval", joins=True)
    assert notes == []
    assert [call["id"] for call in wandb.calls("init")] == ["abc"]
    numbers, table, images = wandb.rows
    assert [row["run/step"] for row in wandb.rows] == [6, 7, 8]
    assert numbers["small-eval/burgers1d/operator/nrmse"] == 0.1
    errors = table["small-eval/errors"]
    row = dict(zip(errors["columns"], errors["data"][0], strict=True))
    assert (row["task"], row["row"], row["metric"], row["low"]) == ("burgers1d", "operator", "nrmse", 0.08)
    assert images["small-eval/training_loss"]["caption"] == "curves"
    assert images["small-eval/burgers1d_spectra"]["nbytes"] > 0
    (sent,) = wandb.calls("log_artifact")
    assert (sent["name"], sent["type"]) == ("run_abc_small-eval", "evaluation")
    assert sent["files"] == ["report.json", "report.csv", "report.html"]
    assert sent["metadata"]["made_from"] == [ORIGIN.to_json()]
    assert [call["name"] for call in wandb.calls("use_artifact")] == ["operator.safetensors"]


def test_report_that_can_not_be_sent_is_a_warning(tmp_path: Path, wandb: Standin, notes: list[str]) -> None:
    send_report(replace(report_of(tmp_path), config={}), {}, name="evaluation")
    assert notes == ["warning: the report isn't at Weights & Biases: 'logging'"]
