"""Stores from before format 1.0 was released: a build makes them again (spec 10.4)."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers
from small_stores import write_building_before_1_0

import ups_store
from ups_store.building.config import BuildConfig
from ups_store.errors import FormatError

NAME = "burgers1d_train.zarr.zip"
COMMENT = b'{"format":"ups_store","version":"1.0"}'


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    write_burgers(tmp_path / "source" / BURGERS)
    return settings(tmp_path, split="train")


def test_build_makes_a_finished_store_from_before_again_and_says_so(config: BuildConfig) -> None:
    build(config, Recorder())
    path = config.cache.dir / NAME
    good = path.read_bytes()
    path.write_bytes(good[:-32] + struct.pack("<H", len(COMMENT)) + COMMENT)
    with pytest.raises(FormatError) as caught:
        ups_store.open(path)
    assert caught.value.kind == "before_1_0"
    watcher = Recorder()
    (result,) = build(config, watcher).stores
    assert (result.reused, result.num_committed) == (False, 16)
    assert any("before format 1.0" in note for note in watcher.notes)
    assert path.read_bytes() == good


def test_build_begins_an_unfinished_store_from_before_again(config: BuildConfig) -> None:
    config.cache.dir.mkdir(parents=True, exist_ok=True)
    building = write_building_before_1_0(config.cache.dir / f"{NAME}.building")
    with pytest.raises(FormatError) as caught:
        ups_store.open(config.cache.dir / NAME, partial=True)
    assert caught.value.kind == "before_1_0"
    (result,) = build(config, Recorder()).stores
    assert (result.num_committed, building.exists()) == (16, False)
