"""Checksums against known vectors and against their plain twins (spec 1.3)."""

from __future__ import annotations

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


@pytest.mark.parametrize(("data", "expected"), CASTAGNOLI)
def test_crc32c_gives_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xCBF43926), (bytes(32), 0x190A55AD), (b"a" * 1000, 0x9A38DA03)],
)
def test_crc32_gives_published_values(data: bytes, expected: int) -> None:
    assert crc32(data) == expected == zlib.crc32(data)


@pytest.mark.parametrize("checksum", [crc32, crc32c])
@pytest.mark.parametrize("cut", [0, 1, 7, 4096, 9999, 10_000])
def test_checksum_continued_equals_checksum_of_whole(checksum, cut: int) -> None:
    data = np.random.default_rng(0).bytes(10_000)
    assert checksum(data[cut:], checksum(data[:cut])) == checksum(data)


@pytest.mark.parametrize("checksum", [crc32, crc32c])
def test_checksum_takes_any_buffer(checksum) -> None:
    data = b"0123456789"
    assert checksum(bytearray(data)) == checksum(memoryview(data)) == checksum(data)
    assert checksum(np.frombuffer(data, np.uint8).data) == checksum(data)


@pytest.mark.parametrize("sizes", [[], [0], [5], [0, 0], [3, 0, 4], [1, 4096, 7, 1 << 20]])
def test_combine_crc32_equals_crc32_of_concatenation(sizes: list[int]) -> None:
    rng = np.random.default_rng(1)
    parts = [rng.bytes(n) for n in sizes]
    assert combine_crc32((crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("num_rows", [0, 1, _FEW_ROWS - 1, _FEW_ROWS, _FEW_ROWS + 1, 300])
@pytest.mark.parametrize("num_words", [0, 1, 3, 16])
@pytest.mark.parametrize("start", [0, 1, 0xDEADBEEF, 0xFFFFFFFF])
def test_crc32c_rows_equals_crc32c_of_each_row(num_rows: int, num_words: int, start: int) -> None:
    rows = np.random.default_rng(2).integers(0, 2**32, (num_rows, num_words), np.uint32)
    found = crc32c_rows(rows, start)
    assert found.dtype == np.uint32
    assert found.tolist() == [crc32c(row.tobytes(), start) for row in rows]


def test_crc32c_rows_reads_rows_that_are_not_contiguous() -> None:
    rows = np.random.default_rng(3).integers(0, 2**32, (200, 40), np.uint32)[::2, ::3]
    assert crc32c_rows(rows).tolist() == [crc32c(row.tobytes()) for row in rows]
