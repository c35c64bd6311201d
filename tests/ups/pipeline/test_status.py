"""`ups status`: what logs, records and processes say of a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ups

from ups.errors import ConfigError
from ups.pipeline.records import RunFolder
from ups.pipeline.status import read_status

GONE = 2**22 + 1  # no process has such a number (proc_sys_kernel(5), pid_max)


def write_log(path: Path, *lines: dict[str, Any], pid: int | None = None, host: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = {"stage": path.stem, "pid": pid or os.getpid(), "host": host or os.uname().nodename}
    text = "".join(json.dumps({**origin, **line}) + "\n" for line in lines)
    path.write_text(text + '{"event": "st')  # a line that is being written


def trained(*, since_s: float = 100.0) -> list[dict[str, Any]]:
    """10 steps of 40 in the 50 s after the first ones; before, another process had come to step 5."""
    now = time.time()
    begun = {"event": "start", "time": now - since_s - 10, "step": 5, "total_steps": 40}
    rates = {"training/samples_per_sec": 64.0, "training/data_wait_share": 0.25, "training/memory_gib": 1.5}
    return [
        {"event": "start", "time": now - 9000, "step": 0, "total_steps": 40},
        {"event": "warning", "time": now - 8999, "text": "of an earlier process"},
        begun,
        {"event": "warning", "time": now - 60, "text": "training made it worse"},
        {"event": "step", "time": now - 50, "step": 10, "loss/a": 3.0, "loss/b": 4.0, **rates},
        {"event": "epoch", "time": now - 40, "step": 10, "score": 0.5},
        {"event": "step", "time": now, "step": 20, "loss/a": 1.0, "loss/b": 0.5, **rates},
    ]


def test_running_stage_says_step_rates_time_left_and_its_last_warning(tmp_path: Path) -> None:
    write_log(tmp_path / "operator.jsonl", *trained())
    (stage,) = read_status(tmp_path).stages
    assert (stage.state, stage.step, stage.total_steps) == ("running", 20, 40)
    assert stage.seconds_left == pytest.approx(20 * 50 / 10, abs=20)
    assert (stage.samples_per_s, stage.data_wait_share, stage.memory_gib) == (64, 0.25, 1.5)
    assert (stage.loss, stage.score, stage.warning) == (1.5, 0.5, "training made it worse")
    shown = run_ups("status", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("operator: running, step 20 of 40 (50%), 1 min left\n")
    assert "64 samples/s, 25% waiting for data" in shown.stdout
    assert "warning: training made it worse" in shown.stdout
    write_log(tmp_path / "seed-4" / "operator.jsonl", *trained())
    assert f"{tmp_path / 'seed-4' / 'operator'}: running" in run_ups("status", tmp_path).stdout


@pytest.mark.parametrize(
    ("last", "origin", "state"),
    [
        ({"event": "end", "step": 40}, {}, "finished"),
        ({"event": "interrupted", "step": 20}, {}, "interrupted"),
        ({"event": "failed", "error": "no space"}, {}, "failed"),
        ({"event": "step", "step": 21}, {"pid": GONE}, "killed"),
        ({"event": "step", "step": 21}, {"host": "elsewhere"}, "unknown"),
        ({"event": "step", "step": 21, "time": 1e9}, {}, "killed"),  # this process is younger than its line
    ],
)
def test_state_is_the_last_event_or_whether_its_process_is_there(
    last: dict[str, Any], origin: dict[str, Any], state: str, tmp_path: Path
) -> None:
    write_log(tmp_path / "operator.jsonl", *trained(), {"time": time.time(), **last}, **origin)
    (stage,) = read_status(tmp_path).stages
    assert (stage.state, stage.error) == (state, last.get("error"))
    assert (stage.seconds_left is None) == (state != "unknown")


def test_run_is_read_from_its_folder_and_from_that_of_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.log("begin", "validate-config")
        folder.log("end", "validate-config", seconds=1.5, exit_code=0)
        folder.log("begin", "dry-run")
        folder.log("end", "dry-run", seconds=1.0, exit_code=6)
        folder.log("begin", "operator")
        write_log(tmp_path / "operator.jsonl", *trained())
        found = read_status(tmp_path)
        assert found.holder == f"process {os.getpid()} of {os.uname().nodename}"
        assert [(node.node, node.state, node.exit_code) for node in found.nodes] == [
            ("validate-config", "done", 0),
            ("dry-run", "failed", 6),
            ("operator", "running", None),
        ]
        inside = read_status(folder.path)
        assert (inside.folder, inside.stages[0].stage) == (str(folder.path), "operator")
    after = json.loads(run_ups("status", folder.path, "--json").stdout)
    assert (after["holder"], after["nodes"][-1]["state"]) == (None, "killed")
    with folder.locked(timeout_s=0):  # looking has left no lock
        pass


def test_missed_gate_is_no_failure_and_names_are_apart_from_states(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        for name, code in (("operator", 0), ("student", 10)):
            folder.log("begin", name)
            folder.log("end", name, seconds=1.0, exit_code=code)
    missed = {"event": "gate_missed", "time": time.time(), "step": 40, "verdicts": []}
    failed = {"event": "failed", "time": time.time(), "error": "crps = 2, expected less than 1"}
    write_log(tmp_path / "student.jsonl", *trained(), missed, failed)
    found = read_status(tmp_path)
    assert [node.state for node in found.nodes] == ["done", "gate_missed"]
    assert [stage.state for stage in found.stages] == ["gate_missed"]
    lines = run_ups("status", tmp_path).stdout.splitlines()
    assert lines[1:3] == ["  operator  done  1 s", "  student   gate missed  1 s"]
    assert lines[3].startswith("student: gate missed, step 40 of 40")
    assert "  error: crps = 2, expected less than 1" in lines


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected <stage>.jsonl or run.jsonl, found neither"):
        read_status(tmp_path)
    assert run_ups("status", tmp_path / "nowhere").exit_code == 2
