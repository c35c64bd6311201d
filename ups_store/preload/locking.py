"""Keeping memory from being swapped out or given back (mlock)."""

from __future__ import annotations

import mmap
from pathlib import Path

from ups_store.errors import MemoryLimitError
from ups_store.system import mappings


def lock(mapping: mmap.mmap, *, path: Path) -> None:
    """Lock every page of a mapping that is there, and the others when they come.

    Raises:
        MemoryLimitError: With kind "memlock", if RLIMIT_MEMLOCK is lower.
    """
    try:
        mappings.lock_on_fault(mapping)
    except OSError as refused:
        limit = mappings.memory_lock_limit()
        raise MemoryLimitError(
            "the system refuses to lock so much memory (RLIMIT_MEMLOCK)",
            needed_bytes=len(mapping),
            available_bytes=limit,
            kind="memlock",
            path=path,
            expected=f"a limit of at least {len(mapping):,} bytes",
            found=f"{limit:,}",
            hint="raise it (`ulimit -l`, or LimitMEMLOCK= of the service), or preload without lock=True",
        ) from refused
