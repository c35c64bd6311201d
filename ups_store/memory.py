"""How much memory this process may still use: of the machine, and of the control groups that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ups_store import files

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# Limits, usage, and what of it the kernel gives back under pressure: pages of files, the clean ones at once.
_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_bytes() -> int:
    """Memory that can be filled without swapping and without being killed for it, in bytes.

    The least of what the machine has left and of what each control group around this process has left under
    its limit (cgroup v1 and v2, containers included). Pages of files that the kernel would give back count as
    available. Other processes take from the same memory: it is an estimate for now, no reservation.
    """
    import psutil  # 60 ms, which reader processes don't pay

    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *cgroup_available_bytes(_CGROUP_ROOT, _MEMBERSHIP)]))


def cgroup_available_bytes(root: Path, membership: Path) -> Iterator[int]:
    """What every control group around a process has left, in bytes; below 0 for one beyond its limit.

    Args:
        root: Where the hierarchies are mounted, `/sys/fs/cgroup`.
        membership: The process's list of groups, `/proc/PID/cgroup` (cgroups(7)).
    Yields:
        One number per limited group, of any version; nothing where no group has a limit.
    """
    for line in (files.system_text(membership) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (root / "memory", _V1) if controllers else (root, _V2)
        # In a container the path may be the host's, which isn't mounted: what is there is the mount itself.
        inner = Path(group.lstrip("/"))
        for folder in (mount / inner, *(mount / parent for parent in inner.parents)):
            yield from _room(folder, *names)


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
