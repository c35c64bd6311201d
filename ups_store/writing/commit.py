"""The unfinished file under its locks, and in which order it is written and synced (spec 6.1 to 6.9).

`commit_samples`, `take_back`, `finish` and `publish` are procedures of the spec; the numbers in the comments
are its steps.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    BuildLockedError,
    CommitError,
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    ReadError,
    StoreError,
    StoreReplacedError,
    TruncatedError,
)
from ups_store.format.build_tail import (
    BUILDER_LOCK,
    GATE_LOCK,
    HOW_TO_REPLACE,
    OWNER_NBYTES,
    OWNER_OFFSET,
    SAMPLE_LOCK,
    Owner,
    TailHeader,
    pack_records,
)
from ups_store.format.checksum import combine_crc32, crc32, crc32c
from ups_store.format.layout import PAGE_BYTES, ArrayLayout, Layout, consecutive_runs
from ups_store.format.ragged import Offsets
from ups_store.format.zip_records import pack_directory
from ups_store.read.catalog import read_building
from ups_store.read.gather import Samples
from ups_store.read.recovery import building_path, read_commits
from ups_store.system import files, locks
from ups_store.system.files import is_in_memory, take_over_permissions
from ups_store.system.parallel import for_each
from ups_store.writing.encode import (
    DURABLE_BLOCK_BYTES,
    LAZY_BLOCK_BYTES,
    CrcTable,
    Scratches,
    Values,
    blocks_of,
    encode_block,
)

LOCK_TIMEOUT_S = 60.0
MAX_LOCKS = 1024  # of a commit: for each the kernel looks through all that the file has
NUM_THREADS = 2  # one encodes while another writes, and the kernel writes to a file for one at a time
_MANY_BLOCKS = 4  # below them the threads gain nothing
_COPY_BYTES = 8 << 20  # of a small array at a time, when its chunk checksum is made


@dataclass(eq=False)
class BuildingFile:
    """An open building file; the process that holds it with the builder lock is the builder."""

    path: Path  # where the store will be published
    fd: int  # for reading and writing; -1 after closing, and in forked children
    layout: Layout
    header: TailHeader
    metadata_crcs: tuple[int, ...]  # of the metadata entries, in file order
    is_lazy: bool  # commits go unsynced: only where the header says so too, for then they are checked
    offsets: Mapping[str, Offsets]  # of each ragged array, the row where each sample begins, shape (N + 1,)
    is_spool: bool = False  # N and the numbers of rows are only what it has room for (spec 6.13)

    @functools.cached_property
    def building_path(self) -> Path:
        """The file's own name."""
        return building_path(self.path)

    @property
    def needed_bytes(self) -> int:
        """Room that it takes on the disk; of a spool, which is sparse, what it takes now."""
        nbytes = self.layout.building_nbytes
        return files.allocated_bytes(self.building_path) if self.is_spool else nbytes

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Have a read that fails say the file's name, not the one that it was created under (spec 6.6)."""
        try:
            yield
        except ReadError as error:
            error.path = str(self.building_path)
            raise

    @contextlib.contextmanager
    def gate(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the gate: shared while committing, exclusive while finishing or recovering (spec 6.3)."""
        with self._locked(GATE_LOCK, 1, exclusive=exclusive):
            if not exclusive:
                self.check_has_tail()
            yield

    def check_has_tail(self) -> None:
        """Fail where a commit record would be garbage, because the build tail isn't there (spec 6.3)."""
        nbytes = files.size(self.fd)
        if nbytes == self.layout.building_nbytes:
            return
        if nbytes == self.layout.file_nbytes:  # its builder died between cutting the tail off and publishing
            problem = "the store is complete and only waits to be published"
            hint = "nothing was written; run its builder again"
            raise StoreReplacedError(problem, path=self.building_path, hint=hint)
        raise TruncatedError(
            "another program changed the length of the unfinished file",
            path=self.building_path,
            clause="6.1",
            expected=self.layout.building_nbytes,
            found=nbytes,
            hint=f"nothing was written; build it again with {HOW_TO_REPLACE}",
        )

    @contextlib.contextmanager
    def samples_locked(self, samples: Samples) -> Iterator[None]:
        """Hold the locks of the samples; `samples` is sorted, so two committers can't wait for each other.

        Where they lie in too many runs, those of the samples between are held, too.
        """
        runs = consecutive_runs(samples)
        if len(runs) > MAX_LOCKS:
            runs = [(int(samples[0]), int(samples[-1] - samples[0]) + 1)]
        with contextlib.ExitStack() as stack:
            for first, num in runs:
                stack.enter_context(self._locked(SAMPLE_LOCK + first, num, exclusive=True))
            yield

    @contextlib.contextmanager
    def _locked(self, offset: int, length: int, *, exclusive: bool) -> Iterator[None]:
        path = self.building_path
        locks.lock(self.fd, offset, length, exclusive=exclusive, timeout_s=LOCK_TIMEOUT_S, path=path)
        try:
            if not files.is_file_at(self.fd, path):  # after taking any lock (spec 6.3)
                problem = "the building file was published, removed or restarted by another process"
                hint = "nothing was written; open the store, or create it again"
                raise StoreReplacedError(problem, path=path, hint=hint)
            yield
        finally:
            if self.fd >= 0:
                locks.unlock(self.fd, offset, length)

    def close(self) -> None:
        """Close the descriptor, which releases its locks."""
        fd, self.fd = self.fd, -1  # first: an interrupt must not have the number closed twice
        if fd >= 0:
            files.close(fd)

    def __del__(self) -> None:
        if self.fd >= 0:  # interrupted before anybody had it: the locks aren't kept
            with contextlib.suppress(OSError):
                self.close()


@contextlib.contextmanager
def failures_as_errors(
    path: Path, needed_bytes: int, problem: str, *, passing: tuple[type[OSError], ...] = ()
) -> Iterator[None]:
    """Turn what the file system reports into `DiskFullError` or `CommitError`, which says what didn't happen.

    The folder of `path` is asked for free room; errors of the classes `passing` are left as they are.
    """
    try:
        with files.disk_full_as_error(path, needed_bytes):
            yield
    except passing:
        raise
    except OSError as error:
        if not isinstance(error, ReadError) and isinstance(error, StoreError):
            raise
        problem = f"{problem} ({error.strerror or error})"
        if isinstance(error, locks.NoLocksError):
            hint = "write to a local disk of Linux, and copy the finished store here: reading needs no locks"
            raise CommitError(problem, kind="no_locks", path=path, hint=hint) from error
        hint = "check the disk and your permissions, and run again: it continues with the last good commit"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "this user may not write there: check the permissions of file and folder, or take another"
        raise CommitError(problem, path=path, hint=hint) from error


def become_builder_or_fail(fd: int, path: Path) -> None:
    """Become the builder, or fail with `BuildLockedError` that names the one there is (spec 6.3)."""
    if locks.try_lock(fd, BUILDER_LOCK):
        return
    owner = read_owner(fd, path)
    is_me = owner == Owner(os.getpid(), socket.gethostname())
    hint = "wait for it or end it; `ups_store.join` commits beside it"
    error = BuildLockedError(
        "this process holds it already" if is_me else "another process is building it",
        path=path,
        found=f"pid {owner.pid} on {owner.host}" if owner else "an unknown process",
        hint="close the first writer" if is_me else hint,
    )
    error.pid, error.host = (owner.pid, owner.host) if owner else (None, None)
    raise error


def read_owner(fd: int, path: Path) -> Owner | None:
    """Read which process noted that it builds the file; None where that isn't known."""
    try:
        layout = read_building(fd, path).layout
    except FormatError:
        return None
    return Owner.parse(files.read_at(fd, layout.tail_offset + OWNER_OFFSET, OWNER_NBYTES))


def commit_samples(
    building: BuildingFile, samples: Samples, rows: Samples, values: Values, scratches: Scratches
) -> None:
    """Write samples whose locks are held, slots first, records second (spec 6.7).

    Samples are sorted and distinct; `rows` says where each lies in `values`. After a write or sync that
    failed none of them counts as committed, and the file must not be written through this descriptor again,
    for the kernel reports a failed sync only once.
    """
    problem = f"samples {int(samples[0])}..{int(samples[-1])} were not committed"
    layout, fd = building.layout, building.fd
    crcs = np.empty((len(samples), len(layout.per_sample)), np.uint32)
    block_bytes = LAZY_BLOCK_BYTES if building.is_lazy else DURABLE_BLOCK_BYTES
    blocks = blocks_of(layout, rows, values, block_bytes=block_bytes)

    def write(block: slice) -> None:
        with scratches.lent() as scratch:
            slots, crcs[block] = encode_block(layout, rows[block], values, scratch)
            _write_slots(building, samples[block], slots)

    with failures_as_errors(building.building_path, building.needed_bytes, problem):
        for_each(write, blocks, num_threads=NUM_THREADS if len(blocks) >= _MANY_BLOCKS else 1)  # 1
        if not building.is_lazy:
            files.sync_data(fd)  # 2: the bytes are durable before a record says so
        write_records(building, samples, pack_records(building.header, samples, crcs))  # 3, 4


def _write_slots(building: BuildingFile, samples: Samples, slots: list[npt.NDArray[np.uint8]]) -> None:
    for array, encoded in zip(building.layout.per_sample, slots, strict=True):
        if array.meta.is_ragged:  # the samples lie one behind the other in memory, in the file in runs
            done = 0
            for sample, num in consecutive_runs(samples):
                first = extent_of(building, array, sample)[0]
                nbytes = extent_of(building, array, sample + num - 1)[1] - first
                if nbytes:
                    files.write_at(building.fd, first, encoded.data[done : done + nbytes])
                    done += nbytes
        else:
            _write_rows(building.fd, array.offset, array.stride, samples, encoded)
        if not building.is_lazy and (array.meta.is_sharded or array.meta.is_ragged):
            # The disk begins with whole pages; the next block begins on the page that follows.
            first = extent_of(building, array, int(samples[0]))[0] // PAGE_BYTES * PAGE_BYTES
            end = extent_of(building, array, int(samples[-1]))[1] // PAGE_BYTES * PAGE_BYTES
            if first < end:
                files.start_writeback(building.fd, first, end - first)


def extent_of(building: BuildingFile, array: ArrayLayout, sample: int) -> tuple[int, int]:
    """Return the `(first, past_last)` byte of a sample of any array."""
    if not array.meta.is_ragged:
        return array.slot(sample)
    start, end = building.offsets[array.meta.name][sample : sample + 2].tolist()
    return building.layout.ragged[array.meta.name].extent(start, end)


def write_records(building: BuildingFile, samples: Samples, records: npt.NDArray[np.uint32]) -> None:
    """Write commit records, and sync them unless the file is lazy; what fails is cleared again."""
    rows, layout = records.view(np.uint8), building.layout
    table = (building.fd, layout.table_offset, layout.record_nbytes, samples)
    try:
        _write_rows(*table, rows)  # 3
        if not building.is_lazy:
            files.sync_data(building.fd)  # 4: from here on the samples are committed
    except OSError:
        with contextlib.suppress(OSError):  # the page cache may hold records that the disk doesn't
            _write_rows(*table, np.zeros_like(rows))
        raise


def take_back(building: BuildingFile, samples: Samples) -> None:
    """Clear the records of samples, sorted: they count as not committed, durably (spec 6.9)."""
    layout, problem = building.layout, f"commits of samples {int(samples[0])}.. were not taken back"
    records = np.zeros((len(samples), layout.record_nbytes), np.uint8)
    with (
        building.gate(exclusive=False),
        building.samples_locked(samples),
        failures_as_errors(building.building_path, building.needed_bytes, problem),
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
    """
    layout, fd = building.layout, building.fd
    with failures_as_errors(building.building_path, building.needed_bytes, "the store was not finished"):
        building.check_has_tail()
        files.sync_data(fd)  # 1: lazy commits, and what other processes wrote
        committed, crcs = read_commits(fd, layout, building.header)
        if not committed.all():
            raise NotCommittedError(
                f"{np.sum(~committed)} of {len(committed)} samples are not committed, the first of them",
                path=building.building_path,
                sample=int(committed.argmin()),
                hint="commit `writer.missing()` first",
            )
        write_entries(building, crcs)  # 2, 3
        files.sync_data(fd)  # 4
        files.truncate(fd, layout.file_nbytes)  # 5: from here on only the rename is left
        files.sync(fd)  # 6
    publish(building)


def publish(building: BuildingFile) -> None:
    """Give a finished file its own name and make that durable (spec 6.8, steps 7 and 8).

    It gets mode and owner of the store that it replaces, as those are now.
    One in memory has its name, and from now on it can't be changed (spec 6.12).
    """
    problem = "the finished store was not published"
    with failures_as_errors(building.building_path, building.needed_bytes, problem):
        if is_in_memory(building.path):
            files.seal(building.fd)
            return
        if take_over_permissions(building.fd, building.path):
            files.sync(building.fd)
        files.rename(building.building_path, building.path)  # 7
        files.sync_folder(building.path.parent)  # 8


def write_entries(building: BuildingFile, crcs: CrcTable) -> None:
    """Write what follows from samples that are there: indexes, local headers, the central directory.

    `crcs` has the CRC-32 of every sample's slot, bytes or rows, shape (N, num_arrays).
    """
    layout, fd, data_crcs = building.layout, building.fd, []
    columns = {array.meta.name: crcs[:, i] for i, array in enumerate(layout.per_sample)}
    for array in [array for array in layout.arrays.values() if array.entry]:
        entry, meta, of_samples, crc = array.entry, array.meta, columns.get(array.meta.name), 0
        assert entry is not None
        if of_samples is not None and meta.is_ragged:
            sizes = np.diff(building.offsets[meta.name]) * array.stride
            crc = combine_crc32(zip(of_samples.tolist(), sizes.tolist(), strict=True))
        elif of_samples is not None:
            crc = combine_crc32((int(sample_crc), array.stride) for sample_crc in of_samples)
        if of_samples is not None and (meta.is_ragged or meta.is_sharded):
            trailer = array.pack_index()
        else:  # a plain chunk is read back for its CRC-32C; its CRC-32 has to be that of what was committed
            castagnoli, iso = 0, 0
            for offset in range(0, meta.nbytes, _COPY_BYTES):
                raw = files.read_at(fd, array.offset + offset, min(_COPY_BYTES, meta.nbytes - offset))
                castagnoli, iso = crc32c(raw, castagnoli), crc32(raw, iso)
            trailer = struct.pack("<I", castagnoli)
            if of_samples is None:  # a constant: its CRC-32C was written with it
                crc, is_same = iso, trailer == files.read_at(fd, entry.end - len(trailer), len(trailer))
            else:
                is_same = crc == iso
            if not is_same:
                raise CorruptChunkError(
                    "bytes changed before the store was finished",
                    path=building.building_path,
                    array=meta.name,
                    byte_range=(entry.data_offset, entry.end),
                    hint=f"the disk or another program damaged them: begin again with {HOW_TO_REPLACE}",
                )
        files.write_at(fd, entry.end - len(trailer), trailer)
        data_crcs.append(crc32(trailer, crc))
        files.write_at(fd, entry.offset, entry.pack_local_header(data_crcs[-1]))
    directory = pack_directory(layout.entries, [*building.metadata_crcs, *data_crcs])
    files.write_at(fd, layout.directory_offset, directory)
