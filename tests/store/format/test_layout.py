"""Geometry: slot sizes, where entries lie, the build tail behind them; literal numbers (spec 2, 5, 6.1)."""

from __future__ import annotations

import struct

import pytest

from ups_store.format.checksum import crc32c
from ups_store.format.layout import Layout, plan, slot_nbytes
from ups_store.format.metadata import ArrayMeta
from ups_store.format.root_metadata import FORMAT_VERSION
from ups_store.format.zip_records import END_BYTES

MIB = 1 << 20


def meta(name: str, shape: tuple[int, ...], dtype: str = "uint8", *, constant: bool = False) -> ArrayMeta:
    dims = tuple(f"{name}_{i}" for i in range(len(shape)))
    return ArrayMeta(name, shape, dtype, dims if constant else ("sample", *dims[1:]))


def layout_of(*metas: ArrayMeta, num_samples: int = 0) -> Layout:
    return plan(4096, [(m, len(m.to_json())) for m in metas], num_samples)


# --- slots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample_nbytes", "expected"),
    [
        (4096, 4160),
        (4097, 4160),
        (4156, 4160),
        (4157, 4224),
        (102_400, 102_464),
        (MIB - 4, MIB),
        (MIB - 3, MIB + 64),
        (MIB - 1, MIB + 64),
        (MIB, MIB + 4096),
        (MIB + 4092, MIB + 4096),
        (MIB + 4093, MIB + 8192),
    ],
)
def test_slot_nbytes_rounds_payload_and_checksum_up(sample_nbytes: int, expected: int) -> None:
    """Spec 5.3: multiples of 64, from 1 MiB a sample on of 4096."""
    assert slot_nbytes(sample_nbytes) == expected


@pytest.mark.parametrize(
    ("array", "is_sharded", "stride"),
    [
        (meta("u", (3, 4095)), False, 4095),
        (meta("u", (3, 4096)), True, 4160),
        (meta("u", (3, 1024), "float32"), True, 4160),
        (meta("u", (3, 1023), "float32"), False, 4092),
        (meta("u", (3,), "float64"), False, 8),
        (meta("u", (3, 0)), False, 0),
        (meta("u", (0, 4096)), True, 4160),
        (meta("x", (100_000,), constant=True), False, 100_000),
        (meta("x", (), "float64", constant=True), False, 8),
    ],
)
def test_array_gets_slots_from_4096_bytes_a_sample_on(
    array: ArrayMeta, is_sharded: bool, stride: int
) -> None:
    """Spec 5.1; constants never."""
    assert array.is_sharded is is_sharded
    assert layout_of(array).arrays[array.name].stride == stride


# --- where entries lie --------------------------------------------------------------------------------


def test_plan_without_arrays_holds_the_root_only() -> None:
    """Spec 2.2: local header 59, text 4096, one central record of 83 bytes, end records."""
    layout = layout_of()
    assert [entry.name for entry in layout.entries] == ["zarr.json"]
    assert (layout.directory_offset, layout.directory_nbytes) == (4155, 83)
    assert layout.file_nbytes == 4155 + 83 + 128
    assert (layout.per_sample, layout.record_nbytes) == ((), 8)


def test_plan_of_the_smallest_store_has_the_numbers_of_the_spec() -> None:
    """Spec 12."""
    layout = layout_of(meta("u", (1,), "int8"), num_samples=1)
    assert [(e.name, e.offset, e.data_offset, e.end) for e in layout.entries] == [
        ("zarr.json", 0, 59, 4155),
        ("u/zarr.json", 4155, 4216, 4532),
        ("u/c/0", 4532, 8192, 8197),
    ]
    assert (layout.directory_offset, layout.file_nbytes) == (8197, 8572)
    assert (layout.tail_offset, layout.table_offset, layout.building_nbytes) == (12288, 16384, 20480)


def test_plan_sorts_arrays_by_name_as_byte_strings() -> None:
    """Spec 2.2: metadata first, then data, both in the order of the names."""
    names = ["b", "a", "B", "_", "a1", "a.b", "a-b", "9"]
    layout = layout_of(*(meta(name, (1,)) for name in names))
    ordered = ["9", "B", "_", "a", "a-b", "a.b", "a1", "b"]
    assert list(layout.arrays) == ordered
    expected = ["zarr.json", *(f"{n}/zarr.json" for n in ordered), *(f"{n}/c/0" for n in ordered)]
    assert [entry.name for entry in layout.entries] == expected


def test_entries_follow_one_another_without_gaps() -> None:
    """Spec 2.2."""
    layout = layout_of(
        meta("u", (3, 5000)), meta("nu", (3,), "float64"), meta("x", (7,), "float64", constant=True)
    )
    entries = layout.entries
    assert [entry.offset for entry in entries] == [0, *(entry.end for entry in entries[:-1])]
    assert layout.directory_offset == entries[-1].end
    assert layout.directory_nbytes == sum(entry.central_nbytes for entry in entries)
    assert layout.file_nbytes == layout.directory_offset + layout.directory_nbytes + END_BYTES


@pytest.mark.parametrize(
    "array",
    [meta("u", (3, 4096)), meta("u", (2, MIB)), meta("nu", (3,)), meta("x", (9000,), constant=True)],
)
def test_data_start_on_a_page(array: ArrayMeta) -> None:
    """Spec 3.4."""
    entry = layout_of(array).arrays[array.name].entry
    assert entry is not None
    assert entry.data_offset % 4096 == 0


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        (meta("u", (3, 4096)), 3 * 4160 + 3 * 16 + 4),
        (meta("u", (2, MIB)), 2 * (MIB + 4096) + 2 * 16 + 4),
        (meta("nu", (3,), "float64"), 3 * 8 + 4),
        (meta("x", (), "float64", constant=True), 8 + 4),
        (meta("x", (2, 3), "bfloat16", constant=True), 12 + 4),
    ],
)
def test_data_entry_has_the_clauses_size(array: ArrayMeta, nbytes: int) -> None:
    """Spec 5.2 and 5.4."""
    entry = layout_of(array).arrays[array.name].entry
    assert entry is not None
    assert entry.nbytes == nbytes


@pytest.mark.parametrize(
    "array",
    [
        meta("u", (0,)),
        meta("u", (0, 4096)),
        meta("u", (5, 0, 3)),
        meta("x", (0,), constant=True),
        meta("x", (2, 0), constant=True),
    ],
)
def test_array_without_elements_has_no_data_entry(array: ArrayMeta) -> None:
    """Spec 4.6."""
    layout = layout_of(array)
    assert [entry.name for entry in layout.entries] == ["zarr.json", f"{array.name}/zarr.json"]
    assert (layout.arrays[array.name].entry, layout.arrays[array.name].offset) == (None, 0)


def test_array_without_elements_leaves_no_gap() -> None:
    layout = layout_of(meta("a", (3,)), meta("b", (3, 0)), meta("c", (3,)))
    a, c = layout.arrays["a"].entry, layout.arrays["c"].entry
    assert a is not None
    assert c is not None
    assert c.offset == a.end


def test_slot_gives_the_extent_of_a_sample() -> None:
    """Spec 5.5 and 5.6."""
    layout = layout_of(meta("u", (3, 5000)), meta("nu", (3,), "float64"))
    large, small = layout.arrays["u"], layout.arrays["nu"]
    assert large.offset % 4096 == 0
    assert large.slot(2) == (large.offset + 2 * 5056, large.offset + 3 * 5056)
    assert small.slot(2) == (small.offset + 16, small.offset + 24)


@pytest.mark.parametrize("num_samples", [1, 2, 1000])
def test_pack_index_holds_offset_and_size_of_every_chunk(num_samples: int) -> None:
    """Spec 5.4."""
    array = layout_of(meta("u", (num_samples, 5000))).arrays["u"]
    body = b"".join(struct.pack("<QQ", i * 5056, 5004) for i in range(num_samples))
    assert array.pack_index() == body + struct.pack("<I", crc32c(body))


def test_pack_index_counts_beyond_32_bits() -> None:
    array = layout_of(meta("u", (3, 1 << 33))).arrays["u"]
    assert struct.unpack_from("<QQ", array.pack_index(), 32) == (2 * ((1 << 33) + 4096), (1 << 33) + 4)


# --- the build tail -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "num_arrays", "record_nbytes", "table_nbytes"),
    [(0, 1, 12, 0), (1, 1, 12, 4096), (341, 1, 12, 4096), (342, 1, 12, 8192), (512, 0, 8, 4096)],
)
def test_commit_table_has_a_record_a_sample_and_whole_pages(
    num_samples: int, num_arrays: int, record_nbytes: int, table_nbytes: int
) -> None:
    """Spec 6.1 and 6.4: R = 4 (A + 2)."""
    metas = [meta(f"a{i}", (num_samples,)) for i in range(num_arrays)]
    layout = layout_of(*metas, meta("x", (2,), constant=True), num_samples=num_samples)
    assert layout.record_nbytes == record_nbytes
    assert layout.tail_offset % 4096 == 0
    assert 0 <= layout.tail_offset - layout.file_nbytes < 4096
    assert layout.table_offset == layout.tail_offset + 4096
    assert layout.building_nbytes == layout.table_offset + table_nbytes


def test_per_sample_leaves_constants_out() -> None:
    layout = layout_of(meta("u", (3,)), meta("x", (2,), constant=True), meta("b", (3, 5)), num_samples=3)
    assert [array.meta.name for array in layout.per_sample] == ["b", "u"]


def test_geometry_does_not_need_memory_for_its_samples() -> None:
    """Spec 11.1: numbers only, whatever the shape says."""
    layout = layout_of(meta("u", (1 << 50, 4096)), num_samples=1 << 50)
    assert layout.file_nbytes > (1 << 50) * 4160
    assert layout.building_nbytes > layout.file_nbytes + (1 << 50) * 12


def test_format_version_is_one_zero() -> None:
    """Spec 10.1."""
    assert FORMAT_VERSION == (1, 0)
