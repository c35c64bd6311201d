"""Locks of folders in which one process works at a time; each is a file, signed by its holder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ups.errors import OutputError, UpsError
from ups.log import logger
from ups_store.system.locks import close_on_fork, is_locked, try_lock

TRAINING_LOCK = ".lock"  # in checkpoint.dir
_POLL_S = 0.05
_SIGNATURE_NBYTES = 200


class _Holder:
    """Of a lock, whose descriptor forked children close."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        close_on_fork(self)


_held: dict[Path, _Holder] = {}  # by the file itself, under whatever names


@contextmanager
def locked(path: Path, *, timeout_s: float = 1.0, is_nested: bool = False) -> Iterator[int]:
    """Hold a lock inside; gives its descriptor, or -1 where this process holds it already.

    Commands that are given the descriptor hold the lock as long as they live, whatever becomes of this one.

    Args:
        path: The file; its folder is made if missing.
        timeout_s: How long it is waited for.
        is_nested: Whether this process may hold it already.

    Raises:
        UpsError: Kind "run_locked", with the process that wrote the lock last.
        OutputError: If the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        real = path.resolve()
        if is_nested and real in _held and _held[real].fd >= 0:
            yield -1
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError.of(error, path) from error
    holder = _Holder(fd)
    try:
        _take(fd, path, timeout_s=timeout_s)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} of {os.uname().nodename}\n".encode(), 0)
        except OSError as error:
            raise OutputError.of(error, path) from error
        _held[real] = holder
        yield fd
    finally:
        if _held.get(real) is holder:
            del _held[real]
        if holder.fd >= 0:
            holder.fd = -1
            os.close(fd)  # released unless a child still has it


def holder_of(path: Path) -> str | None:
    """Return which process holds a lock, as it wrote it; None if none does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _signature(fd) if is_locked(fd, 0) else None
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(fd)


def _take(fd: int, path: Path, *, timeout_s: float) -> None:
    deadline, is_told = time.monotonic() + timeout_s, False
    while True:
        try:
            if try_lock(fd, 0):
                return
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
            logger.warning(f"{path}: the file system has no locks ({why}); begin nothing else here")
            return
        if time.monotonic() >= deadline:
            raise UpsError(
                f"another run works here: {_signature(fd)}, or what it started",
                kind="run_locked",
                path=path,
                hint="wait until it has ended, or end it",
            )
        if not is_told:
            who = f"{_signature(fd)}, or what it started, still works here"
            logger.info(f"{path}: {who}; waiting for at most {timeout_s:g} s")
            is_told = True
        time.sleep(_POLL_S)


def _signature(fd: int) -> str:
    return os.pread(fd, _SIGNATURE_NBYTES, 0).decode(errors="replace").strip() or "a process"
