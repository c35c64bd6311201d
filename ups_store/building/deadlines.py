"""Deadlines of encode calls and commits: a build that stalls ends, and the same command continues it.

A reader is a process of its own, which can be replaced. An encoder or a disk that hangs holds a thread of
this process, so here the process ends. What was committed before stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ups_store.building.config import CacheConfig
from ups_store.building.encode import DescribingEncoder
from ups_store.errors import StoreError
from ups_store.system.stalls import STALLED, DeadlineThread

FIRST_TIMES = 10.0  # longer for the first encode call, which compiles


class BuildDeadlines(DeadlineThread):
    """Ends the process with exit code 4 if encoding or committing a batch takes too long; a context manager.

    Args:
        deadlines: How long that is: its `encode_timeout_s`, also for loading the encoder, `commit_timeout_s`.
        path: Of the store; the stacks go beside it, to `<name>.stalled.txt`.
        encoder: What encodes; None where fields are stored.
    """

    def __init__(self, deadlines: CacheConfig, *, path: Path, encoder: object = None) -> None:
        super().__init__(
            "build-deadlines",
            path=path.with_name(f"{path.name}.stalled.txt"),
            shortest_s=min(deadlines.encode_timeout_s, deadlines.commit_timeout_s),
        )
        self._deadlines, self._store, self._encoder = deadlines, path, encoder
        self._has_encoded = False

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """The block loads the encoder, or encodes one batch."""
        factor = 1.0 if self._has_encoded else FIRST_TIMES
        with self._within(
            "encoding a batch", slot="encode", allowed_s=factor * self._deadlines.encode_timeout_s
        ):
            yield

    def has_encoded(self) -> None:
        """The first batch is encoded: what is compiled then is compiled."""
        self._has_encoded = True

    @contextmanager
    def committing(self) -> Iterator[None]:
        """The block commits one batch."""
        with self._within("committing a batch", slot="commit", allowed_s=self._deadlines.commit_timeout_s):
            yield

    @contextmanager
    def _within(self, what: str, *, slot: str, allowed_s: float) -> Iterator[None]:
        self.allow(what, allowed_s, slot=slot)
        try:
            yield
        finally:
            self.rest(slot=slot)

    def _error(self, what: str, allowed_s: float) -> StoreError:
        key = "encode" if what.startswith("encoding") else "commit"
        return StoreError(
            f"the build stalled: {what} wasn't over in {allowed_s:g} s",
            kind="stalled",
            exit_code=STALLED,
            path=self._store,
            hint=f"{self.path} has the stacks of all threads; raise cache.{key}_timeout_s if it only was"
            " slow; the same command continues",
        )

    def _state(self) -> str:
        if not isinstance(self._encoder, DescribingEncoder):
            return ""
        return f"\n{self._encoder.device_state()}\n"
