"""Small files are replaced whole or not at all, and the message of a failure names them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_stores import MakeStore

from ups_store.building.watch import EventLog
from ups_store.errors import DiskFullError
from ups_store.system import files
from ups_store.system.files import replace_file


def fail_with(number: int, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a function of `files` fail, after half of the bytes where it writes."""

    def fail(*args: object, **options: object) -> None:
        if function == "write_at":
            os.write(args[0], args[2][:3])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, function, fail)


def test_file_is_replaced_and_nothing_else_remains(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"old")
    replace_file(path, b"new text")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new text", [path])


@pytest.mark.parametrize("function", ["create_new", "write_at", "sync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failure_keeps_the_old_file_and_names_it(
    number: int, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    fail_with(number, function, monkeypatch)
    with pytest.raises(OSError, match=f"(?i){os.strerror(number)}") as caught:
        replace_file(path, b"new text")
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    if number == errno.ENOSPC and function != "rename":
        assert isinstance(caught.value, DiskFullError)
        assert str(caught.value).startswith(f"{path}: no space left on device: expected 8 bytes, found ")


def test_interrupt_removes_the_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "sync", press)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "a.json", b"text")
    assert list(tmp_path.iterdir()) == []


def test_preview_on_full_disk_is_one_line_that_names_it_and_leaves_nothing(
    make_store: MakeStore,
    tiny_disk: Path,
) -> None:
    out = tiny_disk / "p.png"
    (tiny_disk / "filler").write_bytes(bytes(files.free_bytes(tiny_disk)))
    command = [sys.executable, "-m", "ups_store", "preview", str(make_store()), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.startswith(f"error: {out}: no space left on device: expected ")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tiny_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("is_begun", [True, False])
def test_log_on_full_disk_names_the_file_and_closes_it(is_begun: bool, tiny_disk: Path) -> None:
    log = EventLog(tiny_disk / "log.jsonl")
    if is_begun:
        log.__enter__()
    (tiny_disk / "filler").write_bytes(bytes(files.free_bytes(tiny_disk)))
    with pytest.raises(DiskFullError) as caught, log:
        log.write("note", message="x" * 10_000)
    assert caught.value.path == str(tiny_disk / "log.jsonl")
    assert log._file.closed


def test_log_on_full_disk_does_not_hide_the_error_that_ended_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    log.__enter__()
    with monkeypatch.context() as full:
        full.setattr(log, "write", _find_no_room)
        log.__exit__(ZeroDivisionError, ZeroDivisionError("the first"), None)
        with pytest.raises(DiskFullError):
            log.__exit__(None, None, None)


def _find_no_room(event: str, **details: object) -> None:
    raise DiskFullError("full")
