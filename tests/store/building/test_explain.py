"""`build --dry-run` says what the build then does, and writes nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, interrupt_after, settings, write_burgers
from command_line import run_build
from pdebench_files import T, X

import ups_store
from ups_store.building import read
from ups_store.building.config import BuildConfig
from ups_store.building.decide import Explanation
from ups_store.building.stores import explain_all
from ups_store.errors import BuildInterruptedError, StoreError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.recovery import building_path
from ups_store.system import files, locks

NAME = "burgers1d_train.zarr.zip"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildConfig:
    """16 samples, committed one by one."""
    monkeypatch.setattr(read, "BATCH_BYTES", 1)
    write_burgers(tmp_path / "source" / BURGERS)
    return settings(tmp_path, split="train")


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file below a folder with inode, length and time."""
    stats = {str(path): path.stat() for path in folder.rglob("*")}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def explain(config: BuildConfig, watcher: Recorder | None = None, *, overwrite: bool = False) -> Explanation:
    """The explanation of the only store; checks that nothing was written."""
    folder = Path(config.data.root).parent
    before = state_of(folder)
    (explained,) = explain_all(config, watcher=watcher or Recorder(), overwrite=overwrite)
    assert state_of(folder) == before
    return explained


def interrupt(config: BuildConfig, num_samples: int) -> None:
    with pytest.raises(BuildInterruptedError):
        build(config, interrupt_after(num_samples))


def with_keys(config: BuildConfig, **keys: Any) -> BuildConfig:
    return settings(Path(config.data.root).parent, split="train", **keys)


def test_store_of_another_configuration_would_be_rebuilt(config: BuildConfig) -> None:
    build(config)
    other = with_keys(config, reduce_time=2)
    found = explain(other)
    assert found.action == "rebuild"
    assert found.differences["content.reduce_time"] == (1, 2)
    assert "content.reduce_time" in str(found)
    assert not build(other).stores[0].reused


def test_store_of_changed_sources_would_be_rebuilt(config: BuildConfig) -> None:
    build(config)
    fields = np.ones((20, T, X), np.float32)
    write_burgers(Path(config.data.root) / BURGERS, fields=fields)
    found = explain(config)
    assert found.action == "rebuild"
    assert any("digest" in key for key in found.differences)


def test_unfinished_store_would_be_continued(config: BuildConfig) -> None:
    interrupt(config, 5)
    found = explain(config)
    assert (found.action, found.reason) == ("continue", "unfinished, 5 of 16 samples committed")
    assert build(config).stores[0].num_committed == 11


def test_unfinished_store_of_another_configuration_is_refused(config: BuildConfig) -> None:
    interrupt(config, 5)
    other = with_keys(config, reduce_time=2)
    found = explain(other)
    assert (found.action, "content.reduce_time" in found.differences) == ("refuse", True)
    with pytest.raises(StoreError):
        build(other)


def test_unfinished_store_without_samples_is_replaced(config: BuildConfig) -> None:
    interrupt(config, 0)
    other = with_keys(config, reduce_time=2)
    assert explain(other).action == "build"
    assert build(other).stores[0].num_committed == 16


def test_damaged_files_are_made_again_and_those_of_other_programs_refused(config: BuildConfig) -> None:
    build(config)
    path = config.cache.dir / NAME
    os.truncate(path, 5000)
    assert explain(config).action == "rebuild"
    assert build(config).stores[0].num_committed == 16
    path.unlink()
    building_path(path).write_bytes(b"something else")
    assert explain(config).action == "refuse"
    with pytest.raises(StoreError):
        build(config)


def test_folder_in_its_place_is_refused(config: BuildConfig) -> None:
    (config.cache.dir / NAME).mkdir(parents=True)
    assert explain(config).action == "refuse"
    with pytest.raises(StoreError):
        build(config)


@pytest.mark.parametrize("place", ["cache", "cache/of/mine"])
def test_file_in_the_place_of_the_folder_is_refused(config: BuildConfig, place: str) -> None:
    folder = Path(config.data.root).parent
    (folder / "cache").write_text("")
    other = with_keys(config, cache_dir=str(folder / place))
    found = explain(other)
    assert found.action == "refuse"
    assert found.reason == f"{folder / 'cache'} is no folder; check cache.dir"
    with pytest.raises(StoreError):
        build(other)


@pytest.fixture
def read_only(config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stores, which this user can't write to (root could, whatever its mode)."""
    folder, access = config.cache.dir, os.access
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    return folder


def test_folder_that_cannot_be_written_is_refused(config: BuildConfig, read_only: Path) -> None:
    for other in (config, with_keys(config, cache_dir=str(read_only / "inner"))):
        found = explain(other)
        assert found.action == "refuse"
        assert found.reason == f"can't write into {read_only}; check cache.dir"


def test_valid_store_in_a_folder_that_cannot_be_written_would_be_reused(
    config: BuildConfig, read_only: Path
) -> None:
    build(config)
    assert explain(config).action == "reuse"
    assert explain(config, overwrite=True).action == "refuse"


def test_store_that_is_being_built_is_refused(config: BuildConfig) -> None:
    interrupt(config, 5)
    build(config)
    path = config.cache.dir / NAME
    shutil.copy(path, path.with_name("kept"))
    with ups_store.open(path) as store:
        path.unlink()
        content = store.identity
        arrays, constants, dims = store.arrays, store.constants, store.dims
        dims = {name: dims[name] for name in constants}
        with ups_store.create(path, arrays, constants=constants, dims=dims, identity=content):
            found = explain(config)
    assert (found.action, f"pid {os.getpid()}" in found.reason) == ("refuse", True)


def test_sources_are_not_read_where_nothing_is_there_to_compare_with(config: BuildConfig) -> None:
    watcher = Recorder()
    assert explain(config, watcher).action == "build"
    assert watcher.stages == []


def test_overwrite_of_a_store_that_is_being_built_is_refused(config: BuildConfig) -> None:
    interrupt(config, 5)
    assert explain(config, overwrite=True).action == "rebuild"
    fd = files.open_existing(building_path(config.cache.dir / NAME), writable=True)
    try:
        assert locks.try_lock(fd, BUILDER_LOCK)
        found = explain(config, overwrite=True)
    finally:
        files.close(fd)
    assert (found.action, "being built by pid" in found.reason) == ("refuse", True)


def test_size_that_is_told_is_that_of_the_file(config: BuildConfig) -> None:
    found = explain(config)
    (built,) = build(config).stores
    assert found.plan["nbytes"] == built.nbytes == built.path.stat().st_size


def test_ranks_of_several_machines_are_told_of_their_partitions(
    config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    found = explain(config)
    assert Path(found.plan["path"]).name == "burgers1d_train-00001-of-00002.zarr.zip"
    assert found.plan["num_samples"] == 8
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert explain_all(config, watcher=Recorder()) == []  # local rank 0 tells


@pytest.mark.parametrize("flag", ["--dry-run", "--explain"])
def test_flag_prints_a_line_or_json(flag: str, config: BuildConfig) -> None:
    root, where = Path(config.data.root), config.cache.dir / NAME
    words = ["--tasks", "burgers1d", "--splits", "train", "--root", root, flag]
    words += ["--cache-dir", config.cache.dir]
    line = f"burgers1d train: build: there is none yet, 16 samples, 21.4 kB, {where}\n"
    assert run_build(*words).stdout == line
    (document,) = json.loads(run_build(*words, "--json").stdout)
    assert (document["action"], document["num_samples"], document["path"]) == ("build", 16, str(where))
    assert document["sources"] == {str(root / BURGERS): [2, 18]}
    assert not config.cache.dir.exists()
