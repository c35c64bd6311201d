"""Weights & Biases: one run for all processes, and nothing about it stops a training. With a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_trainer import Regression, make_config, records, train
from wandb_runs import Standin

from ups.config import RunConfig
from ups.config.run import WandbConfig
from ups.data.origins import Origin
from ups.errors import DivergedError
from ups.train.tracking import (
    GPU_LOAD,
    STARTUP_MINUTES,
    WandbContext,
    WandbSink,
    context_path,
    forget_run,
    handing_on,
    open_wandb,
    send_report,
)


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    return Standin.installed(tmp_path, monkeypatch)


def with_wandb(folder: Path, *overrides: str, **settings: Any) -> RunConfig:
    values = make_config(folder, *overrides).model_dump()
    values["logging"] = {"wandb": {"enabled": True, "project": "waves", **settings}}
    return RunConfig.model_validate(values, context={"tasks": ()})


def opened(folder: Path, job: str, **settings: Any) -> WandbSink:
    values = WandbConfig(enabled=True, project="waves", **settings)
    sink = open_wandb(values, folder, job=job, run_config={})
    assert sink is not None
    return sink


def warnings(folder: Path) -> list[str]:
    return [record["text"] for record in records(folder, "warning")]


def test_stage_sends_numbers_over_its_own_steps_and_its_report_as_summary(
    tmp_path: Path, wandb: Standin
) -> None:
    train(Regression(), with_wandb(tmp_path, run_name="first", tags=("a",)))
    (begun,) = wandb.calls("init")
    assert (begun["project"], begun["name"], begun["tags"]) == ("waves", "first", ["a"])
    assert begun["config"]["training"]["ema_decay"] == 0.9
    assert (begun["dir"], begun["job_type"]) == (str(tmp_path), "autoencoder")
    axes = {call["name"]: call["step_metric"] for call in wandb.calls("define_metric")}
    assert axes["autoencoder/*"] == "autoencoder/step"
    assert axes["training/*"] == axes["startup/*"] == "run/step"
    steps = [row["autoencoder/step"] for row in wandb.rows if "autoencoder/loss/error" in row]
    assert steps == [3, 5, 6, 9, 10]
    assert [row["run/step"] for row in wandb.rows] == list(range(1, 1 + len(wandb.rows)))
    epochs = [row for row in wandb.rows if "training/epoch_time_sec" in row]
    assert [row["autoencoder/step"] for row in epochs] == [5, 10]
    assert all(row["autoencoder/training/peak_memory_gib"] > 0 for row in epochs)
    (startup,) = [row for row in wandb.rows if STARTUP_MINUTES in row]
    assert startup["autoencoder/startup/first_step_sec"] > 0
    assert all(isinstance(value, int | float) for row in wandb.rows for value in row.values())
    summary = {name: value for call in wandb.calls("summary") for name, value in call["values"].items()}
    assert summary["autoencoder/score"] == records(tmp_path, "end")[0]["report"]["score"]
    assert wandb.calls("finish") == [{"exit_code": 0}]
    assert warnings(tmp_path) == []


def test_stages_and_continuations_are_one_run_whose_steps_go_on(tmp_path: Path, wandb: Standin) -> None:
    config = with_wandb(tmp_path)
    with pytest.raises(DivergedError):
        train(Regression(bad_batch=6), config)
    train(Regression(), config)
    first, second = wandb.calls("init")
    assert first["id"] == second["id"]
    assert [call["exit_code"] for call in wandb.calls("finish")] == [1, 0]
    steps = [call["step"] for call in wandb.calls("log")]
    assert steps == list(range(1, 1 + len(steps)))
    context = WandbContext.read(tmp_path / "wandb_context.json")
    assert context is not None
    assert (context.run_id, context.step, context.entity) == (first["id"], len(steps), "team")


def test_context_that_is_handed_over_says_which_run_it_is(
    tmp_path: Path, wandb: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed, info = tmp_path / "handed.json", tmp_path / "info.json"
    handed.write_text(json.dumps({"run_id": "abc", "project": "storms", "step": 7, "other": 1}))
    monkeypatch.setenv("FAST_TO_SOTA_WANDB_INFO", str(info))
    with handing_on(handed):
        sink = opened(tmp_path / "checkpoints", "evaluation")
        forget_run(tmp_path / "checkpoints")
    sink.log({"evaluation/nrmse": 0.5})
    sink.close(has_failed=False)
    (begun,) = wandb.calls("init")
    assert (begun["id"], begun["project"]) == ("abc", "storms")
    (logged,) = wandb.calls("log")
    assert (logged["step"], logged["commit"]) == (8, True)
    assert json.loads(handed.read_text())["step"] == 8
    told = {"id": "abc", "name": None, "project": "storms", "entity": "team", "url": None}
    assert json.loads(info.read_text()) == told


def test_run_from_scratch_is_another_run(tmp_path: Path) -> None:
    context = WandbContext.of(WandbConfig(project="waves"))
    context.write(context_path(tmp_path))
    assert WandbContext.read(context_path(tmp_path)) == context
    forget_run(tmp_path)
    assert WandbContext.read(context_path(tmp_path)) is None
    context_path(tmp_path).write_text("{")
    assert WandbContext.read(context_path(tmp_path)) is None


def test_evaluation_joins_a_run_and_begins_none(tmp_path: Path, wandb: Standin) -> None:
    settings = WandbConfig(enabled=True)
    options: dict[str, Any] = {"job": "evaluation", "run_config": {}, "joins": True}
    assert open_wandb(settings, tmp_path, **options) is None
    assert not context_path(tmp_path).exists()


def test_files_name_what_they_were_made_from(tmp_path: Path, wandb: Standin) -> None:
    path = tmp_path / "operator.safetensors"
    path.write_bytes(b"weights")
    origin = Origin("training data of waves", "store", "latents/waves train.zarr.zip", "config_hash", "ab12")
    sink = opened(tmp_path, "operator")
    sink.log_files("operator", kind="model", files=[path], about={"identity": "ff"}, made_from=[origin])
    sink.log_table("operator/errors", columns=["task"], rows=[("waves",)])
    sink.log_images({"operator/errors": (path, "a caption")})
    sink.close(has_failed=False)
    (sent,) = wandb.calls("log_artifact")
    assert (sent["name"], sent["type"]) == (f"run_{sink.run_id}_operator", "model")
    assert sent["files"] == ["operator.safetensors"]
    assert sent["metadata"] == {"identity": "ff", "made_from": [origin.to_json()]}
    (used,) = wandb.calls("use_artifact")
    assert (used["name"], used["type"]) == ("waves_train.zarr.zip", "store")
    assert used["metadata"]["hash"] == "ab12"
    table, image = (row["operator/errors"] for row in wandb.rows)
    assert table == {"columns": ["task"], "data": [["waves"]]}
    assert image == {"nbytes": 7, "caption": "a caption"}


# --- what goes wrong -----------------------------------------------------------------------------------


def test_missing_wandb_is_one_warning_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.train.tracking.find_spec", lambda name: None)
    train(Regression(), with_wandb(tmp_path))
    (warning,) = warnings(tmp_path)
    assert "wandb isn't installed; pip install 'ups-store[wandb]'" in warning


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("init", "gets nothing more of this command (init is not to be had)"),
        ("log", "didn't take row (log is not to be had)"),
        ("finish", "gets nothing more of this command (finish is not to be had)"),
        ("init:hang", "took longer than 0.4 s and is left behind"),
        ("finish:hang", "took longer than 0.4 s and is left behind"),
        ("finish:timeout", "took longer than 60 s and is left behind"),
    ],
)
def test_training_goes_on_whatever_wandb_does(tmp_path: Path, wandb: Standin, fails: str, says: str) -> None:
    wandb.fails(fails)
    trainer = train(Regression(), with_wandb(tmp_path, timeout_s=0.4 if "hang" in fails else 60))
    assert trainer.step == 10
    assert records(tmp_path, "end") != []
    assert says in warnings(tmp_path)[-1]
    assert sum(says in warning for warning in warnings(tmp_path)) == 1


def test_run_that_can_not_begin_online_is_kept_offline(
    tmp_path: Path, wandb: Standin, notes: list[str]
) -> None:
    wandb.fails("online", "artifact")
    sink = opened(tmp_path, "operator")
    sink.log_files("operator", kind="model", files=[], about={}, made_from=[])
    sink.log({"operator/loss": 1.0})
    sink.close(has_failed=False)
    assert [call["mode"] for call in wandb.calls("init")] == [None, "offline"]
    assert [row["operator/loss"] for row in wandb.rows] == [1.0]
    begin, artifact = notes
    assert "can't begin online (online is not to be had)" in begin
    assert "`wandb sync` sends it" in begin
    assert artifact == "warning: Weights & Biases didn't take artifact (artifact is not to be had)"


def test_rows_never_go_to_another_run_that_was_left_behind(
    tmp_path: Path, wandb: Standin, notes: list[str]
) -> None:
    """Which wandb gives back as long as it isn't over."""
    wandb.monkeypatch.setenv("STANDIN_RUN", "earlier")
    sink = opened(tmp_path, "operator")
    sink.log({"operator/loss": 1.0})
    sink.close(has_failed=False)
    assert "can't begin online (run earlier isn't over in this process)" in notes[0]
    assert [call["mode"] for call in wandb.calls("init")] == [None, "offline"]
    assert len(wandb.calls("teardown")) == len(wandb.rows) == 1


def test_report_that_can_not_be_sent_leaves_no_run_open(
    tmp_path: Path, wandb: Standin, notes: list[str]
) -> None:
    values = with_wandb(tmp_path).model_dump(mode="json")
    send_report(SimpleNamespace(config=values), {}, name="evaluation")  # type: ignore[arg-type]
    assert "the report isn't at Weights & Biases" in notes[0]
    assert wandb.calls("finish") == [{"exit_code": 1}]


def test_context_that_can_not_be_written_is_a_warning(
    tmp_path: Path, wandb: Standin, notes: list[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the place of the folder")
    settings = WandbConfig(enabled=True)
    assert open_wandb(settings, blocked, job="operator", run_config={}) is None
    assert "nothing goes to Weights & Biases" in notes[0]


def test_load_of_the_gpu_is_that_of_the_first_epoch(tmp_path: Path, wandb: Standin) -> None:
    sink = opened(tmp_path, "operator")
    for event, epoch in (("step", 1), ("epoch", 1), ("epoch", 2)):
        sink.write({"event": event, "epoch": epoch, "step": epoch, GPU_LOAD: 90.0})
    sink.close(has_failed=False)
    assert [GPU_LOAD in row for row in wandb.rows] == [False, True, False]
    assert all(row[f"operator/{GPU_LOAD}"] == 90.0 for row in wandb.rows)
