"""`Budget`: what a mode needs and what there is, compared before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ups_store.errors import MemoryLimitError
from ups_store.system import files, mappings
from ups_store.system.memory import available_bytes

_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Budget:
    """Memory that a mode needs, and memory that may be used.

    Attributes:
        needed_bytes: What the mode will fill.
        available_bytes: What there is of it now.
        place: Whose memory it is, for messages.
    """

    needed_bytes: int
    available_bytes: int
    place: str = "RAM"

    def __str__(self) -> str:
        return f"{self.needed_bytes:,} bytes needed, {self.available_bytes:,} bytes of {self.place} available"

    def require(self, mode: str, *, margin: float, path: Path) -> None:
        """Refuse what doesn't fit, a share of `margin` being left to others.

        Raises:
            MemoryLimitError: With needed and available bytes.
        """
        if self.needed_bytes <= self.available_bytes * (1 - margin):
            return
        raise MemoryLimitError(
            f"the store doesn't fit into {self.place} for preload mode {mode!r}",
            needed_bytes=self.needed_bytes,
            available_bytes=self.available_bytes,
            path=path,
            expected=f"{self.needed_bytes:,} bytes and a margin of {margin:.0%}",
            found=f"{self.available_bytes:,} available",
            hint='free memory, raise the limit, or preload with mode="auto", which takes what fits',
        )


def ram_budget(needed_bytes: int, *, is_new: bool) -> Budget:
    """Budget for RAM; new memory must fit into this process's address space too (`ulimit -v`)."""
    left = mappings.address_space_left() if is_new and needed_bytes else None
    available = available_bytes()
    return Budget(needed_bytes, available if left is None else min(available, left))


def locked_bytes() -> int:
    """Memory of the machine that some process has locked (mlock): it never counts as available."""
    lines = (files.system_text(_MEMORY) or "").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Mlocked:"))
