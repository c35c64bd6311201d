"""A split in several files, one a machine, read as one store (spec 2.4)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store import (
    ArraySpec,
    FormatError,
    PartitionedStore,
    SpecError,
    Store,
    StoreNotFoundError,
)
from ups_store.system.paths import partition_path, partition_range

N, T, X = 11, 5, 6
RNG = np.random.default_rng(0)
VALUES = {
    "fields": RNG.standard_normal((N, T, X), np.float32),
    "nu": RNG.random(N),
}
DIMS = {"fields": ("sample", "time", "x"), "nu": ("sample",)}
CONSTANTS = {"x": np.linspace(0, 1, X)}
IDENTITY = {"task": "burgers1d", "split": "train"}


def write(path: Path, samples: range, partition: tuple[int, int] | None = None, **content: Any) -> Path:
    values = {name: array[samples.start : samples.stop] for name, array in VALUES.items()}
    specs = {name: ArraySpec(array.shape, array.dtype, dims=DIMS[name]) for name, array in values.items()}
    identity = {**IDENTITY, **content}
    with ups_store.create(path, specs, constants=CONSTANTS, identity=identity, partition=partition) as writer:
        writer.commit_many(np.arange(len(samples)), values)
        writer.finish()
    return path


def write_parts(folder: Path, count: int) -> Path:
    for number in range(count):
        path = partition_path(folder / "a_train.zarr.zip", number, count)
        write(path, partition_range(N, number, count), partition=(number, count))
    return folder / f"a_train-*-of-{count:05d}.zarr.zip"


@pytest.fixture(params=[3])
def partitions(request: pytest.FixtureRequest, tmp_path: Path) -> PartitionedStore:
    """Some of unequal size."""
    store = ups_store.open(write_parts(tmp_path, request.param))
    assert isinstance(store, PartitionedStore)
    return store


def test_parts_have_the_hash_of_the_store_in_one_file(partitions: PartitionedStore, tmp_path: Path) -> None:
    """Spec 2.4."""
    with ups_store.open(write(tmp_path / "whole.zarr.zip", range(N))) as whole:
        assert isinstance(whole, Store)
        assert partitions.identity == whole.identity
        assert partitions.config_hash == whole.config_hash
        assert partitions.arrays == whole.arrays
        assert partitions.dims == whole.dims


@pytest.mark.parametrize(
    "arguments",
    [
        {"start": [0, 2, 1, 3]},  # to the end of the shortest
        {"length": 3},
        {"out": {"fields": np.empty((4, T, X), np.float64)}},
        {"out": {"fields": np.empty((3, T, X), np.float32)}},
        {"out": {"other": np.empty(4)}},
        {"start": [0, 1, 2, T]},
        {"names": ["nu"], "length": 2},
        {"names": ["other"]},
        {"num_threads": 2},
    ],
)
def test_parts_gather_and_refuse_what_one_file_does(
    partitions: PartitionedStore, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with ups_store.open(write(tmp_path / "whole.zarr.zip", range(N))) as whole:
        expected, found = (_outcome(store, arguments) for store in (whole, partitions))
    assert found == expected


def _outcome(store: Store | PartitionedStore, arguments: dict[str, Any]) -> Any:
    try:
        batch = store.gather([9, 0, 4, 2], **arguments)
    except ups_store.StoreError as error:
        return type(error), error.kind
    return {name: values.tolist() for name, values in batch.items()}


def test_open_of_parts_that_are_missing_names_them(tmp_path: Path) -> None:
    pattern = write_parts(tmp_path, 3)
    partition_path(tmp_path / "a_train.zarr.zip", 1, 3).unlink()
    with pytest.raises(StoreNotFoundError, match="a_train-00001-of-00003"):
        ups_store.open(pattern)


def test_open_of_parts_of_two_stores_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, 2)
    write_parts(tmp_path, 3)
    with pytest.raises(SpecError, match="partitions of one store"):
        ups_store.open(tmp_path / "a_train-*.zarr.zip")


def test_open_of_parts_that_were_renamed_is_refused(tmp_path: Path) -> None:
    pattern = write_parts(tmp_path, 2)
    first, second = (partition_path(tmp_path / "a_train.zarr.zip", number, 2) for number in (0, 1))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(FormatError, match="partition of a store"):
        ups_store.open(pattern)


def test_open_of_parts_of_another_configuration_names_the_key(tmp_path: Path) -> None:
    pattern = write_parts(tmp_path, 2)
    last = partition_path(tmp_path / "a_train.zarr.zip", 1, 2)
    write(last, partition_range(N, 1, 2), partition=[1, 2], reduce_time=5)
    with pytest.raises(FormatError, match="reduce_time"):
        ups_store.open(pattern)


def test_open_of_a_file_whose_name_has_a_star_opens_that_file(tmp_path: Path) -> None:
    with ups_store.open(write(tmp_path / "a*.zarr.zip", range(N))) as store:
        assert len(store) == N


def write_days(folder: Path, starts: list[int]) -> list[Path]:
    ends = [*starts[1:], N]
    return [
        write(folder / f"days-{number:05d}.zarr.zip", range(first, end), day=number)
        for number, (first, end) in enumerate(zip(starts, ends, strict=True))
    ]


def test_pattern_of_stores_that_are_no_partitions_is_one_store_by_name(tmp_path: Path) -> None:
    paths = write_days(tmp_path, [0, 2, 7])
    with ups_store.open(tmp_path / "days-*.zarr.zip") as store:
        assert isinstance(store, PartitionedStore)
        assert [each.path for each in store.partitions] == paths
        assert (len(store), store.path.name) == (N, "days-*.zarr.zip")
        assert "3 stores" in repr(store)
        parents = [each.config_hash for each in store.partitions]
        assert store.identity == {"kind": "stores", "parents": parents}
        order = [10, 0, 2, 6, 2]
        np.testing.assert_array_equal(store.gather(order, ["fields"])["fields"], VALUES["fields"][order])
        assert store.verify().ok
        with pickle.loads(pickle.dumps(store)) as copy:
            assert copy.config_hash == store.config_hash


def test_list_opens_as_one_store_in_its_order(tmp_path: Path) -> None:
    first, second, third = write_days(tmp_path, [0, 2, 7])
    with ups_store.open([third, str(first)]) as store:
        assert (len(store), store.path) == (6, third)
        np.testing.assert_array_equal(store.gather(range(6))["nu"], VALUES["nu"][[7, 8, 9, 10, 0, 1]])
    with ups_store.open((second,)) as store:
        assert store.identity == {**IDENTITY, "day": 1}
    for wrong in ([], [first, tmp_path / "none.zarr.zip"], [first, 3]):
        with pytest.raises((SpecError, StoreNotFoundError)):
            ups_store.open(wrong)


def test_list_of_stores_of_other_arrays_is_refused(tmp_path: Path) -> None:
    (path, *_) = write_days(tmp_path, [0, 2, 7])
    other = tmp_path / "other.zarr.zip"
    with ups_store.create(other, {"u": ArraySpec((1,), "int8")}, identity={}) as writer:
        writer.commit_many([0], {"u": np.zeros(1, np.int8)})
        writer.finish()
    with pytest.raises(FormatError, match="other arrays") as caught:
        ups_store.open([path, other])
    assert (caught.value.kind, caught.value.path) == ("partitions", str(other))


def test_dataset_of_parts_has_all_their_samples(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ups_store.torch import StoreDataset

    pattern = write_parts(tmp_path, 3)
    for given in (pattern, ups_store.open(pattern)):
        dataset = StoreDataset(given)
        assert len(dataset) == N
        found = [dataset[index]["fields"].numpy() for index in range(N)]
        np.testing.assert_array_equal(found, VALUES["fields"])
