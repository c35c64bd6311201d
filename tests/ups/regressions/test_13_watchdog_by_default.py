"""A training that hangs ends with stacks, unless one says that it may; one that was stopped goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from field_runs import field_run, prepared_fields, train
from torch.optim.optimizer import register_optimizer_step_post_hook

from ups.config import load_config
from ups_store.system import stalls

__all__ = ["field_run", "prepared_fields"]


@pytest.mark.usefixtures("field_run")
@pytest.mark.parametrize(("words", "is_watched"), [((), True), (("training.stall_timeout_s=null",), False)])
def test_training_is_watched_unless_it_is_said(words: tuple[str, ...], is_watched: bool) -> None:
    names = set[str]()
    told = register_optimizer_step_post_hook(
        lambda *step: names.update(thread.name for thread in threading.enumerate())
    )
    try:
        assert train("stages.operator.epochs=1", *words).exit_code == 0
    finally:
        told.remove()
    assert ("stall-watch" in names) is is_watched


def test_default_is_ten_minutes() -> None:
    assert load_config(overrides=["data.tasks=burgers1d"]).training.stall_timeout_s == 600


def test_time_for_which_the_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, ended = threading.Event(), list[str]()
    stopped_s, clock = [0.0], time.monotonic

    class Watch(stalls.DeadlineThread):
        def _error(self, what: str, allowed_s: float) -> Exception:
            ended.append(what)
            raise SystemExit  # of the thread

        def _look(self) -> bool:
            looked.set()
            return super()._look()

    monkeypatch.setattr(stalls.time, "monotonic", lambda: clock() + stopped_s[0])
    with Watch("watch", path=tmp_path / "stacks.txt", shortest_s=2.0) as watch:
        watch.allow("a step", 600.0)
        stopped_s[0] = 3600.0
        looked.clear()
        assert looked.wait(60)
        looked.clear()
        assert looked.wait(60)  # the look before is over
    assert ended == []
