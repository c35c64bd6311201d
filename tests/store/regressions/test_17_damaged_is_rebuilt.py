"""A damaged store that a build made doesn't stop builds: it is set aside, and made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_helpers import BURGERS, Recorder, build, interrupt_after, settings, write_burgers
from small_stores import flip

from ups_store.build import BuildConfig
from ups_store.errors import BuildInterruptedError

NAME = "burgers1d_train.zarr.zip"


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    write_burgers(tmp_path / "source" / BURGERS)
    return settings(tmp_path, split="train")


@pytest.mark.parametrize("damage", ["cut", "metadata", "directory"])
def test_damaged_store_is_set_aside_and_made_again(config: BuildConfig, damage: str) -> None:
    build(config)
    path = config.cache.dir / NAME
    good = path.read_bytes()
    if damage == "cut":
        os.truncate(path, len(good) // 2)
    else:
        flip(path, 100 if damage == "metadata" else len(good) - 200)
    bad = path.read_bytes()
    watcher = Recorder()
    (result,) = build(config, watcher).stores
    assert (result.reused, result.num_committed, path.read_bytes() == good) == (False, 16, True)
    assert path.with_name(f"{NAME}.damaged").read_bytes() == bad
    assert (
        len([note for note in watcher.notes if "set aside as burgers1d_train.zarr.zip.damaged" in note]) == 1
    )
    os.truncate(path, 5000)
    build(config)
    assert path.with_name(f"{NAME}.damaged2").stat().st_size == 5000  # the first one isn't lost


def test_damaged_unfinished_store_is_set_aside(config: BuildConfig) -> None:
    with pytest.raises(BuildInterruptedError):
        build(config, interrupt_after(3))
    unfinished = config.cache.dir / f"{NAME}.building"
    os.truncate(unfinished, 6000)
    (result,) = build(config).stores
    assert result.num_committed == 16
    assert unfinished.with_name(f"{NAME}.building.damaged").exists()


def test_damaged_file_of_several_is_made_again_alone(config: BuildConfig, tmp_path: Path) -> None:
    several = settings(tmp_path, split="train", cache_partitions=2)
    build(several)
    path = config.cache.dir / "burgers1d_train-00001-of-00002.zarr.zip"
    os.truncate(path, 5000)
    (result,) = build(several).stores
    assert (result.num_committed, result.num_samples) == (8, 16)
    assert path.with_name(f"{path.name}.damaged").exists()
