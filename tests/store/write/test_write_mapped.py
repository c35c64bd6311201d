"""`ups_store.write(map=..., inputs=...)`: functions in worker processes, whatever they do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mapped_functions import badly, large, noting, one, several

import ups_store
from ups_store.system import files
from ups_store.writing.spool import Spool

pytestmark = pytest.mark.multi_process

IDENTITY = {"kind": "mapped"}


def write(path: Path, function: Any, inputs: Any, **options: Any) -> ups_store.AnyStore:
    options = {"identity": {"function": function.__name__}, "num_workers": 2, **options}
    return ups_store.write(path, map=function, inputs=inputs, **options)


def test_samples_are_in_the_order_of_the_inputs_whatever_the_number_of_workers(tmp_path: Path) -> None:
    for workers in (0, 2):
        with write(tmp_path / f"{workers}.zarr.zip", several, range(12), num_workers=workers) as store:
            assert store["i"].tolist() == [i for i in range(12) for _ in range(i % 4)]
            assert store[5]["text"] == "x" * 3
    contents = {(tmp_path / f"{workers}.zarr.zip").read_bytes() for workers in (0, 2)}
    assert len(contents) == 1


def test_function_may_give_no_sample(tmp_path: Path) -> None:
    with write(tmp_path / "a.zarr.zip", one, iter(range(11)), num_workers=0) as store:
        assert store["i"].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("number", [6, 9, 12])
def test_input_that_fails_is_named(tmp_path: Path, number: int) -> None:
    errors = {
        6: (ups_store.SourceError, "reader_died", "killed by SIGKILL"),
        9: (ups_store.ReadTimeoutError, "read_timeout", "in badly"),
        12: (ups_store.SpecError, "value", "None"),
    }
    expected, kind, found = errors[number]
    timeout_s = 0.2 if number == 9 else 60.0  # others may wait for a processor
    with pytest.raises(expected) as caught:
        write(tmp_path / "a.zarr.zip", badly, [number], num_workers=1, item_timeout_s=timeout_s)
    assert (caught.value.kind, caught.value.path) == (kind, str(number))
    assert found in str(caught.value.found)


def test_inputs_that_fail_are_left_out_noted_and_warned_about(tmp_path: Path) -> None:
    path, options = tmp_path / "a.zarr.zip", {"on_error": "skip"}
    with pytest.warns(RuntimeWarning, match="2 inputs failed"):
        store = write(path, badly, range(9), **options)
    assert store["i"].tolist() == [0, 1, 2, 4, 5, 7, 8]
    skipped = store.attrs["skipped_inputs"]
    assert [each["input"] for each in skipped] == ["3", "6"]
    assert "ValueError: three" in skipped[0]["error"]
    with pytest.warns(RuntimeWarning, match="2 inputs failed"):
        write(path, badly, range(9), **options)


def test_large_samples_of_a_worker_that_is_killed_by_the_next_input_are_there(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="1 input failed"):
        store = write(tmp_path / "a.zarr.zip", large, [1, 2, 6, 4], on_error="skip", num_workers=1)
    assert store["i"].tolist() == [1, 2, 4]
    assert store["u"][2].tolist() == [4] * 100_000


@pytest.mark.slow
def test_inputs_that_hang_are_left_out(tmp_path: Path) -> None:
    """Its deadline is long enough for those that only wait for a processor."""
    with pytest.warns(RuntimeWarning, match="1 input failed"):
        store = write(tmp_path / "a.zarr.zip", badly, range(7, 12), on_error="skip", item_timeout_s=15.0)
    assert store["i"].tolist() == [7, 8, 10, 11]


def test_run_that_failed_continues_behind_the_inputs_that_are_done(tmp_path: Path) -> None:
    path, notes = tmp_path / "a.zarr.zip", tmp_path / "notes"
    notes.mkdir()
    inputs = [(str(notes), number) for number in range(40)]
    options: dict[str, Any] = {"buffer_bytes": 8 * 10, "num_workers": 0}
    for _ in range(2):  # the second finds parts, and needs no first samples for specs
        with pytest.raises(ups_store.SourceError, match="not yet"):
            write(path, noting, inputs, **options)
    assert not path.exists()
    (notes / "go").touch()
    with write(path, noting, inputs, **options) as store:
        assert store["i"].tolist() == list(range(40))
        assert "mapped_inputs" not in store.attrs


def test_inputs_that_are_others_than_before_are_refused(tmp_path: Path) -> None:
    path, notes = tmp_path / "a.zarr.zip", tmp_path / "notes"
    notes.mkdir()
    numbers = [*range(20, 60), 13, 60]
    options: dict[str, Any] = {"buffer_bytes": 8 * 20, "num_workers": 0}
    with pytest.raises(ups_store.SourceError):
        write(path, noting, [(str(notes), number) for number in numbers], **options)
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        write(path, noting, [(str(notes), number) for number in reversed(numbers)], **options)
    assert caught.value.kind == "not_repeated"
    with pytest.raises(ups_store.IdentityMismatchError):
        write(path, noting, [(str(notes), number) for number in numbers[:5]], **options)


@pytest.mark.parametrize(
    ("function", "inputs"), [(lambda number: {"i": number}, range(3)), (one, [bytes(1 << 20)])]
)
def test_what_cannot_be_sent_to_a_worker_is_said(tmp_path: Path, function: Any, inputs: Any) -> None:
    with pytest.raises(ups_store.SpecError) as caught:
        write(tmp_path / "a.zarr.zip", function, inputs)
    assert caught.value.kind == "function"


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [("num_workers", -1, ">= 0"), ("item_timeout_s", 0.0, "> 0"), ("retries", -1, ">= 0")],
)
def test_setting_out_of_range_is_named(tmp_path: Path, argument: str, value: float, expected: str) -> None:
    with pytest.raises(
        ups_store.SpecError, match=f"^{argument}: expected {expected}, found {value}$"
    ) as caught:
        write(tmp_path / "a.zarr.zip", one, [3], **{argument: value})
    assert caught.value.kind == "argument"


def test_all_inputs_failing_says_why(tmp_path: Path) -> None:
    with pytest.raises(ups_store.SpecError, match="three") as caught:
        write(tmp_path / "a.zarr.zip", badly, [3], on_error="skip", num_workers=0)
    assert caught.value.kind == "empty"


SCRIPT = """
import sys
import ups_store
def double(number):
    return {"i": 2 * number}
GUARD
    ups_store.write(sys.argv[1], map=double, inputs=range(9), num_workers=1, identity={})
"""


@pytest.mark.parametrize(
    "guard",
    ['if __name__ == "__main__":', pytest.param("if True:", marks=pytest.mark.slow)],
    ids=["guarded", "not guarded"],
)
def test_function_of_a_script_is_found_and_the_script_not_run_twice(tmp_path: Path, guard: str) -> None:
    script, path = tmp_path / "script.py", tmp_path / "a.zarr.zip"
    script.write_text(SCRIPT.replace("GUARD", guard))
    done = subprocess.run(
        [sys.executable, script, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert path.exists() is (done.returncode == 0) is ("__name__" in guard), done.stderr
    if path.exists():
        with ups_store.open(path) as store:
            assert store["i"].tolist() == list(range(0, 18, 2))
    else:
        assert "below `if __name__ == '__main__':`" in done.stderr


def many(number: int) -> Iterator[dict[str, Any]]:
    for j in range(40):
        yield {"i": 40 * number + j, "text": "x"}


def test_run_that_was_killed_amid_its_first_input_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, commit = tmp_path / "a.zarr.zip", Spool._commit
    options: dict[str, Any] = {"buffer_bytes": 9 * 10, "num_workers": 0}

    def killed(*arguments: Any) -> None:
        commit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            write(path, many, range(3), **options)
    with ups_store.open(path, partial=True) as store:
        assert len(store) == 10
    with write(path, many, range(3), **options) as store:
        assert store["i"].tolist() == list(range(120))


def test_note_that_was_damaged_loses_and_doubles_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"buffer_bytes": 90, "num_workers": 0, "identity": IDENTITY}

    def interrupted(number: int) -> Iterator[dict[str, Any]]:
        if number == 4:
            raise KeyboardInterrupt
        yield from many(number)

    for damage in [(b'"num_samples": 160', b'"num_samples": 150'), (b'"last": "3"', b'"lost": "3"')]:
        path = tmp_path / f"{damage[1].hex()}.zarr.zip"
        with pytest.raises(KeyboardInterrupt):
            ups_store.write(path, map=interrupted, inputs=range(6), **options)
        notes = path.with_name(f"{path.name}.building.notes")
        notes.write_bytes(notes.read_bytes().replace(*damage))
        with ups_store.write(path, map=many, inputs=range(6), **options) as store:
            assert store["i"].tolist() == list(range(240))


def test_note_whose_writing_was_interrupted_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, close = tmp_path / "a.zarr.zip", files.close
    options: dict[str, Any] = {"num_workers": 0, "identity": IDENTITY, "on_error": "skip"}
    notes = path.with_name(f"{path.name}.building.notes")

    def failing(number: int) -> Iterator[dict[str, Any]]:
        if number == 1:
            raise ValueError
        yield from many(number)

    def interrupted(fd: int) -> None:
        is_of_notes = notes.exists() and files.is_file_at(fd, notes) and files.size(fd) > 200
        close(fd)
        if is_of_notes:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ups_store.write(path, map=failing, inputs=range(3), **options)
    with pytest.warns(RuntimeWarning, match="1 input failed"):
        store = ups_store.write(path, map=failing, inputs=range(3), **options)
    with store:
        assert [each["input"] for each in store.attrs["skipped_inputs"]] == ["1"]
        assert len(store) == 80


def test_notes_are_durable_before_the_samples_that_they_cover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync_data = list[str](), files.sync_data
    notes = tmp_path / "a.zarr.zip.building.notes"

    def noting(fd: int) -> None:
        synced.append("notes" if files.is_file_at(fd, notes) else "samples")
        sync_data(fd)

    monkeypatch.setattr(files, "sync_data", noting)
    options: dict[str, Any] = {"num_workers": 0, "buffer_bytes": 90, "save_every_s": 0.0}
    write(tmp_path / "a.zarr.zip", many, range(3), **options).close()
    first = synced.index("notes")
    assert synced[first:] == ["notes", "samples"] * ((len(synced) - first) // 2)
