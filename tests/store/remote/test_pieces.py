"""Objects as sources of downloads: by several ranges at a time, given in order, of one version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_server import Fault, ObjectServer
from remote_stores import fail, object_server

from ups_store.errors import RemoteError
from ups_store.remote import pieces
from ups_store.remote.pieces import ObjectOrigin
from ups_store.sources.origins import ChangedError, Version
from ups_store.system.urls import Url

DATA = bytes(range(256)) * 10
PLACE = ObjectOrigin(Url.of("s3://b/d/a"), "sha256:0")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    with object_server(monkeypatch) as state:
        state.objects["b/d/a"] = DATA
        yield state


def look() -> Version:
    found = PLACE.look(stall_s=5.0)
    assert found is not None
    return found


@pytest.mark.parametrize("has_tags", [True, False])
@pytest.mark.parametrize("start", [0, 1, 2500, len(DATA)])
def test_pieces_come_in_order_from_any_start(server: ObjectServer, has_tags: bool, start: int) -> None:
    server.has_tags = has_tags
    with PLACE.opened(start, look(), stall_s=5.0) as body:
        assert b"".join(body.chunks) == DATA[start:]
    assert (PLACE.location, PLACE.key) == ("s3://b/d/a", "s3://b/d/a")


def test_missing_object_is_none(server: ObjectServer) -> None:
    assert ObjectOrigin(Url.of("s3://b/none")).look(stall_s=5.0) is None


@pytest.mark.parametrize("content", [DATA[::-1], None], ids=["replaced", "removed"])
def test_object_that_changes_meanwhile_is_said_to_have_changed(
    server: ObjectServer, content: bytes | None
) -> None:
    version = look()
    del server.objects["b/d/a"]
    if content is not None:
        server.objects["b/d/a"] = content
    with pytest.raises(ChangedError), PLACE.opened(0, version, stall_s=5.0) as body:
        list(body.chunks)


def test_error_amid_the_pieces_ends_those_under_way(server: ObjectServer) -> None:
    fail(server, lambda asked: asked.range[0] >= 500, Fault(status=403))
    with pytest.raises(RemoteError) as caught, PLACE.opened(0, look(), stall_s=5.0) as body:
        list(body.chunks)
    assert caught.value.kind == "not_allowed"
    assert len(server.asked) <= 1 + 5 + pieces.PIECES_IN_FLIGHT
