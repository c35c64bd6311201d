"""Joining a builder and waiting for it, in one process: what it does meanwhile happens in the pauses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ups_store
from ups_store.building import build as joining
from ups_store.building import decide
from ups_store.errors import FormatError, IdentityMismatchError, StoreError
from ups_store.format.root import config_hash
from ups_store.read.recovery import building_path
from ups_store.writing.plan import identity_of
from ups_store.writing.writer import StoreWriter

ARRAYS = {"u": ups_store.ArraySpec((2, 3), "float32")}
VALUES = {"u": np.ones((2, 3), "float32")}
Steps = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.zarr.zip"


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Has each pause do a step, and time go on by half of what the builder is given."""
    clock = SimpleNamespace(now=0.0)

    def have(*steps: Callable[[], object]) -> None:
        left = list(steps)

        def sleep(seconds: float) -> None:
            clock.now += joining.BUILDER_S / 2
            if left:
                left.pop(0)()

        monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))

    return have


def begin(path: Path, run: str = "this") -> StoreWriter:
    return ups_store.create(path, ARRAYS, identity={"run": run})


HASH = config_hash(identity_of(ARRAYS, identity={"run": "this"}))


def finish(writer: StoreWriter) -> None:
    with writer:
        writer.commit_many(range(2), VALUES)
        writer.finish()


def test_a_builder_is_joined_as_soon_as_its_file_is_there(path: Path, meanwhile: Steps) -> None:
    builders: list[StoreWriter] = []
    meanwhile(lambda: builders.append(begin(path)))
    committer = joining._join(path, {"run": "this"}, HASH)
    assert committer is not None
    with committer:
        committer.commit(0, {"u": VALUES["u"][0]})
    with builders[0] as writer:
        assert writer.missing().tolist() == [1]


def test_nothing_is_joined_where_the_store_is_finished(path: Path, meanwhile: Steps) -> None:
    meanwhile(lambda: finish(begin(path)))
    assert joining._join(path, {"run": "this"}, HASH) is None


def test_a_builder_that_never_begins_is_an_error(path: Path, meanwhile: Steps) -> None:
    meanwhile()
    with pytest.raises(StoreError) as caught:
        joining._join(path, {"run": "this"}, HASH)
    assert (caught.value.kind, caught.value.path) == ("no_builder", str(path))


def test_an_old_file_is_given_time_to_be_replaced(path: Path, meanwhile: Steps) -> None:
    old = begin(path, "another")
    replacing: list[StoreWriter] = []

    def replace() -> None:
        old.close()
        building_path(path).unlink()
        replacing.append(begin(path))

    meanwhile(replace)
    committer = joining._join(path, {"run": "this"}, HASH)
    assert committer is not None
    committer.close()
    replacing[0].close()
    meanwhile()
    with pytest.raises(IdentityMismatchError):
        joining._join(path, {"run": "a third"}, HASH)


def test_what_is_no_unfinished_store_and_has_no_builder_is_refused(path: Path, meanwhile: Steps) -> None:
    building_path(path).write_bytes(b"x" * 5000)
    meanwhile()
    with pytest.raises(FormatError):
        joining._join(path, {"run": "this"}, HASH)


def test_a_store_is_waited_for_as_long_as_its_builder_lives(path: Path, meanwhile: Steps) -> None:
    writer = begin(path)
    meanwhile(*[lambda: None] * 5, lambda: finish(writer))
    with joining.wait_for_store(path, HASH) as store:
        assert store.config_hash == HASH


def test_a_builder_that_ends_early_is_given_time_to_be_started_again(path: Path, meanwhile: Steps) -> None:
    writer = begin(path)
    again: list[StoreWriter] = []
    steps = [writer.close, lambda: again.append(begin(path)), lambda: finish(again[0])]
    meanwhile(*steps)
    joining.wait_for_store(path, HASH).close()
    meanwhile()
    with pytest.raises(StoreError) as caught:
        joining.wait_for_store(path, HASH, is_packed=True)
    assert caught.value.kind == "no_builder"


def test_a_look_that_takes_long_is_no_time_without_a_builder(
    path: Path, meanwhile: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(path).close()
    look, builders = joining.is_finished, list[StoreWriter]()
    meanwhile(lambda: builders.append(begin(path)), lambda: finish(builders[0]))

    def look_long(*arguments: object, **options: object) -> bool:
        clock.now += 4 * joining.BUILDER_S
        return look(*arguments, **options)  # type: ignore[arg-type]

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(joining, "is_finished", look_long)
    monkeypatch.setattr(joining.time, "monotonic", lambda: clock.now)
    joining.wait_for_store(path, HASH).close()


def test_the_process_that_builds_is_named(path: Path) -> None:
    with begin(path):
        assert decide.builder_at(path).startswith("pid ")
    assert decide.builder_at(path) == ""
