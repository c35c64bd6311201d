"""Control groups with a limit of memory, made for a test."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

GROUP_BYTES = 512 << 20
_ROOT = Path("/sys/fs/cgroup")


def memory_group(nbytes: int) -> Iterator[Path]:
    """A fixture's body: the list of members of a new group, which whoever writes 0 into it joins."""
    group, limit = _place()
    folder = group / f"ups-store-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(nbytes))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield folder / "cgroup.procs"
    _remove(folder)


def _place() -> tuple[Path, str]:
    """Where a new group may stand, within what holds this process, and the name of its limit."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, own in entries:
        if "memory" in controllers.split(","):
            inner = _ROOT / "memory" / own.lstrip("/")
            # In a container the path may be the host's, which isn't mounted.
            return (inner if inner.is_dir() else _ROOT / "memory"), "memory.limit_in_bytes"
    own = next((own for _, controllers, own in entries if not controllers), "/")
    # cgroup v2: a group with processes has no inner groups with limits, so the new one stands beside it.
    beside = (_ROOT / own.lstrip("/")).parent
    return (beside if beside.is_relative_to(_ROOT) else _ROOT), "memory.max"


def _remove(folder: Path) -> None:
    """Once its last process is gone, which the kernel may still be ending; the test's time ends a hang."""
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        time.sleep(0.01)
