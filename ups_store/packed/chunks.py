"""`ChunkReader`: chunks of a packed file, checked and decoded (spec 13.5)."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES
from ups_store.packed.catalog import PackedArray, read_index
from ups_store.read.store_file import StoreFile, read_bytes


class ChunkReader:
    """Reads chunks; every checksum is checked before anything is decoded. Safe to use from several threads.

    Args:
        file: The packed file.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._edges: dict[str, npt.NDArray[np.int64]] = {}

    def read(self, array: PackedArray, sample: int | None, out: npt.NDArray[np.generic]) -> None:
        """Decode one chunk into `out`, C-contiguous memory of its shape and dtype.

        Args:
            array: The array.
            sample: Sample number; None for a plain chunk.
            out: Where the payload goes.
        Raises:
            CorruptChunkError: If it is damaged.
            TruncatedError: If another program cut the file.
        """
        first, end = self._extent(array, sample)
        descriptor = self._file.descriptor  # held, see there
        raw = memoryview(read_bytes(descriptor.fd, first, end - first, path=self._file.path))
        packed, stored = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if stored != struct.pack("<I", crc32c(packed)):
            raise self._damaged(array, sample, (first, end), "its crc32c doesn't match")
        try:
            array.chain.decode(packed, out.reshape(-1).view(np.uint8))
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._damaged(array, sample, (first, end), f"it can't be decoded ({error})") from error

    def _damaged(
        self, array: PackedArray, sample: int | None, where: tuple[int, int], problem: str
    ) -> CorruptChunkError:
        return CorruptChunkError(
            f"damaged chunk: {problem}",
            path=self._file.path,
            array=array.meta.name,
            sample=sample,
            byte_range=where,
            clause="5.2",
            hint="`ups-store doctor` says what to do",
        )

    def _extent(self, array: PackedArray, sample: int | None) -> tuple[int, int]:
        assert array.entry is not None
        if sample is None:
            return array.entry.data_offset, array.entry.end
        name = array.meta.name
        if name not in self._edges:
            descriptor = self._file.descriptor
            self._edges[name] = read_index(descriptor.fd, array, self._file.path)
        edges = self._edges[name]
        return int(edges[sample]), int(edges[sample + 1])
