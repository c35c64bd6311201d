"""`doctor`: every state of a file has its name, and `salvage` saves what verifies, no more, no less."""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store
from diagnoses import OTHERS, diagnosis_of
from small_stores import (
    MakeStore,
    Values,
    all_arrays,
    assert_same_bits,
    begin,
    build,
    flip,
    mixed_constants,
    mixed_values,
    samples_of,
)

import ups_store
from tools.conformance import REFUSED, corpus, truncations, write_sample_store
from tools.conformance.archive import edit_shape, put_together, take_apart
from ups_store import CorruptChunkError, FormatError, IdentityMismatchError
from ups_store.check.doctor import ORIGINAL_SAMPLE, Status, examine, salvage, spans
from ups_store.check.intact import read_without_root
from ups_store.format.checksum import crc32c
from ups_store.format.layout import Layout
from ups_store.packed.pack import pack_store
from ups_store.read.recovery import building_path
from ups_store.system import files

VALUES = mixed_values(6)
BROKEN = {Status.DAMAGED, Status.IDENTITY_LOST, Status.METADATA_DAMAGED}
WRONG_IDENTITIES = ["identity_without_content", "digest_of_no_constant"]


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    return make_store(VALUES, constants=mixed_constants())


def layout_of(path: Path) -> Layout:
    with ups_store.open(path, partial=True) as store:
        return store._catalog.layout


def unfinished(folder: Path, committed: list[int]) -> Path:
    """A building file in which some samples are committed."""
    path = folder / "unfinished.zarr.zip"
    with begin(path, VALUES, constants=mixed_constants()) as writer:
        writer.commit_many(committed, samples_of(VALUES, committed))
    return building_path(path)


def assert_salvaged(path: Path, samples: list[int], *, values: Values = VALUES) -> None:
    """`salvage` makes a sound store of exactly these samples, and leaves the file as it is."""
    before, out = path.read_bytes(), path.with_name("saved.zarr.zip")
    assert salvage(examine(path), out) == out
    assert path.read_bytes() == before
    found = all_arrays(out)
    assert found.pop(ORIGINAL_SAMPLE).tolist() == samples
    assert_same_bits(found, samples_of(values, samples))
    with ups_store.open(out) as store:
        content = store.identity
        assert store.verify().ok
    assert (content["kind"], content["samples"]) == ("salvaged", spans(np.array(samples)))


# --- states ---------------------------------------------------------------------------------------------


def test_committed_sample_that_was_damaged_is_not_saved(tmp_path: Path) -> None:
    path = unfinished(tmp_path, [1, 3, 4])
    layout = layout_of(path)
    flip(path, layout.arrays["fields"].slot(3)[0] + 7)
    flip(path, layout.arrays["nu"].slot(1)[0])
    assert_salvaged(path, [4])


@pytest.mark.parametrize("change", ["magic", "half_of_tail"])
def test_torn_tail_leaves_the_samples_with_slots(tmp_path: Path, change: str) -> None:
    path = unfinished(tmp_path, [0, 2])
    layout = layout_of(path)
    if change == "magic":
        flip(path, layout.tail_offset)
    else:
        os.truncate(path, layout.tail_offset + 5000)
    found = examine(path)
    assert (found.status, found.savable.tolist()) == (Status.TORN_TAIL, [0, 2])
    assert set(found.lost_arrays) == {"latent", "mask", "nu"}  # their checksums are written at the end
    assert_salvaged(path, [0, 2], values={name: VALUES[name] for name in ("fields", "nothing")})


@pytest.mark.parametrize("nbytes", [1, 100_000])
def test_finished_store_with_bytes_behind_its_end_is_damaged_and_all_is_saved(
    path: Path, nbytes: int
) -> None:
    with path.open("ab") as file:
        file.write(bytes(nbytes))
    found = examine(path)
    assert (found.status, found.lost_arrays) == (Status.DAMAGED, ())
    assert_salvaged(path, list(range(6)))


def test_damaged_sample_is_left_out(path: Path) -> None:
    flip(path, layout_of(path).arrays["fields"].slot(2)[0] + 99)
    found = examine(path)
    assert (found.status, found.savable.tolist()) == (Status.DAMAGED, [0, 1, 3, 4, 5])
    assert "sample 2" in found.problems[0]
    assert_salvaged(path, [0, 1, 3, 4, 5])
    with ups_store.open(path.with_name("saved.zarr.zip")) as saved, ups_store.open(path) as old:
        assert_same_bits(saved.constants, old.constants)
        assert (saved.attrs, saved.dims["fields"]) == (old.attrs, old.dims["fields"])
        assert saved.identity["source_config_hash"] == old.config_hash


def test_damaged_small_array_and_constant_are_left_out(path: Path) -> None:
    arrays = layout_of(path).arrays
    flip(path, arrays["nu"].offset)
    flip(path, arrays["x"].offset)
    found = examine(path)
    assert (found.lost_arrays, len(found.savable)) == (("nu", "x"), 6)
    assert_salvaged(path, list(range(6)), values={k: v for k, v in VALUES.items() if k != "nu"})


def test_damaged_root_loses_the_identity_and_no_sample(path: Path) -> None:
    flip(path, 100)
    found = examine(path)
    assert (found.status, found.lost_arrays, len(found.problems)) == (Status.IDENTITY_LOST, (), 1)
    assert_salvaged(path, list(range(6)))
    with ups_store.open(path.with_name("saved.zarr.zip")) as saved:
        assert_same_bits(saved.constants, mixed_constants())
        content = saved.identity
    assert content == {"kind": "salvaged", "identity": "lost", "samples": [[0, 6]], "lost_arrays": []}


def test_array_that_is_there_twice_leaves_nothing(path: Path) -> None:
    parts = take_apart(path.read_bytes())
    twice = next(part for part in parts if part.name == "fields/zarr.json")
    path.write_bytes(put_together([*parts[:1], twice, *parts[1:]]))
    assert examine(path).status is Status.METADATA_DAMAGED
    with files.opened(path) as fd, pytest.raises(FormatError, match="an array twice"):
        read_without_root(fd, path)


def test_damaged_root_and_more_samples_than_bytes_leave_nothing(make_store: MakeStore) -> None:
    """Spec 11.1."""
    path = make_store({"e": np.zeros((3, 0))}, dims={})
    path.write_bytes(put_together(edit_shape(take_apart(path.read_bytes()), "e", (1 << 40, 0))))
    flip(path, 100)
    assert examine(path).status is Status.METADATA_DAMAGED
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(FormatError) as caught:
        read_without_root(fd, path)
    os.close(fd)
    assert (caught.value.kind, caught.value.found) == ("limits", 1 << 40)


def test_damaged_metadata_of_an_array_leaves_nothing_and_says_what_to_do(path: Path) -> None:
    layout = layout_of(path)
    flip(path, layout.metadata[1].data_offset + 5)
    found = examine(path)
    assert (found.status, found.num_samples, len(found.problems)) == (Status.METADATA_DAMAGED, 0, 1)
    with pytest.raises(FormatError, match=r"nothing to save: .* any ZIP"):
        salvage(found, path.with_name("saved.zarr.zip"))
    assert "--repair" not in run_ups_store("doctor", path).stdout
    with zipfile.ZipFile(path) as archive:  # as the advice says
        assert VALUES["fields"][5].tobytes() in archive.read(layout.arrays["fields"].meta.chunk_key)


@pytest.mark.parametrize("name", WRONG_IDENTITIES)
def test_identity_that_is_none_is_named_and_salvage_makes_a_sound_store(name: str, tmp_path: Path) -> None:
    path = write_sample_store(tmp_path / "a.zarr.zip")
    with ups_store.open(path) as store:
        values = {name: store[name].copy() for name in store.arrays}
    path.write_bytes(REFUSED[name].build(path.read_bytes()))
    found = examine(path)
    assert found.status is Status.IDENTITY_LOST
    assert "identity" in found.problems[0]
    assert_salvaged(path, [0, 1, 2], values=values)
    assert examine(path.with_name("saved.zarr.zip")).status is Status.COMPLETE


def test_packed_store_is_named_so(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a.packed.zarr.zip"
    with ups_store.open(path) as store:
        pack_store(store, packed)
    found = examine(packed)
    assert (found.status, found.problems) == (Status.PACKED, ())
    done = run_ups_store("doctor", packed)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"{packed}: packed, sound")


def test_damaged_packed_store_is_named_so(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a.packed.zarr.zip"
    with ups_store.open(path) as store:
        pack_store(store, packed)
    with ups_store.open(packed) as packed_store:
        catalog = packed_store.catalog
    metadata, chunk = catalog.metadata[1], catalog.arrays["fields"].entry
    assert chunk is not None
    for offset in (metadata.data_offset + 9, chunk.data_offset + 9, packed.stat().st_size - 1):
        flip(packed, offset)
        found = examine(packed)
        assert (found.status, len(found.problems)) == (Status.PACKED_DAMAGED, 1)
        flip(packed, offset)
    flip(packed, offset)
    assert run_ups_store("doctor", packed).exit_code == 1


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "step", [pytest.param(9, id="every 9th"), pytest.param(1, id="every one", marks=pytest.mark.slow)]
)
def test_file_of_the_corpus_has_the_diagnosis_that_is_listed_and_stays_as_it_is(
    tmp_path: Path, step: int
) -> None:
    found, changed = {}, []
    with tarfile.open(corpus.FOLDER / corpus.ARCHIVE) as archive:
        members = archive.getmembers()[::step]
        archive.extractall(tmp_path, members, filter="data")
    names = [member.name for member in members]
    for name in names:
        path = tmp_path / name
        content, before = path.read_bytes(), path.stat()
        diagnosis = examine(path)
        found[name] = diagnosis.status
        assert diagnosis.to_json()["status"] == diagnosis.status.value
        if (path.read_bytes(), path.stat().st_mtime_ns) != (content, before.st_mtime_ns):
            changed.append(name)
    assert changed == []
    assert found == {name: diagnosis_of(name) for name in names}
    if step == 1:
        assert OTHERS.keys() <= {name.partition(".")[0] for name in names}


def test_every_truncated_store_has_the_diagnosis_of_what_is_left(tmp_path: Path) -> None:
    path = write_sample_store(tmp_path / "a.zarr.zip")
    good, data = path.read_bytes(), layout_of(path).metadata[-1].end
    for content in truncations(good).values():
        path.write_bytes(content)
        expected = {Status.TRUNCATED} if len(content) >= data else {Status.METADATA_DAMAGED, Status.FOREIGN}
        assert examine(path).status in expected, len(content)
        assert path.read_bytes() == content


EVERY = [
    pytest.param(211, id="every 211th"),
    pytest.param(1, id="every one", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]


@pytest.mark.no_cover  # traced it takes twice as long, and finds no other lines
@pytest.mark.parametrize("step", EVERY)
def test_flipped_byte_is_diagnosed_and_nothing_wrong_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    for name in ("sync", "sync_data", "sync_folder"):  # thousands of stores that nobody needs
        monkeypatch.setattr(files, name, lambda *place: None)
    values = {"u": np.arange(1200.0).reshape(2, 600), "nu": np.arange(2.0)}
    good = build(tmp_path / "a.zarr.zip", values, dims={})
    content, layout = good.read_bytes(), layout_of(good)
    copy, out = tmp_path / "b.zarr.zip", tmp_path / "c.zarr.zip"
    for offset in range(0, len(content), step):
        copy.write_bytes(content)
        flip(copy, offset)
        damaged, found = copy.read_bytes(), examine(copy)
        assert found.status in BROKEN, offset
        assert found.problems, offset
        assert (found.savable.tolist(), found.lost_arrays) == expected_of(layout, offset, found.status), (
            offset
        )
        if len(found.savable):
            with ups_store.open(salvage(found, out)) as store:
                assert store[ORIGINAL_SAMPLE].tolist() == found.savable.tolist()
                for name in values.keys() - set(found.lost_arrays):
                    assert np.array_equal(store[name], values[name][found.savable]), offset
            out.unlink()
        assert copy.read_bytes() == damaged, offset


def expected_of(layout: Layout, offset: int, status: Status) -> tuple[list[int], tuple[str, ...]]:
    """Which samples are left of two, and which arrays aren't, after a change at an offset."""
    if status is Status.METADATA_DAMAGED:
        return [], ()
    for sample in range(2):
        first, _ = layout.arrays["u"].slot(sample)
        if first <= offset < first + 600 * 8 + 4:
            return [1 - sample], ()
    first = layout.arrays["nu"].offset
    return [0, 1], ("nu",) if first <= offset < first + 2 * 8 + 4 else ()


# --- salvage --------------------------------------------------------------------------------------------


def test_salvage_of_a_salvaged_store_numbers_its_samples_anew(path: Path, tmp_path: Path) -> None:
    flip(path, layout_of(path).arrays["fields"].slot(0)[0])
    first = salvage(examine(path), tmp_path / "first.zarr.zip")
    second = salvage(examine(first), tmp_path / "second.zarr.zip")
    with ups_store.open(second) as store:
        assert store[ORIGINAL_SAMPLE].tolist() == [1, 2, 3, 4, 5]
        assert store[f"{ORIGINAL_SAMPLE}_before"].tolist() == [0, 1, 2, 3, 4]


def test_salvage_replaces_nothing(path: Path) -> None:
    with pytest.raises(FileExistsError):
        salvage(examine(path), path)


def test_salvage_of_a_file_that_changed_since_is_refused(path: Path, tmp_path: Path) -> None:
    found = examine(path)
    flip(path, layout_of(path).arrays["fields"].slot(5)[0])
    with pytest.raises(CorruptChunkError, match="changed while"):
        salvage(found, tmp_path / "saved.zarr.zip")
    assert not (tmp_path / "saved.zarr.zip").exists()


def test_checksum_of_an_unwritten_slot_does_not_verify(tmp_path: Path) -> None:
    # Zeros in a hole must not pass for a sample: their CRC-32C isn't zero.
    path = unfinished(tmp_path, [])
    flip(path, layout_of(path).tail_offset)
    assert crc32c(bytes(5120)) != 0
    assert len(examine(path).savable) == 0


def test_salvage_beside_another_unfinished_one_advises_another_name(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "saved.zarr.zip"
    begin(out, VALUES).close()
    with pytest.raises(IdentityMismatchError) as caught:
        salvage(examine(path), out)
    assert caught.value.hint == "give the new store another name"


# --- the verb -------------------------------------------------------------------------------------------


def test_doctor_of_a_missing_file_says_so(tmp_path: Path) -> None:
    done = run_ups_store("doctor", tmp_path / "a.zarr.zip")
    assert done.exit_code == 1
    assert "no such file" in done.stderr
