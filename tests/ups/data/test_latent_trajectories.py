"""Latents in the place of fields: from a store, or from the partitions that several machines made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from latent_runs import T, write_latent_run
from operator_runs import build

from ups.config import load_config
from ups.data.fields import Fields
from ups.data.splits import open_latent_fields
from ups.errors import ConfigError
from ups_store.errors import StoreNotFoundError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = (
        "data: {task: burgers1d, root: data, split: train}\n"
        "latent: {dim: 4, tokens: 4}\n"
        "training: {num_workers: 0}\n"
    )
    monkeypatch.chdir(tmp_path)
    return write_latent_run(tmp_path, num_samples=20, config=config)


def build_latents(folder: Path, latents: str) -> None:
    build(folder, f"training.latent_cache_dir={latents}")


def open_latents(folder: Path, latents: str) -> Fields:
    config = load_config(folder / "run.yaml", overrides=[f"training.latent_cache_dir={latents}"])
    return open_latent_fields(config, "burgers1d", "train")


def test_partitions_of_latents_are_found_and_read_as_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_latents(folder, "whole")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        build_latents(folder, "parts")
    assert not (folder / "parts" / "burgers1d_train.zarr.zip").exists()
    whole, parts = open_latents(folder, "whole"), open_latents(folder, "parts")
    samples = np.array([15, 0, 8, 7])
    steps = np.array([0, T - 1, 2, 3])
    np.testing.assert_array_equal(parts.read("fields", samples, steps), whole.read("fields", samples, steps))
    assert parts.info == whole.info
    np.testing.assert_array_equal(parts.parameters(samples)["nu"], whole.parameters(samples)["nu"])
    times = parts.times()
    assert times is not None
    np.testing.assert_array_equal(times, whole.times())


def test_missing_partition_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    build_latents(folder, "parts")
    with pytest.raises(StoreNotFoundError, match="00000-of-00002"):
        open_latents(folder, "parts")


def test_no_store_of_latents_says_where_it_was_looked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"parts/burgers1d_train\.zarr\.zip") as caught:
        open_latents(folder, "parts")
    assert caught.value.kind == "no_store"
