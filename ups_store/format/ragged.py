"""Ragged arrays: how many rows a sample has is its own; as three Zarr arrays in the file; pure (spec 14).

The samples' rows lie back to back in one array, `points`; `points.offsets` says where each sample begins, and
`points.crc32c` has the checksum of each. Any Zarr reader reads all three: the rows are one shard, whose inner
chunks have neither checksum nor padding, so a sample is one piece of memory wherever chunks end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.format.checksum import crc32c

RaggedPart: TypeAlias = Literal["rows", "offsets", "crc32c"]  # what one of the three arrays holds
Encoding: TypeAlias = Literal["utf-8", "bytes"]

CHUNK_BYTES = 1 << 16  # of an inner chunk, about: what a reader that takes parts of the shard reads at least
MAX_ROWS = (1 << 53) - 1  # that whole inner chunks have room for: an axis of the grid (spec 9.1)
MAX_NAME_BYTES = 120  # so that the companions' names are names, too
LENGTHS = ".lengths"  # of padded samples, behind the array's name in a batch
_COMPANIONS: dict[RaggedPart, str] = {"offsets": ".offsets", "crc32c": ".crc32c"}
_INDEX_RECORD_BYTES = 16
_CHECKSUM_BYTES = 4

Offsets: TypeAlias = npt.NDArray[np.int64]


def companion_names(name: str) -> dict[RaggedPart, str]:
    """Name the arrays that belong to the ragged array of this name (spec 14.1)."""
    return {part: name + suffix for part, suffix in _COMPANIONS.items()}


def attribute_of(name: str, encoding: Encoding | None) -> dict[str, Any]:
    """Make the attribute `ups_store` of the array that holds the rows (spec 14.2)."""
    ragged: dict[str, Any] = {str(part): its for part, its in companion_names(name).items()}
    if encoding is not None:
        ragged["encoding"] = encoding
    return {"ragged": ragged}


def encoding_of(attribute: object) -> Encoding | None:
    """Read the encoding in an attribute `ups_store`; None for none, or one that there isn't."""
    ragged = attribute.get("ragged") if isinstance(attribute, dict) else None
    encoding = ragged.get("encoding") if isinstance(ragged, dict) else None
    if encoding == "utf-8":
        return "utf-8"
    return "bytes" if encoding == "bytes" else None


@dataclass(frozen=True)
class RowGeometry:
    """Where rows lie, and what follows them in the shard (spec 14.4)."""

    num_rows: int  # T, of all samples together
    row_nbytes: int  # of one, more than 0

    @property
    def rows_per_chunk(self) -> int:
        """c, of an inner chunk (spec 14.2)."""
        return max(1, CHUNK_BYTES // self.row_nbytes)

    @property
    def num_chunks(self) -> int:
        """Inner chunks of the shard."""
        return -(-self.num_rows // self.rows_per_chunk)

    @property
    def chunk_rows(self) -> int:
        """Rows that all inner chunks have room for; of one chunk where there are no rows."""
        return max(1, self.num_chunks) * self.rows_per_chunk

    @property
    def fill_nbytes(self) -> int:
        """Zeros between the last row and the shard's index."""
        return (self.num_chunks * self.rows_per_chunk - self.num_rows) * self.row_nbytes

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the data entry."""
        chunk_nbytes = self.rows_per_chunk * self.row_nbytes
        return self.num_chunks * (chunk_nbytes + _INDEX_RECORD_BYTES) + _CHECKSUM_BYTES

    def pack_trailer(self) -> bytes:
        """Pack what follows the last row: zeros up to the end of its chunk, the index, its CRC-32C."""
        chunk_nbytes = self.rows_per_chunk * self.row_nbytes
        index = np.empty((self.num_chunks, 2), "<u8")
        index[:, 0] = np.arange(len(index), dtype="<u8") * np.uint64(chunk_nbytes)
        index[:, 1] = chunk_nbytes
        body = index.tobytes()
        return bytes(self.fill_nbytes) + body + struct.pack("<I", crc32c(body))


def offsets_of(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Offsets:
    """Return the row at which each sample begins, and the number of rows last, shape (N + 1,)."""
    offsets = np.zeros(len(lengths) + 1, "<i8")
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def wrong_extents(starts: Offsets, ends: Offsets, num_rows: int) -> npt.NDArray[np.bool_]:
    """Tell which extents aren't some of `num_rows` rows (spec 14.5)."""
    return (starts < 0) | (starts > ends) | (ends > num_rows)


def first_flaw(starts: Offsets, ends: Offsets, num_rows: int) -> int | None:
    """Find the first extent that isn't one of `num_rows` rows; None where all are."""
    wrong = wrong_extents(starts, ends, num_rows)
    return int(wrong.argmax()) if wrong.any() else None
