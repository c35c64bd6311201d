"""What `verify` checks of a ragged array: its offsets, and each sample by its CRC-32C (spec 14.5)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ups_store.format.checksum import Bytes, crc32, crc32c
from ups_store.format.layout import RaggedLayout
from ups_store.format.ragged import Offsets
from ups_store.read.offsets import offset_flaws

Read = Callable[[int, int], bytes]

_BLOCK_BYTES = 4 << 20  # read at a time
_MAX_SAMPLES = 1 << 16  # of a block: samples may be empty


@dataclass(frozen=True)
class RowFlaw:
    """What is wrong with a sample; as `ups_store.read.verify.Problem`."""

    kind: str
    clause: str
    byte_range: tuple[int, int]
    sample: int | None
    detail: str


@dataclass(frozen=True)
class RowBlock:
    """Consecutive samples: CRC-32 and length of their bytes, and what is wrong with them."""

    crc: int
    nbytes: int
    flaws: tuple[RowFlaw, ...]


class RowVerifier:
    """Checks the samples of one ragged array, block by block, in any order.

    Args:
        layout: Of the array.
        read: Returns the file's bytes from an offset on, as many as asked for.

    Attributes:
        blocks: First sample of each block, and the one behind it; one block of no samples where the offsets
            are wrong, for then it isn't known where samples begin.
    """

    def __init__(self, layout: RaggedLayout, read: Read) -> None:
        self._layout, self._read = layout, read
        self._meta = layout.rows.meta
        raw = read(layout.offsets.offset, layout.offsets.meta.nbytes)
        self._offsets: Offsets = np.frombuffer(raw, "<i8")
        wrong = next(offset_flaws(self._offsets, layout), None)
        self._flaw = None if wrong is None else self._offset_flaw(*wrong)
        self.blocks = [(0, 0)] if wrong else _blocks(self._offsets * layout.rows.stride)

    def check(self, block: tuple[int, int]) -> RowBlock:
        """Check one of `blocks`."""
        if self._flaw is not None:
            rows = self._layout.extent(0, self._meta.shape[0])
            crc, has_wrong_bool = 0, False
            for piece in self._pieces(*rows):
                crc = crc32(piece, crc)
                has_wrong_bool |= self._meta.dtype == "bool" and bool(
                    (np.frombuffer(piece, np.uint8) > 1).any()
                )
            wrong_bool = RowFlaw("bool_value", "4.7", rows, None, "expected bytes 0 and 1")
            flaws = (self._flaw, wrong_bool) if has_wrong_bool else (self._flaw,)
            return RowBlock(crc, self._meta.nbytes, flaws)
        first, end = block
        stored = np.frombuffer(self._read(self._layout.checks.offset + 4 * first, 4 * (end - first)), "<u4")
        places = [self._layout.extent(*pair) for pair in zip(*self._rows_of(first, end), strict=True)]
        begin, past = (places[0][0], places[-1][1]) if places else (0, 0)
        crc, found = 0, list[RowFlaw]()
        raw = self._read(begin, past - begin) if past - begin <= _BLOCK_BYTES else None
        for sample, place, wanted in zip(range(first, end), places, stored.tolist(), strict=True):
            within = slice(place[0] - begin, place[1] - begin)
            pieces = self._pieces(*place) if raw is None else iter([raw[within]])
            check = _SampleCheck(self._meta.dtype == "bool", self._meta.encoding == "utf-8")
            for piece in pieces:
                crc = crc32(piece, crc)
                check.add(piece)
            found += check.flaws(sample, place, wanted)
        return RowBlock(crc, past - begin, tuple(found))

    def _rows_of(self, first: int, end: int) -> tuple[list[int], list[int]]:
        return self._offsets[first:end].tolist(), self._offsets[first + 1 : end + 1].tolist()

    def _pieces(self, first: int, end: int) -> Iterator[bytes]:
        for offset in range(first, end, _BLOCK_BYTES):
            yield self._read(offset, min(_BLOCK_BYTES, end - offset))

    def _offset_flaw(self, sample: int, detail: str) -> RowFlaw:
        first = self._layout.offsets.offset + 8 * sample
        return RowFlaw("offsets", "14.5", (first, first + 16), sample, f"found {detail}")


class _SampleCheck:
    """Checksum and values of one sample, piece by piece."""

    def __init__(self, is_bool: bool, is_text: bool) -> None:
        self._crc32c, self._is_bool, self._has_wrong_bool = 0, is_bool, False
        self._decoder = codecs.getincrementaldecoder("utf-8")() if is_text else None
        self._text_error: str | None = None

    def add(self, piece: Bytes) -> None:
        self._crc32c = crc32c(piece, self._crc32c)
        if self._is_bool:
            self._has_wrong_bool |= bool((np.frombuffer(piece, np.uint8) > 1).any())
        self._decode(piece, final=False)

    def _decode(self, piece: Bytes, *, final: bool) -> None:
        if self._decoder is None or self._text_error is not None:
            return
        try:
            self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            self._text_error = error.reason

    def flaws(self, sample: int, place: tuple[int, int], stored: int) -> Iterator[RowFlaw]:
        """What is wrong with the sample that was added."""
        self._decode(b"", final=True)
        if self._crc32c != stored:
            detail = f"crc32c stored {stored:08x}, computed {self._crc32c:08x}"
            yield RowFlaw("chunk_crc", "14.5", place, sample, detail)
        if self._has_wrong_bool:
            yield RowFlaw("bool_value", "4.7", place, sample, "expected bytes 0 and 1")
        if self._text_error is not None:
            yield RowFlaw("text", "14.5", place, sample, f"expected UTF-8: {self._text_error}")


def _blocks(begins: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Samples in runs of about `_BLOCK_BYTES`, by the byte at which each begins; a larger one by itself."""
    number, blocks, first = len(begins) - 1, list[tuple[int, int]](), 0
    while first < number:
        end = int(np.searchsorted(begins, begins[first] + _BLOCK_BYTES, side="right")) - 1
        end = min(max(end, first + 1), number, first + _MAX_SAMPLES)
        blocks.append((first, end))
        first = end
    return blocks
