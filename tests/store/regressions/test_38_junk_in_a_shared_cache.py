"""Number 38: what lies in a shared cache and is no store, or doesn't fit, takes no room and ends no build."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_ups_store

import ups_store
from ups_store.system import files

HASH = "a" * 64


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared" / HASH).mkdir(parents=True)
    return tmp_path / "shared"


def test_junk_is_refused_before_it_is_fetched(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (shared / HASH / "a.zarr.zip").open("wb") as file:
        file.truncate(64 << 20)
    written, write_at = [0], files.write_at

    def counting(fd: int, offset: int, data: Any) -> None:
        written[0] += len(data)
        write_at(fd, offset, data)

    monkeypatch.setattr(files, "write_at", counting)
    done = run_ups_store("pull", shared, f"{HASH}/a", "--into", tmp_path / "into")
    assert done.exit_code == 1
    assert written[0] < 1 << 20
    assert not list((tmp_path / "into").rglob("*"))


@pytest.mark.parametrize("when", ["before", "amid"])
def test_store_that_does_not_fit_leaves_nothing(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = tmp_path / "a.zarr.zip"
    ups_store.save(path, u=np.random.default_rng(0).random(1 << 18))
    run_ups_store("push", path, shared)

    def full(fd: int, offset: int, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if when == "before":
            patched.setattr(files, "free_bytes", lambda folder: 1000)
        else:
            patched.setattr(os, "pwrite", lambda *_: full(0, 0, b""))
        done = run_ups_store("pull", shared, "a", "--into", tmp_path / "into")
    assert done.exit_code == 6
    assert not [each for each in (tmp_path / "into").rglob("*") if each.is_file()]
