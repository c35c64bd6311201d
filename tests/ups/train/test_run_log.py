"""What a run says: its log, the start's phases, the GPU's load, settings without effect."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_trainer import CPU, Regression, make_config, records, train

from ups.errors import InterruptedTrainingError
from ups.log import logger, quiet
from ups.stages import JOINT
from ups.train.checks import unused_in_one_stage, unused_settings
from ups.train.launched import process_began
from ups.train.log import RunLog
from ups.train.meter import StartupClock, StepClock
from ups.train.tracking import GpuWatch, JsonLines
from ups.train.trainer import Trainer


def test_every_line_of_the_log_says_where_it_is_from_and_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_RUN_ID", "nightly")
    log = JsonLines(tmp_path / "log.jsonl")
    for value in (0.5, float("nan")):
        log.write({"event": "step", "loss/error": value, "note": "\x9b2J\x7f"})
    log.close(has_failed=False)
    text = (tmp_path / "log.jsonl").read_text()
    assert all(" " <= c <= "~" or c == "\n" for c in text)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [line["loss/error"] for line in lines] == [0.5, None]
    origin = {"rank": 0, "host": os.uname().nodename, "pid": os.getpid(), "run": "nightly"}
    assert all(origin.items() <= line.items() for line in lines)


# --- the terminal --------------------------------------------------------------------------------------


def test_terminal_shows_rates_beside_the_bar() -> None:
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with RunLog(stage="operator", total_steps=10, console=console) as log:
        log.advance(4)
        rates = {"training/samples_per_sec": 12345.6, "training/data_wait_share": 0.25}
        log.losses({"error": 1.0}, step=4, lr=0.1, rates=rates)
        log._progress.refresh()
        shown = console.export_text(clear=False)
    assert "4/10" in shown
    assert "12,346 samples/s, 25% waiting for data" in shown


def test_quiet_log_says_nothing(capsys: pytest.CaptureFixture[str], notes: list[str]) -> None:
    with RunLog(stage="operator", total_steps=10, is_quiet=True) as log:
        log.note("hello")
        log.record("start")
        log.epoch(1, 2, {"loss": 1.0})
    assert capsys.readouterr() == ("", "")
    assert notes == []


class Recorder:
    """A sink that keeps what was warned of, and how it was closed."""

    run_id = None
    has_failed: bool | None = None

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        self.warnings += [record["text"]] if record["event"] == "warning" else []

    def close(self, *, has_failed: bool) -> None:
        self.has_failed = has_failed


@pytest.mark.parametrize(("error", "has_failed"), [(InterruptedTrainingError, False), (ValueError, True)])
def test_interrupted_run_is_not_a_failed_one(error: type[Exception], has_failed: bool) -> None:
    log, sink = RunLog(stage="operator", total_steps=10), Recorder()
    log.sinks.append(sink)
    with pytest.raises(error), log:
        raise error("stop")
    assert sink.has_failed is has_failed


def test_warnings_are_recorded_though_they_are_quiet_and_shown_without_any_handler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", False)  # handlers of pytest and of this suite
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(sys.stderr))
    sink = Recorder()
    with quiet(), RunLog(stage="operator", total_steps=1) as log:
        log.sinks.append(sink)
        logger.warning("of a trial")
        logger.info("no warning")
    with RunLog(stage="operator", total_steps=1) as log:
        log.sinks.append(sink)
        logger.warning("of a library")
    logger.warning("of nobody")
    assert sink.warnings == ["of a trial", "of a library"]
    assert capsys.readouterr().err == "of a library\nof nobody\n"


def test_log_of_a_training_that_never_begins_leaves_nothing_behind() -> None:
    before = list(logger.filters)
    log = RunLog(stage="operator", total_steps=1)
    assert len(logger.filters) == len(before) + 1
    del log
    gc.collect()
    assert logger.filters == before


# --- the start -----------------------------------------------------------------------------------------


class Clock:
    """Stands for the module `time`: it goes on when a test sleeps, and never by itself."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_phases_have_their_own_time_without_that_of_inner_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    monkeypatch.setattr("ups.train.meter.time", time)
    clock = StartupClock(began=time.time() - 7.0)
    with clock.phase("stage"):
        time.sleep(0.02)
        with clock.phase("data_opening"):
            time.sleep(0.2)
    clock.take({"startup/cache_sec": 3.0})
    metrics = clock.end()
    assert metrics["startup/imports_sec"] == pytest.approx(7.0)
    assert metrics["startup/data_opening_sec"] == pytest.approx(0.2)
    assert metrics["startup/stage_sec"] == pytest.approx(0.02)
    assert metrics["startup/cache_sec"] == 3.0
    assert metrics["startup/total_startup_time_min"] == pytest.approx(7.22 / 60)


def test_start_of_this_process_lies_in_the_past() -> None:
    assert 0 < time.time() - process_began() < 24 * 3600


def test_start_is_logged_once_with_the_first_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    clock = StartupClock()
    with clock.phase("data_opening"):
        pass
    train(Regression(), config, startup=clock)
    (record,) = records(tmp_path, "startup")
    assert record["step"] == 1
    assert {"startup/data_opening_sec", "startup/first_step_sec"} <= record.keys()
    assert record["startup/total_startup_time_min"] > 0


def test_stopwatch_leaves_out_what_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    monkeypatch.setattr("ups.train.meter.time", time)
    watch = StepClock()
    with watch.waiting():
        time.sleep(0.1)
    time.sleep(0.1)
    watch.count(10)
    first = watch.read()
    assert first["training/data_wait_share"] == pytest.approx(0.5)
    assert first["training/samples_per_sec"] == pytest.approx(50)
    time.sleep(0.2)
    watch.skip()
    watch.read()
    assert watch.data_wait_share == pytest.approx(0.5)


# --- batches ahead -------------------------------------------------------------------------------------


def test_training_is_the_same_with_and_without_batches_ahead(tmp_path: Path) -> None:
    ahead = train(Regression(ahead=3), make_config(tmp_path / "ahead", "training.prefetch_factor=3"))
    without = train(Regression(), make_config(tmp_path / "without"))
    for name, tensor in without.stage.model.state_dict().items():
        torch.testing.assert_close(ahead.stage.model.state_dict()[name], tensor, rtol=0, atol=0)
    assert ahead.stage.numbers[:10] == list(range(10))


# --- the GPU -------------------------------------------------------------------------------------------


class FakeNvml:
    """NVML of a GPU that is busy for 40 % and then 60 % of the time, and then isn't known any more."""

    def __init__(self) -> None:
        self.loads, self.asked = [40, 60], threading.Event()

    def nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> int:  # noqa: N802
        if not self.loads:
            self.asked.set()
            return 3  # NVML_ERROR_NOT_SUPPORTED
        out._obj.gpu = self.loads.pop(0)
        return 0


def test_gpu_load_is_the_mean_of_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    monkeypatch.setattr("ups.train.tracking._BETWEEN_LOOKS_S", 0.001)
    monkeypatch.setattr("ups.train.tracking._open_nvml", lambda: library)
    monkeypatch.setattr("ups.train.tracking._find_gpu", lambda *args: True)
    with GpuWatch(torch.device("cuda", 0)) as watch:
        assert library.asked.wait(60)
    assert watch.read() == {"training/gpu_utilization_pct": 50}
    assert watch.read() == {}
    assert watch.end_epoch() == {"training/gpu_utilization_pct": 50}


def test_cpu_has_no_gpu_load(tmp_path: Path) -> None:
    with GpuWatch(CPU) as watch:
        assert watch.read() == {}
    train(Regression(), make_config(tmp_path))
    assert "training/gpu_utilization_pct" not in records(tmp_path, "step")[0]


# --- settings without effect ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages.autoencoder.optimizer.momentum=0.5", "momentum has no effect: adamw"),
        ("stages.autoencoder.scheduler.gamma=0.1", "scheduler.gamma has no effect: cosine"),
        ("training.compile_mode=max-autotune", "training.compile is off"),
        ("training.amp_dtype=float16", "training.amp is off"),
        ("training.use_inverse_losses=true", "stage joint trains with them"),
    ],
)
def test_setting_without_effect_is_named(tmp_path: Path, override: str, says: str) -> None:
    assert list(unused_settings(make_config(tmp_path), "autoencoder")) == []
    (sentence,) = unused_settings(make_config(tmp_path, override), "autoencoder")
    assert says in sentence
    key = override.partition("=")[0]
    assert sentence.startswith(f"{key} has no effect")


@pytest.mark.parametrize(("epochs", "num_sentences"), [(1, 0), (0, 1)])
def test_inverse_losses_without_joint_epochs_are_named(
    tmp_path: Path, epochs: int, num_sentences: int
) -> None:
    joint = ("training.use_inverse_losses=true", f"stages.joint.epochs={epochs}")
    config = make_config(tmp_path, *joint)
    assert config.trains(JOINT) == (epochs > 0)
    assert len(list(unused_settings(config, "autoencoder"))) == num_sentences


@pytest.mark.parametrize(
    "override",
    [
        "operator.noise=0.1",
        "operator.curriculum=0.5",
        "training.lambda_relative=1",
        "training.lambda_spectral=1",
    ],
)
def test_setting_of_the_operator_is_named_in_joint_training_alone(tmp_path: Path, override: str) -> None:
    config = make_config(tmp_path, override, "training.horizon=2", "stages.joint.epochs=1")
    (sentence,) = unused_settings(config, "joint")
    key = override.partition("=")[0]
    assert sentence == f"{key} has no effect in stage joint: stage operator reads it"
    for stage in ("autoencoder", "operator"):
        assert list(unused_settings(config, stage)) == []


def test_curriculum_of_one_step_is_named(tmp_path: Path) -> None:
    (sentence,) = unused_settings(make_config(tmp_path, "operator.curriculum=0.5"), "operator")
    assert sentence == "operator.curriculum has no effect: training.horizon is 1"


def test_evaluation_after_a_single_stage_is_named(tmp_path: Path) -> None:
    assert list(unused_in_one_stage(make_config(tmp_path))) == []
    (sentence,) = unused_in_one_stage(make_config(tmp_path, "evaluation.enabled=true"))
    assert sentence.startswith("evaluation.enabled has no effect")


def test_setting_that_its_kind_reads_is_not_named(tmp_path: Path) -> None:
    settings = ["stages.autoencoder.optimizer.name=sgd", "stages.autoencoder.optimizer.momentum=0.5"]
    assert list(unused_settings(make_config(tmp_path, *settings), "autoencoder")) == []


def test_setting_of_a_stage_is_named_unless_it_is_that_of_training(tmp_path: Path) -> None:
    own = "stages.autoencoder.amp_dtype=float16"
    (sentence,) = unused_settings(make_config(tmp_path, own), "autoencoder")
    assert sentence == "stages.autoencoder.amp_dtype has no effect: stages.autoencoder.amp is off"
    (sentence,) = unused_settings(make_config(tmp_path, own, "training.amp_dtype=float16"), "autoencoder")
    assert sentence == "training.amp_dtype has no effect: training.amp is off"


# --- what a run is trained on --------------------------------------------------------------------------


def test_run_is_not_continued_on_other_data(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    stage = Regression()
    stage.data_identity = lambda: {"waves": {"mean": [0.5, 1.0]}}  # type: ignore[method-assign]
    train(stage, config)
    Trainer(stage, config, device=CPU)
    stage.data_identity = lambda: {"waves": {"mean": [0.5, 1.25]}}  # type: ignore[method-assign]
    with pytest.raises(Exception, match=r"waves\.mean was \[0\.5, 1\.0\] and is \[0\.5, 1\.25\]") as caught:
        Trainer(stage, config, device=CPU)
    assert caught.value.kind == "other_data"  # type: ignore[attr-defined]
    document = json.dumps(records(tmp_path, "start")[0])
    assert "data_identity" not in document
