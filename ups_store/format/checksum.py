"""Checksums: CRC-32 for ZIP and the commit table, CRC-32C for chunks and records.

Both packages release the GIL on large buffers and use the processor's instructions; `zlib.crc32` is ten
times slower here (`docs/format/rationale.md`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

Bytes: TypeAlias = bytes | bytearray | memoryview

_CRC32C_POLYNOMIAL = 0x82F63B78  # reflected Castagnoli polynomial, RFC 3720 appendix B.4


def crc32(data: Bytes, start: int = 0) -> int:
    """Return the CRC-32 (ISO 3309, as in ZIP) of `data`, continued from `start`."""
    return zlib_ng.crc32(data, start)


def crc32c(data: Bytes, start: int = 0) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720) of `data`, continued from `start`."""
    return _castagnoli()(data, start)


@functools.cache
def _castagnoli() -> Callable[..., int]:
    import crc32c as package  # its import takes 40 ms, and opening a store doesn't need it

    function: Callable[..., int] = package.crc32c
    return function


def crc32_each(rows: Sequence[memoryview]) -> list[int]:
    """Return the CRC-32 of every row."""
    return list(map(zlib_ng.crc32, rows))


def crc32c_each(rows: Sequence[memoryview]) -> list[int]:
    """Return the CRC-32C of every row."""
    return list(map(_castagnoli(), rows))


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of a concatenation, from `(crc, nbytes)` of its chunks in order."""
    total = 0
    for crc, nbytes in parts:
        total = zlib_ng.crc32_combine(total, crc, nbytes)
    return total


def combine_crc32c(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32C of a concatenation, from `(crc, nbytes)` of its chunks in order."""
    total = 0
    for crc, nbytes in parts:
        total = _product(_zeros(nbytes), total) ^ crc
    return total


@functools.lru_cache(64)
def _zeros(nbytes: int) -> int:
    """Return by what to multiply a CRC-32C for as many zeros behind: x to the power of 8 * `nbytes`."""
    product, power = 1 << 31, 1 << 23
    while nbytes:
        product = _product(product, power) if nbytes & 1 else product
        nbytes, power = nbytes >> 1, _product(power, power)
    return product


def _product(a: int, b: int) -> int:
    """Multiply two polynomials, the highest bit x^0, modulo Castagnoli's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_CRC32C_POLYNOMIAL if b & 1 else 0)
    return product


def crc32_before(whole: int, suffix: int, nbytes: int) -> int:
    """Return the CRC-32 of what stands before a suffix of `nbytes`, from those of both and of the suffix."""
    # Appending zero bytes permutes the checksums in a cycle of 2^32 - 1: going on to its end goes back.
    return zlib_ng.crc32_combine(whole ^ suffix, 0, -nbytes % (2**32 - 1))


def _word_tables() -> tuple[npt.NDArray[np.uint32], ...]:
    """Return what each byte of a word does to the CRC-32C behind it, the first byte's table first."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_CRC32C_POLYNOMIAL), table >> 1)
    tables = [table]
    for _ in range(3):  # the same byte, one zero byte later
        tables.append(table[tables[-1] & 0xFF] ^ (tables[-1] >> np.uint32(8)))
    return tuple(reversed(tables))


_TABLES = _word_tables()
_FEW_ROWS = 64  # below it one call a row is faster than NumPy operations on a column


def crc32c_rows(rows: npt.NDArray[np.uint32], start: int = 0) -> npt.NDArray[np.uint32]:
    """Return `crc32c(row.tobytes(), start)` of each row of little-endian words, (M, num_words), at once.

    Many rows take four table lookups per column ("slicing by 4"), few rows one call each.
    """
    if len(rows) < _FEW_ROWS:
        function = _castagnoli()
        return np.array([function(row.tobytes(), start) for row in rows], np.uint32)
    crc = np.full(len(rows), start ^ 0xFFFFFFFF, "<u4")
    for words in rows.T:
        octets = (crc ^ words).view(np.uint8).reshape(-1, 4).T
        first, second, third, fourth = (table[octet] for table, octet in zip(_TABLES, octets, strict=True))
        crc = first ^ second ^ third ^ fourth
    return crc ^ np.uint32(0xFFFFFFFF)
