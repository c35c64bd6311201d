"""What the machine has left: memory, processor cores and descriptors, each as containers limit it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory_nbytes() -> int | None:
    """Memory that can be had without swapping, in bytes: the machine's, or what limits leave; None: unknown.

    Limits are those of the process's control groups (version 2), where page cache counts as free.
    """
    known = [_machine_nbytes(), *(_cgroup_nbytes(folder) for folder in _cgroups())]
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def free_descriptors() -> int:
    """File descriptors that this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - len(os.listdir("/proc/self/fd"))


def _machine_nbytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroups() -> list[Path]:
    """The process's control group and those above it: each may have a limit."""
    try:
        entries = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    own = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), None)
    if own is None:
        return []
    folder = _CGROUPS / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUPS))]


def _cgroup_nbytes(folder: Path) -> int | None:
    try:
        limit = int((folder / "memory.max").read_text())  # "max" without one
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    cached = next(
        (int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0
    )
    return max(0, limit - used + cached)
