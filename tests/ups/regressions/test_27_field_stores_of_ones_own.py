"""A store of fields that no build made serves a training; what doesn't serve is named, with what differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ups_store
from ups.data.splits import open_fields
from ups.errors import ConfigError
from ups_store.build import BuildConfig, load_config


def config_of(folder: Path, *overrides: str) -> BuildConfig:
    words = ["data.tasks=burgers1d", f"data.root={folder}", f"cache.dir={folder}", *overrides]
    return load_config(overrides=words)


def write_fields(folder: Path, split: str, identity: dict[str, object]) -> None:
    samples = ({"fields": np.random.default_rng(i).random((5, 16, 1), "f4")} for i in range(4))
    path = folder / f"burgers1d_{split}.zarr.zip"
    ups_store.write(path, samples, identity=identity, attrs={"task": "burgers1d"})


@pytest.mark.parametrize("split", ["train", "val"])
def test_store_that_says_nothing_of_its_selection_serves(tmp_path: Path, split: str) -> None:
    write_fields(tmp_path, split, {"mine": split})
    fields = open_fields(config_of(tmp_path, "data.reduce_space=4"), "burgers1d", split, source="store")
    assert fields.info.grid.points == (16,)


def test_store_of_another_selection_is_named_with_both_values(tmp_path: Path) -> None:
    write_fields(tmp_path, "train", {"reduce_space": 1, "reduce_time": 5})
    with pytest.raises(ConfigError) as caught:
        open_fields(config_of(tmp_path), "burgers1d", "train", source="store")
    assert caught.value.kind == "no_store"
    assert "burgers1d train as configured (its reduce_time is 5, not 1)" in str(caught.value)


def test_missing_store_may_be_of_a_split_without_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="or says if it has no samples"):
        open_fields(config_of(tmp_path), "burgers1d", "val", source="store")
