"""What commands do with ragged stores: describe, draw, save what verifies; what can't be done is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ragged_stores
from command_line import run_ups_store
from ragged_stores import LENGTHS, build_ragged, check_same, ragged_values

import ups_store
from ups_store.check import doctor, info
from ups_store.check.doctor import salvage
from ups_store.check.preview import draw_sample
from ups_store.convert.export import FORMATS, export_store
from ups_store.packed.pack import pack_store
from ups_store.read.catalog import read_finished
from ups_store.read.recovery import building_path, read_building_file
from ups_store.system import files

N = len(LENGTHS)
VALUES = ragged_values()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_ragged(tmp_path_factory.mktemp("ragged") / "a.zarr.zip", VALUES)


def test_info_describes_ragged_arrays_with_their_mean_size(path: Path) -> None:
    with ups_store.open(path) as store:
        found = info.describe(store, statistics=True)
    points = found.arrays["points"]
    assert (points.shape, points.dims) == ((N, None, 3), ("sample", "point", "xyz"))
    assert points.sample_nbytes == sum(LENGTHS) * 12 // N
    assert points.slot_nbytes is None
    assert set(found.arrays) == {"points", "text", "fields", "label"}
    assert found.constants == {}
    rows = np.concatenate(VALUES["points"])
    assert found.statistics is not None
    assert found.statistics["points"].maximum == rows.max()
    assert "(5, *, 3)" in run_ups_store("info", path).stdout


def test_samples_of_ragged_arrays_are_drawn_but_no_text(path: Path) -> None:
    with ups_store.open(path) as store:
        (panel, _) = draw_sample(store, sample=0, array="points").axes
        assert panel.images[0].get_array().shape == (3, 3)
        with pytest.raises(ups_store.SpecError):
            draw_sample(store, sample=0, array="text")


@pytest.mark.parametrize("to", sorted(FORMATS.keys() - {"kerchunk"}))
def test_export_refuses_ragged_arrays_by_name(path: Path, tmp_path: Path, to: str) -> None:
    with ups_store.open(path) as store, pytest.raises(ups_store.SpecError) as error:
        export_store(store, tmp_path / "out", to=to)
    assert (error.value.kind, error.value.array) == ("ragged", "points")
    assert not list(tmp_path.iterdir())


def test_pack_refuses_ragged_arrays_by_name(path: Path, tmp_path: Path) -> None:
    with ups_store.open(path) as store, pytest.raises(ups_store.SpecError) as error:
        pack_store(store, tmp_path / "a.packed.zarr.zip")
    assert (error.value.kind, error.value.array) == ("ragged", "points")


def _flipped(path: Path, out: Path, at: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    out.write_bytes(data)
    return out


def _saved(damaged: Path, out: Path) -> list[int]:
    """Salvage; returns the numbers of the samples that were saved, which are compared."""
    with ups_store.open(salvage(doctor.examine(damaged), out)) as store:
        numbers: list[int] = store["original_sample"].tolist()
        check_same(store.gather(range(len(store))), VALUES, numbers)
        assert store.verify().ok
    return numbers


def test_doctor_saves_the_other_samples_of_a_damaged_ragged_array(path: Path, tmp_path: Path) -> None:
    with files.opened(path) as fd:
        layout = read_finished(fd, path).layout
    damaged = _flipped(path, tmp_path / "b.zarr.zip", layout.arrays["points"].offset + 12 * 50)
    assert doctor.examine(damaged).status is doctor.Status.DAMAGED
    assert _saved(damaged, tmp_path / "saved.zarr.zip") == [0, 1, 3, 4]


def test_doctor_saves_other_arrays_where_the_offsets_are_wrong(path: Path, tmp_path: Path) -> None:
    with files.opened(path) as fd:
        at = read_finished(fd, path).layout.arrays["points.offsets"].offset + 8 * 2 + 7
    found = doctor.examine(_flipped(path, tmp_path / "b.zarr.zip", at))
    assert found.lost_arrays == ("points",)
    with ups_store.open(salvage(found, tmp_path / "saved.zarr.zip")) as store:
        assert sorted(store.arrays) == ["fields", "label", "original_sample", "text"]
        assert store["text"][2] == VALUES["text"][2]


def test_doctor_saves_committed_samples_of_an_unfinished_ragged_store(tmp_path: Path) -> None:
    target, specs = tmp_path / "a.zarr.zip", ragged_stores.ragged_specs(VALUES)
    with ups_store.create(target, specs, identity=ragged_stores.IDENTITY) as writer:
        writer.commit_many([0, 1, 2], ragged_stores.rows_of(VALUES, [0, 1, 2]))
        layout = writer.building.layout
    unfinished = building_path(target)
    damaged = _flipped(unfinished, tmp_path / "b.zarr.zip.building", layout.arrays["points"].offset + 12 * 50)
    assert _saved(damaged, tmp_path / "saved.zarr.zip") == [0, 1]


def test_doctor_saves_ragged_samples_of_a_file_without_end_or_root(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.zarr.zip"
    cut.write_bytes(path.read_bytes()[:-50])
    assert _saved(cut, tmp_path / "saved.zarr.zip") == list(range(N))
    rootless = _flipped(path, tmp_path / "root.zarr.zip", 70)
    assert _saved(rootless, tmp_path / "also.zarr.zip") == list(range(N))


@pytest.mark.parametrize("is_spool", [False, True])
def test_doctor_saves_what_is_committed_where_one_offset_is_damaged(tmp_path: Path, is_spool: bool) -> None:
    target = tmp_path / "a.zarr.zip"
    samples = [{"i": i, "text": "x" * (i % 4)} for i in range(50)]
    if is_spool:
        with pytest.raises(RuntimeError):
            ups_store.write(target, _failing_behind(samples), identity={"v": 1})
    else:
        text = ups_store.ArraySpec((50, None), "uint8", lengths=[i % 4 for i in range(50)], encoding="utf-8")
        arrays = {"i": ups_store.ArraySpec((50,), "int64"), "text": text}
        with ups_store.create(target, arrays, identity={"v": 1}) as writer:
            for number, sample in enumerate(samples[:-1]):
                writer.commit(number, sample)
    building = building_path(target)
    with files.opened(building, writable=True) as fd:
        offsets = read_building_file(fd, building).catalog.layout.ragged["text"].offsets.offset
        files.write_at(fd, offsets + 8 * 21 + 4, b"\x08")  # of the end of sample 20
    salvage(doctor.examine(building), tmp_path / "saved.zarr.zip")
    with ups_store.open(tmp_path / "saved.zarr.zip") as store:
        assert len(store) == (48 if is_spool else 47)
        assert not {20, 21} & {*store["original_sample"].tolist()}
        assert store["i"].tolist() == store["original_sample"].tolist()
        assert [store[i]["text"] for i in range(len(store))] == ["x" * (i % 4) for i in store["i"].tolist()]


def _failing_behind(samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from samples
    raise RuntimeError


def test_gc_names_a_spool_and_removes_it_with_the_unfinished(tmp_path: Path) -> None:
    def failing(number: int) -> Iterator[dict[str, Any]]:
        yield {"u": np.int8(number)}
        if number == 32:
            raise RuntimeError

    for options in ({"map": failing, "inputs": range(33), "num_workers": 0}, {}):
        samples = None if options else (each for i in range(33) for each in failing(i))
        with pytest.raises((RuntimeError, ups_store.SourceError)):
            ups_store.write(tmp_path / "a.zarr.zip", samples, identity={"v": len(options)}, **options)
        (spool,) = tmp_path.glob("*.building")
        done = run_ups_store("doctor", spool)
        assert "32 of 32 samples verify" in done.stdout or "33 of 33 samples verify" in done.stdout
        assert "of an unknown number committed" in run_ups_store("info", spool).stdout
        assert "samples committed" in run_ups_store("gc", tmp_path, "--delete").stdout
        assert "removed" in run_ups_store("gc", tmp_path, "--delete", "--unfinished").stdout
        assert not list(tmp_path.iterdir())


def test_resuming_mends_damaged_offsets_that_follow_from_the_arguments(tmp_path: Path) -> None:
    target, specs = tmp_path / "a.zarr.zip", ragged_stores.ragged_specs(VALUES)
    with ups_store.create(target, specs, identity=ragged_stores.IDENTITY) as writer:
        at = writer.building.layout.arrays["text.offsets"].offset
        writer.commit_many([3], ragged_stores.rows_of(VALUES, [3]))
    _flipped(building_path(target), building_path(target), at + 8)
    said: list[str] = []
    with ups_store.create(target, specs, identity=ragged_stores.IDENTITY, note=said.append) as writer:
        rest = writer.missing().tolist()
        assert rest == [0, 1, 2, 4]
        writer.commit_many(rest, ragged_stores.rows_of(VALUES, rest))
        writer.finish()
    assert "text.offsets" in said[0]
    assert target.read_bytes() == build_ragged(tmp_path / "b.zarr.zip", VALUES).read_bytes()


def test_resuming_refuses_a_building_file_whose_offsets_are_damaged(tmp_path: Path) -> None:
    target, specs = tmp_path / "a.zarr.zip", ragged_stores.ragged_specs(VALUES)
    with ups_store.create(target, specs, identity={}) as writer:
        at = writer.building.layout.arrays["text.offsets"].offset
    for place in (at + 8, at + 8 * (N + 1)):  # offsets and their checksum
        _flipped(building_path(target), building_path(target), place)
    with files.opened(building_path(target)) as fd:
        read_building_file(fd, building_path(target))  # opening doesn't read them
    with pytest.raises(ups_store.CorruptChunkError) as error:
        ups_store.create(target, specs, identity={})
    assert error.value.array == "text.offsets"
    with ups_store.create(target, specs, identity={}, on_mismatch="restart") as writer:
        assert len(writer.missing()) == N


def test_resuming_takes_back_ragged_samples_that_changed(tmp_path: Path) -> None:
    target, specs = tmp_path / "a.zarr.zip", ragged_stores.ragged_specs(VALUES)
    with ups_store.create(target, specs, identity={}) as writer:
        writer.commit_many(range(N), VALUES)
        at = writer.building.layout.arrays["points"].offset + 12 * 50
    _flipped(building_path(target), building_path(target), at)
    with ups_store.create(target, specs, identity={}, note=lambda sentence: None) as writer:
        assert writer.missing().tolist() == [2]
