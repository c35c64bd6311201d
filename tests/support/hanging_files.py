"""Files that hang whoever opens them, as on a dead server, by a lease: fcntl(2), F_SETLEASE."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hanging(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Make files that can't be opened in this block: the kernel waits for the lease, 45 s by default."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for the lease
    descriptors = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    try:
        for fd in descriptors:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield paths
    finally:
        for fd in descriptors:
            os.close(fd)  # what waits goes on
        signal.signal(signal.SIGIO, before)
