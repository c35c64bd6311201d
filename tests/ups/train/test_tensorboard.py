"""TensorBoard's events hold the numbers of the log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_trainer import Regression, make_config, records, train

from ups.errors import MissingExtraError
from ups.train.run import run_stage


def test_events_are_the_numbers_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(Regression(), make_config(tmp_path, "logging.tensorboard.enabled=true"))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "autoencoder")).Reload()
    losses = [(record["step"], record["loss/error"]) for record in records(tmp_path, "step")]
    found = [(event.step, event.value) for event in events.Scalars("loss/error")]
    assert found == [(step, pytest.approx(loss)) for step, loss in losses]
    assert [event.step for event in events.Scalars("training/epoch_time_sec")] == [5, 10]
    (score,) = events.Scalars("report/score")
    assert score.value == pytest.approx(records(tmp_path, "end")[0]["report"]["score"])


def test_missing_writer_names_the_extra_before_data_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = make_config(tmp_path, "logging.tensorboard.enabled=true", "data.root=nowhere")
    with pytest.raises(MissingExtraError, match=r"pip install 'ups-store\[tensorboard\]'"):
        run_stage("autoencoder", config)
