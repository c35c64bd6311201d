"""The commit protocol: in which order a building file is written and synced (spec 6.7, 6.8).

Each public function is one numbered procedure of the spec; the numbers in the comments are its steps.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, NotCommittedError
from ups_store.format.build_tail import HOW_TO_REPLACE, pack_records
from ups_store.format.checksum import combine_crc32, crc32, crc32c
from ups_store.format.layout import PAGE_BYTES, ArrayLayout, consecutive_runs
from ups_store.format.zip_records import pack_directory
from ups_store.read.gather import Samples
from ups_store.read.recovery import read_commits, read_committed, read_records
from ups_store.system import files
from ups_store.system.files import is_in_memory, take_over_permissions
from ups_store.system.parallel import for_each
from ups_store.write.building import BuildingFile, failures_as_errors
from ups_store.write.encode import CrcTable, Piece

NUM_THREADS = 2  # one encodes while another writes, and the kernel writes to a file for one at a time
_MANY_PIECES = 4  # below them the threads gain nothing
_COPY_BYTES = 8 << 20  # of a small array at a time, when its chunk checksum is made


def committed_among(building: BuildingFile, samples: Samples) -> npt.NDArray[np.bool_]:
    """Which of the samples are committed, shape (M,); samples sorted, at least one."""
    with building.reading():
        return read_committed(building.fd, building.layout, building.header, samples)


def recorded_crcs(building: BuildingFile, samples: Samples) -> CrcTable:
    """CRC-32 of every array of committed samples, by their records, shape (M, num_arrays); samples sorted."""
    records = [
        read_records(building.fd, building.layout, np.arange(first, first + num))
        for first, num in consecutive_runs(samples)
    ]
    return np.concatenate(records)[:, 1:-1]


def commit_pieces(
    building: BuildingFile,
    samples: Samples,
    pieces: Sequence[slice],
    encoded: Callable[[slice], contextlib.AbstractContextManager[Piece]],
) -> None:
    """Write samples whose locks are held, slots first, records second (spec 6.7).

    Args:
        building: The file.
        samples: Sample numbers, sorted and distinct.
        pieces: Parts of them, all together.
        encoded: One of them, made ready, as long as the context lasts; called by several threads.
    Raises:
        CommitError: If a write or sync failed: none of these samples counts as committed, and the file must
            not be written through this descriptor again, for the kernel reports a failed sync only once.
    """
    what = f"samples {int(samples[0])}..{int(samples[-1])} were not committed"
    crcs = np.empty((len(samples), len(building.layout.per_sample)), np.uint32)

    def write(part: slice) -> None:
        with encoded(part) as piece:
            _write_piece(building, piece)
            crcs[part] = piece.crcs

    with failures_as_errors(building.building_path, building.needed_bytes, what):
        for_each(write, pieces, num_threads=NUM_THREADS if len(pieces) >= _MANY_PIECES else 1)  # 1
        if not building.is_lazy:
            files.sync_data(building.fd)  # 2: the bytes are durable before a record says so
        _write_records(building, samples, pack_records(building.header, samples, crcs))


def _write_piece(building: BuildingFile, piece: Piece) -> None:
    fd = building.fd
    for array, slots in zip(building.layout.per_sample, piece.slots, strict=True):
        if array.meta.is_ragged:
            _write_ragged(building, array, piece.samples, slots)
        else:
            _write_rows(fd, array.offset, array.stride, piece.samples, slots)
        if not building.is_lazy and (array.meta.is_sharded or array.meta.is_ragged):
            extents = [extent_of(building, array, int(piece.samples[i])) for i in (0, -1)]
            _start_writeback(fd, extents[0][0], extents[1][1])


def extent_of(building: BuildingFile, array: ArrayLayout, sample: int) -> tuple[int, int]:
    """`(first, past_last)` byte of a sample of any array."""
    if not array.meta.is_ragged:
        return array.slot(sample)
    start, end = building.offsets[array.meta.name][sample : sample + 2].tolist()
    return building.layout.ragged[array.meta.name].extent(start, end)


def _write_ragged(
    building: BuildingFile, array: ArrayLayout, samples: Samples, block: npt.NDArray[np.uint8]
) -> None:
    """Write samples of a ragged array, which lie one behind the other in `block`, and in the file in runs."""
    done = 0
    for sample, num in consecutive_runs(samples):
        first, end = extent_of(building, array, sample)[0], extent_of(building, array, sample + num - 1)[1]
        if first < end:
            files.write_at(building.fd, first, block.data[done : done + end - first])
            done += end - first


def _start_writeback(fd: int, first: int, end: int) -> None:
    """Have the disk begin with whole pages of samples; the next piece begins on the page that follows."""
    begin = first // PAGE_BYTES * PAGE_BYTES
    end = end // PAGE_BYTES * PAGE_BYTES
    if begin < end:
        files.start_writeback(fd, begin, end - begin)


def _write_records(building: BuildingFile, samples: Samples, records: npt.NDArray[np.uint32]) -> None:
    rows, layout = records.view(np.uint8), building.layout
    where = (building.fd, layout.table_offset, layout.record_nbytes, samples)
    try:
        _write_rows(*where, rows)  # 3
        if not building.is_lazy:
            files.sync_data(building.fd)  # 4: from here on the samples are committed
    except OSError:
        with contextlib.suppress(OSError):  # the page cache may hold records that the disk doesn't
            _write_rows(*where, np.zeros_like(rows))
        raise


def take_back(building: BuildingFile, samples: Samples) -> None:
    """Clear the records of samples: they count as not committed, durably (spec 6.9).

    Args:
        building: The file.
        samples: Sample numbers, sorted and distinct.
    Raises:
        CommitError: If a write or sync failed; as for `commit_pieces`.
    """
    layout, what = building.layout, f"commits of samples {int(samples[0])}.. were not taken back"
    records = np.zeros((len(samples), layout.record_nbytes), np.uint8)
    with (
        building.gate(exclusive=False),
        building.samples_locked(samples),
        failures_as_errors(building.building_path, building.needed_bytes, what),
    ):
        _write_rows(building.fd, layout.table_offset, layout.record_nbytes, samples, records)
        files.sync_data(building.fd)  # before anything is written in the samples' places


def _write_rows(fd: int, base: int, stride: int, samples: Samples, rows: npt.NDArray[np.uint8]) -> None:
    done = 0
    for first, num in consecutive_runs(samples) if stride else []:
        files.write_at(fd, base + first * stride, rows[done : done + num].data.cast("B"))
        done += num


def finish(building: BuildingFile) -> None:
    """Complete the finished layout, cut off the build tail and publish (spec 6.8); the gate is held.

    Every step can be repeated: until the file is cut to F the build tail stays the truth.

    Raises:
        NotCommittedError: If samples are missing.
        CorruptChunkError: If the bytes of a small array or constant changed since they were written.
        CommitError: If a write or sync failed; as for `commit_pieces`.
    """
    with failures_as_errors(building.building_path, building.needed_bytes, "the store was not finished"):
        _complete(building)
    publish(building)


def _complete(building: BuildingFile) -> None:
    layout, fd = building.layout, building.fd
    building.check_has_tail()
    files.sync_data(fd)  # 1: lazy commits, and what other processes wrote
    committed, crcs = read_commits(fd, layout, building.header)
    _check_complete(building, committed)
    write_entries(building, crcs)  # 2, 3
    files.sync_data(fd)  # 4
    files.truncate(fd, layout.file_nbytes)  # 5: from here on only the rename is left
    files.sync(fd)  # 6


def write_entries(building: BuildingFile, crcs: CrcTable) -> None:
    """Write what follows from samples that are there: indexes, local headers, the central directory.

    Args:
        building: The file, of which all else is written.
        crcs: CRC-32 of every sample's slot, bytes or rows, shape (N, num_arrays).
    """
    layout = building.layout
    columns = {array.meta.name: crcs[:, i] for i, array in enumerate(layout.per_sample)}
    arrays = [array for array in layout.arrays.values() if array.entry]
    data_crcs = [_finish_entry(building, array, columns.get(array.meta.name)) for array in arrays]
    directory = pack_directory(layout.entries, [*building.metadata_crcs, *data_crcs])
    files.write_at(building.fd, layout.directory_offset, directory)


def _check_complete(building: BuildingFile, committed: npt.NDArray[np.bool_]) -> None:
    missing = np.flatnonzero(~committed)
    if len(missing):
        raise NotCommittedError(
            f"{len(missing)} of {len(committed)} samples are not committed, the first of them",
            path=building.building_path,
            sample=int(missing[0]),
            hint="commit `writer.missing()` first",
        )


def publish(building: BuildingFile) -> None:
    """Give a finished file its own name and make that durable (spec 6.8, steps 7 and 8).

    It gets mode and owner of the store that it replaces, as those are now.
    One in memory has its name, and from now on it can't be changed (spec 6.12).
    """
    with failures_as_errors(
        building.building_path, building.needed_bytes, "the finished store was not published"
    ):
        if is_in_memory(building.path):
            files.seal(building.fd)
            return
        if take_over_permissions(building.fd, building.path):
            files.sync(building.fd)
        files.rename(building.building_path, building.path)  # 7
        files.sync_folder(building.path.parent)  # 8


def _finish_entry(building: BuildingFile, array: ArrayLayout, crcs: CrcTable | None) -> int:
    """Write an entry's local header and what follows its samples; returns the entry's CRC-32."""
    entry, fd = array.entry, building.fd
    assert entry is not None
    if array.meta.is_ragged and crcs is not None:
        sizes = np.diff(building.offsets[array.meta.name]) * array.stride
        trailer = array.pack_index()
        crc = combine_crc32(zip(crcs.tolist(), sizes.tolist(), strict=True))
    elif array.meta.is_sharded and crcs is not None:
        trailer = array.pack_index()
        crc = combine_crc32((int(crc), array.stride) for crc in crcs)
    else:
        chunk_crc32c, crc = _read_back(building, array)
        trailer = struct.pack("<I", chunk_crc32c)
        if crcs is None:  # a constant: its checksum was written with it
            is_same = trailer == files.read_at(fd, entry.end - len(trailer), len(trailer))
        else:
            is_same = crc == combine_crc32((int(crc), array.stride) for crc in crcs)
        if not is_same:
            raise CorruptChunkError(
                "bytes changed before the store was finished",
                path=building.building_path,
                array=array.meta.name,
                byte_range=(entry.data_offset, entry.end),
                hint=f"the disk or another program damaged them: begin again with {HOW_TO_REPLACE}",
            )
    files.write_at(fd, entry.end - len(trailer), trailer)
    crc = crc32(trailer, crc)
    files.write_at(fd, entry.offset, entry.pack_local_header(crc))
    return crc


def _read_back(building: BuildingFile, array: ArrayLayout) -> tuple[int, int]:
    """CRC-32C and CRC-32 of a plain chunk's payload."""
    castagnoli, iso = 0, 0
    for offset in range(0, array.meta.nbytes, _COPY_BYTES):
        nbytes = min(_COPY_BYTES, array.meta.nbytes - offset)
        block = files.read_at(building.fd, array.offset + offset, nbytes)
        castagnoli, iso = crc32c(block, castagnoli), crc32(block, iso)
    return castagnoli, iso
