"""A real file system that is full: a tmpfs of 1 MiB, where mounting is allowed (root)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_disk import DISK_BYTES

import ups_store

FITS, TOO_LARGE = 20, 400  # samples of 4 KiB


def _create(path: Path, num_samples: int, seed: int = 0) -> ups_store.StoreWriter:
    arrays = {"u": ups_store.ArraySpec((num_samples, 1024), "float32")}
    return ups_store.create(path, arrays, identity={"seed": seed})


def _build(path: Path, num_samples: int, seed: int = 0) -> None:
    with _create(path, num_samples, seed) as writer:
        writer.commit_many(range(num_samples), {"u": np.full((num_samples, 1024), seed, "float32")})
        writer.finish()


def test_create_on_full_disk_says_needed_and_free_bytes_and_leaves_nothing(tiny_disk: Path) -> None:
    """Spec 6.6.1: all room is taken at the start."""
    with pytest.raises(ups_store.DiskFullError) as caught:
        _create(tiny_disk / "a.zarr.zip", TOO_LARGE)
    assert caught.value.needed_bytes > DISK_BYTES >= caught.value.free_bytes
    assert caught.value.exit_code == 6
    assert list(tiny_disk.iterdir()) == []


def test_rebuild_on_full_disk_leaves_the_old_store(tiny_disk: Path) -> None:
    path = tiny_disk / "a.zarr.zip"
    _build(path, FITS)
    before = path.read_bytes()
    with pytest.raises(ups_store.DiskFullError):
        _create(path, TOO_LARGE, seed=1)
    assert path.read_bytes() == before


def test_disk_filled_by_others_during_the_build_stops_no_commit(tiny_disk: Path) -> None:
    path = tiny_disk / "a.zarr.zip"
    with _create(path, FITS) as writer:
        free = os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize
        (tiny_disk / "other").write_bytes(bytes(free))
        writer.commit_many(range(FITS), {"u": np.ones((FITS, 1024), "float32")})
        writer.finish()
    with ups_store.open(path) as store:
        assert store.verify().ok


def test_build_continues_after_space_was_freed(tiny_disk: Path) -> None:
    path, other = tiny_disk / "a.zarr.zip", tiny_disk / "other"
    other.write_bytes(bytes(DISK_BYTES - (64 << 10)))
    with pytest.raises(ups_store.DiskFullError):
        _build(path, FITS)
    other.unlink()
    _build(path, FITS)
    with ups_store.open(path) as store:
        assert len(store) == FITS


def test_command_on_full_disk_exits_6_with_needed_and_free_bytes(tiny_disk: Path, tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "burgers1d_train.h5", "w") as file:
        file["data"] = np.zeros((64, 21, 1024), "float32")
    command = [sys.executable, "-m", "ups_store.build", "--tasks", "burgers1d", "--splits", "train"]
    command += ["--root", str(tmp_path), "--cache-dir", str(tiny_disk / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 6
    assert "no space left" in ended.stderr
    assert "free" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((tiny_disk / "cache").glob("*.zarr.zip*"))
