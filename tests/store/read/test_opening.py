"""What `open` does with what isn't in the conformance corpus: other things at the path, cuts, huge files."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from small_stores import assert_same_bits

import ups_store
from tools.conformance import DAMAGED, REFUSED, truncations, write_sample_store
from tools.conformance.archive import edit_document, edit_shape, put_together, take_apart
from ups_store.errors import FormatError, StoreError
from ups_store.format.checksum import crc32
from ups_store.format.zip_records import Entry, pack_directory
from ups_store.read.verify import Report

MAX_SECONDS = 2.0
MAX_MEMORY_BYTES = 64 << 20

pytestmark = pytest.mark.timeout(30)  # a hang is a failure, too


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_store(tmp_path_factory.mktemp("good") / "sample_train.zarr.zip")


@contextmanager
def little_time_and_memory() -> Iterator[None]:
    tracemalloc.start()
    begin = time.process_time()  # time of its own: other processes may have the processor
    try:
        yield
    finally:
        seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seconds < MAX_SECONDS
    assert peak < MAX_MEMORY_BYTES


def refusal(path: Path, *, partial: bool = False) -> StoreError:
    with little_time_and_memory(), pytest.raises(StoreError) as caught:
        ups_store.open(path, partial=partial)
    return caught.value


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "burgers1d_train.zarr.zip"
    path.write_bytes(raw)
    return path


def test_open_of_an_older_major_version_says_both_and_what_to_do(good: Path, tmp_path: Path) -> None:
    """Spec 10.2."""
    error = refusal(write(tmp_path, REFUSED["version_0_9"].build(good.read_bytes())))
    assert (error.expected, error.found, error.hint) == ("version 1.x", "'0.9'", "build it again")


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("smallest") / "smallest.zarr.zip"
    with ups_store.create(path, {"u": ups_store.ArraySpec((1,), "int8")}, identity={}) as writer:
        writer.commit(0, {"u": np.int8(7)})
        return writer.finish().read_bytes()


def test_open_refuses_file_cut_anywhere(smallest: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, smallest)
    end = len(smallest)
    for nbytes in [*range(end - 1, end - 500, -1), *range(end - 500, -1, -11)]:
        os.truncate(path, nbytes)
        with pytest.raises(FormatError):
            ups_store.open(path)


def outcome(path: Path) -> FormatError | Report:
    """What `open` raises, else what `verify` finds; any other exception fails the test."""
    try:
        with ups_store.open(path) as store:
            return store.verify()
    except FormatError as error:
        return error


@pytest.mark.parametrize(
    ("key", "depth"),
    [*(("attributes", depth) for depth in (100, 400, 960, 20_000)), ("shape", 500), ("unknown", 1000)],
)
def test_nested_metadata_ends_in_a_store_or_a_typed_error(
    key: str, depth: int, good: Path, tmp_path: Path
) -> None:
    """Whether the JSON reader, the canonical form or a message meets its limit first depends on the depth."""
    value = {"n": "DEEP"} if key == "attributes" else "DEEP"
    parts = take_apart(good.read_bytes())
    parts = edit_document(parts, "nu/zarr.json", lambda array: array.update({key: value}))
    deep = b"[" * depth + b"]" * depth
    parts = [replace(part, data=part.data.replace(b'"DEEP"', deep)) for part in parts]
    found = outcome(write(tmp_path, put_together(parts)))
    assert len(str(found)) < 1000 if isinstance(found, FormatError) else key == "attributes"


# --- what else may lie at the path --------------------------------------------------------------------


def make_zarr_folder(path: Path) -> None:
    zarr.create_group(path)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [make_zarr_folder, make_fifo, make_link_to_device])
@pytest.mark.parametrize("partial", [False, True])
def test_open_refuses_what_is_no_regular_file(
    make: Callable[[Path], None], partial: bool, tmp_path: Path
) -> None:
    """Spec 2.1; a FIFO must not hang."""
    path = tmp_path / "burgers1d_train.zarr.zip"
    make(path)
    error = refusal(path, partial=partial)
    assert (type(error), error.kind, error.clause) == (FormatError, "not_a_file", "2.1")
    assert error.path == str(path)


def test_open_refuses_a_real_hdf5_file(tmp_path: Path) -> None:
    path = tmp_path / "renamed.zarr.zip"
    with h5py.File(path, "w") as file:
        file["tensor"] = np.zeros((3, 40))
    assert refusal(path).kind == "no_end_record"


def test_open_refuses_a_real_archive_of_zarr_python(tmp_path: Path) -> None:
    path = tmp_path / "other.zarr.zip"
    with zarr.storage.ZipStore(path, mode="w") as store:
        zarr.create_array(store, name="u", data=np.zeros(3))
    assert refusal(path).kind == "foreign"


def test_open_of_a_tebibyte_of_zeros_reads_its_end_only(tmp_path: Path) -> None:
    path = write(tmp_path, b"")
    os.truncate(path, 1 << 40)
    assert refusal(path).kind == "no_end_record"


def write_sparse(path: Path, good: Path, *, num_samples: int) -> Path:
    """The good store with many more samples, their bytes a hole in the file: 87 GB for 2^24 samples."""
    parts = take_apart(good.read_bytes())
    for array, shape in {"u": (40, 32), "nu": (), "mask": (4,), "empty": (0,)}.items():
        parts = edit_shape(parts, array, (num_samples, *shape))
    sample_nbytes = {"u/c/0/0/0": 5184 + 16, "nu/c/0": 8, "mask/c/0/0": 4}
    entries: list[Entry] = []
    with path.open("wb") as file:
        for part in parts:
            nbytes = len(part.data)
            if part.name in sample_nbytes:
                nbytes = num_samples * sample_nbytes[part.name] + 4
            entries.append(Entry(part.name, entries[-1].end if entries else 0, nbytes, part.is_aligned))
            file.seek(entries[-1].offset)
            file.write(entries[-1].pack_local_header(crc32(part.data)) + part.data)
        file.seek(entries[-1].end)
        file.write(pack_directory(entries, [crc32(part.data) for part in parts]))
    return path


def test_open_of_87_gigabytes_takes_little_time_and_memory(good: Path, tmp_path: Path) -> None:
    """Spec 7.1: the cost of opening doesn't depend on N."""
    path = write_sparse(tmp_path / "a.zarr.zip", good, num_samples=1 << 24)
    with little_time_and_memory(), ups_store.open(path) as store:
        assert len(store) == 1 << 24
        assert store["u"].shape == (1 << 24, 40, 32)
        assert store["u"][0, 0, 1] == 1.0
        assert store["nu"][-1] == 0.0


# --- files under construction -------------------------------------------------------------------------


@pytest.fixture
def building(tmp_path: Path) -> Path:
    """A building file of two arrays with one of two samples committed."""
    arrays = {"nu": ups_store.ArraySpec((2,), "float64"), "u": ups_store.ArraySpec((2, 4), "int8")}
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit(0, {"nu": 0.5, "u": np.ones(4, np.int8)})
    return tmp_path / "a.zarr.zip.building"


def test_open_partial_refuses_building_file_cut_anywhere(building: Path) -> None:
    """Spec 6.5: the length tells."""
    path, nbytes = building.with_suffix(""), building.stat().st_size
    for cut in [nbytes - 1, nbytes - 4096, 8192, 5000, 4700, 4500, 4214, 4155, 100, 59, 30, 0]:
        os.truncate(building, cut)
        error = refusal(path, partial=True)
        assert isinstance(error, FormatError), cut
        assert error.path == str(building), cut


def test_open_partial_refuses_building_file_with_a_metadata_entry_past_its_end(building: Path) -> None:
    raw = bytearray(building.read_bytes())
    at = raw.index(b"nu/zarr.json") + 12 + 4
    raw[at : at + 16] = b"\xff" * 16
    building.write_bytes(raw)
    error = refusal(building.with_suffix(""), partial=True)
    assert (error.kind, error.clause) == ("truncated", "6.1")


def test_open_partial_refuses_building_file_of_arrays_that_its_identity_lacks(
    building: Path,
) -> None:
    """Spec 6.5: the names stand in the identity."""
    building.write_bytes(building.read_bytes().replace(b"nu/zarr.json", b"mu/zarr.json"))
    error = refusal(building.with_suffix(""), partial=True)
    assert (error.kind, error.clause) == ("local_header", "3.3")
    assert error.problem == "no local header of nu/zarr.json"


# --- damage ------------------------------------------------------------------------------------------------


def test_damage_outside_the_payloads_gives_no_wrong_array(good: Path, tmp_path: Path) -> None:
    with ups_store.open(good) as original:
        expected = {name: original[name] for name in original.arrays}
        for defect in DAMAGED.values():
            if defect.clause in ("3.2", "3.3", "5.3", "5.4"):
                path = write(tmp_path, defect.build(good.read_bytes()))
                with ups_store.open(path) as store:
                    assert_same_bits({name: store[name] for name in store.arrays}, expected)
                    assert_same_bits(store.constants, original.constants)


def test_open_refuses_file_cut_at_each_structural_boundary(good: Path, tmp_path: Path) -> None:
    cut = truncations(good.read_bytes())
    assert len(cut) > 70
    for name, raw in cut.items():
        error = refusal(write(tmp_path, raw))
        assert isinstance(error, FormatError), name
        is_headless = name in ("truncated_before_header_of_zarr.json", "truncated_in_header_of_zarr.json")
        assert error.kind == ("no_end_record" if is_headless else "truncated"), name
