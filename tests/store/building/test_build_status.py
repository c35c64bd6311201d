"""`ups-store status`: what event logs of builds say of every process, on every machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ups_store

from ups_store.building.watch import BuildWatcher, EventLog
from ups_store.system import files

HERE = os.uname().nodename


def event(kind: str, /, *, at_s: float = 0.0, **details: Any) -> dict[str, Any]:
    """A line of a log; of this process, unless it says otherwise."""
    origin = {"run": "a", "host": HERE, "rank": 0, "pid": os.getpid()}
    return {"time_s": time.time() + at_s, "event": kind, **origin, **details}


def log(path: Path, *events: dict[str, Any], cut: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in events) + cut)
    return path


def begun(**of: Any) -> Iterator[dict[str, Any]]:
    """A build that has read 40 of 100 samples, 10 in a second, and waits for a reader."""
    yield event("start", at_s=-9, **of)
    yield event("stage", at_s=-8, name="reading", total=100, unit="samples", **of)
    yield event("progress", at_s=-4, done=20, waits_for="", **of)
    yield event("progress", at_s=-2, done=40, waits_for="reader 1", **of)


@pytest.fixture
def dead() -> int:
    """The id of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def processes(*paths: Path) -> list[dict[str, Any]]:
    """What `status --json` says, checked to be machine by machine."""
    machines = json.loads(run_ups_store("status", *paths, "--json").stdout)["machines"]
    for machine in machines:
        assert all(
            (each["host"], each["run"]) == (machine["host"], machine["run"]) for each in machine["processes"]
        )
    return [each for machine in machines for each in machine["processes"]]


def test_running_process_has_a_rate_time_left_and_what_it_waits_for(tmp_path: Path) -> None:
    log(tmp_path / "a.jsonl", *begun(), event("note", message="slow disk"), cut='{"time_s": 3, "ev')
    (process,) = processes(tmp_path)
    assert (process["state"], process["stage"], process["done"], process["total"]) == (
        "running",
        "reading",
        40,
        100,
    )
    assert (process["per_second"], process["seconds_left"]) == (10.0, 6.0)
    shown = run_ups_store("status", tmp_path).stdout
    assert (
        f"{HERE} (run a), rank 0, pid {os.getpid()} in a.jsonl: running, reading 40 of 100 samples, " in shown
    )
    assert "10/s, 6 s left, waits for reader 1, last line " in shown
    assert "  warning: slow disk" in shown


def test_process_that_is_gone_without_a_last_line_was_killed(tmp_path: Path, dead: int) -> None:
    log(tmp_path / "a.jsonl", *begun(pid=dead))
    (process,) = processes(tmp_path)
    assert (process["state"], process["seconds_left"]) == ("killed", None)
    assert run_ups_store("status", tmp_path, "--watch").exit_code == 0


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ([event("end", is_done=True)], "finished"),
        (
            [event("error", kind="interrupted", message="interrupted"), event("end", is_done=False)],
            "interrupted",
        ),
        ([event("error", kind="stalled", message="reader 0 hangs"), event("end", is_done=False)], "stalled"),
        ([event("error", kind="disk_full", message="no room"), event("end", is_done=False)], "failed"),
    ],
)
def test_ended_process_says_how(tmp_path: Path, end: list[dict[str, Any]], state: str) -> None:
    log(tmp_path / "a.jsonl", *begun(), *end)
    assert [process["state"] for process in processes(tmp_path)] == [state]
    shown = run_ups_store("status", tmp_path).stdout
    assert ("error: " in shown) == (state != "finished")


def test_silent_process_of_another_machine_is_unknown(tmp_path: Path) -> None:
    log(tmp_path / "a.jsonl", *begun(host="far"), *begun(host="farther", rank=1))
    log(tmp_path / "b.jsonl", event("start", at_s=-3600, host="far", rank=2))
    shown = [(each["host"], each["rank"], each["state"]) for each in processes(tmp_path)]
    assert shown == [("far", 0, "running"), ("far", 2, "unknown"), ("farther", 1, "running")]
    assert "in b.jsonl: unknown, last line " in run_ups_store("status", tmp_path).stdout


def test_process_that_took_the_place_of_another_counts_alone(tmp_path: Path, dead: int) -> None:
    path = log(tmp_path / "a.jsonl", *begun(pid=dead), *begun())
    assert [process["pid"] for process in processes(path)] == [os.getpid()]


def test_log_of_a_build_can_be_read_and_others_are_named(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log" / "build.jsonl") as events, BuildWatcher(log=events) as watcher:
        watcher.stage("reading", 4, unit="samples")
        watcher.advance(4)
    assert [process["stage"] for process in processes(tmp_path / "log")] == ["reading"]
    for wrong in (tmp_path, tmp_path / "absent.jsonl"):
        assert run_ups_store("status", wrong).exit_code == 2
    assert run_ups_store("status", tmp_path / "log", "--json", "--watch").exit_code == 2


def test_watching_ends_when_nothing_runs_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path / "a.jsonl", *begun())
    ends = lambda seconds: log(path, *begun(), event("end", is_done=True))  # noqa: E731
    monkeypatch.setattr("ups_store.cli.status.time.sleep", ends)
    assert "finished" in run_ups_store("status", tmp_path, "--watch").stdout


def test_pipe_is_read_but_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, "".join(json.dumps(each) + "\n" for each in begun()).encode())
    os.close(theirs)
    assert "reading 40 of 100" in run_ups_store("status", f"/dev/fd/{ours}").stdout
    os.close(ours)
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    done = run_ups_store("status", tmp_path / "pipe")
    assert (done.exit_code, "nothing came through the pipe" in done.stderr) == (2, True)
