"""`StoreFile`: the file of an open store, mapped or read through a descriptor (spec 7.4, 7.5); its chunks.

Read calls are for network file systems, and for files that others may cut: a read that finds less than it
should is an error, where touching a mapping would end the process.

A chunk is what has a CRC-32C of its own (spec 5.2, 14.5): a sample of an array with slots, a whole array
without, or a sample of a ragged array.
"""

from __future__ import annotations

import errno
import math
import mmap
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, MemoryLimitError, ReadError, StoreClosedError, TruncatedError
from ups_store.format.checksum import Bytes, crc32c
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout, RaggedLayout
from ups_store.format.metadata import dtype_of
from ups_store.format.zip_records import END_BYTES, ROOT_NAME, Entry, may_be_store
from ups_store.system import files, memory

Access: TypeAlias = Literal["auto", "map", "pread"]
Read: TypeAlias = Callable[[int, int], Bytes]  # a file's bytes from an offset on; fewer where it ends

HOW_TO_MEND = "`ups-store verify` shows all damage, `verify --repair CONFIG` rebuilds what is damaged"

_BLOCK_BYTES = 4 << 20  # of a large payload at a time


class Descriptor:
    """A descriptor of a file, closed when nothing refers to this any more.

    Keep a reference as long as you read by it: a number that is closed amid a read, by `Store.close` in
    another thread, may by then be another file's.

    Attributes:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, files.close, fd)


class StoreFile:
    """An open file, which its owner closes, or forgets.

    Attributes:
        path: For messages.
        nbytes: Length of the finished file.
        network: Name of the network file system that it lies on; None for local ones.
        access: "map", or "pread".
        file_access: How the file itself is read; after `use_copy` that may be another way than `access`.
        is_copy: Whether samples and views come from a copy in RAM.
    """

    def __init__(self, path: Path, fd: int, nbytes: int, *, access: Access, keeps_fd: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.network = files.network_file_system(fd)
        self.access = access if access != "auto" else "pread" if self.network else "map"
        self.file_access = self.access
        self.is_copy = False
        self._copy_fd = -1
        # A mapping needs no descriptor of ours; commit tables and samples that are read do.
        keeps_fd = keeps_fd or self.access == "pread"
        self._mapping = None if self.access == "pread" else _map_file(fd, nbytes, path)
        self._descriptor = Descriptor(files.duplicate(fd)) if keeps_fd else None

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of a file that is read, to be held as long as the reading takes."""
        descriptor = self._descriptor
        if descriptor is None:
            raise self._closed()
        return descriptor

    def check_open(self) -> None:
        """Fail after `close`."""
        if self._mapping is None and self._descriptor is None:
            raise self._closed()

    def _closed(self) -> StoreClosedError:
        return StoreClosedError("the store is closed", path=self.path, hint="open it again")

    def mapping(self) -> mmap.mmap:
        """Give the mapped file; a file that is read is mapped when this is first called."""
        self.check_open()
        if self._mapping is None:
            self._mapping = _map_file(self.descriptor.fd, self.nbytes, self.path)
        return self._mapping

    @property
    def copy_path(self) -> Path | None:
        """Tell where other processes of this user can open the copy in RAM; None unless it may be shared."""
        return None if self._copy_fd < 0 else files.descriptor_path(self._copy_fd)

    def use_copy(self, copy: mmap.mmap, *, fd: int = -1) -> None:
        """Take samples and views from a copy in RAM from now on; `fd` is its file if it may be shared."""
        self._copy_fd = files.duplicate(fd) if fd >= 0 else -1
        if fd >= 0:
            weakref.finalize(copy, files.close, self._copy_fd)
        self._mapping, self.access, self.is_copy = copy, "map", True

    def check_length(self) -> None:
        """Fail if the file was cut: touching what is gone of a mapping would end the process (spec 7.5)."""
        if self.is_copy:
            self.check_open()  # a copy can't be cut
            return
        mapping = self._mapping
        if mapping is None:
            descriptor = self.descriptor  # held while it is used
            nbytes = files.size(descriptor.fd)
        else:
            nbytes = memory.mapped_file_nbytes(mapping)
        if nbytes < self.nbytes:
            raise cut(self.path, self.nbytes, nbytes)

    def read(self, first: int, nbytes: int) -> Bytes:
        """Read bytes of the file, the way that its samples are got."""
        if self.access == "pread":
            descriptor = self.descriptor
            return read_bytes(descriptor.fd, first, nbytes, path=self.path)
        return memoryview(self.mapping())[first : first + nbytes]

    def view(self, array: ArrayLayout) -> npt.NDArray[Any]:
        """Give the whole array, read-only: over the mapping, or a constant that was read."""
        meta, dtype = array.meta, dtype_of(array.meta.dtype)
        if array.entry is None:
            view = np.zeros(meta.shape, dtype)
        elif self.access == "pread" and meta.is_constant:
            descriptor = self.descriptor
            view = read_constant(descriptor.fd, array, path=self.path)
        else:
            shape = meta.sample_shape
            strides = tuple(dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            if meta.is_committed:
                strides = (array.stride, *strides)  # one strided array where there are slots (spec 5.5)
            elif not meta.is_constant:
                strides = (dtype.itemsize,)  # offsets of a ragged array
            view = np.ndarray(meta.shape, dtype, self.mapping(), array.offset, strides)
        view.flags.writeable = False
        return view

    def close(self) -> None:
        """Let go of mapping and descriptor; a read under way ends. Closing twice is allowed."""
        self._mapping = self._descriptor = None
        self._copy_fd = -1


def _map_file(fd: int, nbytes: int, path: Path) -> mmap.mmap:
    try:
        return memory.map_private(fd, nbytes)
    except ValueError as error:  # `mmap` compares the length
        raise cut(path, nbytes, files.size(fd)) from error
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise files.opening_error(path, error) from error
        limit = memory.address_space_left()
        raise MemoryLimitError(
            "the system refuses the address space to map the file",
            needed_bytes=nbytes,
            available_bytes=limit or 0,
            kind="address_space",
            path=path,
            expected=f"{nbytes:,} bytes",
            found="no limit of the process" if limit is None else f"{limit:,} bytes left by `ulimit -v`",
            hint='raise that limit, or open it with access="pread"',
        ) from error


def read_constant(fd: int, array: ArrayLayout, *, path: Path) -> npt.NDArray[Any]:
    """Read a whole array without slots into new memory."""
    whole = np.empty(array.meta.shape, dtype_of(array.meta.dtype))
    read_rows(fd, array.offset, whole, path=path)
    return whole


def read_rows(fd: int, first: int, target: npt.NDArray[Any], *, path: Path) -> None:
    """Fill an array, C-contiguous and not empty, with the bytes of the file from `first` on."""
    memory = target.reshape(-1).view(np.uint8).data
    nbytes = read_into(fd, first, memory)
    if nbytes < len(memory):
        raise cut(path, first + len(memory), first + nbytes)


def read_bytes(fd: int, first: int, nbytes: int, *, path: Path) -> bytes:
    """Read bytes of the file; `TruncatedError` if they aren't all there."""
    raw = read_at(fd, first, nbytes)
    if len(raw) < nbytes:
        raise cut(path, first + nbytes, first + len(raw))
    return raw


def cut(path: Path, expected: int, found: int) -> TruncatedError:
    """Make the error for a file that became shorter while it was open."""
    return TruncatedError(
        "another program cut the file while it was open",
        path=path,
        kind="truncated_while_open",
        clause="6.11",
        expected=f"at least {expected} bytes",
        found=found,
        hint="open it again; a store is replaced by renaming, never changed in place",
    )


def read_at(fd: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes`; less only at the end of the file."""
    try:
        return files.read_at(fd, offset, nbytes)
    except OSError as error:
        raise read_failed(error, fd, offset, nbytes) from error


def looks_like_store(fd: int) -> bool:
    """Tell whether an open file begins or ends as a store does, be it damaged (spec 2.2, 3.6)."""
    start = read_at(fd, 0, Entry(ROOT_NAME, 0, 0).header_nbytes)
    return may_be_store(start, read_at(fd, max(0, files.size(fd) - END_BYTES), END_BYTES))


def read_into(fd: int, offset: int, target: memoryview) -> int:
    """Fill `target`, a view of bytes; returns how many there were, fewer only at the end of the file."""
    try:
        return files.read_into(fd, offset, target)
    except OSError as error:
        raise read_failed(error, fd, offset, len(target)) from error


def size(fd: int) -> int:
    """Give the length of the open file; raises as `read_at`."""
    try:
        return files.size(fd)
    except OSError as error:
        raise read_failed(error, fd) from error


def mode(fd: int) -> int:
    """Give the file type and permission bits of the open file; raises as `read_at`."""
    try:
        return files.mode(fd)
    except OSError as error:
        raise read_failed(error, fd) from error


def read_failed(error: OSError, fd: int, offset: int | None = None, nbytes: int = 0) -> ReadError:
    """Make the error for bytes, or the length, of an open file that the system couldn't read."""
    reason = error.strerror or str(error)
    failed = ReadError(
        f"it can't be read ({reason.lower()})",
        path=files.opened_path(fd),
        byte_range=None if offset is None else (offset, offset + nbytes),
        hint="check the disk, or the connection to it (`dmesg`), and open it again; or restore a copy",
    )
    failed.errno, failed.strerror = error.errno, reason
    return failed


class Chunk(NamedTuple):
    """A chunk of a store; one is made for every sample that is read, so it isn't a data class."""

    array: str  # name of its array
    sample: int | None  # its sample; None for a whole array
    first: int  # first byte in the file
    nbytes: int  # bytes of its payload
    crc: int | None = None  # CRC-32C of the payload; None where it lies behind the payload

    @property
    def end(self) -> int:
        """First byte past the chunk, its checksum included."""
        return self.first + self.nbytes + (CHECKSUM_BYTES if self.crc is None else 0)

    def payload_of(self, raw: Bytes) -> memoryview | None:
        """Cut the payload out of the chunk's bytes; None unless it matches the checksum."""
        payload, stored = memoryview(raw)[: self.nbytes], self.crc
        if stored is None:
            stored = _stored(raw[self.nbytes :])
        return payload if len(payload) == self.nbytes and crc32c(payload) == stored else None

    def is_intact(self, read: Read) -> bool:
        """Compare the payload with its checksum, a block at a time."""
        stored, computed = self._checksums(read)
        return computed is not None and stored == computed

    def check(self, read: Read, path: Path) -> None:
        """Raise `CorruptChunkError` unless the chunk is intact; `path` is for the message."""
        stored, computed = self._checksums(read)
        if stored != computed or computed is None:
            raise self.damaged(path, stored=stored, computed=computed)

    def damaged(
        self,
        path: Path,
        problem: str = "the bytes don't match their checksum",
        *,
        stored: int | None = None,
        computed: int | None = None,
        hint: str = HOW_TO_MEND,
    ) -> CorruptChunkError:
        """Make the error for this chunk."""
        return CorruptChunkError(
            problem,
            path=path,
            array=self.array,
            sample=self.sample,
            byte_range=(self.first, self.end),
            clause="5.2" if self.crc is None else "14.5",
            expected=None if stored is None else f"crc32c {stored:08x}",
            found=None if computed is None else f"{computed:08x}",
            hint=hint,
        )

    def _checksums(self, read: Read) -> tuple[int | None, int | None]:
        """Give the CRC-32C that is stored, and the payload's; None where the file ends before."""
        computed = 0
        for offset in range(0, self.nbytes, _BLOCK_BYTES):
            num = min(_BLOCK_BYTES, self.nbytes - offset)
            block = read(self.first + offset, num)
            if len(block) < num:
                return self.crc, None
            computed = crc32c(block, computed)
        if self.crc is not None:
            return self.crc, computed
        return _stored(read(self.first + self.nbytes, CHECKSUM_BYTES)), computed


def _stored(raw: Bytes) -> int | None:
    return int(struct.unpack("<I", raw)[0]) if len(raw) == CHECKSUM_BYTES else None


def chunk_of(array: ArrayLayout, sample: int | None = None) -> Chunk:
    """Give the chunk of a sample, where there are slots; else that of the whole array."""
    if array.meta.is_sharded and sample is not None:
        return Chunk(array.meta.name, sample, array.slot(sample)[0], array.meta.sample_nbytes)
    return Chunk(array.meta.name, None, array.offset, array.meta.nbytes)


def rows_chunk(layout: RaggedLayout, sample: int, rows: tuple[int, int], crc: int) -> Chunk:
    """Give the chunk of a sample of a ragged array, which has these rows."""
    first, end = layout.extent(*rows)
    return Chunk(layout.rows.meta.name, sample, first, end - first, crc)


class TouchChecks:
    """Checks each chunk of an open store when it is first used (`verify="touch"`).

    Compiled code checks what it copies, and marks it; this is the check of all else, and says what is wrong.
    Several threads may check the same chunk twice, which costs time only.
    """

    def __init__(self, read: Read, path: Path) -> None:
        self._read, self._path = read, path
        self._checked: dict[str, npt.NDArray[np.bool_]] = {}
        self._done: set[str] = set()  # arrays of which nothing is left to check

    def flags(self, array: ArrayLayout) -> npt.NDArray[np.bool_] | None:
        """Tell which samples of an array were checked, bool, shape (N,); None where nothing is left to check.

        An array without slots is checked here.
        """
        name = array.meta.name
        if name in self._done or array.entry is None:
            return None
        if not array.meta.is_sharded:
            chunk_of(array).check(self._read, self._path)
            self._done.add(name)
            return None
        return self._flags(name, array.meta.shape[0])

    def check(self, array: ArrayLayout, samples: npt.NDArray[np.int64]) -> None:
        """Check the chunks of an array that hold these samples, unless that was done before."""
        checked = self.flags(array)
        if checked is None or checked[samples].all():
            return
        for sample in np.unique(samples[~checked[samples]]).tolist():
            chunk_of(array, sample).check(self._read, self._path)
            checked[sample] = True

    def check_rows(
        self,
        layout: RaggedLayout,
        samples: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> None:
        """Check samples of a ragged array, which have these rows, likewise."""
        checked = self._flags(layout.rows.meta.name, layout.checks.meta.shape[0])
        for i in np.flatnonzero(~checked[samples]).tolist():
            sample = int(samples[i])
            (stored,) = struct.unpack("<I", self._read(layout.checks.offset + 4 * sample, 4))
            chunk = rows_chunk(layout, sample, (int(starts[i]), int(ends[i])), stored)
            chunk.check(self._read, self._path)
            checked[sample] = True

    def _flags(self, name: str, num_samples: int) -> npt.NDArray[np.bool_]:
        flags = self._checked.get(name)
        if flags is None:
            flags = self._checked.setdefault(name, np.zeros(num_samples, bool))
        return flags
