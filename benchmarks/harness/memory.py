"""Memory of this process as the kernel counts it (proc(5)): its own, and its share of a mapped file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def own_bytes() -> int:
    """What no other process could share: written memory, without the pages of mapped files."""
    return _sum(Path("/proc/self/smaps_rollup").read_text().splitlines(), "Private_Dirty:")


def pss_bytes(path: Path) -> int:
    """This process's share of the pages of the file's mappings."""
    lines, is_meant = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            is_meant = line.endswith(str(path))
        elif is_meant:
            lines.append(line)
    return _sum(lines, "Pss:")


def _sum(lines: Iterable[str], field: str) -> int:
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
