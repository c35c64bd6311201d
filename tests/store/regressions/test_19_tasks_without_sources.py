"""A task that was asked for and has no sources ends a build with exit code 3, unless it may be missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers
from command_line import run_ups_store

from ups_store.errors import SourceError


def test_build_of_a_task_without_sources_ends_before_others_are_built(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    config = settings(tmp_path, tasks=["burgers1d", "advection1d"], split=["train", "val"])
    with pytest.raises(SourceError) as caught:
        build(config)
    assert (caught.value.kind, caught.value.exit_code) == ("no_source", 3)
    assert ("advection1d" in str(caught.value), "--skip-missing" in str(caught.value)) == (True, True)
    assert list(config.cache.dir.glob("*.zarr.zip")) == []
    watcher = Recorder()
    report = build(config, watcher, skip_missing=True)
    assert ([result.task for result in report.stores], len(report.skipped)) == (["burgers1d"] * 2, 2)
    assert sum("skipped advection1d" in note for note in watcher.notes) == 2


def test_command_says_so_when_it_is_quiet_too(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    words = ["build", "-q", "--tasks", "burgers1d", "advection1d", "--root", tmp_path / "source"]
    words += ["--cache-dir", tmp_path / "cache", "--num-workers", "0", "--split", "train"]
    done = run_ups_store(*words)
    assert (done.exit_code, "advection1d" in done.stderr) == (3, True)
    done = run_ups_store(*words, "--skip-missing")
    assert (done.exit_code, (tmp_path / "cache/burgers1d_train.zarr.zip").exists()) == (0, True)
