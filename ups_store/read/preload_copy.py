"""Mode "copy": the whole file in memory of ours, of this process or shared by the processes of a node."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ups_store.errors import MemoryLimitError
from ups_store.read.page_cache import STEP_BYTES, lock, populate, read_steps
from ups_store.read.preload import Budget, PreloadJob, ram_budget
from ups_store.system import files, mappings


def budget(job: PreloadJob) -> Budget:
    """The file's length: its pages in the page cache are given back when memory is short."""
    return ram_budget(job.file.nbytes, is_new=True)


def load(job: PreloadJob) -> None:
    """Copy the file, and have the store gather from the copy."""
    with refusal_as_error(job):
        _load_shared(job) if job.request.shared else _load_private(job)


def fill(memory: mmap.mmap, job: PreloadJob) -> None:
    """Copy the file into memory of the same length."""
    path, nbytes, num_threads = job.file.path, job.file.nbytes, job.num_threads
    target = memoryview(memory)
    with closing(read_steps(job.fd, nbytes, target=target, num_threads=num_threads, path=path)) as steps:
        for length in steps:
            job.progress(length)


@contextmanager
def refusal_as_error(job: PreloadJob) -> Iterator[None]:
    """Turn the system's "no memory" into `MemoryLimitError`: no budget knows of `ulimit -d`, for one."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        needed = budget(job)
        raise MemoryLimitError(
            "the system refuses the memory for a copy of the store",
            needed_bytes=needed.needed_bytes,
            available_bytes=needed.available_bytes,
            path=job.file.path,
            expected=f"{needed.needed_bytes:,} bytes",
            found=f"{needed.available_bytes:,} available by its own account",
            hint='look at `ulimit -a` and the control group, or preload with mode="page-cache"',
        ) from error


def _load_private(job: PreloadJob) -> None:
    memory = mappings.new_memory(job.file.nbytes, kind=mmap.mmap)
    if job.request.lock:
        lock(memory, path=job.file.path)
    fill(memory, job)
    job.file.use_copy(memory)


def _load_shared(job: PreloadJob) -> None:
    """A file in RAM, sealed: others map it too, and it goes with the last process that does."""
    file, nbytes = job.file, job.file.nbytes
    fd = files.create_anonymous("ups_store")
    try:
        files.truncate(fd, nbytes)
        locked = None
        if job.request.lock:
            locked = mappings.map_read_only(fd, nbytes)
            lock(locked, path=file.path)
        memory = mappings.map_to_fill(fd, nbytes)
        fill(memory, job)
        memory.close()  # nothing is sealed while somebody could write
        files.seal(fd)
        mapping = mappings.map_private(fd, nbytes)
        for there in [mapping] if locked is None else [mapping, locked]:
            for first in range(0, nbytes, STEP_BYTES):
                populate(there, first, min(STEP_BYTES, nbytes - first), job=job)
        file.use_copy(mapping, fd=fd)
        if locked is not None:
            file.keep(locked)
    finally:
        files.close(fd)
