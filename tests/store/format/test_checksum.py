"""Checksums against known vectors and against their plain twins (spec 1.3)."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from ups_store.format.checksum import _FEW_ROWS, combine_crc32, crc32, crc32c, crc32c_rows

# RFC 3720, appendix B.4; "123456789" is the check value of the CRC catalogues.
CASTAGNOLI = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def test_checksums_give_published_values() -> None:
    assert [crc32c(data) for data, _ in CASTAGNOLI] == [expected for _, expected in CASTAGNOLI]
    assert [crc32(b""), crc32(b"123456789"), crc32(bytes(32))] == [0, 0xCBF43926, 0x190A55AD]


@pytest.mark.parametrize("checksum", [crc32, crc32c])
def test_checksum_is_continued_and_takes_any_buffer(checksum) -> None:
    data = np.random.default_rng(0).bytes(10_000)
    for cut in (0, 1, 7, 4096, 9999, 10_000):
        assert checksum(data[cut:], checksum(data[:cut])) == checksum(data)
    assert checksum(bytearray(data)) == checksum(memoryview(data)) == checksum(data)
    assert checksum(np.frombuffer(data, np.uint8).data) == checksum(data)


def test_combine_crc32_equals_crc32_of_concatenation() -> None:
    rng = np.random.default_rng(1)
    for sizes in ([], [0], [5], [0, 0], [3, 0, 4], [1, 4096, 7, 1 << 20]):
        parts = [rng.bytes(n) for n in sizes]
        assert combine_crc32((crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("num_rows", [0, 1, _FEW_ROWS - 1, _FEW_ROWS, _FEW_ROWS + 1, 300])
def test_crc32c_rows_equals_crc32c_of_each_row(num_rows: int) -> None:
    for num_words, start in itertools.product((0, 1, 3, 16), (0, 1, 0xDEADBEEF, 0xFFFFFFFF)):
        rows = np.random.default_rng(2).integers(0, 2**32, (num_rows, num_words), np.uint32)
        sums = crc32c_rows(rows, start)
        assert sums.dtype == np.uint32
        assert sums.tolist() == [crc32c(row.tobytes(), start) for row in rows], (num_words, start)


def test_crc32c_rows_reads_rows_that_are_not_contiguous() -> None:
    rows = np.random.default_rng(3).integers(0, 2**32, (200, 40), np.uint32)[::2, ::3]
    assert crc32c_rows(rows).tolist() == [crc32c(row.tobytes()) for row in rows]
