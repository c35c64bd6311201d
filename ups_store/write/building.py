"""The building file under its locks, and typed errors for what the file system says (spec 6.1 to 6.5)."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ups_store.errors import (
    BuildLockedError,
    CommitError,
    FormatError,
    ReadError,
    StoreError,
    StoreReplacedError,
    TruncatedError,
)
from ups_store.format.build_tail import (
    BUILDER_LOCK,
    GATE_LOCK,
    HOW_TO_REPLACE,
    OWNER_NBYTES,
    OWNER_OFFSET,
    SAMPLE_LOCK,
    Owner,
    TailHeader,
)
from ups_store.format.layout import Layout, consecutive_runs
from ups_store.format.ragged import Offsets
from ups_store.read.catalog import read_building
from ups_store.read.gather import Samples
from ups_store.read.recovery import building_path
from ups_store.system import files, locks

LOCK_TIMEOUT_S = 60.0
MAX_LOCKS = 1024  # of a commit: for each the kernel looks through all that the file has


@dataclass(eq=False)
class BuildingFile:
    """An open building file; the process that holds it with the builder lock is the builder.

    Attributes:
        path: Where the store will be published.
        fd: Descriptor, open for reading and writing; -1 after closing, and in forked children.
        layout: Geometry.
        header: Header of the build tail.
        metadata_crcs: CRC-32 of the metadata entries, in file order.
        is_lazy: Whether commits go unsynced; only ever where the header says so too, for its samples are
            checked after a power loss.
        offsets: Of each ragged array, by name, the row at which each sample begins, shape (N + 1,).
        is_spool: Whether N and the numbers of rows are only what it has room for (spec 6.13).
    """

    path: Path
    fd: int
    layout: Layout
    header: TailHeader
    metadata_crcs: tuple[int, ...]
    is_lazy: bool
    offsets: Mapping[str, Offsets]
    is_spool: bool = False

    @functools.cached_property
    def building_path(self) -> Path:
        """The file's own name."""
        return building_path(self.path)

    @property
    def needed_bytes(self) -> int:
        """Room that it takes on the disk; of a spool, which is sparse, what it takes now."""
        nbytes = self.layout.building_nbytes
        return files.allocated_bytes(self.building_path) if self.is_spool else nbytes

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Have a read that fails say the file's name, not the one that it was created under (spec 6.6)."""
        try:
            yield
        except ReadError as error:
            error.path = str(self.building_path)
            raise

    def check_current(self) -> None:
        """Fail if the building name no longer means this file; call it after taking any lock (spec 6.3)."""
        if not files.is_file_at(self.fd, self.building_path):
            raise StoreReplacedError(
                "the building file was published, removed or restarted by another process",
                path=self.building_path,
                hint="nothing was written; open the store, or create it again",
            )

    @contextlib.contextmanager
    def gate(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the gate: shared while committing, exclusive while finishing or recovering (spec 6.3)."""
        with self._locked(GATE_LOCK, 1, exclusive=exclusive):
            if not exclusive:
                self.check_has_tail()
            yield

    def check_has_tail(self) -> None:
        """Fail where a commit record would be garbage, because the build tail isn't there (spec 6.3)."""
        nbytes = files.size(self.fd)
        if nbytes == self.layout.building_nbytes:
            return
        if nbytes == self.layout.file_nbytes:  # its builder died between cutting the tail off and publishing
            raise StoreReplacedError(
                "the store is complete and only waits to be published",
                path=self.building_path,
                hint="nothing was written; run its builder again",
            )
        raise TruncatedError(
            "another program changed the length of the unfinished file",
            path=self.building_path,
            clause="6.1",
            expected=self.layout.building_nbytes,
            found=nbytes,
            hint=f"nothing was written; build it again with {HOW_TO_REPLACE}",
        )

    @contextlib.contextmanager
    def samples_locked(self, samples: Samples) -> Iterator[None]:
        """Hold the locks of the samples; `samples` is sorted, so two committers can't wait for each other.

        Where they lie in too many places, those of the samples between are held, too.
        """
        places = consecutive_runs(samples)
        if len(places) > MAX_LOCKS:
            places = [(int(samples[0]), int(samples[-1] - samples[0]) + 1)]
        with contextlib.ExitStack() as stack:
            for first, num in places:
                stack.enter_context(self._locked(SAMPLE_LOCK + first, num, exclusive=True))
            yield

    @contextlib.contextmanager
    def _locked(self, offset: int, length: int, *, exclusive: bool) -> Iterator[None]:
        where = self.building_path
        locks.lock(self.fd, offset, length, exclusive=exclusive, timeout_s=LOCK_TIMEOUT_S, path=where)
        try:
            self.check_current()
            yield
        finally:
            if self.fd >= 0:
                locks.unlock(self.fd, offset, length)

    def close(self) -> None:
        """Close the descriptor, which releases its locks."""
        fd, self.fd = self.fd, -1  # first: an interrupt must not have the number closed twice
        if fd >= 0:
            files.close(fd)

    def __del__(self) -> None:
        if self.fd >= 0:  # interrupted before anybody had it: the locks aren't kept
            with contextlib.suppress(OSError):
                self.close()


@contextlib.contextmanager
def failures_as_errors(
    path: Path, needed_bytes: int, what: str, *, passing: tuple[type[OSError], ...] = ()
) -> Iterator[None]:
    """Turn what the file system reports into `DiskFullError` or `CommitError`.

    Args:
        path: For messages; its folder is asked for free room.
        needed_bytes: Room for what is being written.
        what: What didn't happen.
        passing: What is left as it is.
    """
    try:
        with files.disk_full_as_error(path, needed_bytes):
            yield
    except passing:
        raise
    except ReadError as error:
        raise not_done(what, path, error) from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise not_done(what, path, error) from error


def not_done(what: str, path: Path, error: OSError) -> CommitError:
    """Make the error for what the file system didn't do."""
    if isinstance(error, locks.NoLocksError):
        hint = "write to a local disk of Linux, and copy the finished store here: reading needs no locks"
        return CommitError(f"{what} ({error.strerror})", kind="no_locks", path=path, hint=hint)
    hint = "check the disk and your permissions, and run again: it continues with the last good commit"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "this user may not write there: check the permissions of file and folder, or take another"
    return CommitError(f"{what} ({error.strerror or error})", path=path, hint=hint)


def take_builder_lock(fd: int, path: Path) -> None:
    """Become the builder, or fail with `BuildLockedError` that names the one there is (spec 6.3)."""
    if locks.try_lock(fd, BUILDER_LOCK):
        return
    owner = read_owner(fd, path)
    is_me = owner == Owner(os.getpid(), socket.gethostname())
    error = BuildLockedError(
        "this process holds it already" if is_me else "another process is building it",
        path=path,
        found=f"pid {owner.pid} on {owner.host}" if owner else "an unknown process",
        hint="close the first writer"
        if is_me
        else "wait for it or end it; `ups_store.join` commits beside it",
    )
    error.pid, error.host = (owner.pid, owner.host) if owner else (None, None)
    raise error


def read_owner(fd: int, path: Path) -> Owner | None:
    """The process that noted that it builds the file; None where that isn't known."""
    try:
        layout = read_building(fd, path).layout
    except FormatError:
        return None
    return Owner.parse(files.read_at(fd, layout.tail_offset + OWNER_OFFSET, OWNER_NBYTES))


def write_owner(building: BuildingFile, owner: Owner) -> None:
    """Note which process builds, for the messages of others."""
    files.write_at(building.fd, building.layout.tail_offset + OWNER_OFFSET, owner.pack())
