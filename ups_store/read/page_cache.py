"""Mode "page-cache": the file's pages in RAM once, whatever the number of processes that map it.

`read_steps`, by which other modes copy as well, reads by several threads in large calls that let go of the
interpreter lock; `lock` keeps memory from being swapped out or given back (mlock).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from ups_store.errors import MemoryLimitError
from ups_store.read.preload import Budget, PreloadJob, locked_bytes, ram_budget
from ups_store.read.store_file import cut, read_failed, read_into
from ups_store.system import files, mappings
from ups_store.system.mappings import page_aligned

STEP_BYTES = 64 << 20  # between two steps progress is called and Ctrl-C is heard

PIECE_BYTES = 4 << 20  # of one call; a step is a whole number of them


def read_steps(
    fd: int,
    nbytes: int,
    *,
    first: int = 0,
    target: memoryview | None = None,
    num_threads: int,
    path: Path,
) -> Generator[int, None, None]:
    """Read part of a file; threads read on while the caller handles a step. Closing it ends them.

    Args:
        fd: The file.
        nbytes: Bytes to read.
        first: Where they begin.
        target: Bytes to fill, as many; by default what is read is dropped, and stays in the page cache.
        num_threads: Reads in flight.
        path: For messages.
    Yields:
        Length of each step, in file order, once it was read: `STEP_BYTES`, the last one less.
    Raises:
        TruncatedError: If the file is shorter.
    """
    scratch = threading.local()

    def read(offset: int) -> None:
        length = min(PIECE_BYTES, nbytes - offset)
        piece = _scratch(scratch)[:length] if target is None else target[offset : offset + length]
        got = read_into(fd, first + offset, piece)
        if got < length:
            raise cut(path, first + nbytes, first + offset + got)

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ups-store-preload")
    try:
        pieces = _map(pool, read, range(0, nbytes, PIECE_BYTES))
        for step in range(0, nbytes, STEP_BYTES):
            length = min(STEP_BYTES, nbytes - step)
            for _ in range(0, length, PIECE_BYTES):
                next(pieces)
            yield length
    finally:
        pool.shutdown(cancel_futures=True)


def _map(
    pool: ThreadPoolExecutor, function: Callable[[int], None], arguments: Iterable[int]
) -> Iterator[None]:
    """Call by threads; one after the other in this one where limits leave no room for their stacks."""
    try:
        return pool.map(function, arguments)
    except RuntimeError:  # can't start new thread
        pool.shutdown(cancel_futures=True)
        return map(function, arguments)


def _scratch(thread: threading.local) -> memoryview:
    """Memory of one thread, used again and again."""
    if not hasattr(thread, "memory"):
        thread.memory = page_aligned(PIECE_BYTES).data
    memory: memoryview = thread.memory
    return memory


def budget(job: PreloadJob) -> Budget:
    """The file's length, or nothing if all of it is there already.

    Resident pages count as available memory as long as no process locks them. So what another process has
    locked needs no room, and what this one will lock does.
    """
    nbytes = job.file.nbytes
    is_resident = mappings.resident_nbytes(job.file.mapping(), nbytes) == nbytes
    stays = is_resident and (not job.request.lock or locked_bytes() >= nbytes)
    return ram_budget(0 if stays else nbytes, is_new=False)


def load(job: PreloadJob) -> None:
    """Read the file, and enter its pages in this process's page table."""
    file, nbytes = job.file, job.file.nbytes
    mapped = [file.mapping()] if file.access == "map" else []
    locked = None
    if job.request.lock:
        try:
            locked = mappings.map_read_only(job.fd, nbytes)
        except ValueError as error:  # `mmap` compares the length
            raise cut(file.path, nbytes, files.size(job.fd)) from error
        lock(locked, path=file.path)
        mapped.append(locked)
    first = 0
    with closing(read_steps(job.fd, nbytes, num_threads=job.num_threads, path=file.path)) as steps:
        for length in steps:
            file.check_length()
            for mapping in mapped:
                populate(mapping, first, length, job=job)
            first += length
            job.progress(length)
    if locked is not None:
        file.keep(locked)


def populate(mapping: mmap.mmap, first: int, nbytes: int, *, job: PreloadJob) -> None:
    """Enter pages of a mapping in the page table, by touching one byte of each where the kernel can't.

    Raises:
        TruncatedError: If the file was cut.
        ReadError: If the disk fails.
    """
    try:
        if not mappings.populate(mapping, first, nbytes):
            np.frombuffer(mapping, np.uint8)[first : first + nbytes : mmap.PAGESIZE].max()
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        length = files.size(job.fd)
        if length < job.file.nbytes:
            raise cut(job.file.path, job.file.nbytes, length) from error
        # What would have been SIGBUS; which of the pages, and what the disk said, isn't known.
        failed = OSError(errno.EIO, os.strerror(errno.EIO))
        raise read_failed(failed, job.fd, first, nbytes) from error


def lock(mapping: mmap.mmap, *, path: Path) -> None:
    """Lock every page of a mapping that is there, and the others when they come.

    Raises:
        MemoryLimitError: With kind "memlock", if RLIMIT_MEMLOCK is lower.
    """
    try:
        mappings.lock_on_fault(mapping)
    except OSError as refused:
        limit = mappings.memory_lock_limit()
        raise MemoryLimitError(
            "the system refuses to lock so much memory (RLIMIT_MEMLOCK)",
            needed_bytes=len(mapping),
            available_bytes=limit,
            kind="memlock",
            path=path,
            expected=f"a limit of at least {len(mapping):,} bytes",
            found=f"{limit:,}",
            hint="raise it (`ulimit -l`, or LimitMEMLOCK= of the service), or preload without lock=True",
        ) from refused
