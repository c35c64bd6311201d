"""`cached`, `save` and `load`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ups_store
from ups_store.writing import wait_for_maker


def test_samples_are_made_once_per_identity(tmp_path: Path) -> None:
    calls = []

    def make() -> list[dict[str, int]]:
        calls.append(1)
        return [{"x": len(calls)}] * 3

    for version in (1, 1, 2, 2):
        with ups_store.cached(tmp_path / "a.zarr.zip", {"version": version}, make) as store:
            assert store["x"].tolist() == [version] * 3
    assert len(calls) == 2
    with pytest.raises(ups_store.IdentityMismatchError):
        ups_store.cached(tmp_path / "a.zarr.zip", {"version": 3}, make, on_mismatch="raise")


WAITER = """
import pathlib, sys, time
import ups_store
def make():
    pathlib.Path(sys.argv[1] + f".made{sys.argv[2]}").touch()
    for i in range(40):
        time.sleep(0.02)
        yield {"x": i}
print(len(ups_store.cached(sys.argv[1], {}, make)))
"""


@pytest.mark.multi_process
def test_processes_that_want_the_same_wait_for_one_that_makes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITER, tmp_path / "a.zarr.zip"]
    running = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("40\n", 0), err
    assert [path.name for path in tmp_path.glob("*.zip")] == ["a.zarr.zip"]


@pytest.mark.parametrize("name", ["cached_in", "write_parts", "StoreSet", "PartsWriter"])
def test_name_that_is_gone_says_what_to_write_instead(name: str) -> None:
    with pytest.raises(AttributeError, match=r"is gone: .*`ups_store\.(cached|write|open)"):
        getattr(ups_store, name)
    assert not hasattr(ups_store, name)


def test_saved_arrays_are_loaded_as_views(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    u, x = np.random.default_rng(0).random((3, 2048)), np.linspace(0, 1, 4)
    clouds = [np.zeros((2, 3)), np.ones((0, 3)), np.ones((1, 3))]
    assert ups_store.save(path, constants={"x": x}, u=u, words=["a", "", "é"], clouds=clouds) == path
    loaded = ups_store.load(path)
    np.testing.assert_array_equal(loaded["u"], u)
    np.testing.assert_array_equal(loaded["x"], x)
    assert not loaded["u"].flags.writeable
    assert [len(cloud) for cloud in loaded["clouds"]] == [2, 0, 1]
    assert list(loaded["words"]) == ["a", "", "é"]


def test_saving_replaces_what_is_there_unless_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    nodes = []
    for options in [{"u": [1, 2]}, {"u": [1, 2]}, {"u": [1, 3]}, {"u": [1, 3], "attrs": {"by": "me"}}]:
        ups_store.save(path, **options)
        nodes.append((path.stat().st_ino, ups_store.open(path).fingerprint))
    assert nodes[0] == nodes[1] != nodes[2] != nodes[3]
    assert ups_store.open(path).attrs["by"] == "me"


def test_turn_that_a_kill_left_beside_a_store_goes_at_the_next_call(tmp_path: Path) -> None:
    path, left = tmp_path / "a.zarr.zip", tmp_path / ".a.zarr.zip.making"
    for _ in range(2):
        ups_store.cached(path, {"version": 1}, lambda: [{"x": 1}]).close()
        assert [*tmp_path.iterdir()] == [path]
        left.write_text("process 1 of a machine")


@pytest.mark.parametrize("call", ["start", "close_on_fork"])
def test_turn_whose_taking_was_interrupted_can_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            wait_for_maker.threading.Thread if call == "start" else wait_for_maker.locks, call, interrupted
        )
        with pytest.raises(KeyboardInterrupt), wait_for_maker.MakerTurn(tmp_path / "a.zarr.zip"):
            pass
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(wait_for_maker, "SILENT_S", 0.0)
    with wait_for_maker.MakerTurn(tmp_path / "a.zarr.zip") as taken:
        assert taken.fd >= 0


def test_turn_whose_file_cannot_be_removed_spoils_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch, wait_for_maker.MakerTurn(tmp_path / "a.zarr.zip"):
        patch.setattr(wait_for_maker.files, "remove", refused)
    with wait_for_maker.MakerTurn(tmp_path / "a.zarr.zip") as taken:
        assert taken.fd >= 0
