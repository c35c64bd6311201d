"""Damaged stores of latents are made again by the build, and repaired."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from latent_runs import write_latent_run
from small_stores import flip

import ups_store
from ups.config import load_config
from ups.data.splits import open_suitable
from ups_store.build import Watcher, build_all
from ups_store.build import load_config as load_build_config
from ups_store.building.repair import repair_store

CONFIG = """
data: {tasks: burgers1d, root: data, split: train}
reading: {num_workers: 0}
latent: {}
training: {latent_cache_dir: latents}
"""
PATH = Path("latents/burgers1d_train.zarr.zip")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_latent_run(tmp_path, num_samples=20, config=CONFIG)
    build_all(load_build_config(Path("run.yaml")), watcher=Watcher())
    return Path("run.yaml")


def test_latents_are_repaired_from_sources_and_encoder(run: Path) -> None:
    good = PATH.read_bytes()
    with ups_store.open(PATH) as store:
        last = store["latent"][7]
        offset = good.index(np.ascontiguousarray(last).tobytes())
    flip(PATH, offset)
    done = repair_store(PATH, run, watcher=Watcher())
    assert done.num_copied + done.num_rebuilt == 16
    assert PATH.read_bytes() == good


def test_damaged_latents_are_made_again(run: Path) -> None:
    good = PATH.read_bytes()
    os.truncate(PATH, 5000)
    (result,) = build_all(load_build_config(run), watcher=Watcher()).stores
    assert (result.num_committed, PATH.read_bytes() == good) == (16, True)


def test_damaged_store_of_fields_is_passed_over_for_the_sources(run: Path) -> None:
    path = Path("cache/burgers1d_train.zarr.zip")
    build_all(load_build_config(run, overrides=["latent.encoder=none"]), watcher=Watcher())
    os.truncate(path, 5000)
    store, problem = open_suitable(path, load_config(run).data)
    assert (store, PATH.name in problem) == (None, True)
