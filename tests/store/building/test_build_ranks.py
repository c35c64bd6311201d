"""Several processes that build together: on one machine one file, on several a partition each.

But for the first test they are forked, and read in their own process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import BURGERS, build, plan, settings, write_burgers
from forked import Forked

import ups_store
from ups_store.building import command
from ups_store.building.fill import Filling
from ups_store.console import run
from ups_store.read.recovery import building_path
from ups_store.read.several import PartitionedStore

N = 64
Process = subprocess.Popen[str] | Forked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=N)
    return tmp_path


def start(
    folder: Path, rank: int, size: int, *, per_machine: int, cache: str = "cache", is_forked: bool = True
) -> Process:
    """One rank as torchrun starts it; each machine sees its own folder of stores."""
    place = {"RANK": rank, "WORLD_SIZE": size}
    place |= {"LOCAL_RANK": rank % per_machine, "LOCAL_WORLD_SIZE": per_machine}
    words = ["--json", "-v", "--tasks", "burgers1d", "--splits", "train", "--root", "source"]
    words += ["--cache-dir", cache, "--num-workers", "0", "--batch-size", "1"]
    if is_forked:
        return Forked(lambda: run(lambda: command.main(words)), folder, place)
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    start = [sys.executable, "-m", "ups_store.build", *words]
    return subprocess.Popen(start, cwd=folder, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]


def told_by(*ranks: Process) -> list[tuple[str, str]]:
    """What each rank said on stdout and stderr, once all have ended well."""
    told = []
    for process in ranks:
        told.append(process.communicate(timeout=150))
        assert process.returncode == 0, told[-1][1]
    return told


def finish(*ranks: Process) -> list[dict[str, object]]:
    """What the builders say of their store; the other ranks leave that to them."""
    return [json.loads(out)["stores"][0] for out, _ in told_by(*ranks) if out]


def alone(folder: Path) -> Path:
    (result,) = build(settings(folder, split="train", cache_dir=str(folder / "alone"))).stores
    return result.path


@pytest.mark.multi_process
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_one_machine_make_the_bytes_of_one_process(folder: Path, size: int) -> None:
    (by_builder, _), *others = told_by(
        *(start(folder, rank, size, per_machine=size, is_forked=False) for rank in range(size))
    )
    path = folder / "cache" / "burgers1d_train.zarr.zip"
    assert path.read_bytes() == alone(folder).read_bytes()
    document = json.loads(by_builder)
    result, seconds = document["stores"][0], document["startup"]["seconds"]
    assert 0 < seconds["imports"] < seconds["total"]
    assert seconds["plan"] > 0
    assert (result["config_hash"], result["num_samples"]) == (ups_store.open(path).config_hash, 52)
    assert [out for out, _ in others] == [""] * (size - 1)
    by_others = [
        int(re.findall(rf"{path.name}: rank {rank} committed ([0-9]+) sample", err)[0])
        for rank, (_, err) in enumerate(others, start=1)
    ]
    assert result["num_committed"] + sum(by_others) >= 51  # of 0.8 * 64 samples
    with ups_store.open(path) as store:
        fields = store["fields"]
    found = result["statistics"]["fields"]  # of all samples, also those that the others committed
    assert (found["min"], found["max"]) == (fields.min(), fields.max())


def test_partitions_of_two_machines_are_the_split(folder: Path) -> None:
    finish(*(start(folder, rank, 2, per_machine=1, cache=f"machine{rank}") for rank in range(2)))
    together = folder / "together"
    together.mkdir()
    for path in folder.glob("machine*/burgers1d_train-*.zarr.zip"):
        path.rename(together / path.name)
    with (
        ups_store.open(together / "burgers1d_train-*-of-00002.zarr.zip") as store,
        ups_store.open(alone(folder)) as whole,
    ):
        assert isinstance(store, PartitionedStore)
        assert store.config_hash == whole.config_hash
        everything = list(range(len(whole)))
        np.testing.assert_array_equal(store.gather(everything)["fields"], whole["fields"])
        with h5py.File(folder / "source" / BURGERS) as file:
            rows = [
                np.flatnonzero((file["tensor"][:, 0] == row[0, :, 0]).all(-1))
                for row in store.gather([0, 50])["fields"]
            ]
        assert all(len(row) == 1 for row in rows)


def test_two_machines_of_two_ranks_make_the_split_in_a_shared_folder(folder: Path) -> None:
    finish(*(start(folder, rank, 4, per_machine=2) for rank in range(4)))
    names = sorted(path.name for path in (folder / "cache").glob("*.zip"))
    assert names == [f"burgers1d_train-0000{i}-of-00002.zarr.zip" for i in range(2)]
    with (
        ups_store.open(folder / "cache" / "burgers1d_train-*-of-00002.zarr.zip") as store,
        ups_store.open(alone(folder)) as whole,
    ):
        np.testing.assert_array_equal(store.gather(list(range(len(whole))))["fields"], whole["fields"])


def test_machine_that_is_lost_is_made_up_by_the_next_run_and_the_others_part_is_reused(folder: Path) -> None:
    (kept,) = finish(start(folder, 0, 2, per_machine=1))
    assert not kept["reused"]
    kept, made = finish(*(start(folder, rank, 2, per_machine=1) for rank in range(2)))
    assert (kept["reused"], made["reused"]) == (True, False)
    with ups_store.open(folder / "cache" / "burgers1d_train-*-of-00002.zarr.zip") as store:
        assert len(store) == 52


def wait_for_building(folder: Path, builder: Process) -> None:
    building = building_path(folder / "cache" / "burgers1d_train.zarr.zip")
    deadline = time.monotonic() + 60
    while not building.exists() and builder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_rank_whose_share_the_builder_has_made_and_published_meanwhile_ends_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(folder, split="train")
    plain = Filling.fill

    def overtaken(self: Filling, samples: np.ndarray) -> None:
        monkeypatch.setattr(Filling, "fill", plain)
        writer.commit_many(writer.missing(), whole.gather(writer.missing()))
        writer.finish()
        self.fill(samples)

    path = alone(folder)
    planned = plan(config)
    with ups_store.open(path) as whole:
        options = {"constants": planned.constants, "dims": planned.dims, "attrs": planned.attrs}
        config.cache.dir.mkdir()
        writer = ups_store.create(planned.path, planned.arrays, identity=whole.identity, **options)
        monkeypatch.setattr(Filling, "fill", overtaken)
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        with writer:
            (result,) = build(config).stores
    assert (result.num_committed, result.num_samples) == (0, 52)
    assert planned.path.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_builder_takes_up_what_a_killed_rank_leaves(folder: Path, size: int) -> None:
    ranks = [start(folder, rank, size, per_machine=size) for rank in range(size)]
    wait_for_building(folder, ranks[0])
    killed = ranks.pop()
    killed.kill()
    killed.communicate(timeout=30)
    finish(*ranks)
    assert (folder / "cache" / "burgers1d_train.zarr.zip").read_bytes() == alone(folder).read_bytes()


def test_next_run_takes_up_what_killed_ranks_leave(folder: Path) -> None:
    ranks = [start(folder, rank, 2, per_machine=2) for rank in range(2)]
    wait_for_building(folder, ranks[0])
    for process in ranks:
        process.kill()
        process.communicate(timeout=30)
    finish(*(start(folder, rank, 2, per_machine=2) for rank in range(2)))
    assert (folder / "cache" / "burgers1d_train.zarr.zip").read_bytes() == alone(folder).read_bytes()
