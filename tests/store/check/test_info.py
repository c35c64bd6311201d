"""`describe`, statistics, and samples that two stores share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore, begin, mixed_values, samples_of

import ups_store
from ups_store import BuildLockedError
from ups_store.check import info
from ups_store.check.info import ArrayInfo, describe
from ups_store.check.statistics import ArrayStatistics

VALUES = mixed_values()


def test_describe_tells_shape_dtype_dims_and_slots_of_every_array(make_store: MakeStore) -> None:
    with ups_store.open(make_store()) as store:
        found = describe(store)
    dims = ("sample", "time", "x", "channel")
    assert found.arrays["fields"] == ArrayInfo((4, 5, 64, 4), "float32", dims, 5120, 5184, {})
    assert found.arrays["latent"].dtype == "bfloat16"
    assert (found.arrays["latent"].sample_nbytes, found.arrays["latent"].slot_nbytes) == (60, None)
    assert found.arrays["nu"] == ArrayInfo((4,), "float64", ("sample",), 8, None, {})
    assert found.constants["t"] == ArrayInfo((5,), "float32", ("time",), 20, None, {})


def test_describe_finished_store_tells_file_and_identity(make_store: MakeStore) -> None:
    path = make_store(attrs={"task": "burgers1d"})
    os.utime(path, (0, 86400))
    with ups_store.open(path) as store:
        found = describe(store)
        assert (found.config_hash, found.fingerprint) == (store.config_hash, store.fingerprint)
        assert found.identity == store.identity
    assert (found.path, found.nbytes, found.num_samples) == (path, path.stat().st_size, 4)
    assert (found.format_version, found.attrs, found.build) == ("1.0", {"task": "burgers1d"}, None)
    assert found.modified_s == 86400
    assert 0 <= found.resident_share <= 1


def test_describe_unfinished_store_tells_progress_and_builder(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr.zip"
    with begin(path, VALUES, durability="lazy") as writer:
        writer.commit_many([0, 2], samples_of(VALUES, [0, 2]))
        with ups_store.open(path, partial=True) as store:
            found = describe(store)
    assert found.build == info.BuildInfo(2, "lazy", True, f"pid {os.getpid()} on {os.uname().nodename}")
    assert found.path == path.with_name("s.zarr.zip.building")
    assert found.fingerprint is None


def test_describe_leaves_the_builders_lock_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr.zip"
    with begin(path, VALUES) as writer:
        with ups_store.open(path, partial=True) as store:
            describe(store)
        with pytest.raises(BuildLockedError):
            begin(path, VALUES)
        writer.commit_many(range(4), VALUES)
    with ups_store.open(path, partial=True) as store:
        describe(store)
        begin(path, VALUES).finish()


def test_describe_finished_but_not_renamed_store_says_so(make_store: MakeStore) -> None:
    path = make_store()
    path.rename(path.with_name(path.name + ".building"))
    with ups_store.open(path, partial=True) as store:
        found = describe(store).build
    assert found == info.BuildInfo(4, None, False, None)


def awkward_values() -> dict[str, np.ndarray[Any, Any]]:
    values = mixed_values(7, seed=3)
    values["fields"][0, 0, 0] = [np.nan, np.inf, -np.inf, np.nan]
    values["fields"][5, 4, 63, 3] = np.nan
    values["nu"][:] = 1e300
    return values


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_statistics_equal_numpys_whatever_the_block(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(info, "_BLOCK_ELEMENTS", block)
    values = awkward_values()
    with ups_store.open(make_store(values)) as store:
        read: list[int] = []
        found = describe(store, statistics=True, progress=read.append).statistics
    assert found is not None
    assert sum(read) == sum(values[name].nbytes for name in found)
    assert found.keys() == {"fields", "latent", "nu"}
    for name, statistics in found.items():
        whole = values[name].astype(np.float64)
        finite = whole[np.isfinite(whole)]
        assert (statistics.minimum, statistics.maximum) == (finite.min(), finite.max())
        assert statistics.mean == pytest.approx(finite.mean(), rel=1e-12)
        assert (statistics.num_nan, statistics.num_inf) == (np.isnan(whole).sum(), np.isinf(whole).sum())


def test_statistics_of_values_without_finite_ones_are_none(make_store: MakeStore) -> None:
    values = {"a": np.full(3, np.nan), "b": np.zeros((3, 0), np.float32), "c": np.full(3, 1.5e308)}
    with ups_store.open(make_store(values)) as store:
        found = describe(store, statistics=True).statistics
    assert found == {
        "a": ArrayStatistics(None, None, None, 3, 0),
        "b": ArrayStatistics(None, None, None, 0, 0),
        "c": ArrayStatistics(1.5e308, 1.5e308, None, 0, 0),
    }


def test_statistics_of_unfinished_store_cover_committed_samples(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr.zip"
    values = {"nu": np.array([5.0, 1.0, 3.0])}
    with begin(path, values) as writer:
        writer.commit_many([1, 2], samples_of(values, [1, 2]))
        with ups_store.open(path, partial=True) as store:
            assert describe(store, statistics=True).statistics == {"nu": ArrayStatistics(1.0, 3.0, 2.0, 0, 0)}
