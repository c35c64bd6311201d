"""Point 67: errors of sources that named another cause, or all of two long lists for one new file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from build_helpers import Recorder, build, settings, write_burgers
from inline_readers import in_this_process
from pdebench_files import T, X, values, write

import ups_store
from ups_store import SourceError
from ups_store.sources import open_source

read_here = pytest.fixture(autouse=True)(in_this_process)


@pytest.mark.parametrize(("number", "called"), [(32015, r"32015 \(zstd\)"), (40001, "40001")])
def test_filter_of_a_source_is_named(tmp_path: Path, number: int, called: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2, T, X))
        plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (3,))
        space = h5py.h5s.create_simple((2, T, X))
        dataset = h5py.h5d.create(file.id, b"tensor", h5py.h5t.IEEE_F32LE, space, plist)
        dataset.write_direct_chunk((0, 0, 0), b"no such stream" * 40)
    # Whether hdf5plugin is there or not: it can't be decoded.
    with pytest.raises(SourceError, match=f"filter {called}"), open_source(tmp_path / "a.h5") as source:
        source.read([0])


def test_source_of_a_filter_of_hdf5plugin_is_read_where_that_is_installed(tmp_path: Path) -> None:
    hdf5plugin = pytest.importorskip("hdf5plugin")
    stored = values("tensor", (4, T, X))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("tensor", data=stored, chunks=(1, T, X), **hdf5plugin.Zstd())
    with open_source(tmp_path / "a.h5") as source:
        np.testing.assert_array_equal(source.read(range(4))["fields"][..., 0], stored)


@pytest.mark.parametrize(
    ("attribute", "told"),
    [("0.01", "expected one number, found text '0.01'"), (0.5, "'Nu' isn't the number in the file's name")],
)
def test_parameter_that_is_text_or_that_its_name_contradicts_is_said_so(
    tmp_path: Path, attribute: Any, told: str
) -> None:
    path = tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5"
    write(path, {"tensor": values("tensor", (2, T, X))}, {"Nu": attribute})
    with pytest.raises(SourceError, match=told):
        open_source(path)


def test_rebuild_names_the_one_file_that_is_new(tmp_path: Path) -> None:
    source, watcher = tmp_path / "source", Recorder()
    for number in range(1, 5):
        write_burgers(source / f"1D_Burgers_Sols_Nu0.{number}.hdf5", num_samples=4, nu=number / 10)
    build(settings(tmp_path, split="train"))
    write_burgers(source / "1D_Burgers_Sols_Nu0.05.hdf5", num_samples=4, nu=0.05)
    build(settings(tmp_path, split="train"), watcher)
    (said,) = (note for note in watcher.notes if "rebuilding" in note)
    assert "4 -> 5 items, also {" in said
    assert said.count("Nu0.") == 1
    assert "Nu0.05" in said


def test_domain_of_a_falling_coordinate_has_a_length_above_zero(tmp_path: Path) -> None:
    config = settings(tmp_path, split="train")
    write_burgers(tmp_path / "source" / "1D_Burgers_Sols_Nu0.01.hdf5", num_samples=4)
    with h5py.File(tmp_path / "source" / "1D_Burgers_Sols_Nu0.01.hdf5", "r+") as file:
        x = file["x-coordinate"]
        x[...] = x[:][::-1]
    build(config)
    with ups_store.open(tmp_path / "cache" / "burgers1d_train.zarr.zip") as store:
        assert store.attrs["domain_lengths"]["x"] > 0
