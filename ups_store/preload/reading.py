"""Reading a file by several threads, in large calls that let go of the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ups_store.pread import cut
from ups_store.system import files
from ups_store.system.mappings import page_aligned

STEP_BYTES = 64 << 20  # between two steps progress is told and Ctrl-C is heard
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
        got = files.read_into(fd, first + offset, piece)
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
