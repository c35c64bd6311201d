"""A build's shared cache, `cache.remote`: stores of other machines are pulled, those made here pushed.

Nothing of it stops a build: what fails or takes too long is a warning, and the store is built here. Transfers
run in a reader process, which is ended where it doesn't get on; a build never uses a client itself, which
wouldn't survive a fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from ups_store.building.build import Build
from ups_store.building.config import BuildConfig
from ups_store.building.decide import count_files
from ups_store.building.progress import Watcher
from ups_store.console import format_nbytes
from ups_store.errors import (
    CorruptChunkError,
    DiskFullError,
    FormatError,
    IdentityMismatchError,
    StoreError,
)
from ups_store.read.base import AnyStore
from ups_store.remote.shared import SharedFile, open_shared
from ups_store.remote.transfer import compare_there, find_there, pull_from, push_to
from ups_store.sources.reader import Call
from ups_store.sources.readers import Patience, ReaderPool

_LOOK_S = 15.0  # the longest that a build waits for an answer whether a store is there
_OF_ONE_STORE = (CorruptChunkError, DiskFullError, FormatError, IdentityMismatchError)
_KINDS_OF_ONE_STORE = ("wrong_length", "source_changed", "not_found", "replaced")
_NOT_WRITABLE = ("not_allowed", "read_only")


class SharedStores:
    """Pulls and pushes the stores of a build; a context manager, which ends their processes."""

    def __init__(self, config: BuildConfig, *, watcher: Watcher) -> None:
        self._timeout_s = config.cache.remote_timeout_s
        self._remote = config.cache.remote
        self._cache = None if self._remote is None else open_shared(self._remote)  # asks for nothing yet
        self._look_s = min(_LOOK_S, self._timeout_s)
        self._watcher = watcher
        # By their deadline: an answer has to come sooner than bytes.
        self._pools: dict[float, ReaderPool] = {}
        self._is_given_up = self._is_push_given_up = False

    def pull(self, build: Build) -> bool:
        """Pull a store that a build hasn't found, if it is the builder; say whether it has it now."""
        if self._cache is None or self._is_given_up or not build.rank.is_builder:
            return False
        is_pulled = False
        with self._warning(f"{build.title}: not pulled from"), build.clock.timed("pull"):
            entries = self._find(build.config_hash, build.path.name)
            # Other processes of this machine wait for files in the number that a build would make.
            if entries and (build.rank.num_local == 1 or len(entries) == count_files(build)):
                nbytes = sum(entry.nbytes for entry in entries)
                self._watcher.stage(f"{build.title}: pulling", nbytes, unit="bytes")
                path = self._ask(pull_from, self._timeout_s, entries, build.path.parent, has_bytes=True)
                self._watcher.note(f"{build.title}: pulled {format_nbytes(nbytes)} from {self._name}, {path}")
                is_pulled = True
        return is_pulled and build.find_again()

    def push(self, build: Build, store: AnyStore) -> bool:
        """Push a finished store, and say whether this put it there; one that is there is compared."""
        if self._cache is None or self._is_given_up or not build.rank.is_builder:
            return False
        if self._cache.is_read_only or self._is_push_given_up:
            return False
        title = build.title
        with self._warning(f"{title}: not pushed to"):
            if entries := self._find(store.config_hash, build.path.name):
                self._ask(compare_there, self._look_s, store.path, entries)
                return False
            self._watcher.stage(f"{title}: pushing", store.nbytes, unit="bytes")
            if self._ask(push_to, self._timeout_s, store.path, has_bytes=True):
                self._watcher.note(f"{title}: pushed {format_nbytes(store.nbytes)} to {self._name}")
                return True
        return False

    def _find(self, config_hash: str, name: str) -> Sequence[SharedFile]:
        entries: Sequence[SharedFile]
        entries = self._ask(find_there, self._look_s, config_hash, name)
        return entries

    def _ask(
        self, function: Callable[..., object], deadline_s: float, *arguments: object, has_bytes: bool = False
    ) -> Any:
        """Call it in the process, which gets half as long again; a client's own deadline comes before."""
        self._watcher.waits("shared cache")
        timeout_s = 1.5 * deadline_s
        if timeout_s not in self._pools:
            patience = Patience(timeout_s=timeout_s, open_timeout_s=timeout_s, retries=0)
            self._pools[timeout_s] = ReaderPool(1, slot_nbytes=1, num_slots=1, patience=patience)
        call = Call(function, (self._remote, deadline_s, *arguments), self._name, "a store")
        progress = self._watcher.advance if has_bytes else lambda num: None
        return self._pools[timeout_s].ask(call, progress=progress)

    @property
    def _name(self) -> str:
        return self._cache.location if self._cache else ""

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Inside, failures are a note; after one that isn't of a single store the place is left alone."""
        try:
            yield
        except (StoreError, OSError) as error:
            kind = getattr(error, "kind", "")
            if isinstance(error, _OF_ONE_STORE) or kind in _KINDS_OF_ONE_STORE:
                rest = ""
            elif kind in _NOT_WRITABLE:
                self._is_push_given_up, rest = True, "; nothing more is pushed"
            else:
                self._is_given_up, rest = True, "; it is left alone from here on"
            self._watcher.note(f"warning: {what} {self._name}: {error}{rest}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools.values():
            pool.close()
