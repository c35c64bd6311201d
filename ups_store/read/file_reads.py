"""Reads of a store's own file; where the disk fails, the error names the file and the bytes.

Other callers of `ups_store.system.files` read sources, downloads and caches, and have errors of their own.
"""

from __future__ import annotations

from ups_store.errors import ReadError
from ups_store.format.zip_records import END_BYTES, ROOT_NAME, Entry, may_be_store
from ups_store.system import files


def read_at(fd: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes`; less only at the end of the file.

    Raises:
        ReadError: If the file system fails.
    """
    try:
        return files.read_at(fd, offset, nbytes)
    except OSError as error:
        raise read_failed(error, fd, offset, nbytes) from error


def looks_like_store(fd: int) -> bool:
    """Whether an open file begins or ends as a store does, be it damaged (spec 2.2, 3.6)."""
    start = read_at(fd, 0, Entry(ROOT_NAME, 0, 0).header_nbytes)
    return may_be_store(start, read_at(fd, max(0, files.size(fd) - END_BYTES), END_BYTES))


def read_into(fd: int, offset: int, target: memoryview) -> int:
    """Fill `target`, a view of bytes; returns how many there were, fewer only at the end of the file.

    Raises:
        ReadError: If the file system fails.
    """
    try:
        return files.read_into(fd, offset, target)
    except OSError as error:
        raise read_failed(error, fd, offset, len(target)) from error


def size(fd: int) -> int:
    """Length of the open file; raises as `read_at`."""
    try:
        return files.size(fd)
    except OSError as error:
        raise read_failed(error, fd) from error


def mode(fd: int) -> int:
    """File type and permission bits of the open file; raises as `read_at`."""
    try:
        return files.mode(fd)
    except OSError as error:
        raise read_failed(error, fd) from error


def read_failed(error: OSError, fd: int, offset: int | None = None, nbytes: int = 0) -> ReadError:
    """The error for bytes, or the length, of an open file that the system couldn't read."""
    reason = error.strerror or str(error)
    failed = ReadError(
        f"it can't be read ({reason.lower()})",
        path=files.opened_path(fd),
        byte_range=None if offset is None else (offset, offset + nbytes),
        hint="check the disk, or the connection to it (`dmesg`), and open it again; or restore a copy",
    )
    failed.errno, failed.strerror = error.errno, reason
    return failed
