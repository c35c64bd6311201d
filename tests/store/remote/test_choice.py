"""Which stores of a shared cache words name; what a web server, which lists nothing, can give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer
from remote_stores import Counted, object_server, some_values
from small_stores import build

import ups_store
from ups_store.errors import RemoteError, SpecError, StoreNotFoundError
from ups_store.remote.choice import choose_stores, list_stores
from ups_store.remote.garbage import find_remote_garbage
from ups_store.remote.shared_cache import SharedCache, files_of_store
from ups_store.remote.shared_place import check_place, is_read_only, name_of_place, needs_client, open_shared
from ups_store.remote.transfer import pull_store
from ups_store.sources.attempts import Attempts

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
def cache(tmp_path: Path) -> SharedCache:
    for key in KEYS:
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_text(key)
    return open_shared(tmp_path)


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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["fire", "heat", "heat-00001-of-00002", "waves", "waves"]),
        (["heat"], ["heat"]),
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


@pytest.mark.parametrize("word", ["wave", "aaaaa", f"{A}/ice", "b/fire", "c" * 64])
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


def test_partitions_of_the_smallest_complete_count_are_a_store(cache: SharedCache) -> None:
    entries = cache.look(A, [])
    assert [file.key for file in files_of_store(entries, "heat.zarr.zip")] == KEYS[2:4]
    assert files_of_store(entries, "ice.zarr.zip") == []
    assert [file.key for file in files_of_store(entries, "fire.zarr.zip")] == [KEYS[7]]


@pytest.mark.parametrize("place", ["ftp://host/a", "s3://", "https:///"])
def test_other_urls_are_no_place(place: str) -> None:
    for work in (check_place, open_shared, name_of_place):
        with pytest.raises(SpecError) as caught:
            work(place)
        assert caught.value.kind == "url"


def test_folders_have_absolute_names_and_urls_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("~/shared", f"file://{tmp_path}/shared"):
        assert check_place(place) == name_of_place(place) == str(tmp_path / "shared")
    assert "secret" not in name_of_place("https://user:secret@host/a")
    assert (is_read_only("https://host/a"), is_read_only("s3://bucket"), is_read_only("a")) == (
        True,
        False,
        False,
    )
    assert (needs_client("s3://bucket"), needs_client("file:///a")) == (True, False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as state:
        yield state


def test_store_behind_a_web_server_is_pulled_by_its_name(server: ObjectServer, tmp_path: Path) -> None:
    path = build(tmp_path / "waves.zarr.zip", some_values(), dims={})
    with ups_store.open(path) as store:
        config_hash = store.config_hash
    server.objects[f"team/{config_hash}/waves.zarr.zip"] = path.read_bytes()
    cache = open_shared(f"{server.url}/team/?signature=secret")
    (found,) = choose_stores(cache, [f"{config_hash}/waves"])
    assert (found.nbytes, found.modified_s) == (path.stat().st_size, 1795428000.0)
    into = pull_store(cache, found.files, tmp_path / "into", attempts=Attempts(5.0), progress=Counted())
    assert into.read_bytes() == path.read_bytes()
    with pytest.raises(StoreNotFoundError):
        choose_stores(cache, [f"{config_hash}/heat"])


def test_web_server_lists_nothing_and_takes_nothing(server: ObjectServer, tmp_path: Path) -> None:
    cache = open_shared(f"{server.url}/team")
    refused = {
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
