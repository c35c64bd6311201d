"""Memory: how much there is, mapped files, memory without a file, and files in memory; also processor cores.

Files in memory are named by no folder, and nothing is left when the last process lets go (spec 6.12).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ups_store.errors import DiskFullError, StoreError, StoreNotFoundError
from ups_store.system import files, locks
from ups_store.system.files import libc, system_text

IN_MEMORY = ":memory:"

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# Limits, usage, and what of it the kernel gives back under pressure: pages of files, the clean ones at once.
_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_POPULATE_READ = 22  # Linux 5.14

_Mapping = TypeVar("_Mapping", bound=mmap.mmap)


# --- what this process may use ------------------------------------------------------------------------


def available_bytes() -> int:
    """Memory that can be filled without swapping and without being killed for it, in bytes.

    The least of what the machine has left and of what each control group around this process has left under
    its limit (cgroup v1 and v2, containers included). Pages of files that the kernel would give back count as
    available. Other processes take from the same memory: it is an estimate for now, no reservation.
    """
    lines = (system_text(_MEMINFO) or "").splitlines()
    machine = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    # No Linux of today: all that the machine has.
    machine_bytes = next(machine, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min([machine_bytes, *cgroup_available_bytes(_CGROUP_ROOT, _MEMBERSHIP)]))


def cgroup_available_bytes(root: Path, membership: Path) -> Iterator[int]:
    """Yield what every limited control group around a process has left, in bytes; below 0 beyond its limit.

    Args:
        root: Where the hierarchies are mounted, `/sys/fs/cgroup`.
        membership: The process's list of groups, `/proc/PID/cgroup` (cgroups(7)).
    """
    for folder, is_v2 in _groups(root, membership, "memory"):
        limits, usage, reclaimable = _V2 if is_v2 else _V1
        used = system_text(folder / usage)
        if used is None:
            continue
        pairs = (line.split() for line in (system_text(folder / "memory.stat") or "").splitlines())
        given_back = sum(int(value) for name, value in pairs if name in reclaimable)
        for limit in (system_text(folder / name) for name in limits):
            if limit is not None and limit.strip() != "max":
                yield int(limit) - max(0, int(used) - given_back)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield folders of control groups around a process that may limit it, and whether they are of v2."""
    for line in (system_text(membership) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controller if controllers else root
        # In a container the path may be the host's, which isn't mounted: what is there is the mount itself.
        inner = Path(group.lstrip("/"))
        for folder in (mount / inner, *(mount / parent for parent in inner.parents)):
            yield folder, not controllers


def num_cores() -> int:
    """Cores that this process may use, at least 1; whatever shares work among threads or processes asks here.

    The least of its affinity, the quota of each control group around it (cgroup v1 and v2, containers
    included; 1.5 cores are 2), and what SLURM gave its task, or where it doesn't say, its job on this node.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _core_limit()))


@functools.cache  # every packed batch asks, and neither changes in the life of a process
def _core_limit() -> int:
    limits: list[float] = []
    for folder, is_v2 in _groups(_CGROUP_ROOT, _MEMBERSHIP, "cpu"):
        names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(system_text(folder / name) or "" for name in names).split()
        if len(words) == 2 and words[0].isdigit():  # else "max", or -1
            limits.append(int(words[0]) / int(words[1]))
    counts = (os.environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"))
    limits += [int(value) for value in counts if value.isdigit()][:1]
    return math.ceil(min(limits, default=sys.maxsize))


def last_cache_bytes() -> int:
    """Return the size of a processor's last cache; 0 where the system doesn't say.

    Not `sysconf`: in a virtual machine glibc works out ten times what the processor has.
    """
    texts = (system_text(_CACHES / f"index{level}" / "size") for level in (3, 2))
    size = next((text.strip() for text in texts if text), "")
    return int(size[:-1]) << 10 if size.endswith("K") and size[:-1].isdigit() else 0


def free_descriptors() -> int:
    """Return how many file descriptors this process may still open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def address_space_left() -> int | None:
    """Return what RLIMIT_AS (`ulimit -v`) leaves this process, in bytes; None for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int((system_text(Path("/proc/self/statm")) or "0").split()[0])
    return max(0, limit - pages * mmap.PAGESIZE)


# --- mapped files, and memory without a file ----------------------------------------------------------


def map_private(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file copy-on-write: changes of the memory never reach the file (spec 7.4)."""
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def map_read_only(fd: int, nbytes: int, *, first: int = 0) -> mmap.mmap:
    """Map a file, from a multiple of the page size on, for reading only.

    Locking a private mapping that may be written would copy every page.
    """
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=first)


def map_to_fill(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file in memory so that what is written to the mapping is in the file."""
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _prefer_huge_pages(mapping)
    return mapping


def new_memory(nbytes: int, *, shared: bool = False, kind: type[_Mapping]) -> _Mapping:
    """Return zeroed memory, which forked children share or copy, with huge pages where there are any."""
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE)
    mapping = kind(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _prefer_huge_pages(mapping)
    return mapping


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
        mapping.madvise(mmap.MADV_HUGEPAGE)


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory that begins with a page, to read files into; owned by its holder.

    malloc's large blocks begin 16 bytes into one, and where a copy's target lies 16 bytes further in its page
    than the source, `rep movsb` crawls on some processors: an AMD EPYC (Zen 3) then reads 2.4 instead of 12
    GB/s out of the page cache (2026-11-22).
    """
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    shift = -memory.ctypes.data % mmap.PAGESIZE
    return memory[shift : shift + nbytes]


def address(mapping: mmap.mmap) -> int:
    """Return where the mapping begins in this process's memory."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def mapped_file_nbytes(mapping: mmap.mmap) -> int:
    """Return the length of the mapped file now: `mmap` keeps a descriptor of it."""
    return mapping.size()


def resident_nbytes(mapping: mmap.mmap, nbytes: int) -> int:
    """Return how many bytes of a mapped file lie in the page cache, in whole pages (mincore).

    The kernel answers only processes that could write the file; to others every page looks resident.
    """
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    _memory_call("mincore", mapping, 0, nbytes, ctypes.c_void_p(pages.ctypes.data))
    return min(nbytes, int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE)


def populate(mapping: mmap.mmap, first: int, nbytes: int) -> bool:
    """Read pages of a mapping in and enter them in the page table, no page copied; False before Linux 5.14.

    `first` is a multiple of the page size. OSError (EFAULT) if the mapped file was cut.
    """
    try:
        _memory_call("madvise", mapping, first, nbytes, ctypes.c_int(_MADV_POPULATE_READ))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _memory_call(name: str, mapping: mmap.mmap, first: int, nbytes: int, *arguments: Any) -> None:
    """Call the system about part of a mapping; unlike a method of `mmap` it lets go of the GIL meanwhile."""
    where = ctypes.c_void_p(address(mapping) + first)
    if getattr(libc(), name)(where, ctypes.c_size_t(nbytes), *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# --- files in memory ----------------------------------------------------------------------------------


class MemoryFile:
    """An anonymous file; it goes with this object, unless another process has it open or mapped.

    `fd` names it; -1 in forked children, whose copies would keep the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = -1
        free = available_bytes()
        if nbytes > free:
            raise _memory_full(nbytes, free)
        try:
            self.fd = files.create_anonymous("ups_store")
        except OSError as error:
            raise _unsupported(str(error)) from error
        try:
            files.allocate_anonymous(self.fd, nbytes)
        except BaseException as error:
            files.close(self.fd)
            self.fd = -1
            if isinstance(error, OSError):
                raise _memory_full(nbytes, available_bytes()) from error
            raise
        locks.close_on_fork(self)

    def __del__(self) -> None:
        if self.fd >= 0:
            files.close(self.fd)


class MemoryPath(PosixPath):
    """The path of a file in memory, for every process of this user that runs beside its owner.

    The object keeps the file; paths that are made from it, its text, and unpickled copies don't.
    """

    file: MemoryFile | None = None


_kept: WeakValueDictionary[str, MemoryPath] = WeakValueDictionary()  # those of this process


def create_in_memory(nbytes: int) -> MemoryPath:
    """Create a file of zeros in memory.

    DiskFullError of kind "memory_full" if so much isn't free, before any is taken; StoreError of kind
    "unsupported" if the system has no such files.
    """
    file = MemoryFile(nbytes)
    path = MemoryPath(files.descriptor_path(file.fd))
    if not files.exists(path):
        raise _unsupported(f"nothing at {path}")
    path.file = file
    _kept[str(path)] = path
    return path


def check_not_reserved(path: str | os.PathLike[str]) -> None:
    """Refuse to look for a store by ":memory:", which makes a new one each time."""
    if os.fspath(path) == IN_MEMORY:
        hint = "use the path of its writer: `open(writer.path)`"
        raise StoreNotFoundError("a store in memory has no name of its own", path=path, hint=hint)


def keeping(path: Path) -> Path:
    """Return the object that keeps the file, where this process has it; else the path as it is."""
    return _kept.get(str(path), path)


def _memory_full(needed: int, free: int) -> DiskFullError:
    return DiskFullError(
        "not enough memory",
        kind="memory_full",
        path=IN_MEMORY,
        expected=f"{needed:,} bytes",
        found=f"{free:,} free",
        hint="free some, or give a path on a disk",
        needed_bytes=needed,
        free_bytes=free,
        errno=errno.ENOMEM,
    )


def _unsupported(found: str) -> StoreError:
    return StoreError(
        "stores in memory aren't possible here",
        kind="unsupported",
        path=IN_MEMORY,
        expected="Linux with memfd_create and /proc",
        found=found,
        hint="give a path, such as one on a RAM disk",
    )
