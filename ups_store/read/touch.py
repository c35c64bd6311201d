"""`TouchChecks`: what is used of a store is checked against its CRC-32C the first time (`verify="touch"`)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import Bytes, crc32c
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout
from ups_store.read.gather import Samples

_BLOCK_BYTES = 4 << 20  # of a plain chunk at a time

Read = Callable[[int, int], Bytes]


class TouchChecks:
    """Which chunks of an open store were checked, and the check of the others.

    Compiled code checks what it copies, and marks it; this is the check of all else, and says what is wrong.
    Several threads may check the same chunk twice, which costs time only.

    Args:
        read: Returns the file's bytes from an offset on, as many as asked for.
        path: For messages.
    """

    def __init__(self, read: Read, path: Path) -> None:
        self._read = read
        self._path = path
        self._checked: dict[str, npt.NDArray[np.bool_]] = {}
        self._done: set[str] = set()  # arrays of which nothing is left to check

    def flags(self, array: ArrayLayout) -> npt.NDArray[np.bool_] | None:
        """Which samples of an array were checked, bool, shape (N,); None where nothing is left to check.

        An array without slots is checked here.

        Raises:
            CorruptChunkError: If that array is damaged.
        """
        name = array.meta.name
        if name in self._done or array.entry is None:
            return None
        if not array.meta.is_sharded:
            self._check_chunk(array, array.offset, array.meta.nbytes, None)
            self._done.add(name)
            return None
        flags = self._checked.get(name)
        if flags is None:
            flags = self._checked.setdefault(name, np.zeros(array.meta.shape[0], bool))
        return flags

    def check(self, array: ArrayLayout, samples: Samples) -> None:
        """Check the chunks of an array that hold these samples, unless that was done before.

        Raises:
            CorruptChunkError: Names array, sample and bytes; the chunk stays unchecked.
        """
        checked = self.flags(array)
        if checked is None or checked[samples].all():
            return
        for sample in np.unique(samples[~checked[samples]]).tolist():
            self._check_chunk(array, array.slot(sample)[0], array.meta.sample_nbytes, sample)
            checked[sample] = True

    def _check_chunk(self, array: ArrayLayout, first: int, nbytes: int, sample: int | None) -> None:
        computed = 0
        for offset in range(0, nbytes, _BLOCK_BYTES):
            computed = crc32c(self._read(first + offset, min(_BLOCK_BYTES, nbytes - offset)), computed)
        (stored,) = struct.unpack("<I", self._read(first + nbytes, CHECKSUM_BYTES))
        if computed != stored:
            raise CorruptChunkError(
                "the bytes don't match their checksum",
                path=self._path,
                array=array.meta.name,
                sample=sample,
                byte_range=(first, first + nbytes + CHECKSUM_BYTES),
                clause="5.2",
                expected=f"crc32c {stored:08x}",
                found=f"{computed:08x}",
                hint="`ups-store verify` shows all damage, `verify --repair CONFIG` rebuilds what is damaged",
            )
