"""Shared caches in folders, in buckets and behind web servers: created once, listed, chosen, cleaned up.

The slow tests have a store that takes several requests, and a real server.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store
from object_server import Asked, Fault, ObjectServer
from remote_stores import Counted, fail, some_values, use_small_parts
from seaweed import BUCKET, serving_s3
from small_stores import build, flip, names_in

import ups_store
from ups_store.errors import RemoteError, SpecError, StoreNotFoundError
from ups_store.remote.shared import (
    SharedCache,
    check_location,
    files_of_store,
    open_shared,
)
from ups_store.remote.transfer import choose_stores, find_remote_garbage, list_stores, pull_store
from ups_store.system import files

NAME = "waves_train.zarr.zip"
HASH = "a" * 64
KEY = f"{HASH}/{NAME}"
PATH = f"bucket/team a/{KEY}"


def make_store_of(folder: Path, width: int) -> Path:
    values = {"fields": np.random.default_rng(0).standard_normal((40, width)).astype(np.float32)}
    return build(folder / NAME, values, dims={})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of 400 KB."""
    return make_store_of(tmp_path, 2500)


@pytest.fixture
def large_store(tmp_path: Path) -> Path:
    """A store of 40 MB: three parts of an upload, and ten ranges."""
    return make_store_of(tmp_path, 250_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty shared cache."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture(params=["one request", "parts"])
def bucket(request: pytest.FixtureRequest, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty shared cache in a bucket, to which a store is put in one request or in several."""
    if request.param == "parts":
        use_small_parts(monkeypatch, 120_000)
    return "s3://bucket/team%20a"


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest) -> str:
    """An empty shared cache of either kind."""
    name = "folder" if request.param == "folder" else "server"
    found = request.getfixturevalue(name)
    return str(found) if request.param == "folder" else "s3://bucket/team%20a"


@pytest.fixture(scope="module")
def real_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty prefix in a real S3 server, whose variables are set."""
    with serving_s3(tmp_path_factory.mktemp("weed")) as variables, pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        yield f"s3://{BUCKET}"


def create(place: object, store: Path, *, replace: bool = False) -> bool:
    return open_shared(str(place), deadline_s=5.0).create(KEY, store, replace=replace, progress=Counted())


# --- the verbs ----------------------------------------------------------------------------------------


def listed(place: object) -> list[dict[str, object]]:
    done = run_ups_store("ls-remote", place, "--json")
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout)["stores"])


def check_round_trip(store: Path, place: str, into: Path) -> None:
    """Push twice, list, and pull the same bytes."""
    for is_new in (True, False):
        done = run_ups_store("push", store, place, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["is_new"] is is_new
    (found,) = listed(place)
    assert (found["name"], found["nbytes"]) == (store.name, store.stat().st_size)
    done = run_ups_store("pull", place, str(found["config_hash"])[:8], "--into", into, "--json")
    assert done.exit_code == 0, done.output
    assert (into / store.name).read_bytes() == store.read_bytes()
    assert names_in(into) == [store.name], "nothing else is left"


def test_store_goes_through_a_folder(store: Path, folder: Path, tmp_path: Path) -> None:
    check_round_trip(store, str(folder), tmp_path / "into")


def test_store_goes_through_a_bucket(store: Path, bucket: str, tmp_path: Path) -> None:
    check_round_trip(store, bucket, tmp_path / "into")


@pytest.mark.slow
def test_store_goes_through_a_real_bucket(large_store: Path, real_bucket: str, tmp_path: Path) -> None:
    check_round_trip(large_store, f"{real_bucket}/a", tmp_path / "into")


def check_kills(store: Path, place: str, into: Path, *, num_kills: int, longest_s: float) -> None:
    """What is killed at random moments leaves nothing that is taken for whole, and another run ends it."""
    rng = random.Random(num_kills)
    for words in (("push", store, place), ("pull", place, "--into", into)):
        for _ in range(num_kills):
            command = [sys.executable, "-m", "ups_store", *map(str, words)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(rng.uniform(0.3, longest_s))
            process.send_signal(signal.SIGKILL)
            process.wait()
            if (into / NAME).exists():
                assert (into / NAME).read_bytes() == store.read_bytes()
        done = run_ups_store(*words)
        assert done.exit_code == 0, done.output
    assert (into / NAME).read_bytes() == store.read_bytes()
    assert len(listed(place)) == 1


@pytest.mark.slow
def test_killed_pushes_and_pulls_of_a_folder(large_store: Path, folder: Path, tmp_path: Path) -> None:
    check_kills(large_store, str(folder), tmp_path / "into", num_kills=10, longest_s=1.5)
    assert all(stray.is_temporary for stray in open_shared(folder).entries()[1])


@pytest.mark.slow
def test_killed_pushes_and_pulls_of_a_bucket(large_store: Path, real_bucket: str, tmp_path: Path) -> None:
    check_kills(large_store, f"{real_bucket}/killed", tmp_path / "into", num_kills=8, longest_s=3.0)


def test_damaged_file_is_not_pulled_and_force_replaces_it(store: Path, folder: Path, tmp_path: Path) -> None:
    run_ups_store("push", store, folder)
    (file,) = folder.glob("*/*")
    flip(file, file.stat().st_size // 2)
    done = run_ups_store("pull", folder, "--into", tmp_path / "into")
    assert done.exit_code == 1
    assert "damaged" in done.stderr
    assert names_in(tmp_path / "into") == []
    assert run_ups_store("push", store, folder, "--force").exit_code == 0
    assert run_ups_store("pull", folder, "--into", tmp_path / "into").exit_code == 0


def test_damaged_store_is_not_pushed(store: Path, folder: Path) -> None:
    flip(store, store.stat().st_size // 2)
    assert run_ups_store("push", store, folder).exit_code == 1
    assert names_in(folder) == []


def test_pull_replaces_another_store_only_by_force(store: Path, folder: Path, tmp_path: Path) -> None:
    run_ups_store("push", store, folder)
    into = tmp_path / "into"
    into.mkdir()
    other = build(into / NAME, {"fields": np.zeros((2, 3))}, dims={}).read_bytes()
    assert run_ups_store("pull", folder, "waves_train", "--into", into).exit_code == 7
    assert (into / NAME).read_bytes() == other
    assert run_ups_store("pull", folder, "waves_train", "--into", into, "--force").exit_code == 0
    assert (into / NAME).read_bytes() == store.read_bytes()


def test_packed_store_is_compared_by_what_it_holds(store: Path, place: str, tmp_path: Path) -> None:
    """A packed one and a mapped one of the same identity have the same fingerprint."""
    pytest.importorskip("numcodecs", reason="the extra [pack]")
    packed = tmp_path / "packed" / NAME
    packed.parent.mkdir()
    assert run_ups_store("pack", store, packed, "--codec", "blosc").exit_code == 0
    for path, said in ((packed, "pushed"), (packed, "there already"), (store, "there already")):
        done = run_ups_store("push", path, place)
        assert said in done.stdout, done.output


def test_gc_removes_what_dead_pushes_left_and_old_stores(store: Path, folder: Path) -> None:
    run_ups_store("push", store, folder)
    (file,) = folder.glob("*/*")
    dead, alive = (file.with_name(f"{NAME}.{digit * 16}") for digit in "01")
    foreign = folder / "README"
    for path in (dead, alive, foreign):
        path.write_text("")
    long_ago_s = time.time() - 10 * 86400
    os.utime(dead, (long_ago_s, long_ago_s))
    done = run_ups_store("gc", "--remote", folder, "--delete", "--json")
    found = {Path(each["key"]).name: each["removed"] for each in map(json.loads, done.stdout.splitlines())}
    assert found == {dead.name: True, alive.name: False, "README": False}
    os.utime(file, (long_ago_s, long_ago_s))
    assert run_ups_store("gc", "--remote", folder, "--older-than", 20, "--delete").exit_code == 0
    assert file.exists()
    run_ups_store("gc", "--remote", folder, "--older-than", 5, "--delete")
    assert not file.exists()


def test_wrong_words_are_errors_that_say_what_there_is(store: Path, folder: Path, tmp_path: Path) -> None:
    run_ups_store("push", store, folder)
    done = run_ups_store("pull", folder, "wave_train")
    assert done.exit_code == 1
    assert "waves_train" in done.stderr
    assert run_ups_store("ls-remote", "ftp://host/a").exit_code == 2
    assert run_ups_store("ls-remote", tmp_path / "absent").exit_code == 1
    assert run_ups_store("gc", "--older-than", 3).exit_code == 2


# --- buckets ------------------------------------------------------------------------------------------


def test_object_is_created_once(server: ObjectServer, bucket: str, store: Path) -> None:
    progress = Counted()
    assert open_shared(bucket).create(KEY, store, replace=False, progress=progress)
    assert progress.nbytes == store.stat().st_size
    assert not create(bucket, store)
    assert server.objects == {PATH: store.read_bytes()}
    assert server.uploads == {}
    server.objects[PATH] = b"damaged"
    assert create(bucket, store, replace=True)
    assert server.objects == {PATH: store.read_bytes()}


def test_object_of_one_request_that_loses_the_race_replaces_nothing(
    server: ObjectServer, store: Path
) -> None:
    def be_faster(asked: Asked) -> None:
        if asked.method == "PUT":
            server.objects[PATH] = b"of another machine"

    server.fault = be_faster
    assert not create("s3://bucket/team%20a", store)
    assert server.objects == {PATH: b"of another machine"}


@pytest.mark.parametrize(
    "fault", [Fault(status=503), Fault(status=409, code="ConditionalRequestConflict")], ids=["503", "409"]
)
def test_put_that_may_work_later_is_sent_again(server: ObjectServer, store: Path, fault: Fault) -> None:
    """409: an object of the key was being removed, so none is there."""
    fail(server, lambda asked: asked.method == "PUT", fault, num=2)
    assert create("s3://bucket/team%20a", store)
    assert server.objects == {PATH: store.read_bytes()}


def test_put_that_is_not_allowed_is_an_error_and_leaves_no_upload(
    server: ObjectServer, bucket: str, store: Path
) -> None:
    fail(server, lambda asked: asked.method == "PUT", Fault(status=403))
    with pytest.raises(RemoteError) as caught:
        create(bucket, store)
    assert caught.value.kind == "not_allowed"
    assert server.uploads == {}


@pytest.mark.parametrize("page_size", [1, 1000])
def test_listing_has_everything_below_the_root_whatever_the_pages(
    server: ObjectServer, page_size: int
) -> None:
    names = [f"b-0000{number}-of-00002.zarr.zip" for number in range(2)]
    keys = [*(f"{HASH}/{name}" for name in names), KEY, "README", f"{KEY}.{'0' * 16}", f"{HASH}/notes.txt"]
    server.objects.update({f"bucket/team a/{key}": b"x" for key in keys})
    server.objects["bucket/elsewhere"] = b"x"
    server.page_size = page_size
    cache = open_shared("s3://bucket/team%20a")
    entries, strays = cache.entries()
    assert [entry.key for entry in entries] == keys[:3]
    assert {stray.key: stray.is_temporary for stray in strays} == dict(
        zip(keys[3:], (False, True, False), strict=True)
    )
    assert [entry.nbytes for entry in cache.look(HASH, [])] == [1, 1, 1]
    assert cache.look("b" * 64, [NAME]) == []
    assert run_ups_store("gc", "--remote", "s3://bucket/team%20a", "--delete").exit_code == 0
    assert f"bucket/team a/{keys[4]}" not in server.objects
    assert len(server.objects) == 6


def is_delete(asked: Asked) -> bool:
    return "delete" in asked.query


DENIED = f"<Key>team a/{KEY}</Key><Code>AccessDenied</Code><Message>Access Denied</Message>"


@pytest.mark.parametrize(
    "fault",
    [Fault(status=403), Fault(body=f"<DeleteResult><Error>{DENIED}</Error></DeleteResult>")],
    ids=["403", "in the answer"],
)
def test_removing_what_may_not_be_removed_is_an_error(server: ObjectServer, fault: Fault) -> None:
    server.objects[PATH] = b"x"
    fail(server, is_delete, fault)
    with pytest.raises(RemoteError) as caught:
        open_shared("s3://bucket/team%20a").remove(KEY)
    assert caught.value.kind == "not_allowed"


# --- folders ------------------------------------------------------------------------------------------


def link_fails(number: int, meanwhile: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    def fail(old: Path, new: Path) -> None:
        meanwhile(new)
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize("has_links", [True, False])
def test_file_in_a_folder_replaces_no_other(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool, is_faster: bool
) -> None:
    """With hard links in one step; on file systems without them by a look and a rename."""

    def meanwhile(new: Path) -> None:
        if is_faster:
            new.write_bytes(b"of another machine")

    really = files.link
    if has_links:
        monkeypatch.setattr(files, "link", lambda old, new: (meanwhile(new), really(old, new)))
    else:
        monkeypatch.setattr(files, "link", link_fails(errno.EPERM, meanwhile))
    assert create(folder, store) is not is_faster
    assert names_in(folder / HASH) == [NAME]
    assert (folder / KEY).read_bytes() == (b"of another machine" if is_faster else store.read_bytes())
    assert not create(folder, store)
    assert create(folder, store, replace=True)
    assert (folder / KEY).read_bytes() == store.read_bytes()


def test_folder_that_may_not_be_written_to_is_an_error(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*arguments: object, **options: object) -> int:
        raise PermissionError(errno.EACCES, "denied")

    for owner, name in ((files, "create_new"), (os, "makedirs")):
        monkeypatch.setattr(owner, name, deny)
        with pytest.raises(RemoteError, match="can't write there") as caught:
            create(folder, store)
        assert (caught.value.kind, caught.value.path) == ("not_allowed", str(folder / KEY))


def test_disk_that_fails_is_an_error_and_leaves_nothing(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "link", link_fails(errno.EIO, lambda new: None))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        create(folder, store)
    assert names_in(folder / HASH) == []


def test_listing_leaves_out_what_is_no_file_or_goes_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / HASH).mkdir()
    (folder / KEY).write_bytes(b"x")
    os.mkfifo(folder / HASH / "b.zarr.zip")
    (folder / HASH / "gone.zarr.zip").symlink_to(tmp_path / "nothing")
    cache = open_shared(folder)
    (entry,), strays = cache.entries()
    assert (entry.key, entry.nbytes, strays) == (KEY, 1, [])
    assert cache.look("b" * 64, []) == []

    def deny(folder: Path, *, onerror: Callable[[OSError], None]) -> list[object]:
        onerror(PermissionError(folder))
        return []

    monkeypatch.setattr(os, "walk", deny)
    with pytest.raises(PermissionError):
        cache.entries()


def test_removing_removes_the_folder_that_is_empty_then(store: Path, folder: Path) -> None:
    create(folder, store)
    (folder / "README").write_text("")
    for key in (KEY, KEY, "README"):
        open_shared(folder).remove(key)
    assert names_in(folder) == []


def test_folder_that_is_not_there_is_never_made(tmp_path: Path, store: Path) -> None:
    """It may be a mount that is missing."""
    place = f"file://{tmp_path}/absent"
    cache = open_shared(place)
    for work in (lambda: cache.look(HASH, []), cache.entries, lambda: create(place, store)):  # type: ignore[arg-type]
        with pytest.raises(StoreNotFoundError) as caught:
            work()
        assert caught.value.kind == "no_cache"
    assert not (tmp_path / "absent").exists()


# --- which stores are meant ---------------------------------------------------------------------------

A, B = "a" * 64, "b" * 64
KEYS = [
    f"{A}/waves.zarr.zip",
    f"{B}/waves.zarr.zip",
    *(f"{A}/heat-0000{number}-of-00002.zarr.zip" for number in range(2)),
    f"{B}/heat-00001-of-00002.zarr.zip",  # alone, from the machine that made it
    *(f"{A}/ice-0000{number}-of-00003.zarr.zip" for number in (0, 2)),  # two of three
    f"{A}/fire.zarr.zip",
    *(f"{A}/fire-0000{number}-of-00002.zarr.zip" for number in range(2)),  # beside the whole
]


@pytest.fixture
def cache(folder: Path) -> SharedCache:
    for key in KEYS:
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_text(key)
    return open_shared(folder)


def test_whole_stores_are_listed_by_name(cache: SharedCache) -> None:
    found = [(each.name, each.config_hash[0], len(each.files)) for each in list_stores(cache)]
    assert found == [
        ("fire.zarr.zip", "a", 1),
        ("heat.zarr.zip", "a", 2),
        ("heat-00001-of-00002.zarr.zip", "b", 1),
        ("waves.zarr.zip", "a", 1),
        ("waves.zarr.zip", "b", 1),
    ]
    heat = list_stores(cache)[1]
    assert heat.to_json()["files"] == [file.key for file in heat.files] == KEYS[2:4]
    assert heat.nbytes == sum(len(key) for key in KEYS[2:4])
    entries = cache.look(A, [])
    assert [file.key for file in files_of_store(entries, "heat.zarr.zip")] == KEYS[2:4]
    assert files_of_store(entries, "ice.zarr.zip") == []
    assert [file.key for file in files_of_store(entries, "fire.zarr.zip")] == [KEYS[7]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["fire", "heat", "heat-00001-of-00002", "waves", "waves"]),
        (["heat.zarr.zip", "heat", "fire"], ["heat", "fire"]),
        (["aaaaaa"], ["fire", "heat", "waves"]),
        (["b/waves"], ["waves"]),
        ([f"{B}/waves"], ["waves"]),
        ([f"{A}/heat.zarr.zip"], ["heat"]),
    ],
    ids=str,
)
def test_words_name_stores(cache: SharedCache, words: list[str], expected: list[str]) -> None:
    assert [each.name.removesuffix(".zarr.zip") for each in choose_stores(cache, words)] == expected


@pytest.mark.parametrize("word", ["aaaaa", f"{A}/ice", "b/fire"])
def test_words_that_name_nothing_are_an_error(cache: SharedCache, word: str) -> None:
    with pytest.raises(StoreNotFoundError, match="no store") as caught:
        choose_stores(cache, [word])
    assert caught.value.found in (None, "fire, heat, heat-00001-of-00002, waves")


def test_name_of_two_stores_is_an_error_with_their_hashes(cache: SharedCache) -> None:
    with pytest.raises(SpecError, match="the name of 2 stores") as caught:
        choose_stores(cache, ["waves"])
    assert (caught.value.kind, caught.value.found) == ("ambiguous", "aaaaaaaaaaaa, bbbbbbbbbbbb")


def test_some_of_the_partitions_of_a_store_are_garbage(cache: SharedCache) -> None:
    found = {each.key: each.kind for each in find_remote_garbage(cache)}
    assert found == dict.fromkeys([*KEYS[5:7], *KEYS[8:]], "incomplete")
    old = find_remote_garbage(cache, older_than_s=-1.0)
    assert {each.key for each in old if each.kind == "old"} == {*KEYS} - {*found}


@pytest.mark.parametrize("place", ["ftp://host/a", "s3://", "https:///"])
def test_other_urls_are_no_place(place: str) -> None:
    for work in (check_location, open_shared):
        with pytest.raises(SpecError) as caught:
            work(place)
        assert caught.value.kind == "url"


def test_remote_of_rclone_is_no_folder_and_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for work in (check_location, open_shared):
        with pytest.raises(SpecError, match=r"s3://bucket/stores") as caught:
            work("b2:bucket/stores")
        assert caught.value.kind == "rclone"
    (tmp_path / "b2:bucket").mkdir()
    assert check_location("b2:bucket") == str(tmp_path / "b2:bucket")


def test_folders_have_absolute_names_and_urls_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("~/shared", f"file://{tmp_path}/shared"):
        assert check_location(place) == open_shared(place).location == str(tmp_path / "shared")
    pytest.importorskip("obstore", reason="the extra [s3]")
    assert open_shared("https://user:secret@host/a").location == "https://host/a"
    caches = map(open_shared, ("https://host/a", "s3://bucket", "file:///a"))
    assert [cache.is_read_only for cache in caches] == [True, False, False]


def test_store_behind_a_web_server_is_pulled_by_its_name(server: ObjectServer, tmp_path: Path) -> None:
    path = build(tmp_path / "waves.zarr.zip", some_values(), dims={})
    with ups_store.open(path) as store:
        config_hash = store.config_hash
    server.objects[f"team/{config_hash}/waves.zarr.zip"] = path.read_bytes()
    cache = open_shared(f"{server.url}/team/?signature=secret")
    (found,) = choose_stores(cache, [f"{config_hash}/waves"])
    assert (found.nbytes, found.modified_s) == (path.stat().st_size, 1795428000.0)
    into = pull_store(cache, found.files, tmp_path / "into", progress=Counted())
    assert into.read_bytes() == path.read_bytes()
    with pytest.raises(StoreNotFoundError):
        choose_stores(cache, [f"{config_hash}/heat"])


def test_web_server_lists_nothing_and_takes_nothing(server: ObjectServer, tmp_path: Path) -> None:
    cache = open_shared(f"{server.url}/team")
    refused: dict[str, list[Callable[[], object]]] = {
        "not_listed": [cache.entries],
        "read_only": [
            lambda: cache.create("a", tmp_path, replace=False, progress=Counted()),
            lambda: cache.remove("a"),
        ],
    }
    for kind, works in refused.items():
        for work in works:
            with pytest.raises(RemoteError) as caught:
                work()
            assert caught.value.kind == kind
    assert (cache.is_read_only, server.asked) == (True, [])
