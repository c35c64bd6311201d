"""ZIP64 records: literal bytes, parse(pack(x)) == x, and every refusal (spec 3)."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from ups_store.errors import FormatError
from ups_store.format.zip_records import (
    ARCHIVE_COMMENT,
    END_BYTES,
    MAX_COMMENT_BYTES,
    MAX_END_BYTES,
    MAX_ENTRIES,
    CentralRecord,
    EndRecords,
    Entry,
    align,
    pack_directory,
    parse_directory,
    parse_end,
    parse_local_header,
)

ROOT = Entry("zarr.json", 0, 4096)
DATA = Entry("u/c/0", 4532, 5, 64)
ENTRIES = [ROOT, Entry("u/zarr.json", ROOT.end, 316), DATA]
CRCS = [0x9F9BE8F6, 0x3D7CE274, 0x88B6688C]
F = 5017  # length of the store of spec 12, whose directory this is


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
    assert (ROOT.central_nbytes, ROOT.padding) == (83, b"")


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("offset", [*range(0, 130), 4036, 4037, 4096, 10**12 + 7])
def test_padding_is_the_shortest_field_that_aligns_the_data(offset: int, alignment: int) -> None:
    """Spec 3.4."""
    entry = Entry("u/c/0", offset, 5, alignment)
    num_zeros = len(entry.padding) - 6
    assert entry.data_offset % alignment == 0
    assert 0 <= num_zeros < alignment
    assert entry.padding == struct.pack("<HHH", 0xD935, 2 + num_zeros, alignment) + bytes(num_zeros)
    assert entry.header_nbytes == 50 + 5 + len(entry.padding)
    assert entry.central_nbytes == 74 + 5 + len(entry.padding)
    assert len(entry.pack_local_header(0)) == entry.header_nbytes
    assert len(entry.pack_central_record(0)) == entry.central_nbytes


# --- literal bytes ------------------------------------------------------------------------------------


def test_local_header_without_padding_has_literal_bytes() -> None:
    """Spec 3.3."""
    assert ROOT.pack_local_header(0x12345678) == bytes_of(
        "504b0304 2d00 0008 0000 0000 2100 78563412 ffffffff ffffffff 0900 1400"
        "7a6172722e6a736f6e 0100 1000 0010000000000000 0010000000000000"
    )


def test_local_header_with_padding_has_literal_bytes() -> None:
    """Spec 3.3 and 3.4: data at 4608, 15 zeros."""
    assert DATA.pack_local_header(0x88B6688C) == bytes_of(
        "504b0304 2d00 0008 0000 0000 2100 8c68b688 ffffffff ffffffff 0500 2900"
        "752f632f30 0100 1000 0500000000000000 0500000000000000 35d9 1100 4000" + "00" * 15
    )


def test_central_record_has_literal_bytes() -> None:
    """Spec 3.5."""
    assert DATA.pack_central_record(0x88B6688C) == bytes_of(
        "504b0102 2d03 2d00 0008 0000 0000 2100 8c68b688 ffffffff ffffffff 0500 3100 0000 0000 0000"
        "0000a481 ffffffff 752f632f30"
        "0100 1800 0500000000000000 0500000000000000 b411000000000000 35d9 1100 4000" + "00" * 15
    )


def test_end_records_have_literal_bytes() -> None:
    """Spec 3.6."""
    assert EndRecords(3, 0x1205, 0x10C, b"{}").pack() == bytes_of(
        "504b0606 2c00000000000000 2d03 2d00 00000000 00000000 0300000000000000 0300000000000000"
        "0c01000000000000 0512000000000000"
        "504b0607 00000000 1113000000000000 01000000"
        "504b0506 0000 0000 ffff ffff ffffffff ffffffff 0200 7b7d"
    )


def test_archive_comment_names_format_and_version() -> None:
    """Spec 3.6."""
    assert ARCHIVE_COMMENT == b'{"format":"ups_store","version":"1.0"}'
    assert (END_BYTES, MAX_END_BYTES) == (98 + 38, 98 + 4095)


def test_pack_directory_joins_records_and_end() -> None:
    records = b"".join(e.pack_central_record(crc) for e, crc in zip(ENTRIES, CRCS, strict=True))
    end = EndRecords(3, DATA.end, len(records), ARCHIVE_COMMENT)
    assert pack_directory(ENTRIES, CRCS) == records + end.pack()
    assert DATA.end + len(pack_directory(ENTRIES, CRCS)) == F


@pytest.mark.parametrize("value", [0, (1 << 64) - 1])
def test_records_hold_64_bit_numbers(value: int) -> None:
    record = Entry("u/zarr.json", value, value).pack_central_record(0xFFFFFFFF)
    parsed = parse_directory(record, 1, path="a.zarr.zip")
    assert parsed == [CentralRecord("u/zarr.json", value, value, 0xFFFFFFFF)]


# --- parse(pack(x)) == x ------------------------------------------------------------------------------


def test_parse_directory_returns_what_was_packed() -> None:
    expected = [CentralRecord(e.name, e.offset, e.nbytes, crc) for e, crc in zip(ENTRIES, CRCS, strict=True)]
    assert parse_directory(directory(), 3, path="a.zarr.zip") == expected
    assert (expected[1].data_offset, expected[1].end) == (ENTRIES[1].data_offset, ENTRIES[1].end)


def test_parse_directory_without_entries_is_empty() -> None:
    assert parse_directory(b"", 0, path="a.zarr.zip") == []


@pytest.mark.parametrize("comment", [b"", ARCHIVE_COMMENT, b" " * MAX_COMMENT_BYTES])
@pytest.mark.parametrize("num_more", [0, 1, 5000])
def test_parse_end_returns_what_was_packed(comment: bytes, num_more: int) -> None:
    """Spec 7.1, step 1: read from the last bytes, or from the whole file."""
    end = EndRecords(3, num_more + 10, 90, comment)
    raw = bytes(num_more + 100) + end.pack()
    assert parse_end(raw[-MAX_END_BYTES:], len(raw), path="a.zarr.zip") == end


def test_parse_end_takes_the_record_whose_comment_reaches_the_end() -> None:
    """Spec 7.1, step 1: a comment may hold the bytes of another end record."""
    decoy = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 40)
    end = EndRecords(3, 0, 0, decoy + b"more")
    assert parse_end(end.pack(), len(end.pack()), path="a.zarr.zip") == end


@pytest.mark.parametrize("num_after", [0, 1, 512])
def test_parse_local_header_returns_what_was_packed(num_after: int) -> None:
    entry = Entry("u/zarr.json", 4155, 316)
    raw = entry.pack_local_header(0x3D7CE274) + bytes(num_after)
    found = parse_local_header(raw, 4155, path="a.zarr.zip")
    assert found == CentralRecord("u/zarr.json", 4155, 316, 0x3D7CE274)


# --- refusals of parse_end ----------------------------------------------------------------------------

END = EndRecords(3, 10, 90, b"{}").pack()  # behind 100 bytes
END64, LOCATOR, END_RECORD = 0, 56, 76


def refusal_of_end(end: bytes, *, before: int = 100) -> FormatError:
    raw = bytes(before) + end
    error = refusal(lambda: parse_end(raw[-MAX_END_BYTES:], len(raw), path="a.zarr.zip"))
    assert error.clause == "3.6"
    return error


@pytest.mark.parametrize("nbytes", range(0, 23))
def test_parse_end_refuses_fewer_bytes_than_an_end_record(nbytes: int) -> None:
    tail = (b"PK\5\6" * 6)[:nbytes]
    assert refusal(lambda: parse_end(tail, nbytes, path="a.zarr.zip")).kind == "no_end_record"


@pytest.mark.parametrize("nbytes", range(1, len(END) - END_RECORD))
def test_parse_end_refuses_a_cut_end_record(nbytes: int) -> None:
    assert refusal_of_end(END[:-nbytes]).kind == "no_end_record"


def test_parse_end_refuses_bytes_behind_the_comment() -> None:
    assert refusal_of_end(END + b"\0").kind == "no_end_record"


def test_parse_end_refuses_a_comment_longer_than_its_limit() -> None:
    end = EndRecords(3, 10, 90, b" " * (MAX_COMMENT_BYTES + 1)).pack()
    assert refusal_of_end(end).kind == "no_end_record"


def test_parse_end_refuses_an_end_record_without_zip64_records() -> None:
    assert refusal_of_end(END[END_RECORD:]).kind == "no_zip64"
    assert refusal_of_end(END[END_RECORD:], before=0).kind == "no_zip64"


@pytest.mark.parametrize("offset", [0, 11, 1 << 63, (1 << 64) - 1])
def test_parse_end_refuses_a_directory_that_ends_elsewhere(offset: int) -> None:
    error = refusal_of_end(changed(END, END64 + 48, "Q", offset))
    assert (error.kind, error.expected, error.found) == ("end_records", 100, offset + 90)


@pytest.mark.parametrize(
    ("at", "layout", "value"),
    [
        (END64 + 0, "4s", b"PK\6\5"),
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
    assert (error.kind, error.byte_range) == ("end_records", (100, 200))


def test_parse_end_refuses_a_locator_with_another_signature() -> None:
    assert refusal_of_end(changed(END, LOCATOR, "4s", b"PK\6\6")).kind == "no_zip64"


# --- refusals of parse_directory ----------------------------------------------------------------------


def refusal_of_directory(raw: bytes, num: int = 3) -> FormatError:
    return refusal(lambda: parse_directory(raw, num, path="a.zarr.zip"))


@pytest.mark.parametrize("nbytes", [1, 45, 46, 82, 83, 84, 200, len(directory()) - 1])
def test_parse_directory_refuses_a_cut_directory(nbytes: int) -> None:
    error = refusal_of_directory(directory()[:nbytes])
    assert (error.kind, error.clause) == ("directory", "3.5")


def test_parse_directory_refuses_bytes_left_over() -> None:
    error = refusal_of_directory(directory(), num=2)
    assert (error.kind, error.found) == ("directory", f"{DATA.central_nbytes} bytes")


@pytest.mark.parametrize("num", [MAX_ENTRIES + 1, 1 << 60, (1 << 64) - 1])
def test_parse_directory_refuses_more_entries_than_the_limit(num: int) -> None:
    error = refusal_of_directory(directory(), num)
    assert (error.kind, error.clause, error.found) == ("limits", "9.1", num)


def test_parse_directory_refuses_two_entries_of_one_name() -> None:
    error = refusal_of_directory(directory() + DATA.pack_central_record(0), num=4)
    assert (error.kind, error.found) == ("duplicate_name", "u/c/0")


@pytest.mark.parametrize(
    ("at", "layout", "value", "kind"),
    [
        (0, "4s", b"PK\3\4", "directory"),
        (8, "H", 2048 | 1, "encrypted"),
        (8, "H", 2048 | 64, "encrypted"),
        (10, "H", 8, "compressed"),
        (10, "H", 93, "compressed"),
        (20, "I", 4096, "sizes"),
        (24, "I", 4096, "sizes"),
        (28, "H", 0xFFFF, "directory"),
        (30, "H", 27, "directory"),
        (30, "H", 0xFFFF, "directory"),
        (32, "H", 1, "directory"),
        (42, "I", 0, "sizes"),
        (46, "B", 0x80, "name"),
        (55, "H", 2, "sizes"),
        (57, "H", 16, "sizes"),
        (59, "Q", 4097, "sizes"),
        (67, "Q", 4097, "sizes"),
    ],
)
def test_parse_directory_refuses_a_wrong_field(at: int, layout: str, value: object, kind: str) -> None:
    """Spec 7.1, step 2: what decides how data are found is as in 3.5; the first record is `zarr.json`'s."""
    error = refusal_of_directory(changed(directory(), at, layout, value))
    assert (error.kind, error.clause) == (kind, "3.5")
    assert "record 0" in str(error)


# --- refusals of parse_local_header -------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 29, 30, 40, 58])
def test_parse_local_header_refuses_a_cut_header(nbytes: int) -> None:
    raw = ROOT.pack_local_header(0)[:nbytes]
    error = refusal(lambda: parse_local_header(raw, 0, path="a.zarr.zip"))
    assert (error.kind, error.clause, error.byte_range) == ("local_header", "3.3", (0, nbytes))


@pytest.mark.parametrize("at", [i for i in range(59) if not 14 <= i < 18 and not 30 <= i < 39])
def test_parse_local_header_refuses_any_other_byte(at: int) -> None:
    """All but CRC-32 and name are fixed by the format, or stand there twice."""
    raw = ROOT.pack_local_header(0x01020304)
    broken = raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]
    assert refusal(lambda: parse_local_header(broken, 0, path="a.zarr.zip")).kind == "local_header"


def test_parse_local_header_refuses_a_name_that_is_not_ascii() -> None:
    raw = ROOT.pack_local_header(0).replace(b"zarr", b"z\xc3\xa4r")
    assert refusal(lambda: parse_local_header(raw, 0, path="a.zarr.zip")).kind == "local_header"
