"""Training that waits for data: a signal ends the waiting, and the stage's data are closed on every exit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from numbered_batches import numbered_loader
from test_trainer import CPU, Regression, Rows, expect_equal, make_config, records, train

from ups.errors import DivergedError, InterruptedTrainingError
from ups.train.trainer import Trainer

AHEAD = "training.prefetch_factor=2"
_LONG_S = 20.0


class Waiting(Regression):
    """A stage one of whose batches waits until the stage is closed, as one whose trajectories don't come."""

    def __init__(self, number: int, *, ahead: int = 0) -> None:
        super().__init__(ahead=ahead)
        self._waiting_number = number
        self.closed, self.num_closed, self.is_left_waiting = threading.Event(), 0, False

    def batch(self, number: int) -> Rows:
        if number == self._waiting_number:
            self.is_left_waiting = not self.closed.wait(_LONG_S)
            raise RuntimeError("the data were closed")
        return super().batch(number)

    def close(self) -> None:
        self.num_closed += 1
        self.closed.set()


def signal_at(trainer: Trainer, step: int, number: int, *, then: Callable[[], None] | None = None) -> None:
    """In a thread: a signal to this process once training has come to a step and waits there."""

    def work() -> None:
        while trainer.step < step:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), number)
        if then is not None:
            time.sleep(0.7)
            then()

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("batch", "steps"), [(0, []), (3, [3]), (5, [3, 5]), (7, [3, 5, 6, 7])])
def test_signal_while_training_waits_for_data_saves_and_the_next_run_continues(
    tmp_path: Path, number: signal.Signals, batch: int, steps: list[int]
) -> None:
    config = make_config(tmp_path / "parts", AHEAD)
    stage = Waiting(batch, ahead=2)
    trainer = Trainer(stage, config, device=CPU)
    signal_at(trainer, batch, number)
    with pytest.raises(InterruptedTrainingError, match=f"stopped by {number.name} after step {batch} of 10"):
        trainer.fit()
    assert stage.num_closed == 1
    assert not stage.is_left_waiting
    assert [record["step"] for record in records(tmp_path / "parts", "step")] == steps
    through = train(Regression(ahead=2), make_config(tmp_path / "through", AHEAD))
    expect_equal(through, train(Regression(ahead=2), config))


def test_signal_amid_accumulation_waits_for_the_steps_end(tmp_path: Path) -> None:
    config = make_config(tmp_path, AHEAD, "training.accum_steps=2", "stages.autoencoder.steps_per_epoch=4")
    stage = Waiting(7, ahead=2)
    trainer = Trainer(stage, config, device=CPU)
    signal_at(trainer, 3, signal.SIGTERM, then=stage.closed.set)
    with pytest.raises(RuntimeError, match="the data were closed"):
        trainer.fit()
    assert trainer.step == 3
    assert not trainer.state_path.exists()


def test_data_are_closed_after_training_and_after_an_error(tmp_path: Path) -> None:
    stage = Waiting(-1)
    train(stage, make_config(tmp_path / "through"))
    assert stage.num_closed == 1
    stage = Waiting(7, ahead=5)
    stage.bad_batch = 2
    with pytest.raises(DivergedError):
        train(stage, make_config(tmp_path / "error", "training.prefetch_factor=5"))
    assert stage.num_closed == 1


def test_error_of_a_batch_is_no_end_of_the_waiting(tmp_path: Path) -> None:
    def make(number: int) -> Rows:
        raise TimeoutError("disk")

    stage = Regression()
    stage.loader = numbered_loader(make, 2, ahead=1)
    with pytest.raises(TimeoutError, match="disk"):
        train(stage, make_config(tmp_path))
