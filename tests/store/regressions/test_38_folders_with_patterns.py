"""Folders and names may have characters that mean something in patterns of names."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_helpers import BURGERS, build, settings, write_burgers

import ups_store


@pytest.mark.parametrize("folder", ["plain", "out[1]", "a*b", "q?x"])
def test_partitioned_build_works_in_any_folder(tmp_path: Path, folder: str) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    config = settings(tmp_path, split="train", cache_dir=str(tmp_path / folder), cache_partitions=2)
    (result,) = build(config).stores
    with ups_store.open(result.path) as store:
        assert (len(store), result.num_files) == (16, 2)
    assert build(config).stores[0].reused


def test_partitions_open_by_a_name_with_brackets(tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"a[1]-0000{number}-of-00002.zarr.zip"
        arrays = {"u": ups_store.ArraySpec((2,), "float32")}
        with ups_store.create(path, arrays, identity={}, partition=(number, 2)) as writer:
            writer.commit_many([0, 1], {"u": [number, number]})
            writer.finish()
    assert len(ups_store.open(tmp_path / "a[1]-*-of-00002.zarr.zip")) == 4
