"""Number 41: what a killed pull, or a killed `cached`, leaves for ever goes with `gc`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store

import ups_store
from ups_store.system import files


def gc(folder: Path, *flags: str) -> list[str]:
    done = run_ups_store("gc", folder, "--json", *flags)
    assert done.exit_code == 0, done.output
    return sorted(json.loads(line)["kind"] for line in done.stdout.splitlines())


def test_gc_removes_what_a_killed_pull_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shared, into = tmp_path / "a.zarr.zip", tmp_path / "shared", tmp_path / "into"
    ups_store.save(path, u=np.arange(5000.0))
    shared.mkdir()
    run_ups_store("push", path, shared)

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(files, "rename", killed)
        run_ups_store("pull", shared, "--into", into)
    kinds = gc(into)
    assert kinds
    assert set(kinds) == {"pull"}
    assert gc(into, "--delete") == kinds  # it would be continued, so it stays
    assert gc(into) == kinds
    gc(into, "--delete", "--unfinished")
    assert list(into.iterdir()) == []


def test_gc_removes_the_lock_of_a_killed_cached_and_no_file_of_others(tmp_path: Path) -> None:
    left, foreign = tmp_path / ".a.zarr.zip.making", tmp_path / ".film.making"
    left.write_text("process 1 of host")
    foreign.write_text("of")
    assert gc(tmp_path, "--delete") == ["foreign", "temporary"]
    assert list(tmp_path.iterdir()) == [foreign]
