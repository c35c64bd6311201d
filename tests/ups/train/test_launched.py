"""The start is counted from the launch of a command, whichever process a stage is trained in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from test_trainer import Regression, make_config, records, train

from ups.eval.training_logs import read_stage_log
from ups.train.launched import (
    EARLIER_SECONDS,
    STARTUP_VARIABLE,
    before_stage,
    hand_over,
    launched_at,
    of_stores,
    restored,
    with_stores,
)
from ups.train.meter import StartupClock
from ups.train.tracking import CACHE_MINUTES, CACHE_REUSED, STARTUP_MINUTES


def test_process_learns_of_the_launch_and_of_stores() -> None:
    stores = of_stores(120.0, is_reused=False)
    with restored(STARTUP_VARIABLE):
        hand_over(1000.0, stores)
        assert launched_at(1300.0) == 1000.0
        assert before_stage(1300.0) == {CACHE_MINUTES: 2.0, CACHE_REUSED: 0.0, EARLIER_SECONDS: 300.0}
    assert launched_at(1300.0) == 1300.0
    assert before_stage(1300.0) == {EARLIER_SECONDS: 0.0}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"launched_at": []}'])
def test_what_can_not_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(STARTUP_VARIABLE, text)
    assert launched_at(1300.0) == 1300.0


def test_minutes_of_several_stores_add_up() -> None:
    fields = with_stores({"startup/imports_sec": 1.0}, of_stores(60.0, is_reused=True))
    both = with_stores(fields, of_stores(30.0, is_reused=False))
    assert both == {"startup/imports_sec": 1.0, CACHE_MINUTES: 1.5, CACHE_REUSED: 0.0}


def test_total_counts_from_the_launch_and_the_log_knows_the_stage_s_own_start(tmp_path: Path) -> None:
    launched = time.time() - 600
    clock = StartupClock(began=launched, before={EARLIER_SECONDS: 500.0, "startup/cache_sec": 90.0})
    train(Regression(), make_config(tmp_path), startup=clock)
    (startup,) = records(tmp_path, "startup")
    assert startup[STARTUP_MINUTES] * 60 >= 600
    assert 0 <= startup["startup/imports_sec"] < 60
    log = read_stage_log(tmp_path / "autoencoder.jsonl", "autoencoder")
    assert log is not None
    assert 100 <= log.startup_s < 160
