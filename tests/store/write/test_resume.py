"""Unfinished files: continued by `create`, joined, replaced or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_stores import (
    IDENTITY,
    all_arrays,
    assert_same_bits,
    begin,
    build,
    complete,
    mixed_constants,
    mixed_values,
    names_in,
    sample_of,
    samples_of,
)

import ups_store
from ups_store import (
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreNotFoundError,
    StoreReplacedError,
    StoreWriter,
    TruncatedError,
)
from ups_store.writing import commit, create


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


def drop(writer: StoreWriter) -> None:
    """What the death of the process does to its writer."""
    os.close(writer.building.fd)
    writer.building.fd = -1


# --- continuing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [StoreWriter.close, drop], ids=["closed", "killed"])
@pytest.mark.parametrize("durability", ["durable", "lazy"])
def test_create_continues_with_the_last_commit(
    path: Path, end: Callable[[StoreWriter], None], durability: str
) -> None:
    values = mixed_values()
    writer = begin(path, values, durability=durability)
    writer.commit_many([3, 1], samples_of(values, [3, 1]))
    end(writer)
    for i in (0, 2):
        with begin(path, values, durability=durability) as writer:
            assert i in writer.missing()
            assert 3 not in writer.missing()
            writer.commit(i, sample_of(values, i))
    with begin(path, values, durability=durability) as writer:
        writer.finish()
    assert_same_bits(all_arrays(path), values)


@pytest.mark.parametrize(
    ("first", "second", "is_lazy"),
    [("durable", "lazy", False), ("lazy", "durable", False)],
)
def test_commits_go_unsynced_only_where_both_creations_say_so(
    path: Path, first: str, second: str, is_lazy: bool
) -> None:
    begin(path, mixed_values(), durability=first).close()
    with begin(path, mixed_values(), durability=second) as writer:
        assert writer.building.is_lazy is is_lazy
        assert writer.building.header.is_lazy is (first == "lazy")


@pytest.mark.parametrize("stop", ["truncate", "sync"], ids=["before the cut", "after the cut"])
def test_create_continues_a_finish_that_was_killed(
    path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    values = mixed_values()
    writer = begin(path, values, constants=mixed_constants())
    writer.commit_many(range(4), values)
    with monkeypatch.context() as patch:
        patch.setattr(commit.files, stop, killed)
        with pytest.raises(SystemExit):
            commit.finish(writer.building)
    drop(writer)
    with begin(path, values, constants=mixed_constants()) as writer:
        assert writer.missing().tolist() == []
        assert writer.commit_many([0, 2], samples_of(values, [0, 2])).tolist() == [False, False]
        assert writer.commit(1, sample_of(values, 1)) is False
        with pytest.raises(SpecError):
            writer.commit_many([4], samples_of(values, [0]))
        writer.finish()
    assert names_in(path.parent) == [path.name]
    expected = path.read_bytes()
    assert_same_bits(all_arrays(path), values)
    assert build(path, values, constants=mixed_constants()).read_bytes() == expected


def killed(*_: object) -> None:
    raise SystemExit


def test_file_with_only_the_rename_left_keeps_its_length(path: Path) -> None:
    values = mixed_values()
    writer = begin(path, values)
    writer.commit_many(range(4), values)
    complete(writer)
    drop(writer)
    building = path.with_name(f"{path.name}.building")
    before = building.read_bytes()
    with begin(path, values) as writer:
        assert writer.is_finished
        assert building.read_bytes() == before
        with pytest.raises(StoreNotFoundError, match="finished"):
            ups_store.join(path, identity=IDENTITY)


# --- another identity, damaged files ------------------------------------------------------------------


def test_create_names_what_differs_from_the_unfinished_file(path: Path) -> None:
    begin(path, mixed_values(), identity={**IDENTITY, "split": "test"}).close()
    with pytest.raises(IdentityMismatchError) as caught:
        begin(path, mixed_values())
    assert caught.value.differences == {"content.split": ("test", "train")}
    assert caught.value.exit_code == 7
    assert "content.split: 'test' -> 'train'" in str(caught.value)


def test_create_names_another_number_of_samples_than_the_unfinished_file_has(path: Path) -> None:
    """Spec 8.4: it isn't part of the identity."""
    begin(path, mixed_values()).close()
    with pytest.raises(IdentityMismatchError, match="num_samples: 4 -> 6") as caught:
        begin(path, mixed_values(6))
    assert caught.value.differences == {"num_samples": (4, 6)}


def test_create_with_other_attributes_continues(path: Path) -> None:
    begin(path, mixed_values(0), attrs={"note": "first"}).close()
    with begin(path, mixed_values(0), attrs={"note": "second"}) as writer:
        writer.finish()
    with ups_store.open(path) as store:
        assert store.attrs == {"note": "first"}


def test_restart_replaces_an_unfinished_file_of_another_identity(path: Path) -> None:
    old, new = mixed_values(seed=0), mixed_values(seed=1)
    with begin(path, old, identity={"seed": 0}) as writer:
        writer.commit_many(range(4), old)
    with begin(path, new, identity={"seed": 1}, on_mismatch="restart") as writer:
        assert len(writer.missing()) == 4
        writer.commit_many(range(4), new)
        writer.finish()
    assert names_in(path.parent) == [path.name]
    assert_same_bits(all_arrays(path), new)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def overwrite_start(path: Path) -> None:
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])


def overwrite_tail(path: Path) -> None:
    raw = path.read_bytes()
    at = raw.index(b"UPSBUILD")
    path.write_bytes(raw[:at] + bytes(128) + raw[at + 128 :])


@pytest.mark.parametrize(
    ("damage", "error"),
    [(cut, TruncatedError), (overwrite_start, FormatError), (overwrite_tail, FormatError)],
)
def test_damaged_unfinished_file_is_refused_and_kept_until_restart(
    path: Path, damage: Callable[[Path], None], error: type[FormatError]
) -> None:
    building = path.with_name(f"{path.name}.building")
    begin(path, mixed_values()).close()
    damage(building)
    before = building.read_bytes()
    for call in (lambda: begin(path, mixed_values()), lambda: ups_store.join(path, identity=IDENTITY)):
        with pytest.raises(error) as caught:
            call()
        assert caught.value.path == str(building)
    assert building.read_bytes() == before
    build(path, mixed_values(), on_mismatch="restart")
    assert_same_bits(all_arrays(path), mixed_values())


def test_create_gives_up_where_others_keep_replacing_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise FileExistsError

    monkeypatch.setattr(create, "create_building", lost)
    with pytest.raises(StoreReplacedError, match="keep replacing"):
        begin(path, mixed_values())


def test_create_beside_a_new_building_file_continues_that_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is taken between looking for it and giving it: one file wins, nothing is left of the other."""
    values = mixed_values()
    link = create.files.link

    def overtaken(old: Path, new: Path) -> None:
        monkeypatch.setattr(create.files, "link", link)
        with begin(path, values) as other:
            other.commit(1, sample_of(values, 1))
        link(old, new)

    monkeypatch.setattr(create.files, "link", overtaken)
    with begin(path, values) as writer:
        assert writer.missing().tolist() == [0, 2, 3]
        assert names_in(path.parent) == [f"{path.name}.building"]


def test_create_that_waited_for_a_published_file_makes_a_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is published between opening its building name and locking it."""
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many(range(4), values)
    is_file_at = create.files.is_file_at

    def overtaken(fd: int, where: Path) -> bool:
        monkeypatch.setattr(create.files, "is_file_at", is_file_at)
        where.rename(path)
        published.append(path.read_bytes())
        return is_file_at(fd, where)

    monkeypatch.setattr(create.files, "is_file_at", overtaken)
    published: list[bytes] = []
    with begin(path, values) as writer:
        assert len(writer.missing()) == 4
        writer.commit(0, sample_of(mixed_values(seed=1), 0))
        assert [path.read_bytes()] == published


# --- joining ------------------------------------------------------------------------------------------


def test_joined_committer_commits_beside_the_builder(path: Path) -> None:
    values = mixed_values()
    with begin(path, values) as writer, ups_store.join(path, identity=IDENTITY) as committer:
        assert committer.commit(1, sample_of(values, 1)) is True
        assert writer.commit(1, sample_of(values, 1)) is False
        assert writer.commit_many([0, 2, 3], samples_of(values, [0, 2, 3])).all()
        assert committer.missing().tolist() == []
        assert not hasattr(committer, "finish")
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_joined_committer_outlives_the_builder(path: Path) -> None:
    values = mixed_values()
    begin(path, values, durability="lazy").close()
    with ups_store.join(path, identity=IDENTITY) as committer:
        assert committer.building.is_lazy
        committer.commit_many(range(4), values)
    with begin(path, values) as writer:
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_interrupt_as_a_file_is_taken_up_is_just_that(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is closed once, and the lock isn't kept."""
    values, taken_up = mixed_values(), create._building_file
    begin(path, values).close()

    def interrupted(*arguments: Any, **options: Any) -> None:
        taken_up(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(create, "_building_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(path, values)
    begin(path, values).close()


def test_join_without_a_build_finds_nothing(path: Path) -> None:
    build(path, mixed_values())
    with pytest.raises(StoreNotFoundError) as caught:
        ups_store.join(path, identity=IDENTITY)
    assert caught.value.path == f"{path}.building"


def test_joined_committer_never_writes_behind_a_file_with_only_the_rename_left(path: Path) -> None:
    """Its builder died between the cut and the rename: a record would make the store too long."""
    values = mixed_values()
    with begin(path, values) as writer, ups_store.join(path, identity=IDENTITY) as committer:
        writer.commit_many(range(4), values)
        complete(writer)
        drop(writer)
        with pytest.raises(StoreReplacedError, match="only waits to be published"):
            committer.commit(0, sample_of(values, 0))
    with begin(path, values) as writer:
        writer.finish()
    assert_same_bits(all_arrays(path), values)


@pytest.mark.parametrize("event", ["published", "restarted", "removed"])
def test_joined_committer_never_writes_once_the_file_is_gone(path: Path, event: str) -> None:
    values = mixed_values()
    with begin(path, values) as writer, ups_store.join(path, identity=IDENTITY) as committer:
        writer.commit_many(range(4), values)
        where = writer.building.building_path
        if event == "published":
            where = writer.finish()
        elif event == "restarted":
            writer.close()
            begin(path, values, identity={"other": 1}, on_mismatch="restart").close()
        else:
            where = where.rename(where.with_name("moved"))
        before = where.read_bytes()
        with pytest.raises(StoreReplacedError, match="nothing was written"):
            committer.commit(0, sample_of(mixed_values(seed=1), 0))
        assert where.read_bytes() == before
