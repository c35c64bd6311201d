"""A run that continues mixes no samples of a data set that changed with those that were committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store

N, STOP = 200, 150
Sample = Callable[[int], dict[str, Any]]


def fixed(i: int) -> dict[str, Any]:
    return {"u": np.full((8, 8), i, "f4"), "n": i}


def ragged(i: int) -> dict[str, Any]:
    return {"u": np.full((8, 8), i, "f4"), "text": "x" * (i % 7)}


class Data:
    def __init__(self, sample: Sample, num: int = N, stop: int = N) -> None:
        self.sample, self.num, self.stop = sample, num, stop
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.asked.append(i)
        if i == self.stop:
            raise RuntimeError("stopped")
        return self.sample(i)


def begin(path: Path, sample: Sample) -> dict[str, Any]:
    options = {"identity": {"v": 1}, "buffer_bytes": 10_000}
    with pytest.raises(RuntimeError, match="stopped"):
        ups_store.write(path, Data(sample, stop=STOP), **options)
    return options


def changed(sample: Sample, *, from_number: int, to: int = N) -> Sample:
    def other(i: int) -> dict[str, Any]:
        values = sample(i)
        return {**values, "u": -values["u"]} if from_number <= i < to else values

    return other


@pytest.mark.parametrize("sample", [fixed, ragged])
@pytest.mark.parametrize(("first", "end"), [(0, N), (0, 1), (STOP - 1, N), (40, 110)])
def test_data_set_of_other_values_is_refused_or_begun_again(
    tmp_path: Path, sample: Sample, first: int, end: int
) -> None:
    path = tmp_path / "a.zarr.zip"
    options = begin(path, sample)
    other = changed(sample, from_number=first, to=end)
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.write(path, Data(other), **options)
    assert caught.value.kind == "not_repeated"
    assert "on_mismatch='restart'" in str(caught.value)
    data = Data(other)
    with ups_store.write(path, data, **options, on_mismatch="restart") as store:
        assert [store[i]["u"][0, 0] for i in range(N)] == [other(i)["u"][0, 0] for i in range(N)]


@pytest.mark.parametrize("sample", [fixed, ragged])
def test_data_set_of_the_same_values_is_asked_for_few_of_those_that_are_there(
    tmp_path: Path, sample: Sample
) -> None:
    path = tmp_path / "a.zarr.zip"
    options = begin(path, sample)
    data = Data(sample)
    ups_store.write(path, data, **options).close()
    assert sum(32 <= i < STOP for i in data.asked) <= 8


@pytest.mark.parametrize("sample", [fixed, ragged])
@pytest.mark.parametrize("num", [20, STOP - 1])
def test_data_set_of_fewer_samples_than_are_there_is_refused(
    tmp_path: Path, sample: Sample, num: int
) -> None:
    path = tmp_path / "a.zarr.zip"
    options = begin(path, sample)
    with pytest.raises(ups_store.IdentityMismatchError):
        ups_store.write(path, Data(sample, num=num), **options)
    with ups_store.write(path, Data(sample, num=num), **options, on_mismatch="restart") as store:
        assert len(store) == num


@pytest.mark.parametrize("sample", [fixed, ragged])
def test_data_set_of_another_dtype_is_refused_or_begun_again(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.zarr.zip"
    options = begin(path, sample)

    def double(i: int) -> dict[str, Any]:
        return {**sample(i), "u": sample(i)["u"].astype("f8")}

    with pytest.raises(ups_store.StoreError, match="float32"):
        ups_store.write(path, Data(double), **options)
    with ups_store.write(path, Data(double), **options, on_mismatch="restart") as store:
        assert (len(store), store[0]["u"].dtype) == (N, "f8")


def test_arrays_of_other_values_under_one_identity_are_refused(tmp_path: Path) -> None:
    path, values = tmp_path / "a.zarr.zip", np.arange(20.0)
    with ups_store.create(path, {"data": ups_store.ArraySpec((20,), "float64")}, identity={"v": 1}) as writer:
        writer.commit_many(range(9), {"data": values[:9]})
    with pytest.raises(ups_store.IdentityMismatchError):
        ups_store.write(path, values + 1, identity={"v": 1})
    with ups_store.write(path, values, identity={"v": 1}) as store:
        assert store["data"].tolist() == values.tolist()
