"""Mode "page-cache": the file's pages in RAM once, whatever the number of processes that map it."""

from __future__ import annotations

import errno
import mmap
from contextlib import closing

import numpy as np

from ups_store.pread import cut
from ups_store.preload.budget import Budget, locked_bytes, ram_budget
from ups_store.preload.locking import lock
from ups_store.preload.reading import read_steps
from ups_store.preload.request import Job
from ups_store.system import files, mappings


def budget(job: Job) -> Budget:
    """The file's length, or nothing if all of it is there already.

    Resident pages count as available memory as long as nobody locks them. So what another process has locked
    needs no room, and what this one will lock does.
    """
    nbytes = job.file.nbytes
    is_resident = mappings.resident_nbytes(job.file.mapping(), nbytes) == nbytes
    stays = is_resident and (not job.request.lock or locked_bytes() >= nbytes)
    return ram_budget(0 if stays else nbytes, is_new=False)


def load(job: Job) -> None:
    """Read the file, and enter its pages in this process's page table."""
    file, nbytes = job.file, job.file.nbytes
    mapped = [file.mapping()] if file.access == "map" else []
    locked = None
    if job.request.lock:
        locked = mappings.map_read_only(job.fd, nbytes)
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


def populate(mapping: mmap.mmap, first: int, nbytes: int, *, job: Job) -> None:
    """Enter pages of a mapping in the page table, by touching one byte of each where the kernel can't.

    Raises:
        TruncatedError: If the file was cut.
    """
    try:
        if not mappings.populate(mapping, first, nbytes):
            np.frombuffer(mapping, np.uint8)[first : first + nbytes : mmap.PAGESIZE].max()
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        raise cut(job.file.path, job.file.nbytes, files.size(job.fd)) from error
