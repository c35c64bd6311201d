"""Preloading: which mode a request for it means, whether there is room, and the report of what was done.

The mode is the one that was asked for, or for "auto" the fastest of those that are allowed and fit. What it
needs and what there is, its budget, are compared before anything is allocated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ups_store.errors import DeviceError, MemoryLimitError, SpecError, StoreReplacedError
from ups_store.printable import printable
from ups_store.read.catalog import Catalog, fingerprint_of, read_finished
from ups_store.read.store_file import StoreFile
from ups_store.system import files, mappings
from ups_store.system.memory import available_bytes
from ups_store.system.progress import Progress

Mode: TypeAlias = Literal["auto", "page-cache", "copy", "pinned", "device"]

Outcome: TypeAlias = Literal["page-cache", "copy", "pinned", "device", "mapped", "mixed"]


ReadCatalog: TypeAlias = Callable[[int, Path], Catalog]

logger = logging.getLogger(__name__)

# Each has `budget(job)` and `load(job)`. Found by name: only `ups_store.torch` may import torch.
_MODULES: dict[Outcome, str] = {
    "page-cache": "ups_store.read.page_cache",
    "copy": "ups_store.read.preload_copy",
    "pinned": "ups_store.torch.pinned",
    "device": "ups_store.torch.device",
}

_IN_RAM = ("auto", "page-cache", "copy")

_MEMORY = Path("/proc/meminfo")

NUM_THREADS = 4  # reads in flight, which a disk needs more of than there may be processors

_USED_BY = {  # arguments that have an effect in some modes only
    "device": ("auto", "pinned", "device"),
    "samples": ("device",),
    "shared": ("auto", "copy"),
    "lock": ("auto", "page-cache", "copy"),
}


@dataclass(frozen=True)
class Request:
    """Arguments of `Store.preload`, which explains them."""

    mode: Mode = "auto"
    device: str | None = None
    samples: range | None = None
    shared: bool = False
    lock: bool = False
    margin: float = 0.1
    num_threads: int | None = None
    progress: Progress | None = None

    def check(self, num_samples: int, *, path: Path) -> None:
        """Refuse what has no meaning for a store of `num_samples`.

        Raises:
            SpecError: Names the argument.
        """
        if self.mode not in get_args(Mode):
            raise _wrong("mode", f"one of {', '.join(get_args(Mode))}", self.mode, path)
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


@dataclass(frozen=True)
class PreloadJob:
    """A request and what it is about.

    Attributes:
        file: The store's file.
        catalog: What it holds.
        fd: The same file, open for reading.
        request: What was asked for.
    """

    file: StoreFile
    catalog: Catalog
    fd: int
    request: Request

    @property
    def num_threads(self) -> int:
        """Threads that read."""
        return self.request.num_threads or NUM_THREADS

    def progress(self, nbytes: int) -> None:
        """Report that so many bytes more are there."""
        if self.request.progress is not None:
            self.request.progress(nbytes)


def _wrong(name: str, expected: str, found: object, path: Path) -> SpecError:
    return SpecError(f"preload argument {name!r}", kind=name, path=path, expected=expected, found=found)


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
        on_device: For "pinned" and "device" an `ups_store.torch.DeviceStore`, whose `gather` returns tensors
            on the device; None for the others, where the store itself gathers from what was preloaded, and
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
        """The report on a store in partitions."""
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


def preload(
    file: StoreFile, catalog: Catalog, request: Request, *, read_catalog: ReadCatalog = read_finished
) -> PreloadReport:
    """Bring a finished store into memory; see `Store.preload`.

    Args:
        file: Its file.
        catalog: What it holds.
        request: What was asked for.
        read_catalog: Reads the catalog again, to see that the path still has the same file.
    """
    file.check_open()
    request.check(catalog.layout.num_samples, path=file.path)
    if file.is_copy and request.mode in _IN_RAM and not request.lock:
        why = "the store gathers from a copy in RAM already"
        return PreloadReport(file.path, "copy", why, file.nbytes, 0.0)
    fd = _open_again(file, catalog, read_catalog)
    files.advise_sequential(fd)  # threads that share a descriptor confuse the kernel's own guess
    try:
        job = PreloadJob(file, catalog, fd, request)
        report = _choose(job) if request.mode == "auto" else _load(job, request.mode)
    finally:
        files.close(fd)
    done = f"{file.path}: preload mode {report.mode} in {report.seconds:.2f} s: {report.why}"
    logger.info(printable(done))
    return report


def candidates(request: Request) -> Sequence[Outcome]:
    """What "auto" tries, fastest first: a mode that takes more memory only if an argument asks for it."""
    on_device: list[Outcome] = ["device", "pinned"] if request.device else []
    shared: list[Outcome] = ["copy"] if request.shared else []
    return [*on_device, *shared, "page-cache"]


def _choose(job: PreloadJob) -> PreloadReport:
    refusals: list[str] = []
    for mode in candidates(job.request):
        try:
            report = _load(job, mode)
        except (MemoryLimitError, DeviceError) as error:
            if error.kind == "memlock":
                raise  # which no other mode would be allowed either
            refusals.append(f"{mode} refused ({error.problem}: {error.found})")
        else:
            return replace(report, why="; ".join([*refusals, report.why]))
    return PreloadReport(job.file.path, "mapped", "; ".join(refusals), 0, 0.0)


def _load(job: PreloadJob, mode: Any) -> PreloadReport:
    started = time.perf_counter()
    module = import_module(_MODULES[mode])
    budget = module.budget(job)
    budget.check(mode, margin=job.request.margin, path=job.file.path)
    on_device = module.load(job)
    nbytes = job.file.nbytes if on_device is None else on_device.nbytes
    seconds = time.perf_counter() - started
    return PreloadReport(job.file.path, mode, f"{mode}: {budget}", nbytes, seconds, on_device)


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


@dataclass(frozen=True)
class Budget:
    """Memory that a mode needs, and memory that may be used.

    Attributes:
        needed_bytes: What the mode will fill.
        available_bytes: What there is of it now.
        place: Whose memory it is, for messages.
    """

    needed_bytes: int
    available_bytes: int
    place: str = "RAM"

    def __str__(self) -> str:
        return f"{self.needed_bytes:,} bytes needed, {self.available_bytes:,} bytes of {self.place} available"

    def check(self, mode: str, *, margin: float, path: Path) -> None:
        """Refuse what doesn't fit, a share of `margin` being left to others.

        Raises:
            MemoryLimitError: With needed and available bytes.
        """
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
    """Budget for RAM; new memory must fit into this process's address space too (`ulimit -v`)."""
    left = mappings.address_space_left() if is_new and needed_bytes else None
    available = available_bytes()
    return Budget(needed_bytes, available if left is None else min(available, left))


def locked_bytes() -> int:
    """Memory of the machine that some process has locked (mlock): it never counts as available."""
    lines = (files.system_text(_MEMORY) or "").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Mlocked:"))
