"""What servers, remotes and folders say of a source: versions, refusals, names and pauses."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from file_server import FileServer, serving, use_as_s3

from ups_store.errors import SourceError
from ups_store.sources import origin_https
from ups_store.sources.attempts import Attempts, persistently
from ups_store.sources.origin_https import HttpsOrigin
from ups_store.sources.origin_rclone import RcloneFolder, RcloneOrigin
from ups_store.sources.origins import ChangedError, LocalOrigin, TransientError, Version
from ups_store.sources.places import folder_of, origin_of
from ups_store.sources.reader import Reader
from ups_store.sources.staging import ListRequest, LookRequest

NAME = "burgers1d_train.h5"
ONCE = Attempts(stall_s=5.0, retries=0, backoff_s=0.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as running:
        running.files[NAME] = b"0123456789"
        yield running


@pytest.fixture
def origin(server: FileServer) -> HttpsOrigin:
    return HttpsOrigin(f"{server.url}/{NAME}")


def look(origin: HttpsOrigin) -> Version | None:
    return origin.look(stall_s=5.0)


@pytest.mark.parametrize("status", [404, 410])
def test_what_the_server_does_not_have_is_nothing(
    server: FileServer, origin: HttpsOrigin, status: int
) -> None:
    server.look_statuses = [status]
    assert look(origin) is None


def test_a_file_of_no_bytes_has_no_first_byte_and_is_there(server: FileServer, origin: HttpsOrigin) -> None:
    server.look_statuses, server.headers = [416], {"Content-Range": "bytes */0"}
    found = look(origin)
    assert found is not None
    assert (found.size, found.name) == (0, NAME)


@pytest.mark.parametrize(("status", "kind"), [(401, "not_allowed"), (403, "not_allowed"), (400, "refused")])
def test_a_refusal_that_stays_is_named(
    server: FileServer, origin: HttpsOrigin, status: int, kind: str
) -> None:
    server.look_statuses = [status]
    with pytest.raises(SourceError, match=f"answered {status}") as caught:
        look(origin)
    assert caught.value.kind == kind


def test_a_version_that_took_its_place_is_noticed_before_its_first_byte(
    server: FileServer, origin: HttpsOrigin
) -> None:
    version = look(origin)
    assert version is not None
    server.files[NAME] = b"9876543210"
    with pytest.raises(ChangedError), origin.opened(4, version, stall_s=5.0):
        pass
    server.files[NAME] = b"0123456789"
    server.statuses = [412]
    with pytest.raises(ChangedError), origin.opened(4, version, stall_s=5.0):
        pass
    server.statuses = [400]
    with pytest.raises(SourceError, match="answered 400"), origin.opened(4, version, stall_s=5.0):
        pass


def test_encoded_bytes_have_no_length_of_the_file(server: FileServer, origin: HttpsOrigin) -> None:
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(SourceError) as caught:
        look(origin)
    assert (caught.value.kind, caught.value.found) == ("no_length", "Content-Encoding gzip")


def test_a_server_without_tags_or_dates_gives_versions_without_a_tag(
    server: FileServer, origin: HttpsOrigin
) -> None:
    server.has_tags = False
    found = look(origin)
    assert found is not None
    assert found.tag == ""
    server.headers = {"ETag": 'W/"weak"', "Last-Modified": "Mon, 23 Nov 2026 10:00:00 GMT"}
    found = look(origin)
    assert found is not None
    assert found.tag == "modified Mon, 23 Nov 2026 10:00:00 GMT", "a weak tag isn't of the bytes"


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        (None, 0.0, 0.0),
        ("7", 7.0, 7.0),
        ("3600", 60.0, 60.0),
        ("Mon, 23 Nov 2098 10:00:00 GMT", 60.0, 60.0),
        ("Mon, 23 Nov 1998 10:00:00 GMT", 0.0, 0.0),
        ("soon", 0.0, 0.0),
    ],
)
def test_pause_that_a_busy_server_asks_for_is_kept_up_to_a_minute(
    server: FileServer, origin: HttpsOrigin, text: str | None, least: float, most: float
) -> None:
    server.look_statuses, server.headers = [503], {"Retry-After": text} if text else {}
    with pytest.raises(TransientError) as caught:
        look(origin)
    assert least <= caught.value.pause_s <= most


def test_redirects_are_followed_but_none_away_from_https(server: FileServer) -> None:
    follow = origin_https._NoDowngrade()
    asked = urllib.request.Request("https://host/a.h5")
    with pytest.raises(SourceError, match="away from https") as caught:
        follow.redirect_request(asked, None, 302, "Found", Message(), "http://host/b.h5?key=secret")
    assert "secret" not in str(caught.value)
    followed = follow.redirect_request(asked, None, 302, "Found", Message(), "https://host/b.h5")
    assert followed is not None
    assert followed.full_url == "https://host/b.h5"


def test_a_certificate_that_is_not_valid_is_no_matter_of_trying_again(
    origin: HttpsOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opener:
        def open(self, request: object, timeout: float) -> None:
            reason = ssl.SSLCertVerificationError("bad")
            reason.verify_message = "certificate has expired"
            raise urllib.error.URLError(reason)

    monkeypatch.setattr(origin_https, "_opener", Opener)
    with pytest.raises(SourceError, match="certificate has expired") as caught:
        look(origin)
    assert caught.value.kind == "not_trusted"


def test_a_url_that_is_none_is_said(origin: HttpsOrigin) -> None:
    with pytest.raises(SourceError) as caught:
        HttpsOrigin("http://127.0.0.1:port/x.h5").look(stall_s=1.0)
    assert caught.value.kind == "bad_url"


def test_a_guess_that_is_forbidden_is_taken_for_missing(server: FileServer, origin: HttpsOrigin) -> None:
    server.look_statuses = [403, 403, 400]
    assert LookRequest(origin, ONCE, is_guess=True).run(Reader()) is None
    for kind in ("not_allowed", "refused"):
        with pytest.raises(SourceError) as caught:
            LookRequest(origin, ONCE, is_guess=kind == "refused").run(Reader())
        assert caught.value.kind == kind


def test_only_what_may_pass_is_tried_again() -> None:
    failures: list[Exception] = [TransientError("busy"), OSError("reset"), PermissionError("no")]
    num_failed = len(failures)

    def work() -> None:
        raise failures.pop(0)

    with pytest.raises(PermissionError):
        persistently(work, origin="there", attempts=Attempts(retries=num_failed, backoff_s=0.0))
    assert failures == []


RCLONE = """#!/bin/sh
case "$2" in
-R) echo '[{"Path":"a/burgers1d_train.h5","Name":"burgers1d_train.h5","Size":3,"ModTime":"t"}]' ;;
--stat) case "$3" in
  *folder*) echo '{"Path":"x","Name":"x","Size":-1,"ModTime":"t","IsDir":true}' ;;
  *none*) exit 3 ;;
  *killed*) kill -9 $$ ;;
  *slow*) exec sleep 30 ;;
  *closes*) exec >&-; exec sleep 30 ;;
  esac ;;
esac
case "$*" in *missing*) exit 3 ;; esac
"""


@pytest.fixture
def rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "rclone"
    program.write_text(RCLONE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def of_remote(name: str) -> RcloneOrigin:
    return RcloneOrigin(f"b2:bucket/{name}", digest="", name=name)


@pytest.mark.usefixtures("rclone")
def test_remote_folders_and_names_without_a_file_are_nothing() -> None:
    assert of_remote("folder").look(stall_s=5.0) is None
    assert of_remote("none").look(stall_s=5.0) is None
    with (
        pytest.raises(ChangedError),
        of_remote("missing").opened(0, Version(1, "", "x"), stall_s=5.0) as body,
    ):
        list(body.chunks)


@pytest.mark.usefixtures("rclone")
def test_an_rclone_that_is_killed_or_stalls_may_go_better_next_time() -> None:
    with pytest.raises(TransientError, match="killed by signal 9"):
        of_remote("killed").look(stall_s=5.0)
    with pytest.raises(TimeoutError, match="gave nothing for"):
        of_remote("slow").look(stall_s=0.05)
    with pytest.raises(TimeoutError, match="didn't end for"):
        of_remote("closes").look(stall_s=0.5)


@pytest.mark.usefixtures("rclone")
def test_a_remote_folder_lists_its_files_or_says_that_it_is_missing() -> None:
    folder = folder_of("b2:bucket/pde")
    assert isinstance(folder, RcloneFolder)
    ((path, version),) = ListRequest(folder, ONCE).run(Reader())
    assert (path, version.size, version.name) == (f"a/{NAME}", 3, NAME)
    assert folder.origin(path).location == f"b2:bucket/pde/a/{NAME}"
    with pytest.raises(SourceError) as caught:
        RcloneFolder("b2:missing").files(stall_s=5.0)
    assert caught.value.kind == "missing_root"


def test_a_folder_of_too_many_files_is_refused(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_s3(server, monkeypatch)
    server.files |= {f"bucket/pde/burgers1d_train_{number:040}.h5": b"" for number in range(1500)}
    folder = folder_of("s3://bucket/pde")
    assert folder is not None
    with pytest.raises(SourceError, match="too many") as caught:
        ListRequest(folder, ONCE).run(Reader())
    assert caught.value.found == "1,500 files"


def test_an_object_that_was_replaced_or_refused_is_not_read(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    server.files[f"bucket/{NAME}"] = b"0123456789"
    origin = origin_of(f"s3://bucket/{NAME}")
    version = origin.look(stall_s=5.0)
    assert version is not None
    assert folder_of("https://host/folder") is None, "https lists nothing"
    server.files[f"bucket/{NAME}"] = b"9876543210"
    with pytest.raises(ChangedError), origin.opened(4, version, stall_s=5.0):
        pass
    del server.files[f"bucket/{NAME}"]
    with pytest.raises(ChangedError), origin.opened(4, version, stall_s=5.0):
        pass
    server.statuses = [403]
    with pytest.raises(SourceError) as caught, origin.opened(0, version, stall_s=5.0):
        pass
    assert caught.value.kind == "not_allowed"
    server.statuses = [503]
    with pytest.raises(TransientError), origin.opened(0, version, stall_s=5.0):
        pass


def test_a_local_file_that_is_gone_or_forbidden_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = origin_of(tmp_path / NAME)
    assert isinstance(origin, LocalOrigin)
    assert origin.look(stall_s=1.0) is None
    with pytest.raises(ChangedError), origin.opened(0, Version(1, "", NAME), stall_s=1.0):
        pass

    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ups_store.system.files.open_existing", forbidden)
    with pytest.raises(SourceError) as caught, origin.opened(0, Version(1, "", NAME), stall_s=1.0):
        pass
    assert caught.value.kind == "unreadable"
    monkeypatch.setattr("os.stat", forbidden)
    with pytest.raises(SourceError, match="can't be read"):
        origin.look(stall_s=1.0)
