"""Steps of a download in this process, from a source in memory: lengths, locks, what is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash_copies import DATA, ONCE, MemoryOrigin, copy

from ups_store.errors import DownloadError, SourceError
from ups_store.sources import download
from ups_store.sources.attempts import Attempts
from ups_store.sources.copies import find_copy, find_part, num_there, part_path
from ups_store.sources.download import fetch
from ups_store.sources.origins import Body, Version
from ups_store.sources.reader import Reader
from ups_store.system import files, locks

VERSION = MemoryOrigin().version


@dataclass
class Digested(MemoryOrigin):
    """A source in memory whose digest is known."""

    digest: str = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


class Untagged(MemoryOrigin):
    """A source in memory that says nothing of its version but its length."""

    @property
    def version(self) -> Version:
        return Version(len(self.data), "", VERSION.name)


class Failing(MemoryOrigin):
    """A source in memory that may not be read."""

    @contextlib.contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        raise PermissionError(13, "Permission denied")
        yield


class Vanishing(MemoryOrigin):
    """A source in memory that is there once."""

    def look(self, *, stall_s: float) -> Version:
        return None  # type: ignore[return-value]


def broken_off(folder: Path, origin: MemoryOrigin, at: int) -> None:
    origin.cuts = [at, 0]
    with pytest.raises(DownloadError) as caught:
        copy(origin, folder)
    assert (caught.value.kind, caught.value.found) == ("cut_short", f"{at:,}")
    assert num_there(folder, origin.version) == at


def test_more_bytes_than_were_announced_are_an_error(tmp_path: Path) -> None:
    short = Version(len(DATA) - 1, "tag", VERSION.name)
    with pytest.raises(DownloadError) as caught:
        fetch(MemoryOrigin(), short, tmp_path, attempts=ONCE, reader=Reader())
    assert caught.value.kind == "wrong_length"
    assert not (tmp_path / VERSION.name).exists()


def test_what_no_attempt_mends_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        copy(Failing(), tmp_path, Attempts(retries=3, backoff_s=100.0))


def test_a_source_that_vanishes_meanwhile_is_said_to_have_changed(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        copy(Vanishing(), tmp_path, Attempts(retries=3, backoff_s=0.0))
    assert caught.value.kind == "source_changed"


def test_nothing_of_an_untagged_source_is_used_twice(tmp_path: Path) -> None:
    origin = Untagged(cuts=[3000])
    assert copy(origin, tmp_path, Attempts(retries=1, backoff_s=0.0)) == 3000 + len(DATA)
    assert (tmp_path / VERSION.name).read_bytes() == DATA
    with pytest.raises(DownloadError):
        copy(Untagged(cuts=[3000, 2000, 0]), tmp_path / "again")
    assert copy(Untagged(), tmp_path / "again") == len(DATA)


def test_a_beginning_of_something_else_is_found_by_the_digest_and_fetched_again(tmp_path: Path) -> None:
    broken_off(tmp_path, Digested(), 3000)
    part = part_path(tmp_path, VERSION)
    part.write_bytes(bytes(3000))
    assert copy(Digested(), tmp_path) == 2 * len(DATA) - 3000
    assert (tmp_path / VERSION.name).read_bytes() == DATA
    assert find_copy(tmp_path, Digested()) == tmp_path / VERSION.name
    assert find_copy(tmp_path, Digested(digest="sha256:" + "0" * 64)) is None


def test_bytes_are_synced_and_recorded_every_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_SYNC_BYTES", 2000)
    broken_off(tmp_path, MemoryOrigin(), 5500)
    there = find_part(tmp_path, MemoryOrigin(), VERSION)
    assert (there.synced, there.is_same, there.is_of_this_boot) == (4000, True, True)
    monkeypatch.setattr(files, "boot_id", lambda: b"\1" * 16)
    assert copy(MemoryOrigin(), tmp_path) == len(DATA) - 4000


@pytest.mark.parametrize("text", ["", "[]", '{"synced": "many"}', "\x00"])
def test_a_record_that_is_damaged_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    broken_off(tmp_path, MemoryOrigin(), 3000)
    (tmp_path / "part.json").write_text(text)
    (tmp_path / "staged.json").write_text(text)
    assert find_part(tmp_path, MemoryOrigin(), VERSION).synced == 0
    assert find_copy(tmp_path, MemoryOrigin(), VERSION) is None
    assert copy(MemoryOrigin(), tmp_path) == len(DATA)


def test_a_copy_of_another_name_or_origin_is_none(tmp_path: Path) -> None:
    copy(MemoryOrigin(), tmp_path)
    renamed = Version(VERSION.size, VERSION.tag, "other.h5")
    assert find_copy(tmp_path, MemoryOrigin(), renamed) is None
    record = json.loads((tmp_path / "staged.json").read_text())
    (tmp_path / "staged.json").write_text(json.dumps(record | {"key": "elsewhere"}))
    assert find_copy(tmp_path, MemoryOrigin(), VERSION) is None


def test_a_copy_that_is_being_made_is_waited_for_and_what_died_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one writes, then dies; the test's own pauses are those of the one that waits."""
    part = part_path(tmp_path, VERSION)
    other = files.create_new(part)
    assert locks.try_lock(other, download._LOCK_AT)
    pauses = 0

    def meanwhile(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            files.write_at(other, 0, b"more")
        elif pauses == 3:
            files.close(other)

    monkeypatch.setattr(time, "sleep", meanwhile)
    assert copy(MemoryOrigin(), tmp_path) == len(DATA)
    assert pauses == 3
    assert (tmp_path / VERSION.name).read_bytes() == DATA


def test_a_copy_that_another_one_finishes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_path(tmp_path, VERSION)
    other = files.create_new(part)
    assert locks.try_lock(other, download._LOCK_AT)

    def finished_by_the_other(seconds: float) -> None:
        monkeypatch.undo()
        part.unlink()
        copy(MemoryOrigin(), tmp_path)
        files.close(other)

    monkeypatch.setattr(time, "sleep", finished_by_the_other)
    assert copy(MemoryOrigin(), tmp_path) == 0
    assert (tmp_path / VERSION.name).read_bytes() == DATA
    assert not part.exists()


def test_a_copy_that_is_renamed_between_two_looks_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, really = part_path(tmp_path, VERSION), files.open_or_create
    part.touch()

    def renamed_this_moment(path: Path) -> int:
        monkeypatch.setattr(files, "open_or_create", really)
        fd = really(path)
        part.unlink()
        return fd

    monkeypatch.setattr(files, "open_or_create", renamed_this_moment)
    assert copy(MemoryOrigin(), tmp_path) == len(DATA)
