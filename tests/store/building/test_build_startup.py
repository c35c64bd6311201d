"""What a build's time goes to: seconds by phase, whether everything was reused, and throughput."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from build_helpers import BURGERS, build, result_of, settings, write_burgers

from ups_store.building import command
from ups_store.building.progress import PHASES, BuildReport, Startup, Stopwatch
from ups_store.building.ranks import BuildRank
from ups_store.building.watch import watching


def test_startup_adds_up_phases_and_takes_the_total_of_the_run() -> None:
    clock = Stopwatch()
    clock.add("imports", 0.25)
    clock.add("plan", 0.125)
    found = Startup.of([result_of(), result_of(seconds={"read": 1.5, "total": 4.0})], clock)
    assert tuple(found.seconds) == PHASES
    assert {phase: s for phase, s in found.seconds.items() if s and phase != "total"} == {
        "imports": 0.25,
        "plan": 0.125,
        "digest": 1.0,
        "read": 4.0,
        "commit": 0.5,
    }
    assert found.seconds["total"] < 60  # of the clock, not of the stores


def test_throughput_is_what_was_committed_over_the_time_after_digesting() -> None:
    assert result_of().to_json().items() >= {"samples_per_s": 4.0, "mb_per_s": 2.0}.items()
    half = result_of(num_committed=8, seconds={"total": 2.0})
    found = Startup.of([result_of(), half, result_of(reused=True, num_committed=0)], Stopwatch())
    assert (found.reused, found.samples_per_s, found.mb_per_s) == (False, 4.0, 2.0)


def test_startup_of_valid_stores_says_that_they_were_reused(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    first, second = build(settings(tmp_path)), build(settings(tmp_path))
    assert (first.startup.reused, second.startup.reused) == (False, True)
    assert first.startup.samples_per_s > 0
    assert second.startup.samples_per_s == 0
    assert first.to_json()["startup"]["seconds"]["commit"] > 0
    assert first.startup.seconds["open"] > 0


def test_metrics_are_numbers_under_names_that_runs_are_compared_by() -> None:
    metrics = Startup.of([result_of()], Stopwatch()).metrics()
    assert {f"startup/{phase}_sec" for phase in PHASES} < set(metrics)
    assert (metrics["startup/reused"], metrics["startup/samples_per_s"]) == (0.0, 4.0)
    assert all(isinstance(value, float) for value in metrics.values())


def test_whoever_begins_is_told_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["build", "--tasks", "burgers1d", "--root", "source", "data.limit=3"])
    told: list[object] = []

    def begin(config: Path | None, overrides: Any) -> Any:
        told.append((config, overrides, Path("cache").exists()))
        return told.append

    with pytest.raises(SystemExit):
        command.main(begin=begin)
    assert told[0] == (None, ["data.limit=3"], False)
    assert isinstance(told[1], BuildReport)


def test_manifest_of_several_machines_has_a_name_for_each() -> None:
    path = Path("out/manifest.json")
    assert BuildRank().own_file(path) == path
    assert BuildRank(0, 2, 3, 16).own_file(path) == Path("out/manifest-00003-of-00016.json")


def test_manifest_is_written_by_the_builder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    monkeypatch.chdir(tmp_path)
    words = "build --tasks burgers1d --root source --manifest manifest.json"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit):
        command.main()
    Path("manifest.json").unlink()
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    assert not Path("manifest.json").exists()


def test_warnings_of_others_are_notes(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with watching(settings(tmp_path), log_json=log):
        logging.getLogger("somebody.else").warning("there is no %s; the CPU is used instead", "cuda")
        logging.getLogger("somebody.else").info("nothing")
    logging.getLogger("somebody.else").warning("too late")
    notes = [
        event["message"]
        for event in map(json.loads, log.read_text().splitlines())
        if event["event"] == "note"
    ]
    assert notes == ["somebody.else: there is no cuda; the CPU is used instead"]
