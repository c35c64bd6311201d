"""Exports and packing on a file system that is really full: a tmpfs of 1 MiB, where mounting is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_stores import build, names_in
from tiny_disk import DISK_BYTES

import ups_store
from ups_store.convert import FORMATS, export_store
from ups_store.errors import DiskFullError
from ups_store.packed.pack import pack_store, unpack_store


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A store of 4 MiB of noise, that no codec makes smaller."""
    noise = np.random.default_rng(0).integers(0, 1 << 32, (64, 16384), np.uint32)
    return build(tmp_path / "large.zarr.zip", {"u": noise}, dims={})


def assert_told(error: DiskFullError, target: Path) -> None:
    """It names the target, the room before the operation took any, and no commits; nothing is left."""
    assert (error.exit_code, error.path) == (6, str(target))
    assert error.needed_bytes > DISK_BYTES >= error.free_bytes > DISK_BYTES // 2
    assert "nothing was written" in str(error)
    assert names_in(target.parent) == []


@pytest.mark.parametrize("to", sorted(FORMATS.keys() - {"kerchunk"}))  # which is a few kB
def test_export_to_a_full_disk_names_the_target_and_the_room(tiny_disk: Path, large: Path, to: str) -> None:
    with ups_store.open(large) as store, pytest.raises(DiskFullError) as caught:
        export_store(store, tiny_disk / "out", to=to)
    assert_told(caught.value, tiny_disk / "out")


def test_pack_to_a_full_disk_names_the_target_and_the_room(tiny_disk: Path, large: Path) -> None:
    with ups_store.open(large) as store, pytest.raises(DiskFullError) as caught:
        pack_store(store, tiny_disk / "out")
    assert_told(caught.value, tiny_disk / "out")


def test_unpack_to_a_full_disk_names_the_target(tiny_disk: Path, large: Path) -> None:
    with ups_store.open(large) as store:
        packed = pack_store(store, large.with_name("packed.zarr.zip")).path
    with ups_store.open(packed) as opened, pytest.raises(DiskFullError) as caught:
        unpack_store(opened, tiny_disk / "out")
    assert caught.value.path == str(tiny_disk / "out")
    assert names_in(tiny_disk) == []


def test_process_whose_export_found_no_room_ends_as_it_should(tiny_disk: Path, large: Path) -> None:
    """The HDF5 library ended it by SIGSEGV at its exit, having closed a file that it couldn't write."""
    command = [
        sys.executable,
        "-m",
        "ups_store",
        "export",
        str(large),
        str(tiny_disk / "out"),
        "--to",
        "hdf5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr
