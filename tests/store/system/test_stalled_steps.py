"""Threads that look at something, and the end of a process that doesn't get on, without ending this one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ups_store.system import stalls
from ups_store.system.stalls import STALLED, DeadlineThread, LookingThread, listening_to_stalls

A_MINUTE_S = 60.0  # what is waited for at most, on a busy machine


class EndError(BaseException):
    """Takes the place of the end of the process."""


class Counting(LookingThread):
    """Looks three times."""

    def __init__(self, **options: Any) -> None:
        super().__init__("counting", **options)
        self.num_looks = 0
        self.is_over = threading.Event()

    def _look(self) -> bool:
        self.num_looks += 1
        if self.num_looks == 3:
            self.is_over.set()
        return self.num_looks < 3


class Watch(DeadlineThread):
    """A deadline thread whose records are lists, and may fail."""

    def __init__(self, path: Path, *, fails: bool = False) -> None:
        super().__init__("watch", path=path, shortest_s=None)
        self.fails, self.recorded = fails, []

    def _error(self, what: str, allowed_s: float) -> Exception:
        return TimeoutError(f"{what} took more than {allowed_s:g} s")

    def _state(self) -> str:
        if self.fails:
            raise RuntimeError
        return super()._state() + "state\n"

    def _record(self, error: Exception) -> None:
        super()._record(error)
        self.recorded.append(error)
        if self.fails:
            raise RuntimeError


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended."""
    codes: list[int] = []

    def end(code: int) -> NoReturn:
        codes.append(code)
        raise EndError

    monkeypatch.setattr(os, "_exit", end)
    return codes


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_thread_ends_with_the_block_and_can_be_used_again(is_waited_for: bool) -> None:
    looking = Counting(every_s=3600.0, is_waited_for=is_waited_for)
    for _ in range(2):
        with looking:
            (thread,) = (each for each in threading.enumerate() if each.name == "counting")
        thread.join(A_MINUTE_S)
        assert not thread.is_alive()
    assert looking.num_looks == 0


def test_what_is_over_in_time_ends_nothing(tmp_path: Path, ended: list[int]) -> None:
    watch = Watch(tmp_path / "stacks")
    watch.allow("a read", 3600.0)
    watch.allow("a step", -1.0, slot="step")
    watch.allow("a step", 3600.0, slot="step")
    watch.allow("a write", -1.0, slot="disk")
    watch.rest(slot="disk")
    watch.rest(slot="nothing")
    assert watch._look()
    assert (ended, watch.recorded) == ([], [])


@pytest.mark.parametrize("fails", [False, True])
def test_stall_leaves_stacks_and_calls_the_listeners_before_the_end(
    tmp_path: Path, ended: list[int], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, heard = Watch(tmp_path / "stacks", fails=fails), []

    def listener(error: BaseException) -> None:
        heard.append(str(error))
        if fails:
            raise RuntimeError

    with listening_to_stalls(listener), (tmp_path / "stderr").open("w") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr)
        watch.allow("a step", -1.0)
        with pytest.raises(EndError):
            watch._look()
    assert ended == [STALLED]
    assert heard == [str(error) for error in watch.recorded] == ["a step took more than -1 s"]
    for name in ("stderr", "stacks"):
        written = (tmp_path / name).read_text()
        assert written.startswith("error: a step took more than -1 s\n")
        assert "in test_stall_leaves_stacks_and_calls_the_listeners_before_the_end" in written
    assert ("state\n" in (tmp_path / "stacks").read_text()) is not fails
    assert stalls._before_end == []


def test_stall_ends_the_process_where_nothing_can_be_written(
    tmp_path: Path, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stderr, as of a service, no folder, and streams that are closed."""
    closed = (tmp_path / "closed").open("w")
    closed.close()
    for name, stream in (("__stderr__", None), ("stdout", closed), ("stderr", closed)):
        monkeypatch.setattr(sys, name, stream)
    watch = Watch(tmp_path / "absent" / "stacks")
    watch.allow("a step", -1.0)
    with pytest.raises(EndError):
        watch._look()
    assert (ended, len(watch.recorded)) == ([STALLED], 1)


def test_last_words_that_never_come_hold_the_end_up_for_a_while_only(
    tmp_path: Path, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "_LAST_WORDS_S", 0.01)
    never = threading.Event()
    watch = Watch(tmp_path / "stacks")
    monkeypatch.setattr(watch, "_last_words", lambda error: never.wait(A_MINUTE_S))
    watch.allow("a step", -1.0)
    with pytest.raises(EndError):
        watch._look()
    assert ended == [STALLED]
    never.set()


class Looked(Watch):
    """Says when it has looked."""

    def __init__(self, path: Path) -> None:
        DeadlineThread.__init__(self, "watch", path=path, shortest_s=0.02)
        self.looked = threading.Event()

    def _look(self) -> bool:
        self.looked.set()
        return super()._look()


def test_deadline_thread_looks_by_itself(tmp_path: Path, ended: list[int]) -> None:
    with Looked(tmp_path / "stacks") as watch:
        watch.allow("a step", 3600.0)
        assert watch.looked.wait(A_MINUTE_S)
    assert ended == []
