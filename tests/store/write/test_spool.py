"""Samples of an unknown number: the spool is read, grows, continues, and ends as what `create` makes."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store.check.doctor import Status, examine
from ups_store.read.recovery import read_building_file
from ups_store.system import files
from ups_store.writing import spool as spool_module

N = 60
IDENTITY = {"kind": "spool"}
LENGTHS = [i % 4 for i in range(N)]


def sample(i: int) -> dict[str, Any]:
    return {
        "big": np.full((40, 40), i, "f4"),
        "n": i,
        "rows": np.full((LENGTHS[i], 2), i, "f4"),
        "text": "é" * LENGTHS[i],
    }


def samples(stop: int = N) -> Iterator[dict[str, Any]]:
    for i in range(N):
        if i == stop:
            raise KeyboardInterrupt
        yield sample(i)


def interrupted(path: Path, stop: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        ups_store.write(path, samples(stop), identity=IDENTITY, ragged=["rows"], **options)


def created(path: Path) -> bytes:
    """What `create` makes of the same, all lengths known."""
    texts = [2 * length for length in LENGTHS]
    arrays = {
        "big": ups_store.ArraySpec((N, 40, 40), "float32"),
        "n": ups_store.ArraySpec((N,), "int64"),
        "rows": ups_store.ArraySpec((N, None, 2), "float32", lengths=LENGTHS),
        "text": ups_store.ArraySpec((N, None), "uint8", lengths=texts, encoding="utf-8"),
    }
    made = [sample(i) for i in range(N)]
    with ups_store.create(path, arrays, identity=IDENTITY) as writer:
        batch: dict[str, Any] = {name: [each[name] for each in made] for name in arrays}
        writer.commit_many(range(N), {**batch, "big": np.stack(batch["big"])})
        return writer.finish().read_bytes()


@pytest.mark.parametrize(("room", "buffer_bytes"), [(1 << 17, 20_000), (4, 1), (4, 1 << 24)])
def test_store_is_that_of_known_lengths_to_the_byte_however_often_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, buffer_bytes: int
) -> None:
    monkeypatch.setattr(spool_module, "_ROOM_SAMPLES", room)
    monkeypatch.setattr(spool_module, "_ROOM_ROWS_BYTES", 8 * room)
    path = tmp_path / "a.zarr.zip"
    for stop in (35, 33, 50):
        interrupted(path, stop, buffer_bytes=buffer_bytes)
    ups_store.write(path, samples(), identity=IDENTITY, buffer_bytes=buffer_bytes).close()
    assert [each.name for each in tmp_path.iterdir()] == ["a.zarr.zip"]
    assert path.read_bytes() == created(tmp_path / "b.zarr.zip")


def test_spool_is_read_like_a_store_of_the_samples_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupted(path, 40)
    with pytest.raises(ups_store.StoreNotFoundError, match="partial=True"):
        ups_store.open(path)
    with ups_store.open(path, partial=True) as store:
        assert (len(store), store.is_partial, store.committed.tolist()) == (40, True, [True] * 40)
        assert store["n"].tolist() == list(range(40))
        assert store["big"].shape == (40, 40, 40)
        assert store.lengths("rows").tolist() == LENGTHS[:40]
        assert (store[39]["text"], len(store["text"])) == ("é" * LENGTHS[39], 40)
        assert "not known yet" in repr(store)
        with pytest.raises(ups_store.SampleIndexError):
            store.sample(40)
        assert store.nbytes < 4 << 20, "what it takes, without the room that it has for more"
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.join(path, identity=IDENTITY)
    assert caught.value.kind == "spool"


def test_list_continues_what_an_iterable_left_and_create_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    fixed = [{"u": np.full(9, i, "f4")} for i in range(N)]

    def failing() -> Iterator[dict[str, Any]]:
        yield from fixed[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ups_store.write(path, failing(), identity=IDENTITY)
    specs = {"u": ups_store.ArraySpec((N, 9), "float32")}
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.create(path, specs, identity=IDENTITY)
    assert caught.value.differences == {"num_samples": ("not known yet", N)}
    with ups_store.write(path, fixed, identity=IDENTITY) as store:
        assert store["u"][:, 0].tolist() == list(range(N))


@pytest.mark.parametrize("number", [0, 39])
def test_sample_that_differs_from_the_committed_one_is_named_or_replaced(tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupted(path, 40)

    def others() -> list[dict[str, Any]]:
        made = [sample(i) for i in range(N)]
        made[number] = {**made[number], "text": "other"}
        return made

    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.write(path, iter(others()), identity=IDENTITY)
    assert caught.value.kind == "not_repeated"
    assert f"at sample {number}" in str(caught.value)
    options: dict[str, Any] = {"identity": IDENTITY, "on_mismatch": "restart", "ragged": ["rows"]}
    with ups_store.write(path, iter(others()), **options) as store:
        assert (store[number]["text"], len(store)) == ("other", N)
        assert store.verify().ok


def test_disk_that_has_no_room_for_the_copy_is_said_before_all_samples_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tmp_path / "a.zarr.zip", list[int]()

    def counted() -> Iterator[dict[str, Any]]:
        for i in range(N):
            made.append(i)
            yield sample(i)

    monkeypatch.setattr(files, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(ups_store.DiskFullError) as caught:
        ups_store.write(path, counted(), identity=IDENTITY, buffer_bytes=20_000)
    assert "nothing that was committed is lost" in str(caught.value)
    assert len(made) < N
    monkeypatch.undo()
    with ups_store.write(path, samples(), identity=IDENTITY) as store:
        assert len(store) == N


def test_parts_of_an_earlier_version_are_said(tmp_path: Path) -> None:
    part = tmp_path / "a.parts" / "00000.zarr.zip"
    part.parent.mkdir()
    ups_store.save(part, u=np.arange(5))
    with pytest.raises(ups_store.IdentityMismatchError, match=r"a\.parts.*ups-store concat"):
        ups_store.write(tmp_path / "a.zarr.zip", samples(), identity=IDENTITY)
    ups_store.write(tmp_path / "a.zarr.zip", samples(), identity=IDENTITY, on_mismatch="restart").close()
    assert part.exists()


def test_samples_of_many_texts_have_room(tmp_path: Path) -> None:
    many = [{f"text{number}": "x" * number for number in range(70)}] * 3
    with ups_store.write(tmp_path / "a.zarr.zip", iter(many), identity=IDENTITY) as store:
        assert store[2]["text69"] == "x" * 69


@pytest.mark.parametrize(("number", "usual", "value"), [(3, 1, (1 << 63) + 5), (40, np.int8(1), 300)])
def test_whole_number_that_would_become_another_is_refused(
    tmp_path: Path, number: int, usual: Any, value: int
) -> None:
    numbers = ({"n": value if i == number else usual} for i in range(50))
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", numbers, identity=IDENTITY)
    assert (caught.value.kind, caught.value.sample) == ("mixed", number)


@pytest.mark.parametrize("call", ["is_file_at", "allocate"])
def test_disk_that_fails_at_the_ends_of_a_run_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.zarr.zip"

    def fails(*arguments: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def ending() -> Iterator[dict[str, Any]]:
        yield from samples()
        monkeypatch.setattr(files, call, fails)

    with pytest.raises(ups_store.CommitError):
        ups_store.write(path, ending(), identity=IDENTITY, ragged=["rows"])
    monkeypatch.undo()
    with ups_store.write(path, samples(), identity=IDENTITY, ragged=["rows"]) as store:
        assert len(store) == N


def test_damaged_offset_gives_no_sample_all_of_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupted(path, 50)
    building = path.with_name("a.zarr.zip.building")
    with files.opened(building, writable=True) as fd:
        offsets = read_building_file(fd, building).catalog.layout.ragged["text"].offsets.offset
        files.write_at(fd, offsets + 8 * 21 + 4, b"\x08")  # of the end of sample 20: 32 GiB more
    with ups_store.open(path, partial=True) as store:
        assert len(store) == 20
        assert store[19]["text"] == sample(19)["text"]
    with ups_store.write(path, samples(), identity=IDENTITY, ragged=["rows"]) as written:
        assert [written[i]["text"] for i in range(N)] == [sample(i)["text"] for i in range(N)]


def test_doctor_does_not_read_the_holes_of_a_spool_without_a_header(tmp_path: Path) -> None:
    path, building = tmp_path / "a.zarr.zip", tmp_path / "a.zarr.zip.building"
    interrupted(path, 50)
    with files.opened(building, writable=True) as fd:
        tail = read_building_file(fd, building).catalog.layout.tail_offset
        files.write_at(fd, tail + 40, b"\xff" * 8)
    diagnosis = examine(building)  # hundreds of GiB otherwise
    assert (diagnosis.status, diagnosis.num_samples) == (Status.TORN_TAIL, 0)
    with pytest.raises(ups_store.FormatError):
        ups_store.write(path, samples(), identity=IDENTITY, ragged=["rows"])


def test_fewer_samples_than_were_committed_are_refused_or_all_there_are(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    interrupted(path, 40)

    def fewer() -> Iterator[dict[str, Any]]:
        yield from (sample(i) for i in range(35))

    options: dict[str, Any] = {"identity": IDENTITY, "ragged": ["rows"]}
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.write(path, fewer(), **options)
    assert (caught.value.kind, caught.value.expected) == ("not_repeated", "40 samples or more")
    with ups_store.write(path, fewer(), on_mismatch="restart", **options) as store:
        assert store["n"].tolist() == list(range(35))
        assert store.verify().ok


def test_spool_grows_as_far_as_the_file_system_has_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr.zip"
    monkeypatch.setattr(spool_module, "_ROOM_SAMPLES", 8)
    monkeypatch.setattr(spool_module, "_MAX_ROOM_BYTES", 90 * 8192)
    for stop, room in ((33, 9 * 4), (40, 37 * 2)):
        fixed = ({"u": np.full((40, 40), i, "f4")} for i in range(N))
        with pytest.raises(KeyboardInterrupt):
            ups_store.write(path, interrupting(fixed, stop), identity=IDENTITY, buffer_bytes=1)
        assert read_room(path) == room


def test_interrupt_as_the_store_is_begun_is_just_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is closed once: a second time the number may be another file's."""
    path, new_building = tmp_path / "a.zarr.zip", spool_module.new_building

    def begun(*arguments: Any, **options: Any) -> None:
        new_building(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "new_building", begun)
        interrupted(path, N + 1)
    with ups_store.write(path, samples(), identity=IDENTITY, ragged=["rows"]) as store:
        assert len(store) == N


def interrupting(samples: Iterator[dict[str, Any]], stop: int) -> Iterator[dict[str, Any]]:
    yield from itertools.islice(samples, stop)
    raise KeyboardInterrupt


def read_room(path: Path) -> int:
    left = spool_module.spool_left(path)
    assert left is not None
    return left.num_samples
