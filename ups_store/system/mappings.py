"""Memory: files that are mapped, memory without a file, which of it is resident, and what limits it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ups_store.system.files import libc, system_text

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_POPULATE_READ = 22  # Linux 5.14

_Mapping = TypeVar("_Mapping", bound=mmap.mmap)


def map_private(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file copy-on-write: changes of the memory never reach the file (spec 7.4)."""
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def mapped_file_nbytes(mapping: mmap.mmap) -> int:
    """Length of the mapped file now: `mmap` keeps a descriptor of it."""
    return mapping.size()


def resident_nbytes(mapping: mmap.mmap, nbytes: int) -> int:
    """Bytes of a mapped file that lie in the page cache, in whole pages (mincore).

    The kernel answers only processes that could write the file; to others every page looks resident.
    """
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    _memory_call("mincore", mapping, 0, nbytes, ctypes.c_void_p(pages.ctypes.data))
    return min(nbytes, int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE)


def _memory_call(name: str, mapping: mmap.mmap, first: int, nbytes: int, *arguments: Any) -> None:
    """A system call on part of a mapping; unlike a method of `mmap` it lets go of the GIL meanwhile."""
    where = ctypes.c_void_p(address(mapping) + first)
    if getattr(libc(), name)(where, ctypes.c_size_t(nbytes), *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def address(mapping: mmap.mmap) -> int:
    """Where the mapping begins in this process's memory."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def populate(mapping: mmap.mmap, first: int, nbytes: int) -> bool:
    """Read pages of a mapping in and enter them in the page table, no page copied; False before Linux 5.14.

    Args:
        mapping: The mapping; OSError (EFAULT) if its file was cut.
        first: A multiple of the page size.
        nbytes: Length.
    """
    try:
        _memory_call("madvise", mapping, first, nbytes, ctypes.c_int(_MADV_POPULATE_READ))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def address_space_left() -> int | None:
    """What RLIMIT_AS (`ulimit -v`) leaves this process, in bytes; None for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int((system_text(Path("/proc/self/statm")) or "0").split()[0])
    return max(0, limit - pages * mmap.PAGESIZE)


def new_memory(nbytes: int, *, shared: bool = False, kind: type[_Mapping]) -> _Mapping:
    """Zeroed memory with huge pages where the system has them.

    Args:
        nbytes: Length, > 0.
        shared: Whether forked children share it; else each has its own copy of what is changed.
        kind: `mmap.mmap` or a subclass.
    """
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE)
    mapping = kind(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _prefer_huge_pages(mapping)
    return mapping


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
        mapping.madvise(mmap.MADV_HUGEPAGE)


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory that begins with a page, to read files into; owned by its holder.

    malloc's large blocks begin 16 bytes into one, and where a copy's target lies 16 bytes further in its page
    than the source, `rep movsb` crawls on some processors: an AMD EPYC (Zen 3) then reads 2.4 instead of 12
    GB/s out of the page cache (2026-11-22).
    """
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    shift = -memory.ctypes.data % mmap.PAGESIZE
    return memory[shift : shift + nbytes]


def map_to_fill(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file in memory so that what is written to the mapping is in the file."""
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _prefer_huge_pages(mapping)
    return mapping


def map_read_only(fd: int, nbytes: int, *, first: int = 0) -> mmap.mmap:
    """Map a file, from a multiple of the page size on, for reading only.

    Locking a private mapping that may be written would copy every page.
    """
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=first)
