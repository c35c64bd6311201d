"""The one downloader: bytes of an `Origin` into a file, resumed where they stopped, digested, renamed whole.

Beside the file that grows lies what it is of, so that another run goes on with it. Of a copy that a power cut
has left, only what was synced is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ups_store.errors import DownloadError
from ups_store.sources.attempts import Attempts, CutError, given_up, is_transient
from ups_store.sources.copies import find_copy, find_part, forget_part, part_path, publish, record_part
from ups_store.sources.file_state import changed
from ups_store.sources.origins import CHUNK_BYTES, Body, ChangedError, Origin, TransientError, Version
from ups_store.system import files, locks

_SYNC_BYTES = 256 << 20  # the most that a power cut costs
_LOCK_POLL_S = 0.05
_LOCK_AT = 1 << 62  # a byte that no copy has, so that the lock is of the file and not of its bytes


class Progress(Protocol):
    """Hears how it goes, such as a `ups_store.sources.readers.Reader`."""

    def doing(self, what: str) -> None:
        """Something else is done from now on, such as "copying"."""
        ...

    def progressed(self, num: int = 0) -> None:
        """It gets on, by so many bytes."""
        ...


def fetch(origin: Origin, version: Version, folder: Path, *, attempts: Attempts, reader: Progress) -> int:
    """Have a whole copy of an origin in a folder of its own; one that another process makes is waited for.

    Args:
        origin: What to copy.
        version: What `look` has found.
        folder: Its folder, which is made.
        attempts: How long and how often.
        reader: Hears how it goes, in bytes.
    Returns:
        Bytes that were fetched by this call.
    Raises:
        DownloadError: Kind "cut_short", "wrong_digest", "wrong_length", "unreachable".
        SourceError: As the origin; kind "source_changed", if it changes time and again.
        ReadTimeoutError: If nothing came for too long, time and again.
        DiskFullError: If there is no room.
    """
    files.make_folder(folder, hint="check data.stage_dir")
    files.check_no_link(folder)
    part = part_path(folder, version)
    with _claimed(part, reader) as fd:
        if find_copy(folder, origin, version) is not None:
            files.remove(part)
            forget_part(folder)
            return 0
        reader.doing("copying")
        return _Fetch(origin, version, folder, fd, attempts, reader).run()


class _Fetch:
    """One copy in the making, in a file that is locked."""

    def __init__(
        self, origin: Origin, version: Version, folder: Path, fd: int, attempts: Attempts, reader: Progress
    ) -> None:
        self._origin, self._version, self._folder, self._fd = origin, version, folder, fd
        self._attempts, self._reader = attempts, reader
        self._part = part_path(folder, version)
        self._offset = self._num_fetched = self._synced = 0
        self._hashers: dict[str, Any] = {}

    def run(self) -> int:
        """Fetch what is missing, look at it, and give it its name."""
        self._resume()
        was_resumed = self._offset > 0
        self._get_rest()
        try:
            self._check_digest()
        except DownloadError:
            self._start_again()
            if not was_resumed:
                raise
            self._get_rest()  # the beginning was of something else, though nothing showed it
            self._check_digest()
        with files.disk_full_as_error(self._part, 0):
            files.sync(self._fd)  # else the name could come to stand for a copy with holes
        digests = {kind: hasher.hexdigest() for kind, hasher in self._hashers.items()}
        publish(self._folder, self._origin, self._version, digests)
        return self._num_fetched

    def _resume(self) -> None:
        """Go on with what an earlier run has left, if it is of this version."""
        self._hashers = self._new_hashers()
        there = find_part(self._folder, self._origin, self._version)
        kept = files.size(self._fd)
        if not there.is_of_this_boot:  # what wasn't synced may be zeros
            kept = min(kept, there.synced)
        self._synced = min(there.synced, kept)
        may_grow = bool(self._version.tag or self._origin.digest)
        if not (there.is_same and may_grow and kept <= self._version.size):
            self._start_again()
            return
        files.truncate(self._fd, kept)
        self._record()
        while self._offset < kept:
            chunk = files.read_at(self._fd, self._offset, min(CHUNK_BYTES, kept - self._offset))
            self._took(chunk)

    def _new_hashers(self) -> dict[str, Any]:
        kinds = {"sha256", self._origin.digest.partition(":")[0] or "sha256"}
        return {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}

    def _start_again(self) -> None:
        """Begin with nothing; what vouches for bytes that were there goes before they do."""
        forget_part(self._folder)
        if self._synced:
            files.sync_folder(self._folder)  # else a power cut could bring it back, with other bytes there
        files.truncate(self._fd, 0)
        self._offset = self._synced = 0
        self._hashers = self._new_hashers()
        self._record()

    def _record(self) -> None:
        record_part(self._folder, self._origin, self._version, synced=self._synced)

    def _took(self, chunk: bytes | memoryview) -> None:
        for hasher in self._hashers.values():
            hasher.update(chunk)
        self._offset += len(chunk)
        self._reader.progressed(len(chunk))

    def _get_rest(self) -> None:
        """Attempt after attempt, as long as one of a few brings something."""
        num_failed = num_changed = furthest = 0
        while True:
            try:
                return self._attempt()
            except ChangedError:
                num_changed += 1
                self._follow(is_last=num_changed > self._attempts.retries)
                furthest = 0
                continue
            except (TransientError, OSError) as error:
                if not is_transient(error):
                    raise
                failure = error
            num_failed = 0 if self._offset > furthest else num_failed + 1
            furthest = max(furthest, self._offset)
            if num_failed > self._attempts.retries:
                raise given_up(self._origin.location, failure, self._offset, self._version.size) from failure
            self._attempts.pause(failure, num_failed)
            if not (self._version.tag or self._origin.digest):
                self._start_again()  # nothing would show that the rest is of another version

    def _attempt(self) -> None:
        """Take what one answer gives; less than is missing is an error that another attempt mends."""
        stall_s = self._attempts.stall_s
        if self._offset < self._version.size:
            with self._origin.opened(self._offset, self._version, stall_s=stall_s) as body:
                if body.start != self._offset:
                    self._start_again()
                self._take(body)
        if self._offset < self._version.size:
            raise CutError
        if self._origin.look(stall_s=stall_s) != self._version:  # it may have changed since the first byte
            raise ChangedError

    def _take(self, body: Body) -> None:
        for chunk in body.chunks:
            if self._offset + len(chunk) > self._version.size:
                raise DownloadError(
                    "there are more bytes than were announced",
                    kind="wrong_length",
                    path=self._origin.location,
                    expected=f"{self._version.size:,} bytes",
                    found="more",
                    hint="wait until no program writes to it, and run again",
                )
            with files.disk_full_as_error(self._part, self._version.size - self._offset):
                files.write_at(self._fd, self._offset, chunk)
            self._num_fetched += len(chunk)
            self._took(chunk)
            if self._offset - self._synced >= _SYNC_BYTES:
                self._sync()

    def _sync(self) -> None:
        with files.disk_full_as_error(self._part, self._version.size - self._offset):
            files.sync_data(self._fd)
        self._synced = self._offset
        self._record()

    def _follow(self, *, is_last: bool) -> None:
        """Begin again with what is there now."""
        found = self._origin.look(stall_s=self._attempts.stall_s)
        if is_last or found is None:
            raise changed(self._origin.location)
        self._version = replace(found, name=self._version.name)
        self._start_again()

    def _check_digest(self) -> None:
        kind, _, expected = self._origin.digest.partition(":")
        if kind and (found := self._hashers[kind].hexdigest()) != expected:
            raise DownloadError(
                f"its {kind} isn't the one that was expected",
                kind="wrong_digest",
                path=self._origin.location,
                expected=expected,
                found=found,
                hint="check the digest, and that nothing on the way changes what is fetched",
            )


@contextlib.contextmanager
def _claimed(part: Path, reader: Progress) -> Iterator[int]:
    """The unfinished copy, open and locked; while another process has it, that has to get on."""
    reader.doing("waiting")
    size = -1
    while True:
        fd = files.open_or_create(part)
        try:
            if locks.try_lock(fd, _LOCK_AT) and files.is_file_at(fd, part):
                yield fd
                return
            if (now := files.size(fd)) != size:
                size = now
                reader.progressed()
        finally:
            files.close(fd)
        time.sleep(_LOCK_POLL_S)
