"""Locks on bytes of open files, held as long as the file is open, and never by forked children (spec 6.3)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ups_store.errors import BuildLockedError, StoreNotFoundError
from ups_store.system import files

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid: struct flock on 64-bit Linux
_LOCK_POLL_S = 0.01
_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_UNSUPPORTED = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL))


class NoLocksError(OSError):
    """A file system doesn't have them, such as Lustre that is mounted without `flock`."""


def _call(command: int | None, fd: int, kind: int, offset: int, length: int) -> int:
    """Ask for a lock, and return the kind of the one that is in the way, if that is what was asked."""
    if command is None:
        raise NoLocksError(errno.ENOSYS, "no locks of open files on this system: writing needs Linux")
    try:
        answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, offset, length, 0))
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise NoLocksError(error.errno, f"no locks on this file system: {error.strerror}") from error
        raise
    return int(_FLOCK.unpack(answer)[0])


def try_lock(fd: int, offset: int, length: int = 1, *, exclusive: bool = True) -> bool:
    """Try to lock bytes for this open file; they may lie past its end (Linux OFD locks)."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        _call(_SET, fd, kind, offset, length)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process holds it
        return False
    return True


def lock(
    fd: int, offset: int, length: int = 1, *, exclusive: bool = True, timeout_s: float, path: Path
) -> None:
    """Lock bytes, waiting at most `timeout_s`; then `BuildLockedError`."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, offset, length, exclusive=exclusive):
        if time.monotonic() >= deadline:
            raise BuildLockedError(
                f"another process has held a lock for {timeout_s:g} s",
                path=path,
                hint="it may be stopped: look for it with `ups-store info`, end it, and run again",
            )
        time.sleep(_LOCK_POLL_S)


def is_locked(fd: int, offset: int, length: int = 1) -> bool:
    """Return whether another open file holds a lock on any of the bytes; takes none itself."""
    return _call(_GET, fd, fcntl.F_WRLCK, offset, length) != fcntl.F_UNLCK


def is_held(path: Path, offset: int) -> bool:
    """Return whether any open file, also of this process, locks a byte of the file at a path, if any."""
    try:
        with files.opened(path) as fd:
            return is_locked(fd, offset)
    except StoreNotFoundError:
        return False


def unlock(fd: int, offset: int, length: int = 1) -> None:
    """Release bytes that `lock` or `try_lock` took."""
    _call(_SET, fd, fcntl.F_UNLCK, offset, length)


_closed_on_fork: WeakSet[Any] = WeakSet()


def close_on_fork(holder: Any) -> None:
    """Have forked children close `holder.fd`, -1 once closed: it would keep a dead builder's locks."""
    _closed_on_fork.add(holder)


def _close_in_child() -> None:
    for holder in list(_closed_on_fork):
        if holder.fd >= 0:
            os.close(holder.fd)
            holder.fd = -1


os.register_at_fork(after_in_child=_close_in_child)
