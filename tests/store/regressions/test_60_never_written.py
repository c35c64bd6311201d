"""Point 60: what a source never wrote became zeros in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups_store import SourceError
from ups_store.sources import open_source

N, T, X = 6, 4, 8
VALUES = 1 + np.arange(N * T * X, dtype="f4").reshape(N, T, X)


def chunked(file: h5py.File) -> None:
    file.create_dataset("tensor", (N, T, X), "f4", chunks=(2, T, X))[:4] = VALUES[:4]


def half_a_sample(file: h5py.File) -> None:
    tensor = file.create_dataset("tensor", (N, T, X), "f4", chunks=(1, 2, X))
    tensor[:4], tensor[4, :2], tensor[5] = VALUES[:4], VALUES[4, :2], VALUES[5]


def one_group_for_each(file: h5py.File) -> None:
    for i in range(N):
        data = file.create_dataset(f"{i:04d}/data", (T, X, 1), "f4", chunks=(T, X, 1))
        if i != 4:
            data[..., 0] = VALUES[i]


def virtual(file: h5py.File) -> None:
    file["source"] = VALUES[:4]
    layout = h5py.VirtualLayout((N, T, X), "f4")
    layout[:4] = h5py.VirtualSource(".", "source", (4, T, X))
    file.create_virtual_dataset("tensor", layout)


@pytest.mark.parametrize("write", [chunked, half_a_sample, one_group_for_each, virtual])
def test_samples_that_were_never_written_are_refused_and_no_others(
    tmp_path: Path, write: Callable[[h5py.File], None]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
    with open_source(tmp_path / "a.h5") as source:
        for sample in range(4):
            np.testing.assert_array_equal(source.read([sample])["fields"][0, ..., 0], VALUES[sample])
        with pytest.raises(SourceError) as caught:
            source.read([4])
    assert (caught.value.kind, caught.value.sample) == ("not_written", 4)
    assert caught.value.dataset in ("tensor", "0004/data")


@pytest.mark.parametrize("name", ["tensor", "x-coordinate"])
def test_contiguous_dataset_without_storage_is_refused(tmp_path: Path, name: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for each, values in (("tensor", VALUES), ("x-coordinate", np.arange(X, dtype="f4"))):
            dataset = file.create_dataset(each, values.shape, "f4")
            if each != name:
                dataset[...] = values
    with pytest.raises(SourceError) as caught, open_source(tmp_path / "a.h5") as source:
        source.read([2])
    assert (caught.value.kind, caught.value.dataset) == ("not_written", name)


def test_parts_that_read_as_nan_are_nan(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("tensor", (N, T, X), "f4", chunks=(1, T, X), fillvalue=np.nan)[:4] = VALUES[:4]
    with open_source(tmp_path / "a.h5") as source:
        assert np.isnan(source.read([5])["fields"]).all()
