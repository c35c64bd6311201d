"""The build tail: header, owner, commit records; literal bytes, and what doesn't check (spec 6.2 to 6.4)."""

from __future__ import annotations

import numpy as np
import pytest

from ups_store.errors import FormatError
from ups_store.format.build_tail import (
    BUILDER_LOCK,
    GATE_LOCK,
    SAMPLE_LOCK,
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


def test_parse_tail_header_refuses_a_flipped_byte_and_a_cut_header() -> None:
    for at in range(128):
        raw = bytearray(HEADER.pack())
        raw[at] ^= 0x40
        assert ("magic" in refusal(bytes(raw)).problem) == (at < 8)
    for nbytes in (0, 8, 127):
        refusal(HEADER.pack()[:nbytes])


# --- owner and locks ----------------------------------------------------------------------------------


def test_locks_lie_past_any_end_of_file() -> None:
    """Spec 6.3."""
    assert (BUILDER_LOCK, GATE_LOCK, SAMPLE_LOCK) == (1 << 62, (1 << 62) + 1, (1 << 62) + 2)


# --- commit records -----------------------------------------------------------------------------------


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
