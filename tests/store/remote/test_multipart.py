"""Uploads in parts: they go on where they were, overwrite nothing, and end in typed errors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import Asked, Fault, ObjectServer
from remote_stores import Counted, fail, object_server, use_small_parts
from small_stores import names_in

from ups_store.errors import RemoteError
from ups_store.remote import multipart
from ups_store.remote.multipart import end_upload, unfinished_uploads, upload
from ups_store.remote.signing import Signer
from ups_store.system import files, locks
from ups_store.system.urls import Url

DATA = bytes(range(256)) * 33  # of 5 parts, the last one shorter
PART_NBYTES = 2000
PARTS = ["1", "2", "3", "4", "5"]
KEY, PLACE = "b/d/a b.zarr.zip", Url.of("s3://b/d/a%20b.zarr.zip")
SIGNER = Signer("id", "secret", "token", "eu")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    use_small_parts(monkeypatch, PART_NBYTES)
    with object_server(monkeypatch) as state:
        yield state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """What is uploaded, alone in its folder."""
    found = tmp_path / "here" / "a.zarr.zip"
    found.parent.mkdir()
    found.write_bytes(DATA)
    return found


def push(path: Path, *, replace: bool = False, progress: Counted | None = None) -> bool:
    options: Any = {"stall_s": 5.0, "progress": progress or Counted()}
    return upload(path, PLACE, SIGNER, digest="some digest", replace=replace, **options)


def is_begin(asked: Asked) -> bool:
    return asked.method == "POST" and "uploads" in asked.query


def is_part(asked: Asked) -> bool:
    return "partNumber" in asked.query


def is_complete(asked: Asked) -> bool:
    return asked.method == "POST" and "uploadId" in asked.query


def parts_sent(server: ObjectServer) -> list[str]:
    return sorted(asked.query["partNumber"] for asked in server.asked if is_part(asked))


def check_whole(server: ObjectServer, path: Path) -> None:
    """The object is there, with its digest, and nothing else anywhere."""
    assert server.objects[KEY] == path.read_bytes()
    assert server.attributes[KEY] == {"x-amz-meta-sha256": "some digest"}
    assert server.uploads == {}
    assert names_in(path.parent) == [path.name]


def test_object_is_made_of_parts_and_nothing_else_is_left(server: ObjectServer, path: Path) -> None:
    progress = Counted()
    assert push(path, progress=progress)
    check_whole(server, path)
    assert parts_sent(server) == PARTS
    assert (progress.done, progress.nbytes) == (["uploading"], len(DATA))


def test_parts_are_longer_where_there_would_be_too_many(
    server: ObjectServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "_MAX_PARTS", 2)
    assert push(path)
    check_whole(server, path)
    assert parts_sent(server) == ["1", "2"]


def interrupt(server: ObjectServer, path: Path) -> set[str]:
    """Have the server refuse the third part; returns the parts that it has."""
    fail(server, lambda asked: asked.query.get("partNumber") == "3", Fault(status=403))
    with pytest.raises(RemoteError) as caught:
        push(path)
    assert caught.value.kind == "not_allowed"
    assert [name for name in names_in(path.parent) if name.endswith(".lock")] == []
    fail(server, is_part, Fault(), num=0)
    server.forget()
    (begun,) = server.uploads.values()
    return {str(number) for number in begun.parts}


def test_upload_that_was_interrupted_sends_what_is_missing(server: ObjectServer, path: Path) -> None:
    there, progress = interrupt(server, path), Counted()
    assert push(path, progress=progress)
    check_whole(server, path)
    assert parts_sent(server) == sorted({*PARTS} - there)
    assert not any(is_begin(asked) for asked in server.asked)
    assert progress.nbytes == len(DATA)


def test_file_that_was_written_since_is_uploaded_from_its_beginning(server: ObjectServer, path: Path) -> None:
    interrupt(server, path)
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(0, 1))
    assert push(path)
    assert server.objects[KEY] == DATA[::-1]
    assert parts_sent(server) == PARTS


def damaged(record: Path, how: str) -> str:
    values = json.loads(record.read_text())
    if how in values:
        return json.dumps({**values, how: {"part_nbytes": 0, "state": 5, "tags": ["x"]}[how]})
    return {"cut": record.read_text()[:-5], "empty": "", "a list": "[]", "another": '{"url": "s3://b/c"}'}[
        how
    ]


@pytest.mark.parametrize("how", ["cut", "empty", "a list", "another", "part_nbytes", "state", "tags"])
def test_damaged_record_begins_the_upload_again(server: ObjectServer, path: Path, how: str) -> None:
    interrupt(server, path)
    (record,) = path.parent.glob(".*.push")
    record.write_text(damaged(record, how))
    assert push(path)
    assert server.objects[KEY] == DATA
    assert parts_sent(server) == PARTS
    assert names_in(path.parent) == [path.name]


def test_upload_that_the_server_ended_is_begun_again(server: ObjectServer, path: Path) -> None:
    interrupt(server, path)
    server.uploads.clear()
    assert push(path)
    check_whole(server, path)


def test_upload_that_was_ended_because_the_object_is_there_makes_none(
    server: ObjectServer, path: Path
) -> None:
    interrupt(server, path)
    server.uploads.clear()
    server.objects[KEY] = b"of another machine"
    assert not push(path)
    assert server.objects[KEY] == b"of another machine"
    assert names_in(path.parent) == [path.name]


def put_before_completion(server: ObjectServer, *, end: Fault | None = None) -> None:
    """Have another machine be faster; `end` is what is wrong with the end of the upload then."""

    def fault(asked: Asked) -> Fault | None:
        if is_complete(asked):
            server.objects[KEY] = b"of another machine"
        return end if asked.method == "DELETE" else None

    server.fault = fault


def test_upload_that_loses_the_race_leaves_the_other_object_and_no_parts(
    server: ObjectServer, path: Path
) -> None:
    put_before_completion(server)
    assert not push(path)
    assert (server.objects[KEY], server.uploads) == (b"of another machine", {})
    assert names_in(path.parent) == [path.name]


def test_loser_whose_parts_cannot_be_removed_has_lost_all_the_same(server: ObjectServer, path: Path) -> None:
    put_before_completion(server, end=Fault(status=403))
    assert not push(path)
    assert len(server.uploads) == 1


def test_replacing_replaces(server: ObjectServer, path: Path) -> None:
    put_before_completion(server)
    assert push(path, replace=True)
    check_whole(server, path)


TRANSIENT = [
    Fault(status=503),
    Fault(status=409, code="ConditionalRequestConflict"),
    Fault(status=200, code="InternalError"),
    Fault(status=200, body="<Error>not XML"),
]


@pytest.mark.parametrize("fault", TRANSIENT, ids=["503", "409", "error with 200", "damaged error with 200"])
@pytest.mark.parametrize("wanted", [is_begin, is_part, is_complete])
def test_what_may_pass_is_tried_again(server: ObjectServer, path: Path, wanted: Any, fault: Fault) -> None:
    fail(server, wanted, fault, num=2)
    assert push(path)
    check_whole(server, path)


@pytest.mark.parametrize("wanted", [is_begin, is_part])
def test_answer_that_was_lost_is_asked_for_again(server: ObjectServer, path: Path, wanted: Any) -> None:
    fail(server, wanted, Fault(cut=0), num=1)
    assert push(path)
    assert server.objects[KEY] == DATA


def test_completion_whose_answer_was_lost_has_made_the_object(server: ObjectServer, path: Path) -> None:
    fail(server, is_complete, Fault(cut=0), num=1)
    assert not push(path)
    check_whole(server, path)


@pytest.mark.parametrize(
    ("fault", "kind", "hint"),
    [
        (Fault(status=403, code="AccessDenied"), "not_allowed", "AWS_ACCESS_KEY_ID"),
        (Fault(status=400, code="InvalidRequest"), "refused", "again"),
        (Fault(status=404, code="NoSuchBucket"), "gone", "check the bucket"),
        (Fault(status=503, code="SlowDown"), "unreachable", "again"),
        (Fault(body="<html>"), "refused", "again"),
        (Fault(body="<A><UploadId></UploadId></A>"), "refused", "again"),
    ],
    ids=str,
)
def test_what_stays_is_an_error(server: ObjectServer, path: Path, fault: Fault, kind: str, hint: str) -> None:
    fail(server, is_begin, fault)
    with pytest.raises(RemoteError) as caught:
        push(path)
    assert (caught.value.kind, str(caught.value.path)) == (kind, str(PLACE.path))
    assert fault.code in str(caught.value)
    assert hint in str(caught.value.hint)
    assert names_in(path.parent) == [path.name]


def test_parts_that_the_server_refuses_to_put_together_are_sent_again_by_the_next_push(
    server: ObjectServer, path: Path
) -> None:
    interrupt(server, path)
    (begun,) = server.uploads.values()
    number = next(iter(begun.parts))
    begun.parts[number] = b"other bytes"
    with pytest.raises(RemoteError, match="InvalidPart") as caught:
        push(path)
    assert caught.value.kind == "refused"
    assert push(path)
    assert server.objects[KEY] == DATA


def no_folder(path: Path) -> int:
    raise PermissionError(path)


def no_locks(fd: int, offset: int) -> bool:
    raise OSError("no locks here")


def no_record(path: Path, text: str) -> None:
    raise OSError("no room")


@pytest.mark.parametrize(
    ("module", "name", "function"),
    [
        (files, "open_or_create", no_folder),
        (locks, "try_lock", no_locks),
        (multipart, "replace_text", no_record),
    ],
    ids=["read-only folder", "no locks", "full disk"],
)
def test_upload_goes_without_a_record_where_there_can_be_none(
    server: ObjectServer, path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, function: Any
) -> None:
    monkeypatch.setattr(module, name, function)
    fail(server, lambda asked: asked.query.get("partNumber") == "3", Fault(status=404), num=1)  # begun again
    assert push(path)
    assert server.objects[KEY] == DATA


def test_of_two_that_upload_the_same_file_the_second_keeps_no_record(
    server: ObjectServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(server, path)
    before = {name: (path.parent / name).read_bytes() for name in names_in(path.parent)}
    (record,) = path.parent.glob(".*.push")
    lock = record.with_name(f"{record.name}.lock")
    fd = files.open_or_create(lock)
    assert locks.try_lock(fd, 0)
    assert push(path)
    assert parts_sent(server) == PARTS
    files.close(fd)
    lock.unlink()
    assert {name: (path.parent / name).read_bytes() for name in names_in(path.parent)} == before


def begin_some(*keys: str) -> None:
    for key in keys:
        multipart.S3Api(Url.of(f"s3://b/{key}"), SIGNER, stall_s=5.0).ask("POST", {"uploads": ""})


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_unfinished_uploads_are_listed_whatever_the_pages(server: ObjectServer, page_size: int) -> None:
    begin_some("d/x", "d/x", "d/y", "d/z", "other/x")
    server.page_size = page_size
    found = unfinished_uploads(Url("s3://b/d/"), SIGNER, stall_s=5.0)
    assert [each.key for each in found] == ["x", "x", "y", "z"]
    assert {each.id for each in found} < {*server.uploads}
    assert found[0].begun_s == 1577872800.0
    assert len(unfinished_uploads(Url("s3://b"), SIGNER, stall_s=5.0)) == 5


@pytest.mark.parametrize("marker", ["", "<NextKeyMarker>d/x</NextKeyMarker>"])
def test_listing_that_never_ends_ends(server: ObjectServer, marker: str) -> None:
    """Of a server that says that there is more, and gives the same; nor does it say when."""
    uploads = "<Upload><Key>d/x</Key><UploadId>1</UploadId></Upload>"
    page = f"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>{marker}{uploads}"
    fail(server, lambda asked: True, Fault(body=f"{page}</ListMultipartUploadsResult>"))
    begun_s = time.time()
    found = unfinished_uploads(Url("s3://b/d"), SIGNER, stall_s=5.0)
    assert {(each.key, each.id) for each in found} == {("x", "1")}
    assert all(each.begun_s >= begun_s for each in found), "what isn't known isn't old"
    assert len(server.asked) <= 2


def test_upload_is_ended_once_and_then_is_gone(server: ObjectServer) -> None:
    begin_some("d/x")
    (number,) = server.uploads
    url = Url.of("s3://b/d/x")
    for _ in range(2):
        end_upload(url, SIGNER, number, stall_s=5.0)
        assert server.uploads == {}
    fail(server, lambda asked: True, Fault(status=403))
    with pytest.raises(RemoteError):
        end_upload(url, SIGNER, number, stall_s=5.0)
