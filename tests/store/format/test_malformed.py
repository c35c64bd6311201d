"""Malformed files: each is refused with a typed error that says where and why, fast and in little memory.

The files are named after their defects; `ups_store.testing` makes them from one good store (spec 7, 11).
"""

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
from small_stores import all_arrays, assert_same_bits

import ups_store
from ups_store.errors import FormatError, StoreError, TruncatedError, VersionTooNewError
from ups_store.format.checksum import crc32
from ups_store.format.zip_records import Entry, pack_directory
from ups_store.read.verify import Report
from ups_store.testing import DAMAGED, MALFORMED, NEWER_MINOR, truncations, write_sample_store
from ups_store.testing.archive import edit_document, edit_identity, edit_shape, put_together, take_apart

MAX_SECONDS = 2.0
MAX_MEMORY_BYTES = 64 << 20

# Class, kind and clause; the defects that give them.
EXPECTED = {
    (FormatError, "no_end_record", "3.6"): "empty_file text_file zeros hdf5_renamed end_record_cut_short",
    (FormatError, "no_zip64", "3.6"): "zip_of_another_program zarr_zip_of_zarr_python magic_of_zip64_locator",
    (FormatError, "foreign", "2.2"): "zip64_of_another_program no_entries root_not_at_0 root_not_first",
    (TruncatedError, "truncated", "3.6"): """
        bytes_after_the_end magic_of_end_record comment_too_long comment_length_wrong
    """,
    (FormatError, "end_records", "3.6"): """
        bytes_before_the_start magic_of_zip64_end locator_points_elsewhere locator_offset_2_63
        directory_offset_2_63 directory_offset_wraps num_entries_differ num_entries_in_16_bits
    """,
    (FormatError, "limits", "9.1"): """
        directory_too_long num_entries_2_60 metadata_of_2_60_bytes too_many_arrays
        metadata_of_17_mib root_metadata_of_17_mib
    """,
    (FormatError, "directory", "3.5"): """
        num_entries_one_too_many num_entries_too_few magic_of_central_record entry_with_comment
        name_past_the_directory no_room_for_zip64_field
    """,
    (FormatError, "compressed", "3.5"): "compressed_entry",
    (FormatError, "encrypted", "3.5"): "encrypted_entry strongly_encrypted_entry",
    (FormatError, "name", "3.5"): "name_not_ascii",
    (FormatError, "sizes", "3.5"): """
        zip64_field_of_another_kind zip64_field_too_short sizes_differ sizes_in_32_bits offset_in_32_bits
    """,
    (FormatError, "duplicate_name", "3.5"): "two_entries_of_one_name",
    (FormatError, "geometry", "2.2"): """
        entries_overlap metadata_entries_overlap entry_offset_outside_file entry_offset_2_63
        metadata_offset_2_64 entry_past_end entry_too_short root_past_end arrays_not_sorted
        data_not_sorted data_entry_missing data_misaligned shape_larger_than_data
    """,
    (FormatError, "geometry", "3.6"): """
        comment_of_another_format directory_overlaps_data shape_huge_everywhere
        shape_huge_everywhere_in_newer_minor
    """,
    (TruncatedError, "truncated", "7.1"): "metadata_past_end",
    (FormatError, "unknown_entry", "2.2"): "unknown_entry entry_for_a_folder",
    (FormatError, "name", "4.2"): "name_not_allowed name_leaves_the_folder",
    (FormatError, "metadata_crc", "3.2"): "crc_of_root_metadata crc_of_array_metadata",
    (FormatError, "json", "4.1"): """
        metadata_not_json metadata_empty metadata_a_list metadata_in_utf_16 metadata_not_utf_8
        metadata_nested_100000_deep identity_nested_100000_deep attributes_nested_100000_deep
        identity_with_nan attributes_with_nan attributes_with_infinity root_attributes_with_lone_surrogate
    """,
    (FormatError, "foreign", "4.3"): """
        root_without_our_attribute root_attribute_not_an_object root_attributes_null root_is_an_array
        root_of_zarr_2
    """,
    (FormatError, "root_metadata", "4.3"): """
        version_missing version_a_number version_a_deep_list version_not_ascii identity_hash_null
        identity_null
    """,
    (FormatError, "root_metadata", "13.2"): "packed_null",
    (VersionTooNewError, "version_too_new", "10.2"): "version_of_newer_major",
    (FormatError, "root_metadata", "10.2"): "version_of_older_major",
    (FormatError, "identity_hash", "8.2"): "identity_with_infinity identity_with_lone_surrogate",
    (FormatError, "identity_hash", "8.3"): """
        identity_edited_without_hash identity_hash_edited identity_with_integer_of_60_bits
    """,
    (FormatError, "identity_arrays", "8.1"): """
        identity_without_an_array identity_with_another_array identity_with_another_shape
        identity_arrays_null array_metadata_missing dtype_other_than_identity
    """,
    (FormatError, "array_metadata", "4.4"): """
        metadata_number_of_a_million_digits shape_missing shape_negative shape_of_floats
        shape_of_booleans shape_of_null shape_a_deep_list shape_2_60 shape_2_64 shape_product_2_64
        shape_empty_but_not_addressable shape_of_40_axes chunk_grid_of_booleans
        chunk_grid_with_two_chunks chunk_keys_with_dots fill_value_of_1 fill_value_false_for_numbers
        storage_transformer array_is_a_group array_of_zarr_2 dimension_names_missing
        dimension_names_too_few dimension_names_null attributes_missing attributes_null
    """,
    (FormatError, "dtype", "4.4"): "dtype_missing dtype_unknown dtype_of_python_objects dtype_a_list",
    (FormatError, "codec", "4.4"): """
        codecs_missing codec_unknown codec_compresses codec_without_checksum codec_big_endian
        codec_a_deep_list index_at_start index_compressed inner_chunk_of_two_samples
        large_array_without_shards
    """,
    (FormatError, "dims", "4.5"): """
        num_samples_differ dimension_lengths_differ dimension_name_twice dimension_sample_not_first
    """,
}
REFUSALS = {name: expected for expected, names in EXPECTED.items() for name in names.split()}

# Kind of the first problem, array and sample, that `verify` reports.
PROBLEMS = {
    "payload_of_large_array": ("chunk_crc", "u", 1),
    "payload_of_small_array": ("chunk_crc", "nu", None),
    "payload_with_crc_of_entry": ("chunk_crc", "u", 0),
    "slot_checksum": ("chunk_crc", "u", 0),
    "slot_padding": ("slot_padding", "u", 0),
    "index_checksum": ("shard_index", "u", None),
    "index_with_one_sample_twice": ("shard_index", "u", None),
    "chunk_checksum": ("chunk_crc", "nu", None),
    "boolean_of_2": ("bool_value", "mask", None),
    "constant_of_another_identity": ("constant_digest", "x", None),
    "empty_constant_of_another_identity": ("identity", None, None),
    "magic_of_root_header": ("local_header", None, None),
    "magic_of_data_header": ("local_header", None, None),
    "time_in_header": ("local_header", None, None),
    "padding_not_zero": ("local_header", None, None),
    "crc_in_directory": ("local_header", None, None),
    "attributes_with_integer_of_60_bits": ("metadata_text", None, None),
    "metadata_with_white_space": ("metadata_text", None, None),
    "metadata_with_a_key_twice": ("metadata_text", None, None),
    "metadata_with_spaces_behind": ("metadata_text", None, None),
    "root_metadata_with_a_page_of_spaces": ("metadata_text", None, None),
    "identity_with_another_key": ("identity", None, None),
    "identity_without_content": ("identity", None, None),
    "identity_of_format_2": ("identity", None, None),
    "identity_with_digest_of_no_constant": ("identity", None, None),
}
PAYLOAD_DAMAGE = {
    "payload_of_large_array",
    "payload_of_small_array",
    "payload_with_crc_of_entry",
    "boolean_of_2",
    "constant_of_another_identity",
}

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


# --- refused when opened ------------------------------------------------------------------------------


def test_every_builder_has_an_expected_refusal() -> None:
    assert REFUSALS.keys() == MALFORMED.keys()
    assert PROBLEMS.keys() == DAMAGED.keys()


@pytest.mark.parametrize("name", MALFORMED)
def test_open_refuses_malformed_file(name: str, good: Path, tmp_path: Path) -> None:
    """Spec 11.1."""
    path = write(tmp_path, MALFORMED[name](good.read_bytes()))
    error = refusal(path)
    assert (type(error), error.kind, error.clause) == REFUSALS[name]
    assert str(error).startswith(str(path))
    assert f"(spec {error.clause})" in str(error)
    assert error.hint is not None
    assert str(error).endswith(f"; {error.hint}"), "nothing says what to do"
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


def test_open_of_an_older_major_version_says_both_and_what_to_do(good: Path, tmp_path: Path) -> None:
    """Spec 10.2."""
    error = refusal(write(tmp_path, MALFORMED["version_of_older_major"](good.read_bytes())))
    assert (error.expected, error.found, error.hint) == ("version 1.x", "0.9", "build it again")


def test_builders_leave_the_good_bytes_alone(good: Path) -> None:
    raw = good.read_bytes()
    assert put_together(take_apart(raw)) == raw
    for name, build in {**MALFORMED, **DAMAGED, **NEWER_MINOR}.items():
        assert build(raw) != raw, name
        assert raw == good.read_bytes(), name


def test_open_refuses_file_cut_at_each_structural_boundary(good: Path, tmp_path: Path) -> None:
    cut = truncations(good.read_bytes())
    assert len(cut) > 70
    for name, raw in cut.items():
        error = refusal(write(tmp_path, raw))
        assert isinstance(error, FormatError), name
        is_headless = name in ("truncated_before_header_of_zarr.json", "truncated_in_header_of_zarr.json")
        assert error.kind == ("no_end_record" if is_headless else "truncated"), name


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("smallest") / "smallest.zarr.zip"
    with ups_store.create(path, {"u": ups_store.ArraySpec((1,), "int8")}, identity={}) as writer:
        writer.commit(0, {"u": np.int8(7)})
        return writer.finish().read_bytes()


def test_open_refuses_file_cut_anywhere(smallest: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, smallest)
    for nbytes in range(len(smallest) - 1, -1, -1):
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


@pytest.mark.no_cover  # traced it takes twice as long, and finds no other lines
def test_any_changed_byte_is_refused_or_found_by_verify(smallest: bytes, tmp_path: Path) -> None:
    """Spec 7.6. The root's white space is one case, not 3700."""
    text_end = smallest.index(b" " * 64)
    path = write(tmp_path, smallest)
    for at in [*range(text_end + 2), *range(4150, len(smallest))]:
        raw = bytearray(smallest)
        raw[at] ^= 1 << (at % 8)
        path.write_bytes(raw)
        found = outcome(path)
        assert str(path) in str(found) if isinstance(found, FormatError) else not found.ok, at


@pytest.mark.parametrize("key", ["attributes", "shape", "codecs", "data_type", "unknown"])
@pytest.mark.parametrize("depth", [100, 240, 320, 400, 480, 500, 700, 900, 960, 990, 1000, 5000, 20_000])
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


def make_folder(path: Path) -> None:
    path.mkdir()


def make_zarr_folder(path: Path) -> None:
    zarr.create_group(path)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [make_folder, make_zarr_folder, make_fifo, make_link_to_device])
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


def test_open_of_a_loop_of_links_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "burgers1d_train.zarr.zip"
    path.symlink_to(path)
    with little_time_and_memory(), pytest.raises(OSError, match=path.name):
        ups_store.open(path)


def test_open_of_a_dangling_link_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "burgers1d_train.zarr.zip"
    path.symlink_to(tmp_path / "gone")
    assert isinstance(refusal(path), ups_store.StoreNotFoundError)


def test_open_follows_a_link_to_a_store(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "link.zarr.zip"
    path.symlink_to(good)
    assert_same_bits(all_arrays(path), all_arrays(good))


def test_open_refuses_a_real_hdf5_file(tmp_path: Path) -> None:
    path = tmp_path / "renamed.zarr.zip"
    with h5py.File(path, "w") as file:
        file["tensor"] = np.zeros((3, 40))
    assert refusal(path).kind == "no_end_record"


def test_open_refuses_a_real_archive_of_zarr_python(tmp_path: Path) -> None:
    path = tmp_path / "other.zarr.zip"
    with zarr.storage.ZipStore(path, mode="w") as store:
        zarr.create_array(store, name="u", data=np.zeros(3))
    assert refusal(path).kind == "no_zip64"


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
            entries.append(Entry(part.name, entries[-1].end if entries else 0, nbytes, part.alignment))
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


@pytest.mark.parametrize("name", MALFORMED)
def test_open_partial_refuses_malformed_building_file(name: str, good: Path, tmp_path: Path) -> None:
    """Spec 6.5: neither resumable nor finished."""
    path = tmp_path / "burgers1d_train.zarr.zip"
    building = tmp_path / "burgers1d_train.zarr.zip.building"
    building.write_bytes(MALFORMED[name](good.read_bytes()))
    error = refusal(path, partial=True)
    assert isinstance(error, FormatError)
    assert str(error).startswith(str(building))


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
    assert (error.kind, error.clause) == ("limits", "9.1")


def test_open_partial_refuses_building_file_of_arrays_that_its_identity_lacks(
    building: Path,
) -> None:
    """Spec 6.5: the names stand in the identity."""
    building.write_bytes(building.read_bytes().replace(b"nu/zarr.json", b"mu/zarr.json"))
    error = refusal(building.with_suffix(""), partial=True)
    assert (error.kind, error.clause, error.expected) == ("foreign", "6.1", "nu/zarr.json")


def test_open_partial_refuses_building_file_with_too_many_arrays(good: Path, tmp_path: Path) -> None:
    """Spec 9.1: before the metadata of any of them is read."""
    names = {f"a{i}": {} for i in range(4097)}
    parts = edit_identity(take_apart(good.read_bytes()), lambda identity: identity.update(arrays=names))
    (tmp_path / "a.zarr.zip.building").write_bytes(put_together(parts))
    error = refusal(tmp_path / "a.zarr.zip", partial=True)
    assert (error.kind, error.clause, error.found) == ("limits", "9.1", 4097)


# --- damage that only `verify` finds ------------------------------------------------------------------


@pytest.mark.parametrize("name", DAMAGED)
def test_verify_finds_damage(name: str, good: Path, tmp_path: Path) -> None:
    """Spec 7.6."""
    path = write(tmp_path, DAMAGED[name](good.read_bytes()))
    with little_time_and_memory(), ups_store.open(path) as store:
        report = store.verify()
    assert not report.ok
    first = report.problems[0]
    assert (first.kind, first.array, first.sample) == PROBLEMS[name]


@pytest.mark.parametrize("name", sorted(DAMAGED.keys() - PAYLOAD_DAMAGE))
def test_damage_outside_the_payloads_gives_no_wrong_array(name: str, good: Path, tmp_path: Path) -> None:
    path = write(tmp_path, DAMAGED[name](good.read_bytes()))
    with ups_store.open(path) as store, ups_store.open(good) as original:
        assert_same_bits({n: store[n] for n in store.arrays}, {n: original[n] for n in original.arrays})
        assert_same_bits(store.constants, original.constants)


# --- newer minor versions -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEWER_MINOR)
def test_open_reads_newer_minor_version(name: str, good: Path, tmp_path: Path) -> None:
    """Spec 10.3: unknown keys, entries and bytes of the comment are ignored."""
    path = write(tmp_path, NEWER_MINOR[name](good.read_bytes()))
    with ups_store.open(path) as store, ups_store.open(good) as original:
        assert store.version == (1, 7)
        assert list(store.arrays) == list(original.arrays)
        assert_same_bits({n: store[n] for n in store.arrays}, {n: original[n] for n in original.arrays})
        assert_same_bits(store.constants, original.constants)


@pytest.mark.parametrize("name", NEWER_MINOR)
def test_verify_refuses_newer_minor_version(name: str, good: Path, tmp_path: Path) -> None:
    """Spec 10.3: what it would call damage may be meant."""
    path = write(tmp_path, NEWER_MINOR[name](good.read_bytes()))
    with ups_store.open(path) as store, pytest.raises(VersionTooNewError) as caught:
        store.verify()
    assert (caught.value.clause, caught.value.found) == ("10.3", "1.7")
