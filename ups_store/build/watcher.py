"""The watcher protocol: who is told how a build goes."""

from __future__ import annotations

from typing import Protocol

from ups_store.sources.pool import ReaderPool


class Watcher(Protocol):
    """Who is told how a build goes; the console's progress bar, or nobody."""

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """A stage begins, which has so many "bytes" or "samples"."""

    def advance(self, num: int) -> None:
        """So much more of the stage is done."""

    def note(self, message: str) -> None:
        """Something that the user should know."""

    def watch(self, pool: ReaderPool) -> None:
        """Readers whose state may be of interest."""

    def waits(self, what: str) -> None:
        """What everything waits for from now on, such as "read" or "commit"."""
