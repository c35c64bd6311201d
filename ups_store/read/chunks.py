"""Chunks: what of a store has a CRC-32C of its own, and the one check of it (spec 5.2, 14.5).

A chunk is a sample of an array with slots, a whole array without, or a sample of a ragged array.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import Bytes, crc32c
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout, RaggedLayout

Read: TypeAlias = Callable[[int, int], Bytes]  # a file's bytes from an offset on; fewer where it ends

HOW_TO_MEND = "`ups-store verify` shows all damage, `verify --repair CONFIG` rebuilds what is damaged"

_BLOCK_BYTES = 4 << 20  # of a large payload at a time


class Chunk(NamedTuple):
    """A chunk of a store; one is made for every sample that is read, so it isn't a data class."""

    array: str  # name of its array
    sample: int | None  # its sample; None for a whole array
    first: int  # first byte in the file
    nbytes: int  # bytes of its payload
    crc: int | None = None  # CRC-32C of the payload; None where it lies behind the payload

    @property
    def end(self) -> int:
        """First byte past the chunk, its checksum included."""
        return self.first + self.nbytes + (CHECKSUM_BYTES if self.crc is None else 0)

    def payload_of(self, raw: Bytes) -> memoryview | None:
        """Cut the payload out of the chunk's bytes; None unless it matches the checksum."""
        payload, stored = memoryview(raw)[: self.nbytes], self.crc
        if stored is None:
            stored = _stored(raw[self.nbytes :])
        return payload if len(payload) == self.nbytes and crc32c(payload) == stored else None

    def is_intact(self, read: Read) -> bool:
        """Compare the payload with its checksum, a block at a time."""
        stored, computed = self._checksums(read)
        return computed is not None and stored == computed

    def check(self, read: Read, path: Path) -> None:
        """Raise `CorruptChunkError` unless the chunk is intact; `path` is for the message."""
        stored, computed = self._checksums(read)
        if stored != computed or computed is None:
            raise self.damaged(path, stored=stored, computed=computed)

    def damaged(
        self,
        path: Path,
        problem: str = "the bytes don't match their checksum",
        *,
        stored: int | None = None,
        computed: int | None = None,
        hint: str = HOW_TO_MEND,
    ) -> CorruptChunkError:
        """Make the error for this chunk."""
        return CorruptChunkError(
            problem,
            path=path,
            array=self.array,
            sample=self.sample,
            byte_range=(self.first, self.end),
            clause="5.2" if self.crc is None else "14.5",
            expected=None if stored is None else f"crc32c {stored:08x}",
            found=None if computed is None else f"{computed:08x}",
            hint=hint,
        )

    def _checksums(self, read: Read) -> tuple[int | None, int | None]:
        """The CRC-32C that is stored, and the payload's; None where the file ends before."""
        computed = 0
        for offset in range(0, self.nbytes, _BLOCK_BYTES):
            num = min(_BLOCK_BYTES, self.nbytes - offset)
            block = read(self.first + offset, num)
            if len(block) < num:
                return self.crc, None
            computed = crc32c(block, computed)
        if self.crc is not None:
            return self.crc, computed
        return _stored(read(self.first + self.nbytes, CHECKSUM_BYTES)), computed


def _stored(raw: Bytes) -> int | None:
    return int(struct.unpack("<I", raw)[0]) if len(raw) == CHECKSUM_BYTES else None


def chunk_of(array: ArrayLayout, sample: int | None = None) -> Chunk:
    """The chunk of a sample, where there are slots; else that of the whole array."""
    if array.meta.is_sharded and sample is not None:
        return Chunk(array.meta.name, sample, array.slot(sample)[0], array.meta.sample_nbytes)
    return Chunk(array.meta.name, None, array.offset, array.meta.nbytes)


def rows_chunk(layout: RaggedLayout, sample: int, rows: tuple[int, int], crc: int) -> Chunk:
    """The chunk of a sample of a ragged array, which has these rows."""
    first, end = layout.extent(*rows)
    return Chunk(layout.rows.meta.name, sample, first, end - first, crc)


class TouchChecks:
    """Checks each chunk of an open store when it is first used (`verify="touch"`).

    Compiled code checks what it copies, and marks it; this is the check of all else, and says what is wrong.
    Several threads may check the same chunk twice, which costs time only.
    """

    def __init__(self, read: Read, path: Path) -> None:
        self._read, self._path = read, path
        self._checked: dict[str, npt.NDArray[np.bool_]] = {}
        self._done: set[str] = set()  # arrays of which nothing is left to check

    def flags(self, array: ArrayLayout) -> npt.NDArray[np.bool_] | None:
        """Which samples of an array were checked, bool, shape (N,); None where nothing is left to check.

        An array without slots is checked here.
        """
        name = array.meta.name
        if name in self._done or array.entry is None:
            return None
        if not array.meta.is_sharded:
            chunk_of(array).check(self._read, self._path)
            self._done.add(name)
            return None
        return self._flags(name, array.meta.shape[0])

    def check(self, array: ArrayLayout, samples: npt.NDArray[np.int64]) -> None:
        """Check the chunks of an array that hold these samples, unless that was done before."""
        checked = self.flags(array)
        if checked is None or checked[samples].all():
            return
        for sample in np.unique(samples[~checked[samples]]).tolist():
            chunk_of(array, sample).check(self._read, self._path)
            checked[sample] = True

    def check_rows(
        self,
        layout: RaggedLayout,
        samples: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> None:
        """Check samples of a ragged array, which have these rows, likewise."""
        checked = self._flags(layout.rows.meta.name, layout.checks.meta.shape[0])
        for i in np.flatnonzero(~checked[samples]).tolist():
            sample = int(samples[i])
            (stored,) = struct.unpack("<I", self._read(layout.checks.offset + 4 * sample, 4))
            chunk = rows_chunk(layout, sample, (int(starts[i]), int(ends[i])), stored)
            chunk.check(self._read, self._path)
            checked[sample] = True

    def _flags(self, name: str, num_samples: int) -> npt.NDArray[np.bool_]:
        flags = self._checked.get(name)
        if flags is None:
            flags = self._checked.setdefault(name, np.zeros(num_samples, bool))
        return flags
