"""Ctrl-C at any line of a writing call: the same call afterwards makes the store with every sample once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store

pytestmark = pytest.mark.no_cover
N = 24


def sample(i: int) -> dict[str, Any]:
    return {"u": np.full((30, 30), i, "f4"), "text": "x" * (i % 5)}


def interrupted(call: Callable[[], object], *, lines: int, after: Callable[[], bool]) -> bool:
    """Raise KeyboardInterrupt so many lines of the package after a condition holds; whether that came."""
    left = lines

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal left
        if "/ups_store/" not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None  # what is raised in `__del__` is dropped by Python
        if event == "line" and after():
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[range], Iterator[tuple[int, Path]]]:
    """Numbers of lines, each with a folder of its own."""

    def numbered(numbers: range) -> Iterator[tuple[int, Path]]:
        for lines in numbers:
            (tmp_path / str(lines)).mkdir()
            yield lines, tmp_path / str(lines)

    return numbered


def test_write_interrupted_amid_its_commits_holds_each_sample_once(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many lines after what a spool begins with was written, and some of the first samples."""

    def call(folder: Path) -> Any:
        samples = list(map(sample, range(N)))
        return ups_store.write(folder / "a.zarr.zip", samples, identity={"v": 1}, buffer_bytes=20_000)

    counts, pwrite = [0], os.pwrite

    def written(*args: Any) -> int:
        counts[0] += 1
        return pwrite(*args)

    for lines, folder in folders(range(0, 120, 2)):
        counts[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", written)
            assert interrupted(lambda: call(folder), lines=lines, after=lambda: counts[0] >= 14)  # noqa: B023
        with call(folder) as store:
            assert store["u"][:, 0, 0].tolist() == list(range(N)), lines
            assert [len(text) for text in store["text"]] == [i % 5 for i in range(N)], lines


def test_map_interrupted_amid_the_samples_of_an_input_holds_each_once(folders: Any) -> None:
    given = [0]

    def three(i: int) -> Iterator[dict[str, Any]]:
        yield from (sample(3 * i + j) for j in range(3))
        given[0] += 1

    def call(folder: Path) -> Any:
        options: Any = {"identity": {"v": 1}, "num_workers": 0}
        return ups_store.write(folder / "a.zarr.zip", map=three, inputs=range(16), **options)

    for lines, folder in folders(range(5, 150, 8)):
        given[0] = 0
        assert interrupted(lambda: call(folder), lines=lines, after=lambda: given[0] == 13)  # noqa: B023
        with call(folder) as store:
            assert store["u"][:, 0, 0].tolist() == list(range(48)), lines


def test_batch_goes_on_after_an_interrupt_amid_a_sample(folders: Any) -> None:
    """Of two ragged arrays of equal lengths one row must not move to the next sample."""
    specs = {name: ups_store.ArraySpec((N, None), "int64", lengths=[2] * N) for name in "ab"}
    for lines, folder in folders(range(0, 60, 4)):
        with ups_store.create(folder / "a.zarr.zip", specs, identity={}) as writer:
            with writer.batched(save_every_s=1e9) as batch:
                for i in range(N):
                    rows = {name: np.full(2, i) for name in "ab"}
                    if i != 9 or interrupted(lambda: batch.commit(9, rows), lines=lines, after=lambda: True):  # noqa: B023
                        batch.commit(i, rows)
            writer.finish()
        with ups_store.open(folder / "a.zarr.zip") as store:
            for name in "ab":
                assert [store[i][name].tolist() for i in range(N)] == [[i, i] for i in range(N)], lines


def test_writer_that_nobody_holds_any_more_holds_no_lock(tmp_path: Path) -> None:
    """As after an interrupt between `create` and `with`: the same cell of a notebook runs again."""
    path, specs = tmp_path / "a.zarr.zip", {"u": ups_store.ArraySpec((2,), "int64")}
    for _ in range(2):
        ups_store.create(path, specs, identity={})
