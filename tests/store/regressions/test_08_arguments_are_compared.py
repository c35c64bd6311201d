"""An argument of `write` or `cached` that would make another store is refused where one is (also 43)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store

N = 5


class Data:
    def __init__(self, num: int = N, stop: int = -1, **more: Any) -> None:
        self.num, self.stop, self.more = num, stop, more

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.stop:
            raise RuntimeError("stopped")
        return {"x": np.full(3, float(i)), "y": i, **self.more}


def rows() -> Iterator[dict[str, Any]]:
    return (Data()[i] for i in range(N))


SAME: dict[str, Any] = {
    "identity": {"v": 1},
    "constants": {"g": np.zeros(3, "i4")},
    "dims": {"x": ["axis"], "g": ["grid"]},
    "attrs": {"a": 1},
}
ARGUMENTS = [
    ({"attrs": {"a": 2}}, "attribute a"),
    ({"attrs": {"a": 1, "b": [1, 2]}}, "attribute b"),
    ({"dims": {"x": ["other"], "g": ["grid"]}}, "dims of x"),
    ({"dims": {"x": ["axis"], "g": ["other"]}}, "constant g"),
    ({"constants": {"g": np.zeros(3, "f4")}}, "constant g"),
    ({"constants": {"g": np.zeros(4, "i4")}}, "constant g"),
    ({"constants": {"g": np.ones(3, "i4")}}, "constant g"),
    ({"constants": {"g": np.zeros(3, "i4"), "h": [1.0]}}, "constant h"),
    ({"ragged": ["x"]}, "array x"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ups_store.write(tmp_path / "a.zarr.zip", rows(), **SAME).close()
    return tmp_path / "a.zarr.zip"


@pytest.mark.parametrize("samples", [rows, Data])
@pytest.mark.parametrize(("change", "key"), ARGUMENTS)
def test_write_with_another_argument_is_refused_or_replaces(
    path: Path, samples: Any, change: dict[str, Any], key: str
) -> None:
    inode = path.stat().st_ino
    ups_store.write(path, samples(), **SAME).close()
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.write(path, samples(), **{**SAME, **change})
    assert list(caught.value.differences) == [key]
    assert path.stat().st_ino == inode
    options = {**SAME, **change}
    with ups_store.write(path, samples(), **options, on_mismatch="restart") as store:
        assert path.stat().st_ino != inode
        assert store.attrs == options["attrs"]
        assert {name: value.dtype for name, value in store.constants.items()} == {
            name: np.asarray(value).dtype for name, value in options["constants"].items()
        }


@pytest.mark.parametrize(("change", "key"), ARGUMENTS)
def test_cached_with_another_argument_is_refused_or_makes_it_again(
    path: Path, change: dict[str, Any], key: str
) -> None:
    options = {**SAME, **change}
    identity = options.pop("identity")
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.cached(path, identity, rows, **options, on_mismatch="raise")
    assert list(caught.value.differences) == [key]
    inode = path.stat().st_ino
    for _ in range(2):
        ups_store.cached(path, identity, rows, **options).close()
    assert path.stat().st_ino != inode


@pytest.mark.parametrize("data", [Data(z=1), Data(x=np.zeros(3, "f4")), Data(x=np.zeros(4)), Data(y="text")])
def test_data_set_of_other_columns_is_refused(path: Path, data: Data) -> None:
    with pytest.raises(ups_store.IdentityMismatchError):
        ups_store.write(path, data, **SAME)


def test_names_of_other_columns_are_refused(tmp_path: Path) -> None:
    path, pairs = tmp_path / "a.zarr.zip", [(1.0, 2)] * 3
    for samples in (pairs, iter(pairs)):
        ups_store.write(path, samples, names=["a", "b"], identity={}).close()
    for samples in (pairs, iter(pairs)):
        with pytest.raises(ups_store.IdentityMismatchError):
            ups_store.write(path, samples, names=["a", "c"], identity={})


@pytest.mark.parametrize(
    "change",
    [
        {"samples": {"u": np.zeros((3, 4)), "v": np.zeros(3)}},
        {"samples": {"u": np.zeros((3, 4), "f4")}},
        {"samples": {"w": np.zeros((3, 4))}},
        {"dims": {"u": ["x"]}},
    ],
)
@pytest.mark.parametrize("identity", [None, {"v": 1}])
def test_arrays_of_other_columns_or_dims_are_refused(
    tmp_path: Path, identity: Any, change: dict[str, Any]
) -> None:
    path, options = tmp_path / "a.zarr.zip", {"samples": {"u": np.zeros((3, 4))}, "identity": identity}
    ups_store.write(path, **options).close()
    with pytest.raises(ups_store.IdentityMismatchError):
        ups_store.write(path, **{**options, **change})


def test_constants_in_another_byte_order_are_the_same(path: Path) -> None:
    inode = path.stat().st_ino
    ups_store.write(path, rows(), **{**SAME, "constants": {"g": np.zeros(3, ">i4")}}).close()
    assert path.stat().st_ino == inode


def test_unfinished_store_of_other_attributes_is_refused_or_begun_again(tmp_path: Path) -> None:
    path, identity = tmp_path / "a.zarr.zip", {"v": 1}
    with pytest.raises(RuntimeError, match="stopped"):
        ups_store.write(path, Data(60, stop=50), identity=identity, attrs={"a": 1})
    with pytest.raises(ups_store.IdentityMismatchError, match="attributes"):
        ups_store.write(path, Data(60), identity=identity, attrs={"a": 2})
    with ups_store.write(path, Data(60), identity=identity, attrs={"a": 2}, on_mismatch="restart") as store:
        assert store.attrs == {"a": 2}
