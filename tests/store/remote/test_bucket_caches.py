"""A shared cache in a bucket: stores in one request, in parts or copied there, losers of races, strays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_ups_store
from object_server import Asked, Fault, ObjectServer
from remote_stores import Counted, fail, object_server, some_values, use_small_parts
from small_stores import build

from ups_store.errors import DownloadError, FormatError, RemoteError
from ups_store.remote.garbage import find_remote_garbage
from ups_store.remote.shared_bucket import BucketCache
from ups_store.remote.shared_place import open_shared
from ups_store.remote.signing import Signer
from ups_store.remote.transfer import pull_store
from ups_store.sources.attempts import Attempts

HASH = "a" * 64
NAME = "a.zarr.zip"
KEY = f"{HASH}/{NAME}"
PATH = f"bucket/team a/{KEY}"
ROOT = "s3://bucket/team%20a"
DENIED = f"<Key>team a/{KEY}</Key><Code>AccessDenied</Code><Message>Access Denied</Message>"
WAYS = ["one request", "parts", "copy"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as state:
        yield state


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of 340 KB."""
    return build(tmp_path / NAME, some_values(), dims={})


@pytest.fixture
def cache() -> BucketCache:
    found = open_shared(ROOT, deadline_s=5.0)
    assert isinstance(found, BucketCache)
    return found


def no_keys(*, patched: pytest.MonkeyPatch) -> None:
    """As with Google's and Azure's buckets, or by the role of a machine."""
    patched.setattr(Signer, "from_environment", lambda: None)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How stores get there."""
    if request.param != "one request":
        use_small_parts(monkeypatch, 100_000)
    if request.param == "copy":
        no_keys(patched=monkeypatch)
    return str(request.param)


def is_delete(asked: Asked) -> bool:
    return "delete" in asked.query


def create(cache: BucketCache, store: Path, *, replace: bool = False) -> bool:
    return cache.create(KEY, store, replace=replace, progress=Counted())


def test_store_is_created_once(server: ObjectServer, cache: BucketCache, store: Path, way: str) -> None:
    progress = Counted()
    assert cache.create(KEY, store, replace=False, progress=progress)
    assert progress.nbytes == store.stat().st_size
    server.forget()
    assert not create(cache, store)
    assert [asked.method for asked in server.asked] == ["HEAD"]
    assert server.objects == {PATH: store.read_bytes()}
    assert server.uploads == {}
    assert ("x-amz-meta-sha256" in server.attributes[PATH]) is (way != "copy")


def test_store_that_loses_the_race_leaves_nothing(
    server: ObjectServer, cache: BucketCache, store: Path, way: str
) -> None:
    def be_faster(asked: Asked) -> None:
        if asked.method in ("PUT", "POST") and asked.path == PATH:
            server.objects[PATH] = b"of another machine"

    server.fault = be_faster
    assert not create(cache, store)
    assert server.objects == {PATH: b"of another machine"}
    assert [each.path for each in server.uploads.values() if each.path == PATH] == [] or way == "copy"


def test_replacing_replaces(server: ObjectServer, cache: BucketCache, store: Path, way: str) -> None:
    server.objects[PATH] = b"damaged"
    assert create(cache, store, replace=True)
    assert server.objects == {PATH: store.read_bytes()}


def test_copy_whose_temporary_object_cannot_be_removed_is_made_all_the_same(
    server: ObjectServer, cache: BucketCache, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_parts(monkeypatch, 100_000)
    no_keys(patched=monkeypatch)
    fail(server, is_delete, Fault(status=403))
    assert create(cache, store)
    (entry,), (stray,) = cache.entries()
    assert (entry.key, stray.is_temporary, stray.upload_id) == (KEY, True, "")


@pytest.mark.parametrize(
    "fault", [Fault(status=503), Fault(status=409, code="ConditionalRequestConflict")], ids=["503", "409"]
)
def test_put_that_may_work_later_is_sent_again(
    server: ObjectServer, cache: BucketCache, store: Path, fault: Fault
) -> None:
    """409: an object of the key was being removed, so none is there."""
    fail(server, lambda asked: asked.method == "PUT", fault, num=2)
    assert create(cache, store)
    assert server.objects == {PATH: store.read_bytes()}


def test_put_that_is_not_allowed_is_an_error(server: ObjectServer, cache: BucketCache, store: Path) -> None:
    fail(server, lambda asked: asked.method == "PUT", Fault(status=403))
    with pytest.raises(RemoteError) as caught:
        create(cache, store)
    assert caught.value.kind == "not_allowed"


def fill(server: ObjectServer) -> None:
    """Stores, partitions, what other programs have there, and uploads of ours and of others."""
    names = [f"b-0000{number}-of-00002.zarr.zip" for number in range(2)]
    keys = [KEY, *(f"{HASH}/{name}" for name in names), "README", ".pushing/dead", f"{HASH}/notes.txt"]
    server.objects.update({f"bucket/team a/{key}": b"x" for key in keys})
    server.objects["bucket/elsewhere"] = b"x"
    for key in (KEY, ".pushing/alive", "film.mp4"):
        server.answer("POST", f"bucket/team a/{key}", {"uploads": ""}, {}, b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 4, 1000])
def test_listing_has_everything_below_the_root_whatever_the_pages(
    server: ObjectServer, cache: BucketCache, page_size: int
) -> None:
    fill(server)
    server.page_size = page_size
    entries, strays = cache.entries()
    assert [entry.name for entry in entries] == [
        NAME,
        "b-00000-of-00002.zarr.zip",
        "b-00001-of-00002.zarr.zip",
    ]
    assert [(stray.key, stray.is_temporary, bool(stray.upload_id)) for stray in strays] == [
        (".pushing/dead", True, False),
        ("README", False, False),
        (f"{HASH}/notes.txt", False, False),
        (".pushing/alive", True, True),
        (KEY, True, True),
        ("film.mp4", False, True),
    ]
    assert [entry.nbytes for entry in cache.look(HASH, [])] == [1, 1, 1]
    assert cache.look("b" * 64, [NAME]) == []


def test_gc_ends_uploads_of_dead_pushes_and_leaves_those_of_other_programs(
    server: ObjectServer, cache: BucketCache
) -> None:
    fill(server)
    assert run_ups_store("gc", "--remote", ROOT, "--delete").exit_code == 0
    assert [each.path for each in server.uploads.values()] == ["bucket/team a/film.mp4"]
    assert "bucket/team a/.pushing/dead" not in server.objects
    assert {f"bucket/team a/{key}" for key in (KEY, "README")} < {*server.objects}
    assert {each.kind for each in find_remote_garbage(cache)} == {"foreign"}


def test_gc_leaves_what_may_be_going_on(server: ObjectServer, cache: BucketCache) -> None:
    fill(server)
    server.written = "2999-01-01T00:00:00Z"
    assert run_ups_store("gc", "--remote", ROOT, "--delete").exit_code == 0
    assert len(server.uploads) == 3
    assert "bucket/team a/.pushing/dead" in server.objects


@pytest.mark.parametrize("fault", [Fault(status=403), Fault(status=404), Fault(body="<html>")], ids=str)
def test_uploads_that_cannot_be_listed_are_not_seen(
    server: ObjectServer, cache: BucketCache, fault: Fault
) -> None:
    fill(server)
    fail(server, lambda asked: "uploads" in asked.query, fault)
    entries, strays = cache.entries()
    assert (len(entries), len(strays)) == (3, 3)


def test_without_keys_uploads_are_neither_seen_nor_ended(
    server: ObjectServer, cache: BucketCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(server)
    number = next(iter(server.uploads))
    no_keys(patched=monkeypatch)
    assert len(cache.entries()[1]) == 3
    cache.remove(KEY, number)
    assert PATH in server.objects, "the store of the same key isn't what was meant"


def test_removing_what_is_not_there_is_no_error(server: ObjectServer, cache: BucketCache) -> None:
    fill(server)
    for _ in range(2):
        cache.remove(KEY)
        assert PATH not in server.objects
    fail(server, is_delete, Fault(status=404), num=1)
    cache.remove(KEY)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=403),
        Fault(body=f"<DeleteResult><Error>{DENIED}</Error></DeleteResult>"),
    ],
    ids=["403", "in the answer"],
)
def test_removing_what_may_not_be_removed_is_an_error(
    server: ObjectServer, cache: BucketCache, fault: Fault
) -> None:
    fill(server)
    fail(server, is_delete, fault)
    with pytest.raises(RemoteError) as caught:
        cache.remove(KEY)
    assert caught.value.kind == "not_allowed"


def pull(cache: BucketCache, into: Path) -> Path:
    return pull_store(cache, cache.look(HASH, [NAME]), into, attempts=Attempts(5.0), progress=Counted())


@pytest.mark.parametrize("content", [b"", b"no store", None])
def test_object_that_is_no_store_is_not_pulled(
    server: ObjectServer, cache: BucketCache, store: Path, tmp_path: Path, content: bytes | None
) -> None:
    error = FormatError if content is not None else DownloadError
    server.objects[PATH] = store.read_bytes() if content is None else content
    if content is None:
        server.attributes[PATH] = {"x-amz-meta-sha256": "0" * 64}
    with pytest.raises(error) as caught:
        pull(cache, tmp_path / "into")
    assert str(caught.value.path) == f"s3://bucket/team%20a/{KEY}"  # type: ignore[attr-defined]
    assert [*(tmp_path / "into").iterdir()] == []


def test_bucket_as_a_whole_is_a_cache(server: ObjectServer, store: Path) -> None:
    cache = open_shared("s3://bucket")
    assert cache.create(KEY, store, replace=False, progress=Counted())
    as_path = open_shared(Path("s3://bucket"))
    assert [entry.key for entry in as_path.entries()[0]] == [KEY]
