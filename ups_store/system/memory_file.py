"""Files in memory: no folder names them, and nothing is left when the last process lets go (spec 6.12)."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path, PosixPath
from weakref import WeakValueDictionary

from ups_store.errors import DiskFullError, StoreError, StoreNotFoundError
from ups_store.system import files, locks
from ups_store.system.memory import available_bytes

IN_MEMORY = ":memory:"

_DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")  # proc(5): opening it opens the file behind it again


class MemoryFile:
    """An anonymous file; it goes with this object, unless another process has it open or mapped.

    Attributes:
        fd: Descriptor that names it; -1 in forked children, whose copies would keep the memory.
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

    Raises:
        DiskFullError: If so much memory isn't free, kind "memory_full"; before any is taken.
        StoreError: If the system has no such files, kind "unsupported".
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


def is_in_memory(path: Path) -> bool:
    """Whether the path is one that `create_in_memory` gives, of any process."""
    return _DESCRIPTOR.fullmatch(str(path)) is not None


def keeping(path: Path) -> Path:
    """The object that keeps the file, where this process has it; else the path as it is."""
    return _kept.get(str(path), path)


def _memory_full(needed: int, free: int) -> DiskFullError:
    error = DiskFullError(
        "not enough memory",
        kind="memory_full",
        path=IN_MEMORY,
        expected=f"{needed:,} bytes",
        found=f"{free:,} free",
        hint="free some, or give a path on a disk",
    )
    error.needed_bytes, error.free_bytes, error.errno = needed, free, errno.ENOMEM
    return error


def _unsupported(found: str) -> StoreError:
    return StoreError(
        "stores in memory aren't possible here",
        kind="unsupported",
        path=IN_MEMORY,
        expected="Linux with memfd_create and /proc",
        found=found,
        hint="give a path, such as one on a RAM disk",
    )
