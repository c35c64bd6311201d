"""Geometry: where everything lies in a store, as a function of its metadata; pure (spec 2, 5, 6.1).

Offsets are bytes from the start of the file. `plan` places the finished file and, behind it, the build tail.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ups_store.format.checksum import crc32c
from ups_store.format.metadata import ArrayMeta
from ups_store.format.ragged import companion_names
from ups_store.format.zip_records import END_BYTES, ROOT_NAME, Entry, align

PAGE_BYTES = 4096
CACHE_LINE_BYTES = 64  # a mapped view of any dtype is aligned on it
PAGE_SLOT_BYTES = 1 << 20  # samples from here on start on a page
CHECKSUM_BYTES = 4  # crc32c behind every chunk
INDEX_RECORD_BYTES = 16  # offset and nbytes of an inner chunk (Zarr sharding-indexed)


@dataclass(frozen=True)
class ArrayLayout:
    """Where one array's samples lie (spec 5)."""

    meta: ArrayMeta
    entry: Entry | None  # None for an array without elements
    stride: int  # bytes from one sample to the next; the slot size where there are slots

    @cached_property
    def offset(self) -> int:
        """First byte of the first sample; 0 where there is no data entry."""
        return self.entry.data_offset if self.entry else 0

    def slot(self, sample: int) -> tuple[int, int]:
        """Return the extent of a sample: `(first, past_last)` byte, slot padding included."""
        first = self.offset + sample * self.stride
        return first, first + self.stride

    def pack_index(self) -> bytes:
        """Pack what follows the samples in a shard: its index and the checksum of that (spec 5.4, 14.4)."""
        if self.meta.is_ragged:
            return self.meta.row_geometry.pack_trailer()
        nbytes = self.meta.sample_nbytes + CHECKSUM_BYTES
        index = np.empty((self.meta.shape[0], 2), "<u8")
        index[:, 0] = np.arange(len(index), dtype="<u8") * np.uint64(self.stride)
        index[:, 1] = nbytes
        body = index.tobytes()
        return body + struct.pack("<I", crc32c(body))


def aligned_slot_nbytes(sample_nbytes: int) -> int:
    """Return the slot size of a sample of a large array (spec 5.3)."""
    alignment = PAGE_BYTES if sample_nbytes >= PAGE_SLOT_BYTES else CACHE_LINE_BYTES
    return align(sample_nbytes + CHECKSUM_BYTES, alignment)


@dataclass(frozen=True)
class RaggedLayout:
    """The three arrays that a ragged one is in the file (spec 14)."""

    rows: ArrayLayout  # of all samples; the stride is that from row to row
    offsets: ArrayLayout  # row at which each sample begins, and the number of rows
    checks: ArrayLayout  # CRC-32C of each sample's rows

    def extent(self, start: int, end: int) -> tuple[int, int]:
        """Return the `(first, past_last)` byte of rows `start` up to `end`."""
        return self.rows.offset + start * self.rows.stride, self.rows.offset + end * self.rows.stride


@dataclass(frozen=True)
class Layout:
    """Geometry of a store: the finished file and, behind it, the build tail."""

    num_samples: int
    metadata: tuple[Entry, ...]  # of the `zarr.json` documents, root first
    arrays: dict[str, ArrayLayout]  # sorted
    directory_offset: int
    directory_nbytes: int

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All entries in file order."""
        data = (array.entry for array in self.arrays.values())
        return (*self.metadata, *(entry for entry in data if entry))

    @cached_property
    def file_nbytes(self) -> int:
        """F, the length of the finished file."""
        return self.directory_offset + self.directory_nbytes + END_BYTES

    @cached_property
    def per_sample(self) -> tuple[ArrayLayout, ...]:
        """The arrays that commit records vouch for, in file order: with a sample axis, or ragged."""
        return tuple(array for array in self.arrays.values() if array.meta.is_committed)

    @cached_property
    def ragged(self) -> dict[str, RaggedLayout]:
        """The ragged arrays by name."""
        names = {name: companion_names(name) for name, array in self.arrays.items() if array.meta.is_ragged}
        return {
            name: RaggedLayout(self.arrays[name], *(self.arrays[part] for part in parts.values()))
            for name, parts in names.items()
        }

    @cached_property
    def record_nbytes(self) -> int:
        """Bytes of one commit record: marker, one CRC-32 an array, checksum (spec 6.4)."""
        return 4 * (len(self.per_sample) + 2)

    @cached_property
    def tail_offset(self) -> int:
        """First byte of the build tail (spec 6.2)."""
        return align(self.file_nbytes, PAGE_BYTES)

    @cached_property
    def table_offset(self) -> int:
        """First byte of the commit table."""
        return self.tail_offset + PAGE_BYTES

    @cached_property
    def building_nbytes(self) -> int:
        """Length of the building file."""
        return align(self.table_offset + self.num_samples * self.record_nbytes, PAGE_BYTES)


def plan(root_nbytes: int, arrays: Iterable[tuple[ArrayMeta, int]], num_samples: int) -> Layout:
    """Lay out a store of N samples, for the bytes of the root's `zarr.json` and of each array's."""
    ordered = sorted(arrays, key=lambda pair: pair[0].name)
    metadata = [Entry(ROOT_NAME, 0, root_nbytes)]
    for meta, nbytes in ordered:
        metadata.append(Entry(f"{meta.name}/zarr.json", metadata[-1].end, nbytes))
    end, placed = metadata[-1].end, {}
    for meta, _ in ordered:
        stride = aligned_slot_nbytes(meta.sample_nbytes) if meta.is_sharded else meta.sample_nbytes
        nbytes = meta.nbytes + CHECKSUM_BYTES
        if meta.is_ragged:
            nbytes = meta.row_geometry.shard_nbytes
        elif meta.is_sharded:
            nbytes = meta.shape[0] * (stride + INDEX_RECORD_BYTES) + CHECKSUM_BYTES
        entry = Entry(meta.chunk_key, end, nbytes, is_aligned=True) if meta.nbytes else None
        placed[meta.name] = ArrayLayout(meta, entry, stride)
        end = entry.end if entry else end
    entries = [*metadata, *(array.entry for array in placed.values() if array.entry)]
    return Layout(num_samples, tuple(metadata), placed, end, sum(e.central_nbytes for e in entries))


def consecutive_runs(numbers: Sequence[int] | npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return first number and length of each run of sample numbers that are one more than the one before."""
    values = np.asarray(numbers, np.int64)
    breaks = np.flatnonzero(values[1:] - values[:-1] != 1) + 1
    starts = [0, *breaks.tolist()] if len(values) else []
    ends = [*starts[1:], len(values)]
    return [(int(values[start]), end - start) for start, end in zip(starts, ends, strict=False)]


def consecutive_ranges(numbers: Sequence[int] | npt.NDArray[np.int64], *, longest: int) -> Iterator[range]:
    """Cut sample numbers into such runs as ranges, of at most `longest` numbers each."""
    for first, num in consecutive_runs(numbers):
        for start in range(first, first + num, longest):
            yield range(start, min(start + longest, first + num))
