"""Number 35: what others put at a name that they can guess is neither followed nor trusted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store
from hostile_server import give_range, serving

import ups_store

PRECIOUS = b"precious" * 4096


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "a.zarr.zip"
    ups_store.save(path, u=np.arange(20000.0))
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "thesis.txt"
    path.write_bytes(PRECIOUS)
    return path


def killed(*_: object) -> None:
    raise RuntimeError("killed")


def traps(folder: Path, victim: Path, *, is_hard: bool = False) -> None:
    """Put links at the names that a killed transfer has left in a folder and those below it."""
    for left in [path for path in folder.rglob("*") if path.is_file()]:
        left.unlink()
        os.link(victim, left) if is_hard else left.symlink_to(victim)


@pytest.mark.parametrize("is_hard", [False, True])
def test_push_follows_no_link_at_the_name_of_its_copy(
    store: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hard: bool
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with monkeypatch.context() as patched:  # the push is killed before its copy has its name
        patched.setattr("ups_store.system.files.link", killed)
        patched.setattr("ups_store.system.files.remove", killed)
        run_ups_store("push", store, shared)
    assert any(path.is_file() for path in shared.rglob("*"))
    traps(shared, victim, is_hard=is_hard)
    assert run_ups_store("push", store, shared).exit_code == 0
    (pushed,) = shared.glob("*/a.zarr.zip")
    assert (pushed.read_bytes(), victim.read_bytes()) == (store.read_bytes(), PRECIOUS)


@pytest.mark.parametrize("target", ["victim", "nothing"])
def test_pull_follows_no_link_at_the_name_of_its_copy(
    store: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    shared, into = tmp_path / "shared", tmp_path / "into"
    shared.mkdir()
    run_ups_store("push", store, shared)
    with monkeypatch.context() as patched:  # the pull is killed before its copy has its name
        patched.setattr("ups_store.system.files.rename", killed)
        run_ups_store("pull", shared, "--into", into)
    assert [path for path in into.rglob("*") if path.is_file()]
    traps(into, victim if target == "victim" else tmp_path / "nowhere" / "x")
    done = run_ups_store("pull", shared, "--into", into)  # once it went round for ever
    assert "symbolic link" in done.stderr
    assert victim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("depth", [1, 2])
def test_pull_uses_no_folder_that_is_a_link(
    store: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    shared, into = tmp_path / "shared", tmp_path / "into"
    shared.mkdir()
    run_ups_store("push", store, shared)
    with monkeypatch.context() as patched:
        patched.setattr("ups_store.system.files.rename", killed)
        run_ups_store("pull", shared, "--into", into)
    folders = sorted((path for path in into.rglob("*") if path.is_dir()), key=lambda path: len(path.parts))
    folders[depth - 1].rename(tmp_path / "away")
    folders[depth - 1].symlink_to(victim.parent)
    assert "symbolic link" in run_ups_store("pull", shared, "--into", into).stderr
    assert victim.read_bytes() == PRECIOUS


def test_slot_cache_follows_no_link(store: Path, victim: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    content, cache = store.read_bytes(), tmp_path / "slots"
    with serving(lambda request: give_range(request, content)) as url:
        with ups_store.open(f"{url}/a.zarr.zip", cache_dir=cache) as first:
            first.gather([0])
        traps(cache, victim)
        with pytest.warns(UserWarning, match="symbolic link"):
            again = ups_store.open(f"{url}/a.zarr.zip", cache_dir=cache)
        assert again.gather([7])["u"][0] == 7.0
        again.close()
    assert victim.read_bytes() == PRECIOUS
