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


def test_replaced_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"")
    old.chmod(0o604)
    before = os.umask(0o027)
    try:
        for path in (old, new):
            write_atomically(path, b"new")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (old, new)] == [0o604, 0o640]
    assert [path.read_bytes() for path in (old, new)] == [b"new", b"new"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.chown(path, 12345, 23456)
    write_atomically(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


def test_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    real.parent.mkdir()
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_atomically(link, b"new")
    assert (link.readlink(), real.read_bytes(), list(real.parent.iterdir())) == (real, b"new", [real])


def test_link_to_nothing_is_an_error_that_names_both(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(OutputError) as caught:
        write_atomically(link, b"new")
    assert (caught.value.kind, caught.value.path) == ("dangling_link", str(link))
    assert caught.value.found == str(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == [link]


def test_what_a_killed_process_left_is_in_no_ones_way(tmp_path: Path) -> None:
    (tmp_path / f".file.{os.getpid()}.partial").write_bytes(b"half")
    write_atomically(tmp_path / "file", b"whole")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]
