"""Files are written whole or not at all, and what can't be written is an error of ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ups.errors import OutputError
from ups.output import write_atomically


def test_file_is_written_into_a_new_folder_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for content in (b"one", b"other"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[step], fail)
    with pytest.raises(OutputError, match=r"can't be written \(no room\); free some space") as caught:
        write_atomically(path, b"new")
    assert (caught.value.path, caught.value.exit_code) == (str(path), 6)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_file_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError) as caught:
        write_atomically(tmp_path / "file" / "a", b"")
    assert caught.value.path == str(tmp_path / "file" / "a")
