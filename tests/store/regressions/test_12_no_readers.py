"""Point 12: `num_workers: 0` switched off every deadline, and a source that never opens hung the build."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_helpers import BURGERS, write_burgers
from command_line import run_ups_store
from hanging_files import hanging

from ups_store import ReadTimeoutError
from ups_store.build import load_config, open_build

QUICK = ("reading.open_timeout_s=0.3", "reading.timeout_s=0.3", "reading.retries=0")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / BURGERS
    write_burgers(path, num_samples=4)
    return path


@pytest.mark.parametrize("words", ["--num-workers 0", "--no-parallel"])
def test_build_with_no_readers_gives_up_a_source_that_never_opens(source: Path, words: str) -> None:
    said = ["build", "--tasks", "burgers1d", "--root", source.parent, "--source-digest", "sampled"]
    with hanging(source):
        done = run_ups_store(*said, *words.split(), "--stall-warning", "0.1", *QUICK)
    assert done.exit_code == 4
    assert source.name in done.stderr
    assert "no progress for" in done.stderr  # and meanwhile a thread says where it stands


def test_build_without_readers_of_the_caller_gives_up_a_source_that_never_opens(source: Path) -> None:
    config = load_config(overrides=["data.tasks=burgers1d", f"data.root={source.parent}", *QUICK])
    with hanging(source), pytest.raises(ReadTimeoutError, match=source.name):
        open_build(config, "burgers1d", "train")
