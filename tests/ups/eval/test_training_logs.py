"""Logs of a run, read back: seconds, waiting, samples, curves, continuations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ups.config import RunConfig, load_config
from ups.eval.training_logs import data_wait_share, read_stage_logs

CONFIG = {"training": {"accum_steps": 2}}


def write_log(path: Path, records: list[dict[str, Any]], stage: str = "operator") -> None:
    lines = [json.dumps({"stage": stage, **record}) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")


def step(number: int, time: float, *, rate: float, wait: float, loss: float) -> dict[str, Any]:
    rates = {"training/samples_per_sec": rate, "training/data_wait_share": wait}
    return {
        "event": "step",
        "step": number,
        "time": time,
        "loss/one_step": loss,
        "loss/spectral": 1.0,
        **rates,
    }


def one_run(start: float, first: int = 0) -> list[dict[str, Any]]:
    """10 steps of 8 samples, at 40 and 20 a second; the process began 2 s before its log."""
    return [
        {"event": "start", "step": first, "time": start, "config": CONFIG, "global_batch_size": 4},
        {"event": "startup", "step": first + 1, "time": start + 1, "startup/total_startup_time_min": 3 / 60},
        step(first + 5, start + 2, rate=40.0, wait=0.5, loss=0.5),
        step(first + 10, start + 4, rate=20.0, wait=0.0, loss=0.25),
        {"event": "epoch", "step": first + 10, "time": start + 6, "score": 0.1},
    ]


def configure(folder: Path, **training: Any) -> RunConfig:
    overrides = [f"training.{name}={value}" for name, value in training.items()]
    return load_config(overrides=["data.tasks=burgers1d", f"checkpoint.dir={folder}", *overrides])


def test_seconds_are_divided_into_startup_training_and_waiting(tmp_path: Path) -> None:
    write_log(tmp_path / "operator.jsonl", one_run(100.0))
    (log,) = read_stage_logs(configure(tmp_path))
    assert log.seconds == pytest.approx(2 + 6)
    assert log.startup_s == pytest.approx(3)
    assert log.train_s == pytest.approx(40 / 40 + 40 / 20)
    assert log.data_wait_s == pytest.approx(0.5)
    assert log.data_wait_share == pytest.approx(0.5 / 3)
    assert (log.steps, log.samples) == (10, 80)
    assert log.loss == ([5, 10], [1.5, 1.25])
    assert log.score == ([10], [0.1])
    assert log.to_json()["samples"] == 80


def test_work_of_steps_is_the_last_total_and_that_of_its_data_counts_once(tmp_path: Path) -> None:
    def with_work(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        totals = {"training/flops": 10.0, "training/processor_s": 0.5}
        counted = [
            {**record, **{name: value * record["step"] for name, value in totals.items()}}
            for record in records
            if record["event"] == "step"
        ]
        return [{**records[0], "preparation_flops": 7.0}, *counted]

    write_log(tmp_path / "operator.jsonl", with_work(one_run(0.0)))
    write_log(tmp_path / "operator.jsonl", with_work(one_run(100.0, first=10)))
    (log,) = read_stage_logs(configure(tmp_path))
    assert (log.flops, log.preparation_flops, log.processor_s) == (200.0, 7.0, 10.0)


def test_continuation_adds_up_and_a_new_beginning_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "operator.jsonl"
    write_log(path, one_run(0.0))
    write_log(path, one_run(100.0))
    write_log(path, one_run(200.0, first=10))
    (log,) = read_stage_logs(configure(tmp_path))
    assert log.seconds == pytest.approx(8 + 8)
    assert log.steps == 20
    assert log.loss[0] == [5, 10, 15, 20]


def test_steps_that_a_crash_has_repeated_count_every_time(tmp_path: Path) -> None:
    path = tmp_path / "operator.jsonl"
    write_log(path, one_run(0.0))
    write_log(path, one_run(100.0, first=5))  # it was killed at step 10; step 5 had been saved
    (log,) = read_stage_logs(configure(tmp_path))
    assert log.train_s == pytest.approx(2 * (40 / 40 + 40 / 20))
    assert log.data_wait_s == pytest.approx(2 * 0.5)
    assert (log.steps, log.trained_at) == (15, 106.0)


def test_stages_come_in_the_order_of_training_also_from_one_file(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    write_log(path, one_run(100.0), stage="operator")
    write_log(path, one_run(0.0), stage="autoencoder")
    logs = read_stage_logs(configure(tmp_path, log_path=path))
    assert [log.stage for log in logs] == ["autoencoder", "operator"]
    assert data_wait_share(logs) == pytest.approx(sum(log.data_wait_s for log in logs) / 6)


def test_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "operator.jsonl"
    write_log(path, one_run(100.0))
    with path.open("a") as file:
        file.write('{"event": "step", "stage": "oper')
    (log,) = read_stage_logs(configure(tmp_path))
    assert log.steps == 10


def test_no_logs_are_no_stages(tmp_path: Path) -> None:
    assert read_stage_logs(configure(tmp_path)) == []
    assert data_wait_share([]) is None


def test_a_finished_stage_that_is_run_again_was_trained_no_longer(tmp_path: Path) -> None:
    again = [
        {"event": "start", "step": 10, "time": 900.0, "config": CONFIG},
        {"event": "end", "step": 10, "time": 950.0},
    ]
    write_log(tmp_path / "operator.jsonl", [*one_run(100.0), *again])
    (log,) = read_stage_logs(configure(tmp_path))
    assert log.seconds == pytest.approx(2 + 6)
    assert (log.steps, log.samples) == (10, 80)


def test_lines_that_are_no_records_are_told_and_left_out(tmp_path: Path, notes: list[str]) -> None:
    path = tmp_path / "operator.jsonl"
    write_log(path, one_run(100.0))
    with path.open("ab") as file:
        file.write(b'7\n{"event": "step", "stage": "oper\xff')
    (log,) = read_stage_logs(configure(tmp_path))
    assert log.steps == 10
    assert [text.partition(": ")[2].partition(" isn't")[0] for text in notes] == [
        f"{path}: line 6",
        f"{path}: line 7",
    ]
    assert '\'{"event": "step"' in notes[1]
