"""Several processes that build together: on one machine one file, on several a partition each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import BURGERS, write_burgers

import ups_store
from ups_store.partitioned_store import PartitionedStore
from ups_store.recovery import building_path

pytestmark = pytest.mark.multi_process

N = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=N)
    return tmp_path


def start(
    folder: Path, rank: int, size: int, *, per_machine: int, cache: str = "cache"
) -> subprocess.Popen[str]:
    """One rank as torchrun starts it; each machine sees its own folder of stores."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % per_machine,
        "LOCAL_WORLD_SIZE": per_machine,
    }
    command = [sys.executable, "-m", "ups_store.build", "--json", "--tasks", "burgers1d", "--splits", "train"]
    command += ["--root", "source", "--cache-dir", cache, "--num-workers", "0", "--batch-size", "1"]
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*ranks: subprocess.Popen[str]) -> list[dict[str, object]]:
    results = []
    for process in ranks:
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
        results.append(json.loads(out)["stores"][0])
    return results


def alone(folder: Path) -> Path:
    process = start(folder, 0, 1, per_machine=1, cache="alone")
    finish(process)
    return folder / "alone" / "burgers1d_train.zarr.zip"


def test_ranks_of_one_machine_make_the_bytes_of_one_process(folder: Path) -> None:
    results = finish(*(start(folder, rank, 2, per_machine=2) for rank in range(2)))
    path = folder / "cache" / "burgers1d_train.zarr.zip"
    assert path.read_bytes() == alone(folder).read_bytes()
    assert {result["config_hash"] for result in results} == {ups_store.open(path).config_hash}
    assert sum(int(str(result["num_committed"])) for result in results) >= 51  # of 0.8 * 64 samples
    assert results[0]["statistics"]


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


def test_builder_takes_up_what_a_killed_rank_leaves(folder: Path) -> None:
    builder, helper = (start(folder, rank, 2, per_machine=2) for rank in range(2))
    building = building_path(folder / "cache" / "burgers1d_train.zarr.zip")
    deadline = time.monotonic() + 60
    while not building.exists() and builder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    helper.send_signal(signal.SIGKILL)
    helper.communicate(timeout=30)
    finish(builder)
    assert (folder / "cache" / "burgers1d_train.zarr.zip").read_bytes() == alone(folder).read_bytes()


def test_next_run_takes_up_what_killed_ranks_leave(folder: Path) -> None:
    ranks = [start(folder, rank, 2, per_machine=2) for rank in range(2)]
    building = building_path(folder / "cache" / "burgers1d_train.zarr.zip")
    deadline = time.monotonic() + 60
    while not building.exists() and ranks[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.communicate(timeout=30)
    finish(*(start(folder, rank, 2, per_machine=2) for rank in range(2)))
    assert (folder / "cache" / "burgers1d_train.zarr.zip").read_bytes() == alone(folder).read_bytes()
