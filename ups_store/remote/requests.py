"""What a build asks of a shared cache, for a reader process: it is ended where a server or mount hangs.

A build never uses a client itself, which wouldn't survive a fork.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ups_store.remote.shared_cache import SharedFile
from ups_store.remote.shared_place import name_of_place, open_shared
from ups_store.remote.transfer import Pushed, find_store, pull_store, push_store
from ups_store.sources.attempts import Attempts
from ups_store.sources.download import Progress

if TYPE_CHECKING:
    from ups_store.sources.reader import Reader

_LEAST_BYTES = 4 << 20  # within a deadline; what brings less isn't worth waiting for


@dataclass(frozen=True)
class FindRequest:
    """Ask whether a store is there.

    Attributes:
        place: URL or folder of the shared cache.
        config_hash: Hash of the store's identity.
        name: Its file name.
        deadline_s: For the answer.
    """

    place: str
    config_hash: str
    name: str
    deadline_s: float
    subject = "what it has"
    first_sample = None

    @property
    def path(self) -> str:
        """For messages."""
        return name_of_place(self.place)

    def run(self, reader: Reader) -> list[SharedFile]:
        """Its files; empty if it isn't there."""
        reader.doing("asking")
        return find_store(open_shared(self.place, deadline_s=self.deadline_s), self.config_hash, self.name)


@dataclass(frozen=True)
class PullRequest:
    """Pull a store; see `pull_store`. One of another identity is replaced, as a build does."""

    place: str
    entries: tuple[SharedFile, ...]
    folder: Path
    deadline_s: float
    subject = "a store"
    first_sample = None

    @property
    def path(self) -> str:
        """For messages."""
        return f"{name_of_place(self.place)}/{self.entries[0].key}"

    def run(self, reader: Reader) -> str:
        """What opens it."""
        cache = open_shared(self.place, deadline_s=self.deadline_s)
        attempts = Attempts(self.deadline_s)
        options = {"attempts": attempts, "progress": _Paced(reader), "replace": True}
        return str(pull_store(cache, self.entries, self.folder, **options))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PushRequest:
    """Push a store; see `push_store`."""

    place: str
    store: Path
    deadline_s: float
    subject = "a store"
    first_sample = None

    @property
    def path(self) -> str:
        """For messages."""
        return name_of_place(self.place)

    def run(self, reader: Reader) -> list[Pushed]:
        """What became of each file."""
        cache = open_shared(self.place, deadline_s=self.deadline_s)
        return push_store(self.store, cache, progress=_Paced(reader))


class _Paced:
    """Has a transfer get on only as fast as is worth it: by `_LEAST_BYTES` within a deadline."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num = 0

    def doing(self, what: str) -> None:
        """See `Progress`."""
        self._progress.progressed(self._num)
        self._num = 0
        self._progress.doing(what)

    def progressed(self, num: int = 0) -> None:
        """See `Progress`; no bytes are work on this machine, which has no least speed."""
        self._num += num
        if not num or self._num >= _LEAST_BYTES:
            self._progress.progressed(self._num)
            self._num = 0
