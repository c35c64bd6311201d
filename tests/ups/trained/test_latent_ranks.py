"""Several processes that encode together: one file with the bytes of a single process, or partitions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from latent_runs import write_latent_run

import ups_store
from ups_store.building.config import load_config
from ups_store.building.progress import Watcher
from ups_store.building.stores import build_all
from ups_store.read.recovery import building_path

pytestmark = pytest.mark.multi_process

NAME = "burgers1d_train.zarr.zip"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Burgers file in PDEBench's layout, an encoder, and a configuration of many small batches."""
    config = (
        "data: {task: burgers1d, root: data, split: train}\n"
        "latent: {dim: 4, tokens: 4, micro_batch: 5}\n"
        "reading: {num_workers: 0, batch_size: 1}\n"
        "checkpoint: {dir: checkpoints}\n"
    )
    return write_latent_run(tmp_path, num_samples=200, config=config)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments, "--config", "run.yaml", "--json"]


def build_alone(folder: Path) -> Path:
    """The store of a single process, this one."""
    folders = {"data.root": folder / "data", "checkpoint.dir": folder / "checkpoints", "cache.dir": folder}
    overrides = [f"{name}={path}" for name, path in folders.items()]
    build_all(load_config(folder / "run.yaml", overrides=overrides), watcher=Watcher())
    return folder / NAME


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torchrun_makes_the_bytes_of_one_process(folder: Path, num: int) -> None:
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m", "ups_store.build"]
    words = [*command(*words), "--cache-dir", "cache", "--manifest", "manifest.json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert (folder / "cache" / NAME).read_bytes() == build_alone(folder).read_bytes()
    (store,) = json.loads((folder / "manifest.json").read_text())["stores"]
    assert store["statistics"]["latent"]["num_nan"] == 0
    assert 0 < store["num_committed"] < store["num_samples"] == 160


def start(folder: Path, rank: int, size: int, *, per_machine: int) -> subprocess.Popen[str]:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_machine}
    place |= {"LOCAL_WORLD_SIZE": per_machine, "OMP_NUM_THREADS": 1}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    words = [*command("ups_store.build"), "--cache-dir", "cache"]
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*ranks: subprocess.Popen[str]) -> None:
    for process in ranks:
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0, err


def num_committed(path: Path) -> int:
    try:
        with ups_store.open(building_path(path), partial=True) as store:
            return int(store.committed.sum())
    except ups_store.StoreError:
        return 0


def wait_for_commits(path: Path, builder: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not num_committed(path) and builder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rank_that_is_killed_while_it_encodes_is_made_up_for(folder: Path, num: int) -> None:
    ranks = [start(folder, rank, num, per_machine=num) for rank in range(num)]
    wait_for_commits(folder / "cache" / NAME, ranks[0])
    kill(ranks.pop(1))
    finish(*ranks)
    assert (folder / "cache" / NAME).read_bytes() == build_alone(folder).read_bytes()


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_partitions_of_latents_are_those_of_one_file(folder: Path, num: int) -> None:
    finish(*(start(folder, rank, num, per_machine=1) for rank in range(num)))
    expect_latents_of_one_file(folder, num)


def expect_latents_of_one_file(folder: Path, num: int) -> None:
    with (
        ups_store.open(folder / "cache" / f"burgers1d_train-*-of-{num:05}.zarr.zip") as store,
        ups_store.open(build_alone(folder)) as whole,
    ):
        everything = list(range(len(whole)))
        np.testing.assert_array_equal(store.gather(everything)["latent"], whole["latent"])


def test_partition_whose_machine_is_killed_is_continued_by_the_next_run(folder: Path) -> None:
    machines = [start(folder, rank, 2, per_machine=1) for rank in range(2)]
    part = folder / "cache" / "burgers1d_train-00001-of-00002.zarr.zip"
    wait_for_commits(part, machines[1])
    kill(machines[1])
    left = num_committed(part)
    finish(machines[0])
    assert 0 < left < 80
    assert not part.exists()
    again = start(folder, 1, 2, per_machine=1)
    out, err = again.communicate(timeout=150)
    assert again.returncode == 0, err
    assert json.loads(out)["stores"][0]["num_committed"] == 80 - left
    expect_latents_of_one_file(folder, 2)
