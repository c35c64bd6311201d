"""What this process may use: memory within every limit, processor cores and caches, file descriptors."""

from __future__ import annotations

import functools
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ups_store.system import files

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# Limits, usage, and what of it the kernel gives back under pressure: pages of files, the clean ones at once.
_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_bytes() -> int:
    """Memory that can be filled without swapping and without being killed for it, in bytes.

    The least of what the machine has left and of what each control group around this process has left under
    its limit (cgroup v1 and v2, containers included). Pages of files that the kernel would give back count as
    available. Other processes take from the same memory: it is an estimate for now, no reservation.
    """
    return max(0, min([_machine_bytes(), *cgroup_available_bytes(_CGROUP_ROOT, _MEMBERSHIP)]))


def num_cores() -> int:
    """Cores that this process may use, at least 1; whatever shares work among threads or processes asks here.

    The least of its affinity, the quota of each control group around it (cgroup v1 and v2, containers
    included; 1.5 cores are 2), and what SLURM gave its task, or where it doesn't say, its job on this node.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _core_limit()))


@functools.cache  # every packed batch asks, and neither changes in the life of a process
def _core_limit() -> int:
    limits = [*cgroup_cores(_CGROUP_ROOT, _MEMBERSHIP), *_slurm_cores(os.environ)]
    return math.ceil(min(limits, default=sys.maxsize))


def cgroup_cores(root: Path, membership: Path) -> Iterator[float]:
    """The quota of every control group around a process that has one, in cores; arguments as below."""
    for folder, is_v2 in _groups(root, membership, "cpu"):
        names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(files.system_text(folder / name) or "" for name in names).split()
        if len(words) == 2 and words[0].isdigit():  # else "max", or -1
            yield int(words[0]) / int(words[1])


def _slurm_cores(environment: Mapping[str, str]) -> list[int]:
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        value = environment.get(name, "")
        if value.isdigit():
            return [int(value)]
    return []


def last_cache_bytes() -> int:
    """Size of a processor's last cache; 0 where the system doesn't say.

    Not `sysconf`: in a virtual machine glibc works out ten times what the processor has.
    """
    texts = (files.system_text(_CACHES / f"index{level}" / "size") for level in (3, 2))
    size = next((text.strip() for text in texts if text), "")
    return int(size[:-1]) << 10 if size.endswith("K") and size[:-1].isdigit() else 0


def free_descriptors() -> int:
    """File descriptors that this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - len(os.listdir("/proc/self/fd"))


def cgroup_available_bytes(root: Path, membership: Path) -> Iterator[int]:
    """What every control group around a process has left, in bytes; below 0 for one beyond its limit.

    Args:
        root: Where the hierarchies are mounted, `/sys/fs/cgroup`.
        membership: The process's list of groups, `/proc/PID/cgroup` (cgroups(7)).
    Yields:
        One number per limited group, of any version; nothing where no group has a limit.
    """
    for folder, is_v2 in _groups(root, membership, "memory"):
        yield from _room(folder, *(_V2 if is_v2 else _V1))


def _groups(root: Path, membership: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups around a process that may limit something, and whether each is of v2."""
    for line in (files.system_text(membership) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controller if controllers else root
        # In a container the path may be the host's, which isn't mounted: what is there is the mount itself.
        inner = Path(group.lstrip("/"))
        for folder in (mount / inner, *(mount / parent for parent in inner.parents)):
            yield folder, not controllers


def _machine_bytes() -> int:
    lines = (files.system_text(_MEMINFO) or "").splitlines()
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no Linux of today: all that it has


def _room(folder: Path, limits: tuple[str, ...], usage: str, reclaimable: tuple[str, ...]) -> Iterator[int]:
    used, stat = files.system_text(folder / usage), files.system_text(folder / "memory.stat")
    if used is None:
        return
    pairs = (line.split() for line in (stat or "").splitlines())
    given_back = sum(int(value) for name, value in pairs if name in reclaimable)
    for name in limits:
        limit = files.system_text(folder / name)
        if limit is not None and limit.strip() != "max":
            yield int(limit) - max(0, int(used) - given_back)
