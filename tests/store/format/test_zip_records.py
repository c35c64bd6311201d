"""ZIP64 records: literal bytes, parse(pack(x)) == x, and every refusal (spec 3)."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from ups_store.errors import FormatError
from ups_store.format.zip_records import (
    ARCHIVE_COMMENT,
    END_BYTES,
    EndRecords,
    Entry,
    align,
    pack_directory,
    parse_central_record,
    parse_end,
    parse_local_header,
)

ROOT = Entry("zarr.json", 0, 4096)
DATA = Entry("u/c/0", 4532, 5, is_aligned=True)
ENTRIES = [ROOT, Entry("u/zarr.json", ROOT.end, 316), DATA]
CRCS = [0x9F9BE8F6, 0x3D7CE274, 0x88B6688C]
F = 8572  # length of the store of spec 12, whose directory this is


def bytes_of(text: str) -> bytes:
    return bytes.fromhex(text)


def directory() -> bytes:
    """Central directory without the end records."""
    return pack_directory(ENTRIES, CRCS)[:-END_BYTES]


def changed(raw: bytes, at: int, layout: str, *values: object) -> bytes:
    copy = bytearray(raw)
    struct.pack_into(f"<{layout}", copy, at, *values)
    return bytes(copy)


def refusal(call: Callable[[], object]) -> FormatError:
    with pytest.raises(FormatError) as caught:
        call()
    assert caught.value.path == "a.zarr.zip"
    return caught.value


# --- geometry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "alignment", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (9, 1, 9)]
)
def test_align_gives_smallest_multiple_not_below(offset: int, alignment: int, expected: int) -> None:
    assert align(offset, alignment) == expected


def test_entry_without_padding_has_the_clauses_sizes() -> None:
    """Spec 3.3 and 3.5: h = 50 + n, central record 74 + n."""
    assert (ROOT.header_nbytes, ROOT.data_offset, ROOT.end) == (59, 59, 4155)
    assert (ROOT.central_nbytes, ROOT.padding_nbytes) == (83, 0)


@pytest.mark.parametrize("offset", [*range(0, 130), *range(4030, 4060), 4096, 10**12 + 7])
def test_padding_is_the_shortest_field_that_aligns_the_data(offset: int) -> None:
    """Spec 3.4: none where the data are aligned without it."""
    entry = Entry("u/c/0", offset, 5, is_aligned=True)
    padding = entry.pack_local_header(0)[50 + 5 :]
    z = align(offset + 50 + 5 + 6, 4096) - (offset + 50 + 5 + 6)
    expected = struct.pack("<HHH", 0xD935, 2 + z, 4096) + bytes(z)
    assert padding == (b"" if (offset + 50 + 5) % 4096 == 0 else expected)
    assert entry.data_offset % 4096 == 0
    assert entry.header_nbytes == 50 + 5 + len(padding)
    assert entry.central_nbytes == len(entry.pack_central_record(0)) == 74 + 5


# --- literal bytes ------------------------------------------------------------------------------------


def test_local_header_without_padding_has_literal_bytes() -> None:
    """Spec 3.3."""
    assert ROOT.pack_local_header(0x12345678) == bytes_of(
        "504b0304 2d00 0008 0000 0000 2100 78563412 ffffffff ffffffff 0900 1400"
        "7a6172722e6a736f6e 0100 1000 0010000000000000 0010000000000000"
    )


def test_local_header_with_padding_has_literal_bytes() -> None:
    """Spec 3.3 and 3.4: data at 8192, 3599 zeros."""
    assert DATA.pack_local_header(0x88B6688C) == bytes_of(
        "504b0304 2d00 0008 0000 0000 2100 8c68b688 ffffffff ffffffff 0500 290e"
        "752f632f30 0100 1000 0500000000000000 0500000000000000 35d9 110e 0010" + "00" * 3599
    )


def test_central_record_has_literal_bytes() -> None:
    """Spec 3.5."""
    assert DATA.pack_central_record(0x88B6688C) == bytes_of(
        "504b0102 2d03 2d00 0008 0000 0000 2100 8c68b688 ffffffff ffffffff 0500 1c00 0000 0000 0000"
        "0000a481 ffffffff 752f632f30"
        "0100 1800 0500000000000000 0500000000000000 b411000000000000"
    )


def test_end_records_have_literal_bytes() -> None:
    """Spec 3.6."""
    assert EndRecords(3, 0x1205, 0x10C).pack() == bytes_of(
        "504b0606 2c00000000000000 2d03 2d00 00000000 00000000 0300000000000000 0300000000000000"
        "0c01000000000000 0512000000000000"
        "504b0607 00000000 1113000000000000 01000000"
        "504b0506 0000 0000 ffff ffff ffffffff ffffffff 1e00" + ARCHIVE_COMMENT.hex()
    )


def test_archive_comment_names_no_version() -> None:
    """Spec 3.6."""
    assert ARCHIVE_COMMENT == b"ups_store: a Zarr v3 hierarchy"
    assert END_BYTES == 128


def test_pack_directory_joins_records_and_end() -> None:
    records = b"".join(e.pack_central_record(crc) for e, crc in zip(ENTRIES, CRCS, strict=True))
    end = EndRecords(3, DATA.end, len(records))
    assert pack_directory(ENTRIES, CRCS) == records + end.pack()
    assert DATA.end + len(pack_directory(ENTRIES, CRCS)) == F


@pytest.mark.parametrize("value", [0, (1 << 64) - 1])
def test_records_hold_64_bit_numbers(value: int) -> None:
    record = Entry("u/zarr.json", value, value).pack_central_record(0xFFFFFFFF)
    assert parse_central_record(record, 0, "u/zarr.json") == (value, 0xFFFFFFFF)


# --- parse(pack(x)) == x ------------------------------------------------------------------------------


def test_parse_central_record_returns_what_was_packed() -> None:
    at = 0
    for entry, crc in zip(ENTRIES, CRCS, strict=True):
        assert parse_central_record(directory(), at, entry.name) == (entry.nbytes, crc)
        at += entry.central_nbytes
    assert at == len(directory())


@pytest.mark.parametrize("name", ["u/zarr.json", "zarr.jsom", "zarr.jso"])
def test_parse_central_record_gives_nothing_for_another_name(name: str) -> None:
    assert parse_central_record(directory(), 0, name) is None


@pytest.mark.parametrize("nbytes", [0, 45, 82])
def test_parse_central_record_gives_nothing_for_a_cut_record(nbytes: int) -> None:
    assert parse_central_record(directory()[:nbytes], 0, "zarr.json") is None


@pytest.mark.parametrize("num_before", [0, 1, 5000])
def test_parse_end_returns_what_was_packed(num_before: int) -> None:
    """Spec 7.1, step 1."""
    end = EndRecords(3, num_before, 90)
    raw = bytes(num_before + 90) + end.pack()
    assert parse_end(raw[-END_BYTES:], len(raw), path="a.zarr.zip") == end


def test_parse_local_header_returns_what_was_packed() -> None:
    entry = Entry("u/zarr.json", 4155, 316)
    raw = entry.pack_local_header(0x3D7CE274)
    assert parse_local_header(raw, "u/zarr.json", 4155, path="a.zarr.zip") == (316, 0x3D7CE274)


# --- refusals of parse_end ----------------------------------------------------------------------------

END = EndRecords(3, 10, 90).pack()  # behind 100 bytes
END64, LOCATOR, END_RECORD = 0, 56, 76


def refusal_of_end(end: bytes, *, before: int = 100) -> FormatError:
    raw = bytes(before) + end
    error = refusal(lambda: parse_end(raw[-END_BYTES:], len(raw), path="a.zarr.zip"))
    assert error.clause == "3.6"
    return error


@pytest.mark.parametrize("nbytes", range(1, 31))
def test_parse_end_refuses_a_cut_comment(nbytes: int) -> None:
    assert refusal_of_end(END[:-nbytes], before=0).kind == "foreign"


@pytest.mark.parametrize("raw", [b"", b"PK", bytes(500), b"x" * 128])
def test_parse_end_refuses_what_is_no_zip_file(raw: bytes) -> None:
    assert refusal_of_end(raw, before=0).kind == "no_end_record"


def test_parse_end_refuses_a_comment_without_end_records() -> None:
    assert refusal_of_end(END[1:], before=0).kind == "end_records"
    assert refusal_of_end(ARCHIVE_COMMENT, before=0).kind == "end_records"


def test_parse_end_refuses_bytes_behind_the_comment() -> None:
    assert refusal_of_end(END + b"\0").kind == "foreign"


@pytest.mark.parametrize("offset", [0, 9, 11, 1 << 63, (1 << 64) - 1])
def test_parse_end_refuses_a_directory_that_ends_elsewhere(offset: int) -> None:
    assert refusal_of_end(changed(END, END64 + 48, "Q", offset)).kind == "end_records"


@pytest.mark.parametrize(
    ("at", "layout", "value"),
    [
        (END64 + 0, "4s", b"PK\6\5"),
        (LOCATOR + 0, "4s", b"PK\6\6"),
        (END_RECORD + 0, "4s", b"PK\5\5"),
        (END_RECORD + 20, "H", 29),
        (END64 + 4, "Q", 45),
        (END64 + 12, "H", 20),
        (END64 + 14, "H", 20),
        (END64 + 16, "I", 1),
        (END64 + 20, "I", 1),
        (END64 + 24, "Q", 4),
        (END64 + 32, "Q", 4),
        (LOCATOR + 4, "I", 1),
        (LOCATOR + 8, "Q", 101),
        (LOCATOR + 16, "I", 2),
        (END_RECORD + 4, "H", 1),
        (END_RECORD + 6, "H", 1),
        (END_RECORD + 8, "H", 3),
        (END_RECORD + 10, "H", 3),
        (END_RECORD + 12, "I", 90),
        (END_RECORD + 16, "I", 10),
    ],
)
def test_parse_end_refuses_records_that_disagree(at: int, layout: str, value: object) -> None:
    """Spec 7.1, step 1: the ZIP64 records agree with the end record and with each other."""
    error = refusal_of_end(changed(END, at, layout, value))
    assert (error.kind, error.byte_range) == ("end_records", (100, 228))


# --- refusals of parse_local_header -------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 29, 30, 40, 58])
def test_parse_local_header_refuses_a_cut_header(nbytes: int) -> None:
    raw = ROOT.pack_local_header(0)[:nbytes]
    error = refusal(lambda: parse_local_header(raw, "zarr.json", 0, path="a.zarr.zip"))
    assert (error.kind, error.clause, error.byte_range) == ("local_header", "3.3", (0, nbytes))


@pytest.mark.parametrize("at", [i for i in range(59) if not 14 <= i < 18])
def test_parse_local_header_refuses_any_other_byte(at: int) -> None:
    """All but the CRC-32 are fixed by the format, or stand there twice."""
    raw = ROOT.pack_local_header(0x01020304)
    broken = raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]
    error = refusal(lambda: parse_local_header(broken, "zarr.json", 0, path="a.zarr.zip"))
    assert error.kind == "local_header"
