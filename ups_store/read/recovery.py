"""What an interrupted file means: which samples of a building file are committed (spec 6.5); reads only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, TruncatedError
from ups_store.format.build_tail import (
    HOW_TO_REPLACE,
    SPOOL_MAGIC,
    SPOOL_OFFSET,
    TailHeader,
    is_committed,
    parse_tail_header,
)
from ups_store.format.checksum import crc32, crc32_each
from ups_store.format.layout import PAGE_BYTES, ArrayLayout, Layout, consecutive_runs
from ups_store.read.catalog import Catalog, read_building, read_finished
from ups_store.read.ragged import extents_hold, sample_extent
from ups_store.read.store_file import read_at, size
from ups_store.system import files
from ups_store.system.files import Progress, is_in_memory
from ups_store.system.parallel import for_each

BUILDING_SUFFIX = ".building"
UNPACKING_SUFFIX = ".unpacking"  # of a packed store's mapped form until it is whole

_TABLE_BLOCK_BYTES = 8 << 20  # of the commit table at a time
_CHECK_BLOCK_BYTES = 1 << 20  # read at a time and thread: stays in the cache until its checksum is taken
_PIECES_AT_ONCE = 64  # between two calls of progress


class State(Enum):
    """What a file under its building name is (spec 6.5)."""

    RESUMABLE = "resumable"  # the build tail is the truth
    FINISHED = "finished"  # only the rename is left


@dataclass(frozen=True)
class Building:
    """A file under its building name, as it was found."""

    state: State
    catalog: Catalog  # its metadata and geometry
    header: TailHeader | None  # header of its build tail; None once it is finished


def building_path(path: Path) -> Path:
    """Find where the store of `path` is built (spec 6.1); one in memory has no other name (spec 6.12).

    A symbolic link is followed: the file is beside the one that it will replace.
    """
    if is_in_memory(path):
        return path
    target = files.link_target(path) or path
    return target.with_name(target.name + BUILDING_SUFFIX)


def read_building_file(fd: int, path: Path) -> Building:
    """Classify a file under its building name by its length and its build tail (spec 6.5)."""
    try:
        return Building(State.FINISHED, read_finished(fd, path), None)
    except FormatError as error:  # while it is built, there is no end yet
        flaw = error
    catalog = read_building(fd, path)
    layout, nbytes = catalog.layout, size(fd)
    if nbytes == layout.file_nbytes:
        raise flaw
    if nbytes != layout.building_nbytes:
        raise TruncatedError(
            "unfinished file has a wrong length",
            path=path,
            clause="6.1",
            expected=layout.building_nbytes,
            found=nbytes,
            hint=f"its samples can't be distinguished from garbage: remove it, or say {HOW_TO_REPLACE}",
        )
    raw = read_at(fd, layout.tail_offset, PAGE_BYTES)
    return Building(State.RESUMABLE, catalog, parse_tail_header(raw, layout, path=path))


def read_is_spool(fd: int, layout: Layout) -> bool:
    """Tell whether a building file is a spool: its N is what it has room for, not what there will be."""
    return read_at(fd, layout.tail_offset + SPOOL_OFFSET, len(SPOOL_MAGIC)) == SPOOL_MAGIC


def read_records(fd: int, layout: Layout, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Commit records of consecutive samples, shape (M, num_arrays + 2); zeros past the end of the file."""
    nbytes = layout.record_nbytes
    first = layout.table_offset + int(samples[0]) * nbytes if len(samples) else 0
    raw = read_at(fd, first, len(samples) * nbytes).ljust(len(samples) * nbytes, b"\0")
    return np.frombuffer(raw, "<u4").reshape(len(samples), nbytes // 4)


def read_commits(
    fd: int, layout: Layout, header: TailHeader
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
    """Read the whole commit table."""
    committed = np.zeros(layout.num_samples, bool)
    crcs = np.zeros((layout.num_samples, header.num_arrays), np.uint32)
    step = max(1, _TABLE_BLOCK_BYTES // layout.record_nbytes)
    for first in range(0, layout.num_samples, step):
        samples = np.arange(first, min(first + step, layout.num_samples))
        records = read_records(fd, layout, samples)
        committed[samples] = _commits_among(fd, layout, header, samples, records)
        crcs[samples] = records[:, 1:-1]
    return committed, crcs


def read_committed(
    fd: int, layout: Layout, header: TailHeader, samples: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Find which of some samples are committed, shape (M,); samples sorted, at least one."""
    if samples[-1] - samples[0] >= 4 * len(samples):  # sparse: a record at a time
        parts = [read_records(fd, layout, samples[i : i + 1]) for i in range(len(samples))]
        records = np.concatenate(parts)
    else:
        span = np.arange(samples[0], samples[-1] + 1)
        records = read_records(fd, layout, span)[samples - samples[0]]
    return _commits_among(fd, layout, header, samples, records)


def _commits_among(
    fd: int,
    layout: Layout,
    header: TailHeader,
    samples: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint32],
) -> npt.NDArray[np.bool_]:
    """Find which samples are committed by their records, and have offsets that can be right, shape (M,).

    After another boot of the machine the samples of a lazy build are read and checked first: their records
    may have reached the disk before their bytes (spec 6.5, step 3).
    """
    committed = is_committed(header, samples, records)
    is_spool = bool(layout.ragged) and read_is_spool(fd, layout)
    for ragged in layout.ragged.values():
        committed &= extents_hold(fd, ragged, samples, is_spool=is_spool)
    if committed.any() and is_read_to_count(header):
        recorded = np.flatnonzero(committed)
        parts = intact_parts(fd, layout, samples[recorded], records[recorded, 1:-1])
        committed[recorded] = parts.all(axis=1)
    return committed


def is_read_to_count(header: TailHeader) -> bool:
    """Tell whether samples are checked when the commit table is read: of lazy files, after another boot."""
    is_same_boot = header.boot_id == files.boot_id() != bytes(16)  # zeros: the system doesn't say
    return header.is_lazy and not is_same_boot


def intact_parts(
    fd: int,
    layout: Layout,
    samples: npt.NDArray[np.int64],
    crcs: npt.NDArray[np.uint32],
    *,
    num_threads: int = 1,
    progress: Progress = lambda nbytes: None,
) -> npt.NDArray[np.bool_]:
    """Read samples and compare their bytes in the file with what their records say (spec 6.4)."""
    computed = np.zeros_like(crcs)
    sample_nbytes = sum(array.meta.nbytes for array in layout.per_sample) // max(1, layout.num_samples)
    per_piece = max(1, _CHECK_BLOCK_BYTES // max(1, sample_nbytes))
    pieces = [slice(first, first + per_piece) for first in range(0, len(samples), per_piece)]

    def read(rows: slice) -> None:
        for column, array in enumerate(layout.per_sample):
            computed[rows, column] = _crcs_of(fd, layout, array, samples[rows])

    for first in range(0, len(pieces), _PIECES_AT_ONCE):
        batch = pieces[first : first + _PIECES_AT_ONCE]
        for_each(read, batch, num_threads=num_threads)
        progress(len(samples[batch[0].start : batch[-1].stop]) * sample_nbytes)
    intact: npt.NDArray[np.bool_] = computed == crcs
    return intact


def _crcs_of(fd: int, layout: Layout, array: ArrayLayout, samples: npt.NDArray[np.int64]) -> list[int]:
    """Compute the CRC-32 of each sample's slot or bytes."""
    if array.meta.is_ragged:
        ragged = layout.ragged[array.meta.name]
        return [_crc_of_extent(fd, *sample_extent(fd, ragged, sample)) for sample in samples.tolist()]
    if array.stride > _CHECK_BLOCK_BYTES:
        return [_crc_of_extent(fd, *array.slot(sample)) for sample in samples.tolist()]
    crcs, stride = [], array.stride
    for first, num in consecutive_runs(samples):
        raw = memoryview(read_at(fd, array.slot(first)[0], num * stride))
        crcs += crc32_each([raw[i * stride : (i + 1) * stride] for i in range(num)])
    return crcs


def _crc_of_extent(fd: int, first: int, end: int) -> int:
    crc = 0
    for offset in range(first, end, _CHECK_BLOCK_BYTES):
        crc = crc32(read_at(fd, offset, min(_CHECK_BLOCK_BYTES, end - offset)), crc)
    return crc
