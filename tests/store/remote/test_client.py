"""Objects are read by ranges of one version, within a deadline, whatever the server does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from object_server import Asked, Fault, ObjectServer, serving_objects, use_as_s3

from ups_store.errors import MissingExtraError, RemoteError, SpecError, StoreNotFoundError, StoreReplacedError
from ups_store.remote import client
from ups_store.remote.client import RemoteObject
from ups_store.system.paths import Url

DATA = bytes(range(256)) * 100


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serving_objects() as state:
        use_as_s3(state.url, monkeypatch)
        monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
        client._client.cache_clear()
        state.objects["b/d/a"] = DATA
        yield state
        client._client.cache_clear()


def failing(server: ObjectServer, num: float, **fault: Any) -> None:
    """Have the next `num` answers be wrong in this way."""
    left = [num]

    def next_fault(asked: Asked) -> Fault | None:
        left[0] -= 1
        return Fault(**fault) if left[0] >= 0 else None

    server.fault = next_fault


@pytest.mark.parametrize("form", ["s3://b/d/a", "{url}/b/d/a", "{url}/b/d/a?signature=%2Fx"])
def test_ranges_and_end_are_a_request_each(server: ObjectServer, form: str) -> None:
    found = RemoteObject(Url.of(form.format(url=server.url)))
    assert bytes(found.read_end(4)) == DATA[-4:]
    assert bytes(found.read(300, 20)) == DATA[300:320]
    assert found.version.nbytes == len(DATA)
    assert [(asked.method, asked.range) for asked in server.asked] == [
        ("GET", (25596, 25600)),
        ("GET", (300, 320)),
    ]
    assert (found.num_requests, found.num_bytes) == (2, 24)


@pytest.mark.parametrize(
    "fault",
    [{"status": 503}, {"status": 429}, {"cut": 3}, {"shift": 7}, {"is_whole": True}],
    ids=str,
)
def test_what_may_pass_is_tried_again(server: ObjectServer, fault: dict[str, Any]) -> None:
    found = RemoteObject(Url.of("s3://b/d/a"))
    failing(server, 2, **fault)
    assert bytes(found.read(5, 10)) == DATA[5:15]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": 503}, "unreachable"),
        ({"shift": 7}, "unreachable"),
        ({"is_whole": True}, "no_ranges"),
        ({"status": 403}, "not_allowed"),
        ({"status": 400}, "refused"),
        ({"delay_s": 0.5}, "unreachable"),
    ],
    ids=str,
)
def test_what_stays_is_an_error_in_time(server: ObjectServer, fault: dict[str, Any], kind: str) -> None:
    found = RemoteObject(Url.of("s3://b/d/a"), deadline_s=0.4)
    failing(server, float("inf"), **fault)
    with pytest.raises(RemoteError) as caught:
        found.read(5, 10)
    assert (caught.value.kind, caught.value.path) == (kind, "s3://b/d/a")
    assert caught.value.hint


def test_nothing_listens(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    client._client.cache_clear()
    with pytest.raises(RemoteError, match="no answer") as caught:
        RemoteObject(Url.of("s3://b/d/a"), deadline_s=0.2).read(0, 1)
    assert caught.value.kind == "unreachable"


def test_missing_object(server: ObjectServer) -> None:
    for form in ("s3://b/none", f"{server.url}/b/none"):
        with pytest.raises(StoreNotFoundError, match="no such object") as caught:
            RemoteObject(Url.of(form)).read_end(5)
        assert caught.value.path == form


@pytest.mark.parametrize("has_tags", [True, False])
def test_object_of_another_length_or_tag_is_another(server: ObjectServer, has_tags: bool) -> None:
    server.has_tags = has_tags
    found = RemoteObject(Url.of("s3://b/d/a"))
    found.read(0, 1)
    server.objects["b/d/a"] = DATA[1:]
    with pytest.raises(StoreReplacedError, match="replaced since"):
        found.read(0, 1)


def test_stale_tag_of_a_server_that_knows_no_conditions(server: ObjectServer) -> None:
    found = RemoteObject(Url.of("s3://b/d/a"))
    found.read(0, 1)
    failing(server, 1, tag='"other"')
    with pytest.raises(StoreReplacedError, match='found 25,600 bytes, etag "other"'):
        found.read(0, 1)


def test_child_of_a_process_with_a_client_gets_an_error_and_no_hang(server: ObjectServer) -> None:
    found = RemoteObject(Url.of("s3://b/d/a"))
    found.read(0, 1)
    pid = os.fork()
    if pid == 0:
        try:
            found.read(0, 1)
        except RemoteError as error:
            os._exit(7 if error.kind == "forked" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_no_secret_is_shown(server: ObjectServer) -> None:
    url = Url.of(f"{server.url.replace('//', '//user:word@')}/b/none?signature=abc#d")
    with pytest.raises(StoreNotFoundError) as caught:
        RemoteObject(url).read(0, 1)
    for text in (str(caught.value), repr(url), str(url.path)):
        assert not {"user", "word", "abc"} & set(text.replace("@", "/").replace("=", "/").split("/"))


@pytest.mark.parametrize("text", ["a/b.zarr.zip", "s3://bucket", "s3://bucket/", "ftp://host/a", "s3:///a"])
def test_what_names_no_object_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Url.of(text)
    assert caught.value.kind == "url"


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"ups-store\[s3\]"):
        RemoteObject(Url.of("s3://b/d/a")).read(0, 1)


def test_deadline_bounds_a_request_that_hangs(server: ObjectServer) -> None:
    """Bounded by the server's delay in the end; the error is there before."""
    failing(server, float("inf"), delay_s=60.0)
    begun = time.monotonic()
    with pytest.raises(RemoteError):
        RemoteObject(Url.of("s3://b/d/a"), deadline_s=0.4).read(0, 1)
    assert time.monotonic() - begun < 60.0


def test_end_of_an_object_of_a_known_version_is_a_range(server: ObjectServer) -> None:
    found = RemoteObject(Url.of("s3://b/d/a"))
    assert found.version.nbytes == len(DATA)
    assert bytes(found.read_end(4)) == DATA[-4:]
    assert bytes(found.read_end(1 << 20)) == DATA
    assert [asked.range for asked in server.asked[1:]] == [(len(DATA) - 4, len(DATA)), (0, len(DATA))]
    assert bytes(found.read(0, 0)) == b""


def test_process_that_has_used_none_has_places_for_all_requests(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a child that was forked amid its parent's requests."""
    monkeypatch.setattr(client, "_pid", None)
    monkeypatch.setattr(client, "_requests", threading.BoundedSemaphore(1))
    with client._requests:
        client._renew()
        assert bytes(RemoteObject(Url.of("s3://b/d/a")).read(0, 1)) == DATA[:1]
    assert client._pid == os.getpid()


@pytest.mark.parametrize("url", ["s3://b/a", "gs://b/a", "az://b/a", "https://h/a?key=1"])
def test_each_kind_of_bucket_has_its_client(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    pytest.importorskip("obstore", reason="the extra [s3]")
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_SKIP_SIGNATURE", "GOOGLE_SKIP_SIGNATURE"):
        monkeypatch.setenv(name, "true")
    client._client.cache_clear()
    place = Url.of(url)
    assert client.client_of(place) is client.client_of(place.beside("b"))
    client._client.cache_clear()
