"""`SlotCache`: fetched chunks of a remote store in a sparse file on a local disk, shared by processes.

`FINGERPRINT.slots` holds the store's bytes where they lie in the object, holes where they weren't fetched,
and behind them one byte a chunk: whether it is there; its last bytes say that it is ours. It is named by
content, so it serves the same store at any URL, also one that was uploaded again. There is no order between
writes, and no sync: what another process is writing, has given back, or lost in a crash doesn't match its
checksum, which every reader checks, and is fetched again. So nothing but a file's removal needs a lock.

A folder has a limit in bytes. When it is reached, files that no process uses go first, those that were opened
longest ago before others. After that a store keeps most of what it has: of an epoch that is larger than the
cache, any order by last use would find nothing. Every 16th new chunk takes the place of others.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from ups_store.errors import SpecError, StoreError
from ups_store.printable import printable
from ups_store.read.store_file import Descriptor
from ups_store.system import files, locks

SUFFIX = ".slots"
_PAGE_BYTES = 4096
_REPLACED_SHARE = 1 / 16  # of the new chunks, once the folder is full
_GIVEN_BACK_BYTES = 64 << 10  # at least at a time: of a page that two chunks share neither frees anything
_MAX_DRAWS = 256  # of chunks that may be there, and be given back
_THERE, _GONE = b"\1", b"\0"
_LOCK_OFFSET = 0  # a byte of the file that each process which uses it has locked, shared
_LOCK_WAIT_S = 2.0  # removing takes no time: who holds the lock for longer is stopped, or hostile
_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
_MARK = b"ups-store slots\n"  # the end of a file


@dataclass(frozen=True)
class Places:
    """Where the chunks of one array with slots lie."""

    base: int  # number of the first
    count: int  # how many there are
    first: int  # first byte of the first
    stride: int  # bytes from one to the next


class SlotCache:
    """The chunks of one store that lie on this machine. For any thread; a forked child shares it.

    Whatever its disk does, reading goes on: an error of it ends the cache, with a warning. Its folder takes a
    little more than the limit where several processes write. `places` are those of chunks that may be given
    back one by one.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        fingerprint: str,
        file_nbytes: int,
        num_chunks: int,
        places: tuple[Places, ...],
    ) -> None:
        self.path, self.limit_bytes = folder / f"{fingerprint}{SUFFIX}", limit_bytes
        self._flags = -(-file_nbytes // _PAGE_BYTES) * _PAGE_BYTES  # where they begin
        self._places = places
        self._random = random.Random()
        self._lock = threading.Lock()
        self._descriptor: Descriptor | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = Descriptor(_open_shared(self.path))
            if files.size(self._descriptor.fd) < self._flags + num_chunks + len(_MARK):
                files.truncate(self._descriptor.fd, self._flags + num_chunks)
                files.write_at(self._descriptor.fd, self._flags + num_chunks, _MARK)
            files.touch(self._descriptor.fd)
        except (OSError, StoreError) as error:
            self._give_up(error)

    def get(self, number: int, first: int, nbytes: int) -> bytes | None:
        """The bytes of a chunk, which may be anything: check them; None if it isn't there."""
        descriptor = self._descriptor
        if descriptor is None:
            return None
        try:
            if files.read_at(descriptor.fd, self._flags + number, 1) == _THERE:
                return files.read_at(descriptor.fd, first, nbytes)
        except (OSError, StoreError) as error:
            self._give_up(error)
        return None

    def put(self, number: int, first: int, raw: memoryview) -> None:
        """Keep the bytes of a chunk, if there is room."""
        descriptor = self._descriptor
        if descriptor is None:
            return
        try:
            if self._has_room(descriptor.fd, len(raw)):
                files.write_at(descriptor.fd, first, raw)
                files.write_at(descriptor.fd, self._flags + number, _THERE)
        except (OSError, StoreError) as error:
            self._give_up(error)

    def drop(self, number: int) -> None:
        """Forget a chunk that was found to be wrong."""
        descriptor = self._descriptor
        if descriptor is None:
            return
        try:
            files.write_at(descriptor.fd, self._flags + number, _GONE)
        except (OSError, StoreError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End the cache after an error of its disk."""
        self.close()
        warnings.warn(printable(f"{self.path}: no chunk is kept any more ({error})"), stacklevel=3)

    @property
    def nbytes(self) -> int:
        """Bytes of this store that lie on the disk."""
        return files.allocated_bytes(self.path)

    def close(self) -> None:
        """Let go of the file, which stays; a call under way ends first."""
        self._descriptor = None

    def _has_room(self, fd: int, nbytes: int) -> bool:
        """Say whether a chunk may be written, after others went."""
        needed = nbytes + 3 * _PAGE_BYTES  # the pages that it begins and ends in, and that of its flag
        limit = self.limit_bytes - needed
        if _used(self.path.parent) <= limit:
            return True
        with self._lock:  # one thread at a time; other processes do the same work, which does no harm
            if _remove_unused(self.path, limit):
                return True
            num_slots, freed = sum(slots.count for slots in self._places), max(needed, _GIVEN_BACK_BYTES)
            if not num_slots or self._random.random() >= _REPLACED_SHARE * needed / freed:
                return False
            # Neighbours of about so many bytes, drawn by chance, until the folder takes no more.
            for _ in range(_MAX_DRAWS):
                number = self._random.randrange(num_slots)
                for slots in self._places:
                    if number < slots.count:
                        break
                    number -= slots.count
                if files.read_at(fd, self._flags + slots.base + number, 1) != _THERE:
                    continue
                num = min(slots.count - number, -(-freed // slots.stride))
                files.write_at(fd, self._flags + slots.base + number, _GONE * num)
                files.punch_hole(fd, slots.first + number * slots.stride, num * slots.stride)
                if _used(self.path.parent) <= limit:
                    return True
            return False


def limit_of(nbytes: int | None, folder: Path) -> int:
    """The limit of a folder: what was asked for, by default half of what is free, and what it has already.

    Raises:
        SpecError: If that isn't positive.
    """
    if nbytes is not None:
        if nbytes <= 0:
            raise SpecError("cache_bytes", kind="cache", path=folder, expected="more than 0", found=nbytes)
        return nbytes
    there = next(parent for parent in (folder, *folder.parents) if files.exists(parent))
    used = _used(folder)
    return used + files.free_bytes(there) // 2


def _used(folder: Path) -> int:
    """Bytes that all stores of a folder take on its disk."""
    return sum(
        files.allocated_bytes(folder / name) for name in files.names_in(folder) if _NAME.fullmatch(name)
    )


def _open_shared(path: Path) -> int:
    """Open or make a file, and lock it against removal, together with all that use it."""
    while True:
        fd = files.open_or_create(path)
        try:
            locks.lock(fd, _LOCK_OFFSET, exclusive=False, timeout_s=_LOCK_WAIT_S, path=path)
            if files.is_file_at(fd, path):  # else it was removed meanwhile
                fd, ours = -1, fd
                return ours
        finally:
            if fd >= 0:
                files.close(fd)


def _remove_unused(own: Path, limit: int) -> bool:
    """Remove files of stores that no process uses until the folder takes no more; say whether it does."""
    others = [own.parent / name for name in files.names_in(own.parent) if _NAME.fullmatch(name)]
    ages = sorted((last[1], path) for path in others if path != own and (last := files.last_write(path)))
    used = _used(own.parent)
    for _, path in ages:
        if used <= limit:
            break
        nbytes = files.allocated_bytes(path)
        with contextlib.suppress(StoreError, OSError), files.opened(path, writable=True) as fd:
            end = files.read_at(fd, max(0, files.size(fd) - len(_MARK)), len(_MARK))
            if end == _MARK and locks.try_lock(fd, _LOCK_OFFSET):  # ours, and used by no process
                files.remove(path)
                used -= nbytes
    return used <= limit
