"""The build tail: header, owner, commit records; literal bytes, and what doesn't check (spec 6.2 to 6.4)."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from ups_store.errors import FormatError
from ups_store.format.build_tail import (
    BUILDER_LOCK,
    GATE_LOCK,
    SAMPLE_LOCK,
    Owner,
    TailHeader,
    is_committed,
    pack_records,
    parse_tail_header,
)
from ups_store.format.layout import plan
from ups_store.format.metadata import ArrayMeta

ARRAYS = [ArrayMeta(name, (3,), "float64", ("sample",)) for name in ("nu", "u")]
LAYOUT = plan(4096, [(meta, 300) for meta in ARRAYS], 3)
BUILD_ID, BOOT_ID = bytes(range(16)), bytes(range(100, 116))
HEADER = TailHeader.for_layout(LAYOUT, build_id=BUILD_ID, boot_id=BOOT_ID, is_lazy=False)
SAMPLES = np.arange(3)
CRCS = np.array([[1, 2], [0xDEADBEEF, 0], [0xFFFFFFFF, 7]], np.uint32)


def refusal(raw: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parse_tail_header(raw, LAYOUT, path="a.building")
    assert (caught.value.kind, caught.value.clause, caught.value.path) == ("build_tail", "6.2", "a.building")
    assert caught.value.byte_range == (LAYOUT.tail_offset, LAYOUT.tail_offset + 128)
    return caught.value


# --- header -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lazy", [False, True])
def test_parse_tail_header_returns_what_was_packed(is_lazy: bool) -> None:
    header = replace(HEADER, is_lazy=is_lazy)
    assert parse_tail_header(header.pack() + bytes(3968), LAYOUT, path="a.building") == header


def test_parse_tail_header_refuses_a_flipped_byte_and_a_cut_header() -> None:
    for at in range(128):
        raw = bytearray(HEADER.pack())
        raw[at] ^= 0x40
        assert ("magic" in refusal(bytes(raw)).problem) == (at < 8)
    for nbytes in (0, 8, 127):
        refusal(HEADER.pack()[:nbytes])


# --- owner and locks ----------------------------------------------------------------------------------


def test_owner_parse_returns_what_was_packed_whatever_stands_there() -> None:
    for host in ("", "ü" * 10, "x" * 300):
        assert Owner.parse(Owner(12345, host).pack()) == Owner(12345, host[:244])
    for raw in (b"", bytes(11), bytes(256)):
        assert Owner.parse(raw) is None
    assert Owner.parse(struct.pack("<QI", 7, 0xFFFFFFFF) + b"\xff" * 244) == Owner(7, "\ufffd" * 244)


def test_locks_lie_past_any_end_of_file() -> None:
    """Spec 6.3."""
    assert (BUILDER_LOCK, GATE_LOCK, SAMPLE_LOCK) == (1 << 62, (1 << 62) + 1, (1 << 62) + 2)


# --- commit records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 63, 64])
def test_packed_records_are_commits(num: int) -> None:
    """On both sides of the number of rows from which checksums are made column by column."""
    samples = np.arange(num) * 1_000_003
    records = pack_records(HEADER, samples, np.resize(CRCS, (num, 2)))
    assert (records.shape, records.dtype) == ((num, 4), np.dtype("<u4"))
    assert is_committed(HEADER, samples, records).tolist() == [True] * num


def test_records_of_arrays_without_a_sample_axis_are_commits() -> None:
    header = replace(HEADER, num_arrays=0)
    records = pack_records(header, SAMPLES, np.zeros((3, 0), np.uint32))
    assert records.shape == (3, 2)
    assert is_committed(header, SAMPLES, records).all()


def test_record_with_a_flipped_byte_is_no_commit() -> None:
    for at in range(16):
        for mask in (0x01, 0x80, 0xFF):
            records = pack_records(HEADER, SAMPLES, CRCS)
            records.view(np.uint8)[1, at] ^= mask
            assert is_committed(HEADER, SAMPLES, records).tolist() == [True, False, True], at


def test_torn_record_is_no_commit() -> None:
    """However much of a record reached the disk before a crash, only the whole of it counts."""
    raw = pack_records(HEADER, SAMPLES[:1], CRCS[:1]).tobytes()
    for nbytes in range(1, 16):
        torn = np.frombuffer(raw[:nbytes].ljust(16, b"\0"), "<u4").reshape(1, 4)
        assert not is_committed(HEADER, SAMPLES[:1], torn).any(), nbytes


def test_sample_number_counts_with_64_bits() -> None:
    records = pack_records(HEADER, np.array([1 << 32]), CRCS[:1])
    assert is_committed(HEADER, np.array([1 << 32]), records).all()
    assert not is_committed(HEADER, np.array([0]), records).any()
