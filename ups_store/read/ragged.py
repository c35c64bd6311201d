"""Ragged arrays: samples as views of their rows, or padded to a batch (spec 14).

What the offsets say is checked before it is used; opening a store reads none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, SpecError
from ups_store.format.layout import RaggedLayout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.format.ragged import LENGTHS, Offsets, first_flaw, wrong_extents
from ups_store.read.gather import (
    READS_IN_FLIGHT,
    TIME_DIM,
    BatchArguments,
    Indices,
    Samples,
    check_indices,
    check_output,
)
from ups_store.read.store_file import HOW_TO_MEND, StoreFile, chunk_of, read_at, read_bytes, read_rows
from ups_store.system.parallel import for_each

Form: TypeAlias = Literal["views", "padded"]

_MAX_GAP = 512  # offsets that are read between two that are used, sooner than each by itself
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
    """Gathers samples of one ragged array of an open store."""

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
        """Give the first row, and row past the last one, of samples, all valid; shape (B,) each."""
        if not len(samples):
            return samples, samples
        first, last = int(samples.min()), int(samples.max())
        if self._file.access != "pread":
            starts, ends = self._offsets[samples], self._offsets[samples + 1]
        elif last - first <= _MAX_SPREAD * len(samples):
            offsets = self._read_offsets(first, last - first + 2)
            starts, ends = offsets[samples - first], offsets[samples - first + 1]
        else:
            starts, ends = np.stack([self._read_offsets(sample, 2) for sample in samples.tolist()]).T
        wrong = first_flaw(starts, ends, self.meta.shape[0])
        if wrong is not None:
            actual = f"rows {starts[wrong]}..{ends[wrong]}"
            raise bad_offsets(self._file.path, self.layout, int(samples[wrong]), actual)
        return starts, ends

    def _read_offsets(self, first: int, num: int) -> Offsets:
        return np.frombuffer(self._file.read(self.layout.offsets.offset + 8 * first, 8 * num), "<i8")

    def all_offsets(self) -> Offsets:
        """Give all offsets, checked, shape (N + 1,); those that are read by their CRC-32C, too."""
        if self._file.access == "pread":
            descriptor = self._file.descriptor  # held, see there
            return read_offsets(descriptor.fd, self.layout, path=self.path)
        check_offsets(self._offsets, self.layout, path=self.path)
        return self._offsets

    def views(self, samples: Samples, *, num_threads: int | None = None, decode: bool = True) -> list[Any]:
        """Give samples, all valid, as read-only arrays (rows, ...) over the mapping, or that were read."""
        starts, ends = self.extents(samples)
        bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
        if self._file.access == "pread":
            dtype, descriptor = dtype_of(self.meta.dtype), self._file.descriptor
            arrays = [np.empty((end - start, *self.meta.sample_shape), dtype) for start, end in bounds]

            def read(number: int) -> None:
                first, _ = self.layout.extent(*bounds[number])
                read_rows(descriptor.fd, first, arrays[number], path=self._file.path)

            numbers = [number for number, array in enumerate(arrays) if array.size]
            for_each(read, numbers, num_threads=num_threads or READS_IN_FLIGHT)
            for array in arrays:
                array.flags.writeable = False
        else:
            rows = self.rows
            arrays = [rows[start:end] for start, end in bounds]
        if self.meta.encoding is None or not decode:
            return arrays
        pairs = zip(arrays, samples.tolist(), strict=True)
        return [decoded(array, self.meta, sample, path=self._file.path) for array, sample in pairs]


def decoded(value: npt.NDArray[Any], meta: ArrayMeta, sample: int, *, path: Path) -> str | bytes:
    """Give the text or the bytes that the rows of a sample are."""
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


def read_offsets(fd: int, layout: RaggedLayout, *, path: Path) -> Offsets:
    """Read all offsets of a ragged array, checked against their CRC-32C and each other, shape (N + 1,)."""
    chunk = chunk_of(layout.offsets)
    payload = chunk.payload_of(read_bytes(fd, chunk.first, chunk.end - chunk.first, path=path))
    if payload is None:
        raise chunk.damaged(path, "the offsets don't match their checksum")
    offsets = np.frombuffer(payload, "<i8")
    check_offsets(offsets, layout, path=path)
    return offsets


def check_offsets(offsets: Offsets, layout: RaggedLayout, *, path: Path) -> None:
    """Check all offsets: 0 first, never falling, the number of rows last (spec 14)."""
    if flaw := offset_flaw(offsets, layout):
        raise bad_offsets(path, layout, *flaw)


def offset_flaw(offsets: Offsets, layout: RaggedLayout) -> tuple[int, str] | None:
    """Find the sample and a description of the first thing that is wrong with all offsets together."""
    num_rows = layout.rows.meta.shape[0]
    wrong = first_flaw(offsets[:-1], offsets[1:], num_rows)
    if wrong is not None:
        return wrong, f"rows {offsets[wrong]}..{offsets[wrong + 1]}"
    if offsets[0] != 0 or offsets[-1] != num_rows:
        return 0 if offsets[0] else len(offsets) - 2, f"rows {offsets[0]}..{offsets[-1]} in all"
    return None


def bad_offsets(path: Path, layout: RaggedLayout, sample: int, found: str) -> CorruptChunkError:
    """Make the error for offsets that can't be right."""
    first = layout.offsets.offset + 8 * sample
    return CorruptChunkError(
        "the sample's offsets are wrong",
        kind="offsets",
        path=path,
        array=layout.rows.meta.name,
        sample=sample,
        byte_range=(first, first + 16),
        clause="14.5",
        expected=f"rows within 0..{layout.rows.meta.shape[0]}, the first not behind the last",
        found=found,
        hint=HOW_TO_MEND,
    )


def extents_hold(
    fd: int, layout: RaggedLayout, samples: npt.NDArray[np.int64], *, is_spool: bool
) -> npt.NDArray[np.bool_]:
    """Find which samples have offsets that can be right (spec 14.5), shape (M,); samples sorted.

    Those of a spool have no checksum: a damaged one may say that a sample has all of a sparse file.
    """
    holds, past_last = np.zeros(len(samples), bool), layout.offsets.meta.shape[0]
    for run in np.split(np.arange(len(samples)), np.flatnonzero(np.diff(samples) > _MAX_GAP) + 1):
        if len(run):
            first = int(samples[run[0]])
            num = min(int(samples[run[-1]]) + 3, past_last) - first
            raw = read_at(fd, layout.offsets.offset + 8 * first, 8 * num).ljust(8 * num, b"\xff")
            offsets, within = np.frombuffer(raw, "<i8"), samples[run] - first
            ends, next_ends = offsets[within + 1], offsets[np.minimum(within + 2, num - 1)]
            holds[run] = ~wrong_extents(offsets[within], ends, layout.rows.meta.shape[0])
            if is_spool:
                holds[run] &= ends <= next_ends
    return holds


def sample_extent(fd: int, layout: RaggedLayout, sample: int) -> tuple[int, int]:
    """`(first, past_last)` byte of a sample by the offsets in the file; nothing where they can't be right."""
    raw = read_at(fd, layout.offsets.offset + 8 * sample, 16)
    start, end = struct.unpack("<qq", raw) if len(raw) == 16 else (0, 0)
    return layout.extent(start, end) if 0 <= start <= end <= layout.rows.meta.shape[0] else (0, 0)


def check_form(
    form: object, names: Sequence[str], out: Mapping[str, Any] | None, *, path: Path
) -> dict[str, Any]:
    """Check how `gather` shall give ragged arrays, and the memory for them."""
    if form not in ("views", "padded"):
        hint = "`ups_store.torch.gather_nested` gives nested tensors" if form == "nested" else None
        expected = "views or padded"
        raise SpecError("ragged", kind="argument", path=path, expected=expected, found=repr(form), hint=hint)
    memory = out if isinstance(out, Mapping) else {}
    theirs = {*names, *(name + LENGTHS for name in names)}
    if form == "views" and theirs & memory.keys():
        hint = 'views are not copied: leave `out` away, or say ragged="padded"'
        raise SpecError("out", kind="out", path=path, array=min(theirs & memory.keys()), hint=hint)
    return {name: value for name, value in memory.items() if name not in theirs}


def check_not_ragged(metas: Iterable[ArrayMeta], what: str, hint: str, *, path: Path) -> None:
    """Refuse what isn't there for ragged arrays; `what` names it."""
    for meta in metas:
        if meta.is_ragged:
            problem = f"{what} isn't there for ragged arrays"
            raise SpecError(problem, kind="ragged", path=path, array=meta.name, clause="14.1", hint=hint)


def check_no_window(metas: Sequence[ArrayMeta], arguments: BatchArguments, *, path: Path) -> None:
    """Refuse windows over the time of ragged arrays; arrays without time are taken whole."""
    if not arguments.is_window:
        return
    for meta in metas:
        if TIME_DIM in meta.dims:
            problem = "windows over time aren't cut out of a ragged array"
            hint = "gather whole samples, which are views, and cut them"
            raise SpecError(problem, kind="unsupported", path=path, array=meta.name, hint=hint)


def padded(
    meta: ArrayMeta,
    views: Sequence[npt.NDArray[Any]],
    out: npt.NDArray[Any] | None = None,
    lengths: npt.NDArray[Any] | None = None,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Pad samples of a ragged array to one array, the rest of each row zeros."""
    sizes = np.array([len(view) for view in views], np.int64)
    longest = int(sizes.max(initial=0))
    if out is None:
        out = np.empty((len(views), longest, *meta.sample_shape), dtype_of(meta.dtype))
    else:
        room = out.shape[1] if isinstance(out, np.ndarray) and out.ndim > 1 else longest
        if room < longest:
            wrong = int(sizes.argmax())
            expected, actual = f"room for {longest} rows", f"{room}"
            hint = "make its second axis longer, or leave `out` away"
            problem = f"out: item {wrong} doesn't fit"
            raise SpecError(problem, kind="out", array=meta.name, expected=expected, found=actual, hint=hint)
        check_output(meta.name, dtype_of(meta.dtype), (len(views), room, *meta.sample_shape), out)
    for row, view, size in zip(out, views, sizes.tolist(), strict=True):
        row[:size] = view
        if size < len(row):
            row[size:] = 0
    if lengths is None:
        return out, sizes
    check_output(meta.name + LENGTHS, np.dtype(np.int64), (len(views),), lengths)
    lengths[...] = sizes
    return out, lengths
