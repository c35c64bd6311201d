"""`append`: stores of a pattern, one after the other, that open as one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store.system import files

IDENTITY = {"kind": "days"}


def day(first: int, num: int = 4) -> Iterator[dict[str, Any]]:
    for i in range(first, first + num):
        yield {"u": np.full(5, i, "f4"), "text": "x" * (i % 3)}


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    return tmp_path / "days-*.zarr.zip"


def firsts(pattern: Path) -> list[int]:
    with ups_store.open(pattern) as store:
        return [int(store[i]["u"][0]) for i in range(len(store))]


def test_stores_are_numbered_and_open_as_one(pattern: Path) -> None:
    for number in range(3):
        with ups_store.append(pattern, day(4 * number), identity=IDENTITY) as store:
            assert store.path.name == f"days-0000{number}.zarr.zip"
    with ups_store.open(pattern) as store:
        assert (len(store), len(store.partitions)) == (12, 3)
        assert store.identity == IDENTITY
        assert store.lengths("text").tolist() == [i % 3 for i in range(12)]
        assert store.verify().ok
    assert firsts(pattern) == list(range(12))
    assert len(list(pattern.parent.iterdir())) == 3


def test_store_that_write_made_is_the_first(pattern: Path) -> None:
    first = pattern.with_name("days-00000.zarr.zip")
    ups_store.write(first, day(0), identity=IDENTITY, constants={"x": np.arange(3.0)}).close()
    with ups_store.append(pattern, list(day(4))) as store:
        assert (store.identity, store.constants["x"].tolist()) == (IDENTITY, [0, 1, 2])
    assert firsts(pattern) == list(range(8))


def test_key_makes_a_repeated_call_do_nothing(pattern: Path) -> None:
    def never() -> Iterator[Any]:
        raise AssertionError
        yield

    ups_store.append(pattern, day(0), identity=IDENTITY, key="monday").close()
    ups_store.append(pattern, day(4), key="tuesday", attrs={"by": "me"}).close()
    with ups_store.append(pattern, never(), key="monday") as store:
        assert store.path.name == "days-00000.zarr.zip"
    assert firsts(pattern) == list(range(8))


def test_interrupted_append_is_continued_by_its_key_alone(pattern: Path) -> None:
    def failing() -> Iterator[Any]:
        yield from day(4, 40)
        raise KeyboardInterrupt

    ups_store.append(pattern, day(0), identity=IDENTITY, key="monday").close()
    with pytest.raises(KeyboardInterrupt):
        ups_store.append(pattern, failing(), key="tuesday")
    assert firsts(pattern) == list(range(4))
    with pytest.raises(ups_store.IdentityMismatchError, match="another key"):
        ups_store.append(pattern, day(4), key="wednesday")
    ups_store.append(pattern, day(4, 50), key="tuesday").close()
    assert firsts(pattern) == list(range(54))


@pytest.mark.parametrize(
    ("samples", "options", "error"),
    [
        (lambda: day(0), {"identity": {"kind": "other"}}, ups_store.IdentityMismatchError),
        (lambda: day(0), {"constants": {"x": np.arange(4.0)}}, ups_store.IdentityMismatchError),
        (lambda: [{"u": np.zeros(5, "f8"), "text": ""}], {}, ups_store.SpecError),
        (lambda: {"u": np.zeros((3, 5), "f4")}, {}, ups_store.SpecError),
    ],
)
def test_what_does_not_belong_to_the_pattern_is_refused(
    pattern: Path, samples: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    ups_store.append(pattern, day(0), identity=IDENTITY).close()
    with pytest.raises(error):
        ups_store.append(pattern, samples(), **options)
    assert firsts(pattern) == list(range(4))


def test_call_that_committed_nothing_is_in_no_other_key_s_way(pattern: Path) -> None:
    ups_store.append(pattern, day(0), identity=IDENTITY, key="first").close()
    with pytest.raises(ups_store.SpecError):
        ups_store.append(pattern, [{"v": 1}], key="wrong")
    with ups_store.append(pattern, day(4), key="right") as store:
        assert store.attrs["append_key"] == "right"
    assert firsts(pattern) == list(range(8))


@pytest.mark.parametrize("name", ["days.zarr.zip", "*-*.zarr.zip", "days.zarr.json"])
def test_path_that_is_no_pattern_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.append(tmp_path / name, day(0))
    assert caught.value.kind in ("path", "set")


APPENDER = """
import sys, numpy as np, ups_store
for number in range(3):
    value = int(sys.argv[2]) + number
    ups_store.append(sys.argv[1], [{"u": np.full(5, value, "f4")}], identity={"v": 1}, key=str(value)).close()
"""


def test_appenders_in_two_processes_take_turns(pattern: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", APPENDER, pattern, str(n)]) for n in (0, 10)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert sorted(firsts(pattern)) == [0, 1, 2, 10, 11, 12]
    assert len(list(pattern.parent.iterdir())) == 6


def one_of(value: int, stop: int = 99) -> Any:
    """A function of inputs that is interrupted at one of them."""

    def function(number: int) -> dict[str, Any]:
        if number == stop:
            raise KeyboardInterrupt
        return {"u": np.full(5, value, "f4"), "text": "x"}

    return function


@pytest.mark.parametrize("keys", [("monday", "tuesday"), (None, None)])
def test_function_of_another_key_continues_nothing_not_with_restart_either(
    pattern: Path, keys: tuple[str | None, str | None]
) -> None:
    options: dict[str, Any] = {"inputs": range(12), "num_workers": 0, "buffer_bytes": 60}
    ups_store.append(pattern, day(0), identity=IDENTITY).close()
    with pytest.raises(KeyboardInterrupt):
        ups_store.append(pattern, map=one_of(10, 8), key=keys[0], **options)
    with pytest.raises(ups_store.IdentityMismatchError, match="another key"):
        ups_store.append(pattern, map=one_of(20), key=keys[1], **options)
    ups_store.append(pattern, map=one_of(20), key=keys[1], on_mismatch="restart", **options).close()
    assert firsts(pattern) == [0, 1, 2, 3] + [20] * 12


def test_spool_that_a_kill_left_beside_its_store_goes_at_the_next_call(
    pattern: Path, monkeypatch: Any
) -> None:
    remove = files.remove

    def killed(path: Path) -> None:
        if path.name.endswith(".building"):
            raise OSError
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", killed)
        ups_store.append(pattern, day(0), identity=IDENTITY, key="monday").close()
    assert len(list(pattern.parent.glob("*.building"))) == 1
    ups_store.append(pattern, day(4), key="tuesday").close()
    assert firsts(pattern) == list(range(8))
    assert len(list(pattern.parent.iterdir())) == 2


def test_coordinates_of_samples_have_to_be_those_of_the_first_store(pattern: Path) -> None:
    xarray = pytest.importorskip("xarray")
    for first in (0.0, 100.0):
        u, x = np.full((3, 4), first), np.arange(4) + first
        samples = xarray.Dataset({"u": (("sample", "x"), u)}, coords={"x": x})
        if first:
            with pytest.raises(ups_store.SpecError, match="constant x"):
                ups_store.append(pattern, samples)
        else:
            ups_store.append(pattern, samples, identity=IDENTITY).close()
    assert len(list(pattern.parent.iterdir())) == 1


def test_pattern_of_partitions_is_refused(pattern: Path) -> None:
    ups_store.save(pattern.with_name("days-00000-of-00001.zarr.zip"), u=np.zeros((3, 2)))
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.append(pattern, day(0), identity=IDENTITY)
    assert caught.value.kind == "partitions"


def test_damaged_file_in_the_next_place_gives_way_to_restart_alone(pattern: Path) -> None:
    ups_store.append(pattern, day(0), identity=IDENTITY, key="monday").close()
    pattern.with_name("days-00001.zarr.zip.building").write_bytes(b"garbage" * 1000)
    with pytest.raises(ups_store.IdentityMismatchError, match="a damaged file"):
        ups_store.append(pattern, day(4), key="tuesday")
    ups_store.append(pattern, day(4), key="tuesday", on_mismatch="restart").close()
    assert firsts(pattern) == list(range(8))


def test_store_of_a_key_that_lacks_inputs_says_so_again(pattern: Path) -> None:
    def failing(number: int) -> dict[str, Any]:
        if number == 1:
            raise ValueError
        return {"u": number}

    options: dict[str, Any] = {"map": failing, "inputs": range(4), "num_workers": 0, "on_error": "skip"}
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="1 input failed"):
            ups_store.append(pattern, identity=IDENTITY, key="monday", **options).close()
