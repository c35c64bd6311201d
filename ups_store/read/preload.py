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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ups_store import module_above
from ups_store.errors import DeviceError, MemoryLimitError, SpecError, StoreReplacedError
from ups_store.printable import printable
from ups_store.read.catalog import Catalog, fingerprint_of, read_finished
from ups_store.read.store_file import StoreFile, cut, read_failed, read_into
from ups_store.system import files, memory
from ups_store.system.files import Progress
from ups_store.system.memory import available_bytes

Mode: TypeAlias = Literal["auto", "page-cache", "copy", "device"]

Outcome: TypeAlias = Literal["page-cache", "copy", "device", "mapped", "mixed"]

ReadCatalog: TypeAlias = Callable[[int, Path], Catalog]

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

    def check(self, num_samples: int, *, path: Path) -> None:
        """Refuse what has no meaning for a store of `num_samples`."""
        if self.mode not in get_args(Mode):
            hint = _INSTEAD.get(self.mode)
            raise _wrong("mode", f"one of {', '.join(get_args(Mode))}", self.mode, path, hint)
        for name, modes in _USED_BY.items():
            if getattr(self, name) and self.mode not in modes:
                raise _wrong(name, f"mode {' or '.join(modes)}, where it has an effect", self.mode, path)
        if not 0 <= self.margin < 1:
            raise _wrong("margin", "0 <= margin < 1", self.margin, path)
        if self.num_threads is not None and self.num_threads < 1:
            raise _wrong("num_threads", "at least 1", self.num_threads, path)
        part = self.samples
        if part is not None and (part.step != 1 or not 0 <= part.start < part.stop <= num_samples):
            raise _wrong("samples", f"a range of step 1 within 0..{num_samples}", part, path)


def refuse_lock(lock: object, *, path: Path) -> None:
    """Refuse the argument `lock`, which there was."""
    if lock:
        hint = 'leave it out; preload("copy", shared=True) keeps what the page cache may give back'
        raise _wrong("lock", "none: pages aren't locked any more", lock, path, hint)


def _wrong(name: str, expected: str, found: object, path: Path, hint: str | None = None) -> SpecError:
    problem = f"preload argument {name!r}"
    return SpecError(problem, kind=name, path=path, expected=expected, found=found, hint=hint)


@dataclass(frozen=True)
class PreloadJob:
    """A request and what it is about."""

    file: StoreFile
    catalog: Catalog
    fd: int
    request: Request

    def read(self, nbytes: int, *, first: int = 0, target: memoryview | None = None) -> Iterator[int]:
        """Read part of the file as `read_steps` does, and report each step once it was handled."""
        path, num_threads = self.file.path, self.request.num_threads or NUM_THREADS
        steps = read_steps(self.fd, nbytes, first=first, target=target, num_threads=num_threads, path=path)
        with closing(steps):
            for length in steps:
                yield length
                if self.request.progress is not None:
                    self.request.progress(length)


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


def plan_preload(needed_bytes: int, mode: str = "auto", *, margin: float = MARGIN) -> tuple[Outcome, str]:
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
        return "mapped", _refused("page-cache", error)
    return outcome, f"{outcome}: {budget}"


def ram_budget(needed_bytes: int, *, is_new: bool) -> Budget:
    """Compute the budget for RAM; new memory must fit into this process's address space too (`ulimit -v`)."""
    left = memory.address_space_left() if is_new and needed_bytes else None
    available = available_bytes()
    return Budget(needed_bytes, available if left is None else min(available, left))


def preload(
    file: StoreFile, catalog: Catalog, request: Request, *, read_catalog: ReadCatalog = read_finished
) -> PreloadReport:
    """Bring a finished store into memory; see `Store.preload`."""
    file.check_open()
    request.check(catalog.layout.num_samples, path=file.path)
    if file.is_copy and request.mode != "device":
        why = "the store gathers from a copy in RAM already"
        return PreloadReport(file.path, "copy", why, file.nbytes, 0.0)
    fd = _open_again(file, catalog, read_catalog)
    files.advise_sequential(fd)  # threads that share a descriptor confuse the kernel's own guess
    try:
        job = PreloadJob(file, catalog, fd, request)
        report = _load_first(job) if request.mode == "auto" else _load(job, request.mode)
    finally:
        files.close(fd)
    done = f"{file.path}: preload mode {report.mode} in {report.seconds:.2f} s: {report.why}"
    logger.info(printable(done))
    return report


def _load_first(job: PreloadJob) -> PreloadReport:
    """Take the fastest mode that fits; one that takes more memory only if an argument asks for it."""
    modes: list[Outcome] = ["device"] if job.request.device else []
    modes += ["copy", "page-cache"] if job.request.shared else ["page-cache"]
    refusals: list[str] = []
    for mode in modes:
        try:
            report = _load(job, mode)
        except (MemoryLimitError, DeviceError) as error:
            refusals.append(_refused(mode, error))
        except SpecError as error:
            if error.kind != "unsupported":
                raise
            refusals.append(_refused(mode, error))
        else:
            return replace(report, why="; ".join([*refusals, report.why]))
    return PreloadReport(job.file.path, "mapped", "; ".join(refusals), 0, 0.0)


def _refused(mode: str, error: Any) -> str:
    return f"{mode} refused ({error.problem}: {error.found})"


def _load(job: PreloadJob, mode: Any) -> PreloadReport:
    started, file, on_device = time.perf_counter(), job.file, None
    device = module_above("device") if mode == "device" else None
    budget = _budget(job, mode) if device is None else device.budget(job)
    budget.check(mode, margin=job.request.margin, path=file.path)
    if device is not None:
        on_device = device.load(job)
    elif mode == "page-cache":
        _fill_page_cache(job)
    else:
        _copy(job)
    seconds = time.perf_counter() - started
    nbytes = file.nbytes if on_device is None else on_device.nbytes
    return PreloadReport(file.path, mode, f"{mode}: {budget}", nbytes, seconds, on_device)


def _budget(job: PreloadJob, mode: str) -> Budget:
    """Compute what a mode needs: the file's length; the page cache nothing if all of it is there already."""
    nbytes = job.file.nbytes
    if mode == "copy":
        return ram_budget(nbytes, is_new=True)
    is_resident = memory.resident_nbytes(job.file.mapping(), nbytes) == nbytes
    return ram_budget(0 if is_resident else nbytes, is_new=False)


def _open_again(file: StoreFile, catalog: Catalog, read_catalog: ReadCatalog) -> int:
    """Open the file for reading: the mapping, which needs no descriptor of ours, can't be read from."""
    fd = files.open_existing(file.path)
    try:
        if fingerprint_of(read_catalog(fd, file.path)) != fingerprint_of(catalog):
            raise StoreReplacedError(
                "the file was replaced since it was opened", path=file.path, hint="open it again"
            )
    except BaseException:
        files.close(fd)
        raise
    return fd


def _fill_page_cache(job: PreloadJob) -> None:
    """Read the file, and enter its pages in this process's page table."""
    file, first = job.file, 0
    mapping = file.mapping() if file.access == "map" else None
    for length in job.read(file.nbytes):
        file.check_length()
        if mapping is not None:
            _populate(mapping, first, length, job=job)
        first += length


def _copy(job: PreloadJob) -> None:
    """Copy the file, and have the store gather from the copy."""
    path = job.file.path
    try:
        _copy_shared(job) if job.request.shared else _copy_private(job)
    except OSError as error:
        if error.errno in _NO_FILES_IN_MEMORY and job.request.shared:
            raise SpecError(
                "no copy that processes share",
                kind="unsupported",
                path=path,
                expected="Linux, with memfd_create allowed",
                found=os.strerror(error.errno),
                hint='preload with mode="page-cache", which processes share, too',
            ) from error
        if error.errno != errno.ENOMEM:
            raise
        needed = _budget(job, "copy")
        raise MemoryLimitError(
            "the system refuses the memory for a copy of the store",
            needed_bytes=needed.needed_bytes,
            available_bytes=needed.available_bytes,
            path=path,
            expected=f"{needed.needed_bytes:,} bytes",
            found=f"{needed.available_bytes:,} available by its own account",
            hint='look at `ulimit -a` and the control group, or preload with mode="page-cache"',
        ) from error


def _copy_private(job: PreloadJob) -> None:
    copy = memory.new_memory(job.file.nbytes, kind=mmap.mmap)
    for _ in job.read(job.file.nbytes, target=memoryview(copy)):
        pass
    job.file.use_copy(copy)


def _copy_shared(job: PreloadJob) -> None:
    """Fill a file in RAM, and seal it: others map it too, and it goes with the last process that does."""
    file, nbytes = job.file, job.file.nbytes
    fd = files.create_anonymous("ups_store")
    try:
        files.truncate(fd, nbytes)
        writable = memory.map_to_fill(fd, nbytes)
        with memoryview(writable) as target:
            for _ in job.read(nbytes, target=target):
                pass
        writable.close()  # nothing is sealed while somebody could write
        files.seal(fd)
        mapping = memory.map_private(fd, nbytes)
        for first in range(0, nbytes, STEP_BYTES):
            _populate(mapping, first, min(STEP_BYTES, nbytes - first), job=job)
        file.use_copy(mapping, fd=fd)
    finally:
        files.close(fd)


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

    They read in large calls that let go of the interpreter lock.
    """
    own = threading.local()

    def read(offset: int) -> None:
        length = min(PIECE_BYTES, nbytes - offset)
        if target is not None:
            block = target[offset : offset + length]
        else:
            if not hasattr(own, "scratch"):  # memory of one thread, used again and again
                own.scratch = memory.page_aligned(PIECE_BYTES).data
            block = own.scratch[:length]
        got = read_into(fd, first + offset, block)
        if got < length:
            raise cut(path, first + nbytes, first + offset + got)

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ups-store-preload")
    try:
        blocks = _map(pool, read, range(0, nbytes, PIECE_BYTES))
        for step in range(0, nbytes, STEP_BYTES):
            length = min(STEP_BYTES, nbytes - step)
            for _ in range(0, length, PIECE_BYTES):
                next(blocks)
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


def _populate(mapping: mmap.mmap, first: int, nbytes: int, *, job: PreloadJob) -> None:
    """Enter pages of a mapping in the page table, by touching one byte of each where the kernel can't."""
    try:
        if not memory.populate(mapping, first, nbytes):
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
