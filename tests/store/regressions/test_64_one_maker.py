"""Numbers 64 and 39: of many that want a store one makes it; a stopped one isn't waited for for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ups_store


def test_store_that_twelve_want_is_made_once(tmp_path: Path) -> None:
    path, calls, together = tmp_path / "a.zarr.zip", [], threading.Barrier(12)

    def make() -> Iterator[dict[str, int]]:
        calls.append(1)
        time.sleep(0.2)
        yield from ({"x": i} for i in range(5))

    def want(_: int) -> int:
        together.wait()
        with ups_store.cached(path, {"v": 1}, make) as store:
            return int(store["x"].sum())

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(want, range(12))) == [10] * 12
    assert len(calls) == 1
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_builder_that_does_not_get_on_is_named_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups_store.writing.wait_for_maker.SILENT_S", 0.2, raising=False)
    path = tmp_path / "a.zarr.zip"
    stopped = ups_store.create(path, {"x": ups_store.ArraySpec((3,), "int64")}, identity={"v": 1})
    with pytest.raises(ups_store.BuildLockedError, match="hasn't got on"):
        ups_store.cached(path, {"v": 1}, lambda: [{"x": i} for i in range(3)])
    stopped.close()
    with ups_store.cached(path, {"v": 1}, lambda: [{"x": i} for i in range(3)]) as store:
        assert store["x"].tolist() == [0, 1, 2]


def test_maker_that_shows_no_sign_of_life_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups_store.writing.wait_for_maker.SILENT_S", 0.2, raising=False)
    path, has_begun, may_end = tmp_path / "a.zarr.zip", threading.Event(), threading.Event()

    def make() -> list[dict[str, int]]:
        has_begun.set()
        assert may_end.wait(60)
        return [{"x": 1}]

    with ThreadPoolExecutor(1) as pool:
        maker = pool.submit(ups_store.cached, path, {"v": 1}, make)
        assert has_begun.wait(60)
        try:
            with pytest.raises(ups_store.BuildLockedError, match=r"found process \d+ of "):
                ups_store.cached(path, {"v": 1}, list)
        finally:
            may_end.set()
        maker.result().close()
