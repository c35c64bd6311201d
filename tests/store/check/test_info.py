"""`describe`, statistics, and samples that two stores share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore, begin, mixed_values, samples_of

import ups_store
from ups_store import BuildLockedError, Store
from ups_store.check import info
from ups_store.check.info import ArrayInfo, describe, shared_samples
from ups_store.check.statistics import ArrayStatistics
from ups_store.format.metadata import dtype_of

VALUES = mixed_values()


def fields_store(make_store: MakeStore, fields: np.ndarray[Any, Any], name: str) -> Store:
    return ups_store.open(make_store({"fields": fields}, name=name, dims={}))


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


@pytest.mark.parametrize("durability", ["durable", "lazy"])
def test_describe_unfinished_store_tells_progress_and_builder(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "s.zarr.zip"
    with begin(path, VALUES, durability=durability) as writer:
        writer.commit_many([0, 2], samples_of(VALUES, [0, 2]))
        with ups_store.open(path, partial=True) as store:
            found = describe(store)
    assert found.build == info.BuildInfo(2, durability, True, f"pid {os.getpid()} on {os.uname().nodename}")
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


@pytest.mark.parametrize("block", [1, 7, 2000, 1 << 20])
def test_statistics_equal_numpys_whatever_the_block(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(info, "_BLOCK_ELEMENTS", block)
    values = awkward_values()
    with ups_store.open(make_store(values)) as store:
        found = describe(store, statistics=True).statistics
    assert found is not None
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


def test_statistics_progress_adds_up_to_the_bytes_of_float_arrays(make_store: MakeStore) -> None:
    seen: list[int] = []
    with ups_store.open(make_store()) as store:
        describe(store, statistics=True, progress=seen.append)
    assert sum(seen) == VALUES["fields"].nbytes + VALUES["latent"].nbytes + VALUES["nu"].nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "float16", "int64"])
@pytest.mark.parametrize("width", [100, 5000])  # plain chunk and slots
def test_shared_samples_finds_samples_that_moved(make_store: MakeStore, dtype: str, width: int) -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 2, (num, 4, width)).astype(dtype_of(dtype)) for num in (6, 5))
    right[[0, 1, 4]] = left[[5, 2, 2]]
    a, b = fields_store(make_store, left, "a.zarr.zip"), fields_store(make_store, right, "b.zarr.zip")
    assert shared_samples(a, b).tolist() == [2, 5]
    assert shared_samples(b, a).tolist() == [0, 1, 4]


def test_shared_samples_with_equal_checksums_only_are_none(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = np.arange(6 * 2000, dtype=np.float32).reshape(6, 2000)
    a = fields_store(make_store, fields[:4], "a.zarr.zip")
    b = fields_store(make_store, fields[3:], "b.zarr.zip")
    monkeypatch.setattr(info, "_checksums", lambda view: np.zeros(len(view), np.uint32))
    assert shared_samples(a, b).tolist() == [3]


def test_shared_samples_compares_nan_and_zero_by_their_bytes(make_store: MakeStore) -> None:
    zeros = np.zeros((1, 2000), np.float32)
    nans = np.full((1, 2000), np.nan, np.float32)
    a = fields_store(make_store, np.concatenate([zeros, nans]), "a.zarr.zip")
    b = fields_store(make_store, np.concatenate([-zeros, nans]), "b.zarr.zip")
    assert shared_samples(a, b).tolist() == [1]
