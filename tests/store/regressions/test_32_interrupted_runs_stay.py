"""Nothing that an interrupted run committed is removed unless the caller says restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store

NAMED = {"v": 1}


def rows(num: int, *, fail: bool = False) -> Iterator[dict[str, Any]]:
    for i in range(num):
        yield {"u": np.full((50, 50), i, "f4")}
    if fail:
        raise RuntimeError("stopped")


class Data:
    def __init__(self, num: int, *, fail: bool = False) -> None:
        self.num, self.fail = num, fail

    def __len__(self) -> int:
        return 100 if self.fail else self.num

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.num:
            raise RuntimeError("stopped")
        return {"u": np.full((50, 50), i, "f4")}


def interrupt(path: Path, samples: Any, **identity: Any) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        ups_store.write(path, samples, buffer_bytes=100_000, **identity)


def bytes_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unnamed(path: Path) -> Any:
    return ups_store.write(path, rows(3))


def unnamed_data(path: Path) -> Any:
    return ups_store.write(path, Data(3))


def cached(path: Path) -> Any:
    return ups_store.cached(path, {"v": 2}, lambda: rows(3))


def saved(path: Path) -> Any:
    return ups_store.save(path, u=np.arange(3))


@pytest.mark.parametrize("call", [unnamed, cached, saved])
def test_spool_of_a_named_run_is_not_removed_by_another_call(
    tmp_path: Path, call: Callable[[Path], Any]
) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupt(path, rows(80, fail=True), identity=NAMED)
    before = bytes_below(tmp_path)
    with pytest.raises(ups_store.IdentityMismatchError):
        call(path)
    assert bytes_below(tmp_path) == before
    asked = []

    class Rest(Data):
        def __getitem__(self, i: int) -> dict[str, Any]:
            asked.append(i)
            return super().__getitem__(i)

    with ups_store.write(path, Rest(100), identity=NAMED) as store:
        assert store["u"][:, 0, 0].tolist() == list(range(100))
    assert sum(i < 80 for i in asked) < 20


@pytest.mark.parametrize("call", [unnamed_data, saved])
def test_samples_of_a_named_run_are_not_removed_by_another_call(
    tmp_path: Path, call: Callable[[Path], Any]
) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupt(path, Data(80, fail=True), identity=NAMED)
    before = bytes_below(tmp_path)
    with pytest.raises(ups_store.IdentityMismatchError):
        call(path)
    assert bytes_below(tmp_path) == before
    with ups_store.write(path, Data(3), on_mismatch="restart") as store:
        assert len(store) == 3


@pytest.mark.parametrize("samples", [lambda: rows(30, fail=True), lambda: Data(30, fail=True)])
@pytest.mark.parametrize("identity", [{}, {"identity": NAMED}])
def test_what_no_call_can_continue_gives_way(
    tmp_path: Path, samples: Callable[[], Any], identity: dict[str, Any]
) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupt(path, samples())
    for data in (rows(3), Data(3)):
        ups_store.write(path, data, **identity).close()
        path.unlink()


def test_interrupted_save_gives_way_to_another(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    for values in (np.arange(5), np.arange(7)):
        with ups_store.create(
            path, {"u": ups_store.ArraySpec((5,), "int64")}, identity=digest(tmp_path)
        ) as left:
            left.commit(0, {"u": 0})
        ups_store.save(path, u=values)
        assert ups_store.load(path)["u"].tolist() == values.tolist()


def digest(folder: Path) -> Any:
    """The identity that `save` gives other values."""
    with ups_store.open(ups_store.save(folder / "other.zarr.zip", u=np.arange(9))) as store:
        return store.identity


def test_cached_leaves_the_parts_of_an_earlier_version(tmp_path: Path) -> None:
    (tmp_path / "a.parts").mkdir()
    for number in (0, 7):
        ups_store.save(tmp_path / "a.parts" / f"{number:05}.zarr.zip", u=np.arange(5.0))
    before = bytes_below(tmp_path)
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.cached(tmp_path / "a.zarr.zip", NAMED, lambda: rows(3))
    assert bytes_below(tmp_path) == before
    assert "a.parts" in str(caught.value)
    assert "restart" in str(caught.value)
