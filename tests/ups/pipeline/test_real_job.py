"""A launch without stand-ins: rclone serves the sources and takes the results, `ups` builds and trains."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ups.data.solvers import make_dataset
from ups.pipeline.launch.job import Job, job_script, make_job
from ups_store import open as open_store

pytestmark = [pytest.mark.slow, pytest.mark.multi_process, pytest.mark.timeout(1800)]

REPO = Path(__file__).resolve().parents[3]
ONE_STEP = {"epochs": 1, "steps_per_epoch": 1}
SETTINGS = {
    "data": {"tasks": "burgers1d", "reduce_space": 2},
    "latent": {"dim": 4, "tokens": 8},
    "encoder": {"patch_size": 8, "residual": False},
    "operator": {"size": "tiny", "mixer": "spectral", "depths": [1], "width": 8},
    "training": {"batch_size": 2, "latent_cache_dir": "latents", "device": "cpu"},
    "stages": {"autoencoder": ONE_STEP, "operator": ONE_STEP},
    "reading": {"num_workers": 0},
    "checkpoint": {"dir": "out"},
}


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of the remote `store`, which rclone serves from a folder with a task's files."""
    rclone = shutil.which("rclone")
    if rclone is None:
        pytest.skip("rclone isn't installed")
    folder = tmp_path / "remote/full/burgers1d"
    folder.mkdir(parents=True)
    for split in ("train", "val", "test"):
        made = make_dataset("burgers1d", tmp_path, num_samples=4, points=128, frames=6)
        made.rename(folder / f"burgers1d_{split}.h5")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [rclone, "serve", "webdav", tmp_path / "remote", "--addr", f"127.0.0.1:{port}"],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port)
        yield {"RCLONE_CONFIG_STORE_TYPE": "webdav", "RCLONE_CONFIG_STORE_URL": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def write_job(folder: Path, latent_dim: int) -> Job:
    config = folder / "mine.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    overrides = [f"latent.dim={latent_dim}"]
    work = folder / "work"
    work.mkdir(exist_ok=True)
    options = {"remote": "store:full", "results": "store:runs"}
    return make_job(config, overrides, num_gpus=1, workdir=str(work), **options)


def run(job: Job, folder: Path, remote: dict[str, str]) -> float:
    """The job on a machine whose home is the folder; returns the seconds of precomputing."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "ups").write_text(f'#!/bin/sh\nexec {sys.executable} -m ups "$@"\n')
    (commands / "ups").chmod(0o755)
    env = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        ["bash", "-c", job_script(job)],
        env={**env, **remote, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    rows = [line.split("\t") for line in (folder / "work/launches/mine/phases.tsv").read_text().splitlines()]
    (seconds,) = [row[2] for row in rows if row[:2] == [job.launch_id, "precompute"]]
    return float(seconds)


def test_first_launch_generates_second_reuses_third_of_another_size_generates_again(
    tmp_path: Path, remote: dict[str, str]
) -> None:
    store = tmp_path / "work/latents/burgers1d_train.zarr.zip"
    first = run(write_job(tmp_path, 4), tmp_path, remote)
    made = store.stat()
    second = run(write_job(tmp_path, 4), tmp_path, remote)
    reused = store.stat()
    assert (reused.st_ino, reused.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    third = run(write_job(tmp_path, 2), tmp_path, remote)
    print(f"precompute: {first} s, again {second} s, another latent size {third} s")
    with open_store(store) as opened:
        assert opened.arrays["latent"].shape[-1] == 2
    uploaded = [path.parent.name for path in tmp_path.glob("remote/runs/mine/*/out/operator.safetensors")]
    assert len(uploaded) == 3


def test_a_bucket_without_the_files_ends_before_anything_is_built(
    tmp_path: Path, remote: dict[str, str]
) -> None:
    job = replace(write_job(tmp_path, 4), tasks=("darcy2d",))
    with pytest.raises(AssertionError, match="darcy2d, train: no files from store:full"):
        run(job, tmp_path, remote)
    assert not (tmp_path / "work/latents").exists()
