"""Preloading: which mode fits into memory, what each does, and the report of what was done.

- "page-cache": the file's pages in RAM once, whatever the number of processes that map it.
- "copy": the whole file in memory of this process, or shared by the processes of a machine.
- "device": samples in a device's memory, by `ups_store.torch`.

What a mode needs and what there is, its budget, are compared before anything is allocated.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ups_store import module_above
from ups_store.errors import DeviceError, MemoryLimitError, SpecError, StoreError
from ups_store.printable import printable
from ups_store.read.catalog import Catalog
from ups_store.read.store_file import StoreFile, cut, read_failed, read_into
from ups_store.system import files, memory
from ups_store.system.files import Progress
from ups_store.system.memory import available_bytes

Mode: TypeAlias = Literal["auto", "page-cache", "copy", "device"]
Outcome: TypeAlias = Literal["page-cache", "copy", "device", "mapped", "mixed"]

logger = logging.getLogger(__name__)

MARGIN = 0.1  # share of the available memory that is left to others
NUM_THREADS = 4  # reads in flight, which a disk needs more of than there may be processors
STEP_BYTES = 64 << 20  # between two steps progress is called and Ctrl-C is heard
PIECE_BYTES = 4 << 20  # of one call; a step is a whole number of them
_USED_BY = {  # arguments that have an effect in some modes only
    "device": ("auto", "device"),
    "samples": ("device",),
    "shared": ("auto", "copy"),
}

_INSTEAD = {"pinned": 'write "device", or "copy" for memory of the host'}  # of modes that there were
_NO_FILES_IN_MEMORY = (errno.ENOSYS, errno.EPERM)  # no memfd: another system, or a sandbox that forbids it


@dataclass(frozen=True)
class Request:
    """Arguments of `Store.preload`, which explains them."""

    mode: Mode = "auto"
    device: str | None = None
    samples: range | None = None
    shared: bool = False
    margin: float = MARGIN
    num_threads: int | None = None
    progress: Progress | None = None

    def check(self, num_samples: int, *, path: Path, lock: object = False) -> None:
        """Refuse what has no meaning for a store of `num_samples`, and `lock`, which there was."""

        def expect(name: str, fits: bool, expected: str, found: object, hint: str | None = None) -> None:
            if not fits:
                problem = f"preload argument {name!r}"
                raise SpecError(problem, kind=name, path=path, expected=expected, found=found, hint=hint)

        hint = 'leave it out; preload("copy", shared=True) keeps what the page cache may give back'
        expect("lock", not lock, "none: pages aren't locked any more", lock, hint)
        modes, hint = get_args(Mode), _INSTEAD.get(self.mode, "")
        expect("mode", self.mode in modes, f"one of {', '.join(modes)}", self.mode, hint)
        for name, useful in _USED_BY.items():
            fits = self.mode in useful or not getattr(self, name)
            expect(name, fits, f"mode {' or '.join(useful)}, where it has an effect", self.mode)
        expect("margin", 0 <= self.margin < 1, "0 <= margin < 1", self.margin)
        fits = self.num_threads is None or self.num_threads >= 1
        expect("num_threads", fits, "at least 1", self.num_threads)
        part = self.samples
        fits = part is None or (part.step == 1 and 0 <= part.start < part.stop <= num_samples)
        expect("samples", fits, f"a range of step 1 within 0..{num_samples}", part)


@dataclass(frozen=True)
class PreloadJob:
    """A request and what it is about; `fd` reads the file, as the mapping can't be read from."""

    file: StoreFile
    catalog: Catalog
    fd: int
    request: Request

    def read(
        self, nbytes: int, *, first: int = 0, target: memoryview | None = None
    ) -> Generator[int, None, None]:
        """Read part of the file, and report each step once it was handled; closing it ends the threads.

        Threads read on in large calls, which let go of the interpreter lock, while the caller handles a step.
        """
        path, scratches = self.file.path, threading.local()

        def read(offset: int) -> None:
            length = min(PIECE_BYTES, nbytes - offset)
            if target is not None:
                block = target[offset : offset + length]
            else:
                if not hasattr(scratches, "block"):  # of one thread, used again and again
                    scratches.block = memory.page_aligned(PIECE_BYTES).data
                block = scratches.block[:length]
            nbytes_read = read_into(self.fd, first + offset, block)
            if nbytes_read < length:
                raise cut(path, first + nbytes, first + offset + nbytes_read)

        offsets = range(0, nbytes, PIECE_BYTES)
        pool = ThreadPoolExecutor(self.request.num_threads or NUM_THREADS, "ups-store-preload")
        try:
            try:
                blocks = pool.map(read, offsets)
            except RuntimeError:  # limits leave no room for the stacks of threads
                pool.shutdown(cancel_futures=True)
                blocks = map(read, offsets)
            for step in range(0, nbytes, STEP_BYTES):
                length = min(STEP_BYTES, nbytes - step)
                for _ in range(0, length, PIECE_BYTES):
                    next(blocks)
                yield length
                if self.request.progress is not None:
                    self.request.progress(length)
        finally:
            pool.shutdown(cancel_futures=True)

    def populate(self, mapping: mmap.mmap, first: int, nbytes: int) -> None:
        """Enter pages of a mapping in the page table, by touching one byte of each where the kernel can't."""
        try:
            if not memory.populate(mapping, first, nbytes):
                np.frombuffer(mapping, np.uint8)[first : first + nbytes : mmap.PAGESIZE].max()
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            length = files.size(self.fd)
            if length < self.file.nbytes:
                raise cut(self.file.path, self.file.nbytes, length) from error
            # What would have been SIGBUS; which of the pages, and what the disk said, isn't known.
            failed = OSError(errno.EIO, os.strerror(errno.EIO))
            raise read_failed(failed, self.fd, first, nbytes) from error


@dataclass(frozen=True)
class PreloadReport:
    """What `preload` of a store did.

    Attributes:
        path: The store.
        mode: Where the data lie now; "mapped" if `auto` found room nowhere: they are read when they are used;
            "mixed" for partitions of which `auto` put some here, some there.
        why: Why this mode, with needed and available bytes, and what the modes before it were refused for.
        nbytes: Bytes that lie there now, also where they did before; 0 for "mapped".
        seconds: How long it took, in seconds.
        on_device: For "device" an `ups_store.torch.DeviceStore`, whose `gather` returns tensors there; None
            for a store in partitions: each of its `parts` has one.
        partitions: A report for each partition; empty for a store in one file.
    """

    path: Path
    mode: Outcome
    why: str
    nbytes: int
    seconds: float
    on_device: Any = None
    partitions: tuple[PreloadReport, ...] = ()

    @classmethod
    def joined(cls, path: Path, partitions: Sequence[PreloadReport]) -> PreloadReport:
        """Make the report on a store in partitions."""
        modes = {report.mode for report in partitions}
        mode: Outcome = modes.pop() if len(modes) == 1 else "mixed"
        why = "; ".join(dict.fromkeys(f"{report.path.name}: {report.why}" for report in partitions))
        nbytes = sum(report.nbytes for report in partitions)
        seconds = sum(report.seconds for report in partitions)
        return cls(path, mode, why, nbytes, seconds, None, tuple(partitions))

    @property
    def parts(self) -> tuple[PreloadReport, ...]:
        """The report on each file: those on the partitions, or this one."""
        return self.partitions or (self,)


@dataclass(frozen=True)
class Budget:
    """Memory that a mode needs, and memory that may be used."""

    needed_bytes: int
    available_bytes: int
    place: str = "RAM"

    def __str__(self) -> str:
        return f"{self.needed_bytes:,} bytes needed, {self.available_bytes:,} bytes of {self.place} available"

    def check(self, mode: str, *, margin: float = MARGIN, path: Path | None = None) -> None:
        """Refuse what doesn't fit, a share of `margin` being left to others."""
        if self.needed_bytes <= self.available_bytes * (1 - margin):
            return
        raise MemoryLimitError(
            f"the store doesn't fit into {self.place} for preload mode {mode!r}",
            needed_bytes=self.needed_bytes,
            available_bytes=self.available_bytes,
            path=path,
            expected=f"{self.needed_bytes:,} bytes and a margin of {margin:.0%}",
            found=f"{self.available_bytes:,} available",
            hint='free memory, raise the limit, or preload with mode="auto", which takes what fits',
        )


def ram_budget(needed_bytes: int, *, is_new: bool) -> Budget:
    """Compute the budget for RAM; new memory must fit into this process's address space too (`ulimit -v`)."""
    limit = memory.address_space_left() if is_new and needed_bytes else None
    available = available_bytes()
    return Budget(needed_bytes, available if limit is None else min(available, limit))


def forecast_preload(needed_bytes: int, mode: str = "auto", *, margin: float = MARGIN) -> tuple[Outcome, str]:
    """Say what preloading so many bytes into RAM would come to now: "mapped" if `auto` finds no room.

    Args:
        needed_bytes: Bytes of the stores together.
        mode: "auto", "page-cache" or "copy".
        margin: Share of the available memory that must be left.
    Returns:
        The mode, and why, with the numbers.
    Raises:
        MemoryLimitError: If another mode than "auto" doesn't fit.
    """
    outcome: Outcome = "copy" if mode == "copy" else "page-cache"
    budget = ram_budget(needed_bytes, is_new=mode == "copy")
    try:
        budget.check(outcome, margin=margin)
    except MemoryLimitError as error:
        if mode != "auto":
            raise
        return "mapped", refused("page-cache", error)
    return outcome, f"{outcome}: {budget}"


def refused(mode: str, error: StoreError) -> str:
    """Say which mode didn't fit, and why."""
    return f"{mode} refused ({error.problem}: {error.found})"


def preload(file: StoreFile, catalog: Catalog, request: Request) -> PreloadReport:
    """Bring a finished store into memory; see `Store.preload`.

    "auto" takes the fastest mode that fits; one that takes more memory only if an argument asks for it.
    """
    file.check_open()
    request.check(catalog.layout.num_samples, path=file.path)
    if file.is_copy and request.mode != "device":
        why = "the store gathers from a copy in RAM already"
        return PreloadReport(file.path, "copy", why, file.nbytes, 0.0)
    modes: list[Outcome] = ["page-cache" if request.mode == "auto" else request.mode]
    if request.mode == "auto" and request.shared:
        modes.insert(0, "copy")
    if request.mode == "auto" and request.device:
        modes.insert(0, "device")
    report, refusals = None, list[str]()
    fd = files.open_existing(file.path)
    try:
        catalog.check_still(fd, file.path)
        files.advise_sequential(fd)  # threads that share a descriptor confuse the kernel's own guess
        job = PreloadJob(file, catalog, fd, request)
        for mode in modes:
            try:
                report = _bring_in(job, mode)
                break
            except (MemoryLimitError, DeviceError, SpecError) as error:
                is_refusal = not isinstance(error, SpecError) or error.kind == "unsupported"
                if request.mode != "auto" or not is_refusal:
                    raise
                refusals.append(refused(mode, error))
    finally:
        files.close(fd)
    if report is None:
        report = PreloadReport(file.path, "mapped", "; ".join(refusals), 0, 0.0)
    elif refusals:
        report = replace(report, why="; ".join([*refusals, report.why]))
    done = f"{file.path}: preload mode {report.mode} in {report.seconds:.2f} s: {report.why}"
    logger.info(printable(done))
    return report


def _bring_in(job: PreloadJob, mode: Outcome) -> PreloadReport:
    started, file, on_device = time.perf_counter(), job.file, None
    if mode == "device":
        device = module_above("device")
        budget = device.budget(job)
    elif mode == "copy":
        budget = ram_budget(file.nbytes, is_new=True)
    else:  # the page cache needs nothing where all of it is there
        is_resident = memory.resident_nbytes(file.mapping(), file.nbytes) == file.nbytes
        budget = ram_budget(0 if is_resident else file.nbytes, is_new=False)
    budget.check(mode, margin=job.request.margin, path=file.path)
    if mode == "device":
        on_device = device.load(job)
    elif mode == "copy":
        _copy(job)
    else:
        first, mapping = 0, file.mapping() if file.access == "map" else None
        with closing(job.read(file.nbytes)) as steps:
            for length in steps:
                file.check_length()
                if mapping is not None:  # this process's page table has the pages then, too
                    job.populate(mapping, first, length)
                first += length
    seconds = time.perf_counter() - started
    nbytes = file.nbytes if on_device is None else on_device.nbytes
    return PreloadReport(file.path, mode, f"{mode}: {budget}", nbytes, seconds, on_device)


def _copy(job: PreloadJob) -> None:
    """Copy the file, and have the store gather from the copy.

    One that is shared is a sealed file in RAM: others map it, and it goes with the last process that does.
    """
    file, nbytes = job.file, job.file.nbytes
    try:
        if not job.request.shared:
            copy = memory.new_memory(nbytes, kind=mmap.mmap)
            _read_all(job, copy)
            file.use_copy(copy)
            return
        fd = files.create_anonymous("ups_store")
        try:
            files.truncate(fd, nbytes)
            copy = memory.map_to_fill(fd, nbytes)
            _read_all(job, copy)
            copy.close()  # nothing is sealed while somebody could write
            files.seal(fd)
            mapping = memory.map_private(fd, nbytes)
            for first in range(0, nbytes, STEP_BYTES):
                job.populate(mapping, first, min(STEP_BYTES, nbytes - first))
            file.use_copy(mapping, fd=fd)
        finally:
            files.close(fd)
    except OSError as error:
        if error.errno in _NO_FILES_IN_MEMORY and job.request.shared:
            raise SpecError(
                "no copy that processes share",
                kind="unsupported",
                path=file.path,
                expected="Linux, with memfd_create allowed",
                found=os.strerror(error.errno),
                hint='preload with mode="page-cache", which processes share, too',
            ) from error
        if error.errno != errno.ENOMEM:
            raise
        budget = ram_budget(nbytes, is_new=True)
        raise MemoryLimitError(
            "the system refuses the memory for a copy of the store",
            needed_bytes=nbytes,
            available_bytes=budget.available_bytes,
            path=file.path,
            expected=f"{nbytes:,} bytes",
            found=f"{budget.available_bytes:,} available by its own account",
            hint='look at `ulimit -a` and the control group, or preload with mode="page-cache"',
        ) from error


def _read_all(job: PreloadJob, copy: mmap.mmap) -> None:
    with memoryview(copy) as target, closing(job.read(len(target), target=target)) as steps:
        for _ in steps:
            pass
