"""Offsets of ragged arrays: the row at which each sample begins, checked before they are used (spec 14)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES, RaggedLayout
from ups_store.format.ragged import Offsets, first_flaw, wrong_extents
from ups_store.read.file_reads import read_at
from ups_store.read.store_file import read_bytes

_MAX_GAP = 512  # offsets that are read between two that are used, sooner than each by itself

HOW_TO_MEND = "`ups-store verify` shows all damage; rebuild it"


def read_offsets(fd: int, layout: RaggedLayout, *, path: Path) -> Offsets:
    """All offsets of a ragged array, checked against their CRC-32C and each other, shape (N + 1,)."""
    array = layout.offsets
    raw = read_bytes(fd, array.offset, array.meta.nbytes + CHECKSUM_BYTES, path=path)
    (stored,), computed = struct.unpack("<I", raw[-CHECKSUM_BYTES:]), crc32c(raw[:-CHECKSUM_BYTES])
    if stored != computed:
        raise CorruptChunkError(
            "the offsets don't match their checksum",
            path=path,
            array=array.meta.name,
            byte_range=(array.offset, array.offset + len(raw)),
            clause="5.6",
            expected=f"crc32c {stored:08x}",
            found=f"{computed:08x}",
            hint=HOW_TO_MEND,
        )
    offsets = np.frombuffer(raw[:-CHECKSUM_BYTES], "<i8")
    check_offsets(offsets, layout, path=path)
    return offsets


def read_offsets_of_spool(fd: int, layout: RaggedLayout, *, path: Path) -> Offsets:
    """All offsets of a ragged array of a spool, as they stand there: they grow, and have no checksum yet."""
    return np.frombuffer(read_bytes(fd, layout.offsets.offset, layout.offsets.meta.nbytes, path=path), "<i8")


def check_offsets(offsets: Offsets, layout: RaggedLayout, *, path: Path) -> None:
    """Check all offsets: 0 first, never falling, the number of rows last (spec 14)."""
    for sample, detail in offset_flaws(offsets, layout):
        raise bad_offsets(path, layout, sample, detail)


def offset_flaws(offsets: Offsets, layout: RaggedLayout) -> Iterator[tuple[int, str]]:
    """Sample and description of the first thing that is wrong with all offsets together, if any."""
    num_rows = layout.rows.meta.shape[0]
    wrong = first_flaw(offsets[:-1], offsets[1:], num_rows)
    if wrong is not None:
        yield wrong, f"rows {offsets[wrong]}..{offsets[wrong + 1]}"
    elif offsets[0] != 0 or offsets[-1] != num_rows:
        yield 0 if offsets[0] else len(offsets) - 2, f"rows {offsets[0]}..{offsets[-1]} in all"


def bad_offsets(path: Path, layout: RaggedLayout, sample: int, found: str) -> CorruptChunkError:
    """The error for offsets that can't be right."""
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


def extents_hold(fd: int, layout: RaggedLayout, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which samples have offsets that can be right (spec 14.5), shape (M,); samples sorted."""
    holds = np.zeros(len(samples), bool)
    for run in np.split(np.arange(len(samples)), np.flatnonzero(np.diff(samples) > _MAX_GAP) + 1):
        if len(run):
            first, num = int(samples[run[0]]), int(samples[run[-1]] - samples[run[0]]) + 2
            raw = read_at(fd, layout.offsets.offset + 8 * first, 8 * num).ljust(8 * num, b"\xff")
            offsets, within = np.frombuffer(raw, "<i8"), samples[run] - first
            holds[run] = ~wrong_extents(offsets[within], offsets[within + 1], layout.rows.meta.shape[0])
    return holds


def sample_extent(fd: int, layout: RaggedLayout, sample: int) -> tuple[int, int]:
    """`(first, past_last)` byte of a sample by the offsets in the file; nothing where they can't be right."""
    raw = read_at(fd, layout.offsets.offset + 8 * sample, 16)
    start, end = struct.unpack("<qq", raw) if len(raw) == 16 else (0, 0)
    return layout.extent(start, end) if 0 <= start <= end <= layout.rows.meta.shape[0] else (0, 0)
