"""Geometry: slot sizes, where entries lie, the build tail behind them; literal numbers (spec 2, 5, 6.1)."""

from __future__ import annotations

import struct

import pytest

from ups_store.errors import FormatError
from ups_store.format.layout import Layout, aligned_slot_nbytes, consecutive_ranges, consecutive_runs, plan
from ups_store.format.metadata import ArrayMeta
from ups_store.format.zip_records import Entry, align, parse_central_record, parse_local_header

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
        (4156, 4160),
        (4157, 4224),
        (MIB - 4, MIB),
        (MIB - 1, MIB + 64),
        (MIB, MIB + 4096),
        (MIB + 4093, MIB + 8192),
    ],
)
def test_aligned_slot_nbytes_rounds_payload_and_checksum_up(sample_nbytes: int, expected: int) -> None:
    """Spec 5.3: multiples of 64, from 1 MiB a sample on of 4096."""
    assert aligned_slot_nbytes(sample_nbytes) == expected


# --- where entries lie --------------------------------------------------------------------------------


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


def test_geometry_does_not_need_memory_for_its_samples() -> None:
    """Spec 11.1: numbers only, whatever the shape says."""
    layout = layout_of(meta("u", (1 << 50, 4096)), num_samples=1 << 50)
    assert layout.file_nbytes > (1 << 50) * 4160
    assert layout.building_nbytes > layout.file_nbytes + (1 << 50) * 12


# --- records ------------------------------------------------------------------------------------------


def test_padding_is_the_shortest_field_that_aligns_the_data() -> None:
    """Spec 3.4: none where the data are aligned without it."""
    for offset in (*range(0, 130), *range(4030, 4060), 4096, 10**12 + 7):
        entry = Entry("u/c/0", offset, 5, is_aligned=True)
        padding = entry.pack_local_header(0)[50 + 5 :]
        z = align(offset + 50 + 5 + 6, 4096) - (offset + 50 + 5 + 6)
        expected = struct.pack("<HHH", 0xD935, 2 + z, 4096) + bytes(z)
        assert padding == (b"" if (offset + 50 + 5) % 4096 == 0 else expected), offset
        assert entry.data_offset % 4096 == 0, offset
        assert entry.header_nbytes == 50 + 5 + len(padding), offset
        assert entry.central_nbytes == len(entry.pack_central_record(0)) == 74 + 5, offset


@pytest.mark.parametrize("value", [0, (1 << 64) - 1])
def test_records_hold_64_bit_numbers(value: int) -> None:
    record = Entry("u/zarr.json", value, value).pack_central_record(0xFFFFFFFF)
    assert parse_central_record(record, 0, "u/zarr.json") == (value, 0xFFFFFFFF)


ROOT = Entry("zarr.json", 0, 4096)


def refusal(raw: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parse_local_header(raw, "zarr.json", 0, path="a.zarr.zip")
    return caught.value


def test_parse_local_header_refuses_a_cut_header_and_any_other_byte() -> None:
    """All but the CRC-32 are fixed by the format, or stand there twice."""
    raw = ROOT.pack_local_header(0x01020304)
    for nbytes in (0, 29, 58):
        error = refusal(raw[:nbytes])
        assert (error.kind, error.clause, error.byte_range) == ("local_header", "3.3", (0, nbytes))
    for at in (*range(14), *range(18, 59)):
        assert refusal(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]).kind == "local_header"


# --- runs of samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [([], []), ([3], [(3, 1)]), ([4, 5, 6, 9, 8], [(4, 3), (9, 1), (8, 1)]), ([2, 2], [(2, 1), (2, 1)])],
)
def test_samples_are_cut_into_runs(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert consecutive_runs(numbers) == runs
    ranges = list(consecutive_ranges(numbers, longest=2))
    assert [n for each in ranges for n in each] == numbers
    assert all(len(each) <= 2 for each in ranges)
