"""Pushes and pulls of stores: what is refused, what is replaced, what another process does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_stores import Counted, object_server
from small_stores import build, names_in

import ups_store
from ups_store.errors import FormatError, IdentityMismatchError, SpecError, StoreNotFoundError
from ups_store.remote import transfer
from ups_store.remote.shared import FolderCache, open_shared
from ups_store.remote.transfer import find_store, is_pulling, pull_store, push_store
from ups_store.system import files
from ups_store.system.paths import partition_path

NAME = "a.zarr.zip"
VALUES = {"u": np.arange(12.0).reshape(4, 3)}


@pytest.fixture
def cache(tmp_path: Path) -> FolderCache:
    (tmp_path / "shared").mkdir()
    return FolderCache(tmp_path / "shared")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return build(tmp_path / NAME, VALUES, dims={})


def partitions_of(folder: Path, identity: object) -> Path:
    """Two partitions of a store; returns their pattern."""
    folder.mkdir(exist_ok=True)
    for number in range(2):
        with ups_store.create(
            partition_path(folder / NAME, number, 2),
            {"u": ups_store.ArraySpec((2, 3), "float64")},
            identity={"of": identity},
            partition=(number, 2),
        ) as writer:
            writer.commit_many([0, 1], {"u": np.full((2, 3), float(number))})
            writer.finish()
    return folder / "a-*-of-00002.zarr.zip"


def push(cache: FolderCache, path: Path) -> list[transfer.Pushed]:
    return push_store(path, cache, progress=Counted())


def pull(cache: FolderCache, config_hash: str, into: Path, **options: Any) -> Path:
    entries = find_store(cache, config_hash, NAME)
    return pull_store(cache, entries, into, progress=Counted(), **options)


def test_second_pull_finds_the_store_and_reads_nothing(
    cache: FolderCache, store: Path, tmp_path: Path
) -> None:
    (pushed,) = push(cache, store)
    place = pull(cache, pushed.config_hash, tmp_path / "into")
    entries = find_store(cache, pushed.config_hash, NAME)
    cache.remove(pushed.key)
    progress = Counted()
    again = pull_store(cache, entries, tmp_path / "into", progress=progress)
    assert (again, progress.done) == (place, [])
    assert names_in(tmp_path / "into") == [NAME]


def test_store_that_went_meanwhile_is_not_found(cache: FolderCache, store: Path, tmp_path: Path) -> None:
    (pushed,) = push(cache, store)
    entries = find_store(cache, pushed.config_hash, NAME)
    cache.remove(pushed.key)
    with pytest.raises(StoreNotFoundError, match="isn't there any more") as caught:
        pull_store(cache, entries, tmp_path / "into", progress=Counted())
    assert caught.value.path == str(tmp_path / "shared" / pushed.key)
    assert names_in(tmp_path / "into") == []


def test_sets_and_other_names_are_not_pushed(cache: FolderCache, store: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        push(cache, tmp_path / "a.zarr.json")
    assert caught.value.kind == "set"
    other = store.rename(tmp_path / "a.zip")
    with pytest.raises(SpecError, match=r"NAME\.zarr\.zip"):
        push(cache, other)
    assert names_in(tmp_path / "shared") == []


def test_partitions_are_pulled_together(cache: FolderCache, tmp_path: Path) -> None:
    pattern = partitions_of(tmp_path / "made", 1)
    pushed = push(cache, pattern)
    assert [each.is_new for each in pushed] == [True, True]
    assert [each.is_new for each in push(cache, pattern)] == [False, False]
    place = pull(cache, pushed[0].config_hash, tmp_path / "into")
    with ups_store.open(place) as found:
        assert found.config_hash == pushed[0].config_hash
        assert found.gather(range(4))["u"][:, 0].tolist() == [0, 0, 1, 1]


def test_partition_of_another_store_is_replaced_only_by_force(cache: FolderCache, tmp_path: Path) -> None:
    config_hash = push(cache, partitions_of(tmp_path / "made", 1))[0].config_hash
    into = tmp_path / "into"
    partitions_of(into, 2)
    partition_path(into / NAME, 0, 2).unlink()
    other = partition_path(into / NAME, 1, 2).read_bytes()
    with pytest.raises(IdentityMismatchError, match="something else is in its place"):
        pull(cache, config_hash, into)
    assert not partition_path(into / NAME, 0, 2).exists(), "all or none"
    assert partition_path(into / NAME, 1, 2).read_bytes() == other
    pull(cache, config_hash, into, replace=True)
    assert names_in(into) == ["a-00000-of-00002.zarr.zip", "a-00001-of-00002.zarr.zip"]


def test_what_is_no_store_is_not_replaced(cache: FolderCache, store: Path, tmp_path: Path) -> None:
    (pushed,) = push(cache, store)
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / NAME).write_text("a letter")
    with pytest.raises(IdentityMismatchError) as caught:
        pull(cache, pushed.config_hash, tmp_path / "into")
    assert caught.value.found == "what is no store"
    assert (tmp_path / "into" / NAME).read_text() == "a letter"


def test_partitions_whose_identities_differ_are_not_believed(cache: FolderCache, tmp_path: Path) -> None:
    """The second one was made from something else than the first."""
    config_hash = push(cache, partitions_of(tmp_path / "made", 1))[0].config_hash
    other = push(cache, partitions_of(tmp_path / "other", 2))[1].key
    (tmp_path / "shared" / other).rename(tmp_path / "shared" / config_hash / Path(other).name)
    with pytest.raises(ups_store.StoreError):
        pull(cache, config_hash, tmp_path / "into")
    assert names_in(tmp_path / "into") == []


def test_pulling_shows_when_another_pull_of_the_same_store_has_ended(
    cache: FolderCache, store: Path, tmp_path: Path
) -> None:
    (pushed,) = push(cache, store)
    into, seen = tmp_path / "into", []

    class Overtaken(Counted):
        def doing(self, what: str) -> None:
            if not seen:
                pull(cache, pushed.config_hash, into)
            seen.append(is_pulling(into))

    entries = find_store(cache, pushed.config_hash, NAME)
    pull_store(cache, entries, into, progress=Overtaken())
    assert set(seen) == {True}
    assert not is_pulling(into)


def test_folder_that_another_pull_removes_is_made_again(
    cache: FolderCache, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pushed,) = push(cache, store)
    opened, open_or_create = [], files.open_or_create

    def first_too_late(path: Path) -> int:
        opened.append(path)
        if len(opened) == 1:
            path.parent.rmdir()
        return open_or_create(path)

    monkeypatch.setattr(files, "open_or_create", first_too_late)
    assert pull(cache, pushed.config_hash, tmp_path / "into").exists()
    assert [path.suffix for path in opened] == [".lock", ".lock", ".part"]


def test_functions_of_a_build_find_compare_pull_and_push(
    cache: FolderCache, store: Path, tmp_path: Path
) -> None:
    """As a reader process runs them."""
    progress = Counted()
    there = (progress, str(tmp_path / "shared"), 5.0)
    assert transfer.push_to(*there, store)
    with ups_store.open(store) as opened:
        config_hash = opened.config_hash
    entries = transfer.find_there(*there, config_hash, NAME)
    transfer.compare_there(*there, store, entries)
    assert transfer.pull_from(*there, entries, tmp_path / "into") == str(tmp_path / "into" / NAME)
    (tmp_path / "other").mkdir()
    other = build(tmp_path / "other" / NAME, {"u": VALUES["u"] + 1}, dims={})
    with ups_store.open(other) as opened:
        assert opened.config_hash == config_hash
    with pytest.raises(IdentityMismatchError) as caught:
        transfer.compare_there(*there, other, entries)
    assert caught.value.kind == "other_content"
    assert {"asking", "verifying", "copying"} < {*progress.done}


@pytest.mark.parametrize("content", [b"", b"no store"])
def test_object_that_is_no_store_is_not_pulled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    key = f"{'a' * 64}/{NAME}"
    with object_server(monkeypatch) as server:
        server.objects[f"bucket/team a/{key}"] = content
        bucket = open_shared("s3://bucket/team%20a")
        with pytest.raises(FormatError) as caught:
            pull_store(bucket, bucket.look("a" * 64, [NAME]), tmp_path / "into", progress=Counted())
    assert caught.value.path == f"s3://bucket/team%20a/{key}"
    assert names_in(tmp_path / "into") == []
