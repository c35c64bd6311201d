"""Copies are whole or not there: servers that cut, change and refuse; resumed ones; ranks; full disks."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from crash_copies import DATA as SHORT
from crash_copies import InMemory
from crash_copies import copy as copy_of_memory
from faulty_disk import FaultyDisk
from file_server import FileServer, serving, use_as_s3
from tiny_disk import DISK_BYTES, mounted

from ups_store.errors import (
    ConfigError,
    DiskFullError,
    ReadTimeoutError,
    RemoteError,
    SourceError,
)
from ups_store.remote import client
from ups_store.remote import fetch as fetching
from ups_store.remote.client import Version
from ups_store.remote.fetch import (
    Body,
    LocalFile,
    Original,
    fetch,
    find_copy,
    list_sources,
    look,
    num_there,
    original_of,
)
from ups_store.sources.reader_pool import Patience, ReaderPool
from ups_store.sources.reader_process import Call, Reader
from ups_store.system import files, locks
from ups_store.system.paths import Url, instead_of_rclone

DATA = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)
NAME = "burgers1d_train.h5"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    pytest.importorskip("obstore", reason="the extra [s3]")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetching, "_RANGE_BYTES", 100_000)
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
    client._client.cache_clear()
    with serving() as running:
        running.files[NAME] = running.files[f"bucket/a/{NAME}"] = DATA
        use_as_s3(running, monkeypatch)
        yield running
    client._client.cache_clear()


@pytest.fixture(params=["http", "s3"])
def url(request: pytest.FixtureRequest, server: FileServer) -> str:
    """Where the file is."""
    return f"{server.url}/bucket/a/{NAME}" if request.param == "http" else f"s3://bucket/a/{NAME}"


def of(url: str, *, deadline_s: float = 10.0) -> Original:
    return original_of(url, deadline_s=deadline_s)


def copy(original: Original, folder: Path, *, retries: int = 2) -> int:
    """Fetch in this process; returns the bytes that were fetched."""
    version = original.look()
    assert version is not None
    return fetch(Reader(), original, version, folder, retries)


def test_a_copy_is_whole_and_recorded_with_its_digest(url: str, server: FileServer, tmp_path: Path) -> None:
    assert copy(of(url), tmp_path) == len(DATA)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert sorted(os.listdir(tmp_path)) == [NAME, "staged.json"]
    record = json.loads((tmp_path / "staged.json").read_text())
    assert record["sha256"] == hashlib.sha256(DATA).hexdigest()
    server.asked.clear()
    assert copy(of(url), tmp_path) == 0
    assert len(server.asked) == 1, "the second time it is only looked at"


def test_cut_bodies_are_continued_where_they_ended(url: str, server: FileServer, tmp_path: Path) -> None:
    server.cut_at = 60_000
    copy(of(url), tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert {0, 60_000, 100_000, 160_000, 200_000, 260_000} <= {*server.starts}


def test_a_server_without_ranges_gives_all_of_it(server: FileServer, tmp_path: Path) -> None:
    server.has_ranges = False
    assert copy(of(f"{server.url}/{NAME}"), tmp_path) == len(DATA)
    assert (tmp_path / NAME).read_bytes() == DATA


def test_busy_servers_are_asked_again_and_then_given_up(server: FileServer, tmp_path: Path) -> None:
    url = f"{server.url}/{NAME}"
    server.statuses = [503, 429]
    copy(of(url), tmp_path / "a")
    assert (tmp_path / "a" / NAME).read_bytes() == DATA
    server.statuses = [503] * 100_000
    with pytest.raises(RemoteError, match="503") as caught:
        copy(of(url, deadline_s=0.2), tmp_path / "b")
    assert caught.value.kind == "unreachable"


def test_what_no_retry_mends_is_an_error_without_secrets(server: FileServer, tmp_path: Path) -> None:
    server.statuses = [403] * 30
    with pytest.raises(RemoteError) as caught:
        copy(of(f"{server.url}/{NAME}?signature=hush"), tmp_path)
    assert caught.value.kind == "not_allowed"
    assert "hush" not in str(caught.value)


def test_a_file_that_is_replaced_meanwhile_is_fetched_again_whole(server: FileServer, tmp_path: Path) -> None:
    def replace() -> None:
        server.files[f"bucket/a/{NAME}"] = OTHER

    server.after = replace
    copy(of(f"s3://bucket/a/{NAME}"), tmp_path)
    assert (tmp_path / NAME).read_bytes() == OTHER


def test_a_file_that_never_stays_the_same_is_an_error(server: FileServer, tmp_path: Path) -> None:
    def change() -> None:
        server.files[NAME] = server.files[NAME][::-1]

    server.after = change
    with pytest.raises(SourceError) as caught:
        copy(of(f"{server.url}/{NAME}"), tmp_path)
    assert caught.value.kind == "source_changed"
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_an_expected_digest_is_checked(server: FileServer, tmp_path: Path, kind: str) -> None:
    good, bad = (hashlib.new(kind, data).hexdigest() for data in (DATA, OTHER))
    with pytest.raises(SourceError) as caught:
        copy(of(f"{server.url}/{NAME}#{kind}={bad}"), tmp_path / "bad")
    assert (caught.value.kind, caught.value.found) == ("wrong_digest", good)
    assert not (tmp_path / "bad" / NAME).exists()
    original = of(f"{server.url}/{NAME}#{kind}={good}")
    copy(original, tmp_path / "good")
    assert find_copy(tmp_path / "good", original) == tmp_path / "good" / NAME


def test_a_copy_that_was_touched_is_no_copy(server: FileServer, tmp_path: Path) -> None:
    original = of(f"{server.url}/{NAME}")
    copy(original, tmp_path)
    os.utime(tmp_path / NAME, ns=(1, 1))
    assert find_copy(tmp_path, original) is None
    assert copy(original, tmp_path) == len(DATA)


def test_the_server_names_a_file_that_the_url_does_not(server: FileServer, tmp_path: Path) -> None:
    server.files["datafile/133110"] = DATA
    server.headers["Content-Disposition"] = f'attachment; filename="{NAME}"'
    copy(of(f"{server.url}/datafile/133110"), tmp_path)
    assert (tmp_path / NAME).exists()
    server.headers["Content-Disposition"] = 'attachment; filename="../x.h5"'
    with pytest.raises(SourceError) as caught:
        copy(of(f"{server.url}/datafile/133110"), tmp_path)
    assert caught.value.kind == "bad_name"


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_read_that_never_returns_is_ended_by_the_pool(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    """The client's own deadline is longer: as with a network mount, only its supervisor can end it."""
    (tmp_path / NAME).write_bytes(DATA)
    original = of(f"{server.url}/{NAME}", deadline_s=600.0) if is_remote else LocalFile(tmp_path / NAME)
    version = original.look()
    assert version is not None
    if is_remote:
        server.hang = threading.Event()
    else:
        FaultyDisk(tmp_path, monkeypatch).begin("hang")
    arguments = (original, version, tmp_path / "copies", 2)
    call = Call(fetch, arguments, original.location, "its copy")
    patience = Patience(timeout_s=2.0, retries=0)
    with ReaderPool(1, slot_nbytes=1, patience=patience) as pool, pytest.raises(ReadTimeoutError) as caught:
        list(pool.ask_each([call]))
    assert caught.value.path == original.location
    assert "copying" in str(caught.value)
    assert not (tmp_path / "copies" / NAME).exists()


def test_user_and_password_are_sent_and_not_shown(server: FileServer, tmp_path: Path) -> None:
    original = of(f"{server.url.replace('://', '://anna:secret@')}/{NAME}")
    assert "secret" not in original.location + original.key
    copy(original, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert "secret" not in (tmp_path / "staged.json").read_text()
    assert server.authorizations == {"Basic YW5uYTpzZWNyZXQ="}


def test_a_disk_that_runs_full_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    source = tmp_path / NAME
    source.write_bytes(bytes(2 * DISK_BYTES))
    with mounted(tmp_path / "disk") as disk, pytest.raises(DiskFullError) as caught:
        copy(LocalFile(source), disk / "copies")
    assert caught.value.needed_bytes > caught.value.free_bytes


def test_a_local_file_that_is_gone_or_forbidden_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, version = LocalFile(tmp_path / NAME), Version(1, "", NAME)
    assert original.look() is None
    with pytest.raises(SourceError) as caught:
        fetch(Reader(), original, version, tmp_path / "copies")
    assert caught.value.kind == "source_changed"

    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ups_store.system.files.open_existing", forbidden)
    with pytest.raises(SourceError) as caught:
        list(original.read(0, version)[1])
    assert caught.value.kind == "unreadable"
    monkeypatch.setattr("os.stat", forbidden)
    with pytest.raises(SourceError, match="can't be read"):
        original.look()


# --- what a server says before anything is copied -----------------------------------------------------


@pytest.mark.parametrize("status", [404, 403, 400])
def test_refusals_are_told_apart(url: str, server: FileServer, status: int) -> None:
    server.look_statuses = [status] * 3
    if status == 404:
        assert of(url).look() is None
        return
    with pytest.raises(RemoteError) as caught:
        of(url).look()
    assert caught.value.kind == ("refused" if status == 400 else "not_allowed")


def test_a_guess_that_is_forbidden_is_taken_for_missing(server: FileServer) -> None:
    server.look_statuses = [403, 403]
    original = of(f"{server.url}/{NAME}")
    assert look(Reader(), original, True) is None
    with pytest.raises(RemoteError):
        look(Reader(), original, False)


def test_weak_tags_are_no_conditions(server: FileServer) -> None:
    server.has_tags, server.headers = False, {"ETag": 'W/"weak"'}
    version = of(f"{server.url}/{NAME}").look()
    assert version is not None
    assert (version.condition, version.tag) == (None, 'weak W/"weak"')


def test_a_folder_of_too_many_files_is_refused(server: FileServer) -> None:
    server.files |= {f"bucket/pde/burgers1d_train_{number:040}.h5": b"" for number in range(1500)}
    with pytest.raises(SourceError, match="too many") as caught:
        list_sources(Reader(), Url("s3://bucket/pde"), 5.0)
    assert caught.value.found == "1,500 files"


@pytest.mark.parametrize("text", ["ftp://h/x.h5", "https://h/x.h5#sha256=12", "https://h/x.h5#crc=1"])
def test_places_that_can_not_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        original_of(text)


@pytest.mark.parametrize(
    ("text", "is_rclone"),
    [
        ("b2:bucket/pdebench", True),
        (":http:pdebench", True),
        ("https://host/x.h5", False),
        ("/data/run_12:30.h5", False),
        ("c:/data", False),
    ],
)
def test_what_is_an_rclone_remote(text: str, is_rclone: bool, tmp_path: Path) -> None:
    hint = instead_of_rclone(text, folder=tmp_path)
    assert (hint is not None) is is_rclone
    assert hint is None or "s3://" in hint
    if is_rclone and "/" not in text:
        (tmp_path / text).touch()
        assert instead_of_rclone(text, folder=tmp_path) is None, "a file of that name is meant"


# --- steps, from an original in memory ----------------------------------------------------------------

VERSION = InMemory().version


@dataclass
class Digested(InMemory):
    """An original in memory whose digest is known."""

    digest: str = f"sha256:{hashlib.sha256(SHORT).hexdigest()}"


class Untagged(InMemory):
    """An original in memory that says nothing of its version but its length."""

    @property
    def version(self) -> Version:
        return Version(len(self.data), "", VERSION.name)


def cut(folder: Path, original: InMemory, at: int) -> None:
    original.cuts = [at, 0]
    with pytest.raises(SourceError) as caught:
        copy_of_memory(original, folder)
    assert (caught.value.kind, caught.value.found) == ("cut_short", f"{at:,}")
    assert num_there(folder, original.version) == at


def growing(folder: Path) -> Path:
    return folder / f"{VERSION.name}.part"


def test_more_bytes_than_were_announced_are_an_error(tmp_path: Path) -> None:
    short = Version(len(SHORT) - 1, "tag", VERSION.name)
    with pytest.raises(SourceError) as caught:
        fetch(Reader(), InMemory(), short, tmp_path)
    assert caught.value.kind == "wrong_length"
    assert not (tmp_path / VERSION.name).exists()


def test_a_disk_that_fails_for_a_while_is_tried_again(tmp_path: Path) -> None:
    class Failing(InMemory):
        def read(self, start: int, version: Version) -> Body:
            if self.cuts:
                raise OSError(self.cuts.pop(), "Input/output error")
            return super().read(start, version)

    assert copy_of_memory(Failing(cuts=[5, 5]), tmp_path / "a", retries=2) == len(SHORT)
    with pytest.raises(SourceError, match="Input/output error") as caught:
        copy_of_memory(Failing(cuts=[5, 5, 5]), tmp_path / "b", retries=2)
    assert caught.value.kind == "unreachable"
    with pytest.raises(PermissionError):
        copy_of_memory(Failing(cuts=[13, 13]), tmp_path / "c", retries=2)


def test_nothing_of_an_untagged_original_is_used_twice(tmp_path: Path) -> None:
    assert copy_of_memory(Untagged(cuts=[3000]), tmp_path, retries=1) == 3000 + len(SHORT)
    assert (tmp_path / VERSION.name).read_bytes() == SHORT
    with pytest.raises(SourceError):
        copy_of_memory(Untagged(cuts=[3000, 2000, 0]), tmp_path / "again")
    assert copy_of_memory(Untagged(), tmp_path / "again") == len(SHORT)


def test_a_beginning_of_something_else_is_found_by_the_digest_and_fetched_again(tmp_path: Path) -> None:
    cut(tmp_path, Digested(), 3000)
    growing(tmp_path).write_bytes(bytes(3000))
    assert copy_of_memory(Digested(), tmp_path) == 2 * len(SHORT) - 3000
    assert (tmp_path / VERSION.name).read_bytes() == SHORT
    assert find_copy(tmp_path, Digested()) == tmp_path / VERSION.name
    assert find_copy(tmp_path, Digested(digest="sha256:" + "0" * 64)) is None


def test_bytes_are_synced_and_recorded_every_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_SYNC_BYTES", 2000)
    cut(tmp_path, InMemory(), 5500)
    assert json.loads((tmp_path / "part.json").read_text())["synced"] == 4000
    monkeypatch.setattr(files, "boot_id", lambda: b"\1" * 16)
    assert copy_of_memory(InMemory(), tmp_path) == len(SHORT) - 4000


@pytest.mark.parametrize("what", ["the same", "another version", "another boot"])
def test_an_unfinished_copy_is_resumed_only_if_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    cut(tmp_path, InMemory(SHORT[::-1] if what == "another version" else SHORT), 3000)
    if what == "another boot":  # what wasn't synced before a power cut may be zeros
        monkeypatch.setattr(files, "boot_id", lambda: b"\1" * 16)
    missing = len(SHORT) - 3000 if what == "the same" else len(SHORT)
    assert copy_of_memory(InMemory(), tmp_path) == missing
    assert (tmp_path / VERSION.name).read_bytes() == SHORT


@pytest.mark.parametrize("text", ["[]", '{"synced": "many"}'])
def test_a_record_that_is_damaged_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    cut(tmp_path, InMemory(), 3000)
    (tmp_path / "part.json").write_text(text)
    (tmp_path / "staged.json").write_text(text)
    assert find_copy(tmp_path, InMemory(), VERSION) is None
    assert copy_of_memory(InMemory(), tmp_path) == len(SHORT)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_copy_that_is_being_made_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    """The other one writes, then dies or finishes; the test's own pauses are those of the one that waits."""
    other = files.create_new(growing(tmp_path))
    assert locks.try_lock(other, fetching._LOCK_AT)
    pauses = 0

    def meanwhile(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            files.write_at(other, 0, b"more")
        elif pauses == 3:
            if is_finished:
                growing(tmp_path).unlink()
                copy_of_memory(InMemory(), tmp_path)
            files.close(other)

    monkeypatch.setattr(time, "sleep", meanwhile)
    assert copy_of_memory(InMemory(), tmp_path) == (0 if is_finished else len(SHORT))
    assert pauses == 3
    assert (tmp_path / VERSION.name).read_bytes() == SHORT
    assert not growing(tmp_path).exists()


def test_a_copy_that_is_renamed_between_two_looks_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing(tmp_path).touch()
    really = files.open_or_create

    def renamed_this_moment(path: Path) -> int:
        monkeypatch.setattr(files, "open_or_create", really)
        fd = really(path)
        growing(tmp_path).unlink()
        return fd

    monkeypatch.setattr(files, "open_or_create", renamed_this_moment)
    assert copy_of_memory(InMemory(), tmp_path) == len(SHORT)
