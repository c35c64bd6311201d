"""Reading ragged arrays: samples as views of their rows (spec 14); `ragged_batch` has them padded.

What the offsets say is checked before it is used; opening a store reads none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import Bytes, crc32c
from ups_store.format.layout import RaggedLayout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.format.ragged import Offsets, first_flaw
from ups_store.read.gather import Indices, Samples, check_indices
from ups_store.read.offsets import HOW_TO_MEND, bad_offsets, check_offsets, read_offsets
from ups_store.read.store_file import READS_IN_FLIGHT, StoreFile, read_bytes, read_rows
from ups_store.system.parallel import for_each

_MAX_SPREAD = 512  # offsets that are read for one that is used, sooner than each by itself


class RaggedArray(Sequence[Any]):
    """A ragged array of an open store: `store[name][i]` is sample i, as in a list; nothing is copied.

    Args:
        reader: What reads it.

    Attributes:
        rows: The rows of all samples one behind the other, shape (M, ...), read-only.
    """

    def __init__(self, reader: RaggedReader) -> None:
        self._reader, self.rows = reader, reader.rows

    def __len__(self) -> int:
        return self._reader.num_samples

    @property
    def offsets(self) -> Offsets:
        """Row at which each sample begins, and the number of rows, all checked, shape (N + 1,)."""
        return self._reader.all_offsets()

    @property
    def lengths(self) -> Samples:
        """Number of rows of each sample, shape (N,)."""
        return np.diff(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice | Indices) -> list[Any]: ...

    def __getitem__(self, index: int | slice | Indices) -> Any:
        """A sample, shape (rows, ...), read-only, `str` or `bytes`; of a slice or several numbers a list."""
        if isinstance(index, slice | Sequence) or (isinstance(index, np.ndarray) and index.ndim):
            return self._reader.views(check_indices(index, len(self), path=self._reader.path))
        number = range(len(self))[index]  # raises IndexError, which ends an iteration
        return self._reader.views(np.array([number]))[0]

    def __repr__(self) -> str:
        meta = self._reader.meta
        tail = "".join(f", {n}" for n in meta.sample_shape)
        return f"<RaggedArray {meta.name}: {len(self):,} samples of (rows{tail}) {meta.dtype}>"


class RaggedReader:
    """Gathers samples of one ragged array of an open store.

    Args:
        layout: Its layout.
        file: The file; where a copy of it takes its place, another reader is needed.
    """

    def __init__(self, layout: RaggedLayout, file: StoreFile) -> None:
        self.layout, self.meta, self._file = layout, layout.rows.meta, file
        self.num_samples = layout.checks.meta.shape[0]

    @cached_property
    def rows(self) -> npt.NDArray[Any]:
        """All rows as a view of the mapping, read-only."""
        return self._file.view(self.layout.rows)

    @cached_property
    def _offsets(self) -> Offsets:
        return self._file.view(self.layout.offsets)

    @property
    def path(self) -> Path:
        """Path of the store."""
        return self._file.path

    def extents(self, samples: Samples) -> tuple[Offsets, Offsets]:
        """First row, and row past the last one, of samples, all valid; shape (B,) each.

        Raises:
            CorruptChunkError: If they can't be right; names the first such sample.
        """
        if not len(samples):
            return samples, samples
        if self._file.access != "pread":
            starts, ends = self._offsets[samples], self._offsets[samples + 1]
        else:
            starts, ends = self._read_extents(samples)
        wrong = first_flaw(starts, ends, self.meta.shape[0])
        if wrong is not None:
            found = f"rows {starts[wrong]}..{ends[wrong]}"
            raise bad_offsets(self._file.path, self.layout, int(samples[wrong]), found)
        return starts, ends

    def _read_extents(self, samples: Samples) -> tuple[Offsets, Offsets]:
        first, last = int(samples.min()), int(samples.max())
        descriptor, base = self._file.descriptor, self.layout.offsets.offset

        def read(sample: int, num: int) -> Offsets:
            raw = read_bytes(descriptor.fd, base + 8 * sample, 8 * (num + 1), path=self._file.path)
            return np.frombuffer(raw, "<i8")

        if last - first <= _MAX_SPREAD * len(samples):
            offsets = read(first, last - first + 1)
            return offsets[samples - first], offsets[samples - first + 1]
        pairs = np.stack([read(sample, 1) for sample in samples.tolist()])
        return pairs[:, 0], pairs[:, 1]

    def all_offsets(self) -> Offsets:
        """All offsets, checked, shape (N + 1,)."""
        descriptor = self._file.descriptor if self._file.access == "pread" else None
        if descriptor is not None:
            return read_offsets(descriptor.fd, self.layout, path=self._file.path)
        check_offsets(self._offsets, self.layout, path=self._file.path)
        return self._offsets

    def views(self, samples: Samples, *, num_threads: int | None = None, decode: bool = True) -> list[Any]:
        """Samples, all valid, as read-only arrays (rows, ...) over the mapping, or that were read.

        Args:
            samples: Sample numbers, int64, shape (B,).
            num_threads: Reads under way at once, where the file is read; 8 by default.
            decode: Whether samples of text become `str`, those of bytes `bytes`.
        """
        starts, ends = self.extents(samples)
        bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
        if self._file.access == "pread":
            found = self._read_rows(bounds, num_threads or READS_IN_FLIGHT)
        else:
            rows = self.rows
            found = [rows[start:end] for start, end in bounds]
        if self.meta.encoding is None or not decode:
            return found
        numbers, path = samples.tolist(), self._file.path
        return [
            decoded(value, self.meta, number, path=path) for value, number in zip(found, numbers, strict=True)
        ]

    def _read_rows(self, bounds: list[tuple[int, int]], num_threads: int) -> list[npt.NDArray[Any]]:
        found = [
            np.empty((end - start, *self.meta.sample_shape), dtype_of(self.meta.dtype))
            for start, end in bounds
        ]
        descriptor = self._file.descriptor

        def read(number: int) -> None:
            first, _ = self.layout.extent(*bounds[number])
            read_rows(descriptor.fd, first, found[number], path=self._file.path)

        for_each(read, [i for i, value in enumerate(found) if value.size], num_threads=num_threads)
        for value in found:
            value.flags.writeable = False
        return found


def decoded(value: npt.NDArray[Any], meta: ArrayMeta, sample: int, *, path: Path) -> str | bytes:
    """The text or the bytes that the rows of a sample are.

    Raises:
        CorruptChunkError: If text isn't UTF-8, kind "text".
    """
    raw = value.tobytes()
    if meta.encoding == "bytes":
        return raw
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CorruptChunkError(
            "the text isn't valid UTF-8",
            kind="text",
            path=path,
            array=meta.name,
            sample=sample,
            clause="14.5",
            found=str(error),
            hint=HOW_TO_MEND,
        ) from error


class RowChecks:
    """Which samples of a ragged array were checked against their CRC-32C, and the check of the others.

    Args:
        layout: Of the array.
        read: Returns the file's bytes from an offset on, as many as asked for.
        path: For messages.
    """

    def __init__(self, layout: RaggedLayout, read: Callable[[int, int], Bytes], path: Path) -> None:
        self._layout, self._read, self._path = layout, read, path
        self._checked = np.zeros(layout.checks.meta.shape[0], bool)

    def check(self, samples: Samples, starts: Offsets, ends: Offsets) -> None:
        """Check samples that weren't checked before, which have these rows.

        Raises:
            CorruptChunkError: Names array, sample and bytes; the sample stays unchecked.
        """
        for i in np.flatnonzero(~self._checked[samples]).tolist():
            sample = int(samples[i])
            first, end = self._layout.extent(int(starts[i]), int(ends[i]))
            place = self._layout.checks.offset + 4 * sample
            (stored,) = struct.unpack("<I", self._read(place, 4))
            computed = crc32c(self._read(first, end - first)) if first < end else 0
            if computed != stored:
                raise CorruptChunkError(
                    "the bytes don't match their checksum",
                    path=self._path,
                    array=self._layout.rows.meta.name,
                    sample=sample,
                    byte_range=(first, end),
                    clause="14.5",
                    expected=f"crc32c {stored:08x}",
                    found=f"{computed:08x}",
                    hint=HOW_TO_MEND,
                )
            self._checked[sample] = True
