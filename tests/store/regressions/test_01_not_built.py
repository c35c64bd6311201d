"""A build replaces, unasked, only what a build made: stores that can't be made again stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers

import ups_store
from ups_store.build import BuildConfig, open_build
from ups_store.building.decide import explain
from ups_store.errors import ConfigError

NAME = "burgers1d_train.zarr.zip"


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    write_burgers(tmp_path / "source" / BURGERS)
    return settings(tmp_path, split="train")


def refused(config: BuildConfig, kind: str) -> None:
    """See that a build, and what explains it, leave what is there as it is."""
    before = {path: path.read_bytes() for path in config.cache.dir.glob("*.zarr.zip")}
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert (caught.value.kind, caught.value.exit_code) == (kind, 2)
    assert "--overwrite" in str(caught.value)
    assert explain(open_build(config, "burgers1d", "train")).action == "refuse"
    assert {path: path.read_bytes() for path in config.cache.dir.glob("*.zarr.zip")} == before


@pytest.mark.parametrize("identity", [{"mine": 1}, {"kind": "fields", "task": "burgers1d", "split": "train"}])
def test_store_of_the_users_own_is_replaced_by_overwrite_only(
    config: BuildConfig, identity: dict[str, object]
) -> None:
    config.cache.dir.mkdir()
    samples = ({"fields": np.full((3, 4), i, "f4")} for i in range(5))
    ups_store.write(config.cache.dir / NAME, samples, identity=identity)
    refused(config, "not_built")
    assert build(config, overwrite=True).stores[0].num_samples == 16


def test_imported_folder_of_pt_files_stays(config: BuildConfig, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    config.cache.dir.mkdir()
    (tmp_path / "old").mkdir()
    for number in range(3):
        torch.save({"latent": torch.ones(2, 4, 3)}, tmp_path / "old" / f"sample_{number:05d}.pt")
    from ups_store.convert.import_pt import import_pt

    import_pt(tmp_path / "old", config.cache.dir / NAME)
    refused(config, "not_built")


def test_partition_of_the_users_own_stays(config: BuildConfig) -> None:
    config.cache.dir.mkdir()
    arrays = {"fields": ups_store.ArraySpec((2, 3), "float32")}
    path = config.cache.dir / "burgers1d_train-00001-of-00003.zarr.zip"
    with ups_store.create(path, arrays, identity={"mine": 1}, partition=(1, 3)) as writer:
        writer.commit_many(range(2), {"fields": np.zeros((2, 3), "f4")})
        writer.finish()
    refused(config, "not_built")


def test_limit_leaves_a_store_of_more_samples(config: BuildConfig, tmp_path: Path) -> None:
    build(config)
    refused(settings(tmp_path, split="train", limit=7), "larger_store")
    (tmp_path / "cache" / NAME).unlink()
    assert build(settings(tmp_path, split="train", limit=7)).stores[0].num_samples == 7
    assert build(config).stores[0].num_samples == 16


def test_files_beside_the_stores_stay_whatever_they_are_called(config: BuildConfig) -> None:
    config.cache.dir.mkdir()
    kept = config.cache.dir / f"{NAME}.building.mine"
    kept.write_bytes(b"mine")
    build(config)
    assert kept.read_bytes() == b"mine"


def test_store_that_a_build_made_is_replaced_as_before(config: BuildConfig, tmp_path: Path) -> None:
    build(config)
    watcher = Recorder()
    (result,) = build(settings(tmp_path, split="train", reduce_time=2), watcher).stores
    assert (result.num_committed, "rebuilding" in watcher.notes[0]) == (16, True)
