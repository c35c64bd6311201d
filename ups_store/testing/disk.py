"""A disk in memory that tells written from durable bytes, and what may be left of it after a power loss.

`installed` puts it in the place of `ups_store.system.files` and `ups_store.system.locks`. What a file system
may do to unsynced writes is what this disk does: drop any of them, keep any of them, in any order, whole, in
part, or sector by sector. Names appear and vanish in order, as a journal does it. Everything that was synced
stays.
"""

from __future__ import annotations

import contextlib
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from ups_store.errors import StoreNotFoundError
from ups_store.system import files, locks
from ups_store.testing.unsynced import Change, Resize, Write, variants_of


class PowerLoss(BaseException):
    """The machine went off; not an Exception, so that no error handling mistakes it for one."""


@dataclass(eq=False)
class _Inode:
    durable: bytearray = field(default_factory=bytearray)
    content: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        change.on(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        """Stands in for `files.sync`."""
        self.durable, self.pending = bytearray(self.content), []

    def left_after(self, kept: list[Change]) -> _Inode:
        content = bytearray(self.durable)
        for change in kept:
            change.on(content)
        return _Inode(bytearray(content), content)


@dataclass(frozen=True)
class _NameChange:
    """`name` means `inode` from now on; None: the name is gone. A rename is both at once."""

    names: tuple[tuple[Path, _Inode | None], ...]

    def on(self, names: dict[Path, _Inode]) -> None:
        for name, inode in self.names:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode


class Disk:
    """A file system in memory; its methods are those of `ups_store.system.files`.

    Args:
        names: Files that are there, durable.
        lose_power_at: Number of the changing operation before which the power is lost; None for never.
    """

    def __init__(self, names: dict[Path, bytes] | None = None, *, lose_power_at: int | None = None) -> None:
        inodes = {path: _Inode(bytearray(raw), bytearray(raw)) for path, raw in (names or {}).items()}
        self._names, self._durable_names = dict(inodes), dict(inodes)
        self._pending_names: list[_NameChange] = []
        self._open: dict[int, _Inode] = {}
        self._locks: list[tuple[int, _Inode, int, int, bool]] = []
        self._next_fd = 1 << 20
        self.lose_power_at = lose_power_at
        self.num_changes = 0
        self.num_syncs = 0
        self.num_writebacks = 0
        self.is_off = False

    def read(self, path: Path) -> bytes | None:
        """Content of a file as programs see it; None if there is none."""
        inode = self._names.get(path)
        return None if inode is None else bytes(inode.content)

    def go_on(self) -> None:
        """After `PowerLoss`: it was only the process that died; what it had written is still there."""
        self.is_off, self.lose_power_at = False, None

    def after_power_loss(self, *, seed: int = 0) -> Iterator[dict[Path, bytes]]:
        """Everything that may be found after the power came back, as files by name."""
        for kept_names in range(len(self._pending_names) + 1):
            names = dict(self._durable_names)
            for change in self._pending_names[:kept_names]:
                change.on(names)
            dirty = [inode for inode in dict.fromkeys(names.values()) if inode.pending]
            assert len(dirty) <= 1, "the variants of several unsynced files aren't multiplied out"
            variants = variants_of(dirty[0].pending, random.Random(seed)) if dirty else iter([[]])
            for kept in variants:
                left = {inode: inode.left_after(kept if inode in dirty else []) for inode in names.values()}
                yield {path: bytes(left[inode].content) for path, inode in names.items()}

    def open_existing(self, path: Path, *, writable: bool = False) -> int:
        """Stands in for `files.open_existing`."""
        self._check_power()
        if path not in self._names:
            raise StoreNotFoundError("no such file", path=path)
        return self._new_fd(self._names[path])

    def permissions(self, place: int | Path) -> None:
        """Stands in for `files.permissions`: the disk keeps none."""

    def create_new(self, path: Path, *, mode: int = 0o666) -> int:
        """Stands in for `files.create_new`."""
        self._change()
        if path in self._names:
            raise FileExistsError(path)
        inode = _Inode()
        self._rename(((path, inode),))
        return self._new_fd(inode)

    def close(self, fd: int) -> None:
        """Stands in for `files.close`."""
        self._open.pop(fd, None)
        self._locks = [lock for lock in self._locks if lock[0] != fd]

    def size(self, fd: int) -> int:
        """Stands in for `files.size`."""
        return len(self._open[fd].content)

    def mode(self, fd: int) -> int:
        """Stands in for `files.mode`."""
        return stat.S_IFREG | 0o644

    def read_at(self, fd: int, offset: int, nbytes: int) -> bytes:
        """Stands in for `files.read_at`."""
        self._check_power()
        return bytes(self._open[fd].content[offset : offset + nbytes])

    def read_into(self, fd: int, offset: int, target: memoryview) -> int:
        """Stands in for `files.read_into`."""
        data = self.read_at(fd, offset, len(target))
        target[: len(data)] = data
        return len(data)

    def write_at(self, fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Stands in for `files.write_at`."""
        self._change()
        self._open[fd].change(Write(offset, bytes(data)))

    def allocate(self, fd: int, nbytes: int) -> None:
        """Stands in for `files.allocate`."""
        self._change()
        self._open[fd].change(Resize(nbytes, only_grow=True))

    def truncate(self, fd: int, nbytes: int) -> None:
        """Stands in for `files.truncate`."""
        self._change()
        self._open[fd].change(Resize(nbytes, only_grow=False))

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """Stands in for `files.start_writeback`: a hint, so the bytes stay what they were, unsynced."""
        self._check_power()
        self.num_writebacks += 1
        assert offset + nbytes <= len(self._open[fd].content)

    def sync_data(self, fd: int) -> None:
        """Stands in for `files.sync_data`."""
        self._change()
        self.num_syncs += 1
        self._open[fd].sync()

    def sync(self, fd: int) -> None:
        """Stands in for `files.sync`."""
        self.sync_data(fd)

    def sync_folder(self, path: Path) -> None:
        """Stands in for `files.sync_folder`."""
        self._change()
        self.num_syncs += 1
        self._durable_names, self._pending_names = dict(self._names), []

    def rename(self, old: Path, new: Path) -> None:
        """Stands in for `files.rename`."""
        self._change()
        self._rename(((new, self._names[old]), (old, None)))

    def link(self, old: Path, new: Path) -> None:
        """Stands in for `files.link`."""
        self._change()
        if new in self._names:
            raise FileExistsError(new)
        self._rename(((new, self._names[old]),))

    def remove(self, path: Path) -> None:
        """Stands in for `files.remove`."""
        if self.is_off:
            return
        self._change()
        self._rename(((path, None),))

    def copy_range(self, source: int, start: int, fd: int, offset: int, nbytes: int) -> int:
        """Stands in for `files.copy_range`."""
        data = self.read_at(source, start, nbytes)
        self.write_at(fd, offset, data)
        return len(data)

    def names_in(self, folder: Path) -> list[str]:
        """Stands in for `files.names_in`."""
        return sorted(path.name for path in self._names if path.parent == folder)

    def remove_folder(self, folder: Path) -> None:
        """Stands in for `files.remove_folder`: folders themselves aren't modelled."""

    def exists(self, path: Path) -> bool:
        """Stands in for `files.exists`."""
        return path in self._names

    def is_file_at(self, fd: int, path: Path) -> bool:
        """Stands in for `files.is_file_at`."""
        return self._names.get(path) is self._open[fd]

    def free_bytes(self, folder: Path) -> int:
        """Stands in for `files.free_bytes`."""
        return 1 << 40

    def try_lock(self, fd: int, offset: int, length: int = 1, *, exclusive: bool = True) -> bool:
        """Stands in for `locks.try_lock`."""
        inode = self._open[fd]
        for holder, other, first, num, is_exclusive in self._locks:
            overlaps = first < offset + length and offset < first + num
            if holder != fd and other is inode and overlaps and (exclusive or is_exclusive):
                return False
        self._locks.append((fd, inode, offset, length, exclusive))
        return True

    def unlock(self, fd: int, offset: int, length: int = 1) -> None:
        """Stands in for `locks.unlock`."""
        self._locks = [lock for lock in self._locks if (lock[0], lock[2], lock[3]) != (fd, offset, length)]

    def _new_fd(self, inode: _Inode) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = inode
        return self._next_fd

    def _rename(self, names: tuple[tuple[Path, _Inode | None], ...]) -> None:
        change = _NameChange(names)
        change.on(self._names)
        self._pending_names.append(change)

    def _change(self) -> None:
        self._check_power()
        if self.num_changes == self.lose_power_at:
            self.is_off = True
            raise PowerLoss
        self.num_changes += 1

    def _check_power(self) -> None:
        if self.is_off:
            raise PowerLoss


_REPLACED = [
    "open_existing",
    "permissions",
    "create_new",
    "close",
    "size",
    "mode",
    "read_at",
    "read_into",
    "write_at",
    "allocate",
    "truncate",
    "start_writeback",
    "sync_data",
    "sync",
    "sync_folder",
    "rename",
    "link",
    "remove",
    "copy_range",
    "names_in",
    "remove_folder",
    "exists",
    "is_file_at",
    "free_bytes",
]
_REPLACED_LOCKS = ["try_lock", "unlock"]


@contextlib.contextmanager
def installed(disk: Disk) -> Iterator[Disk]:
    """Have the package use `disk` in the place of the machine's file system while the block runs."""
    with contextlib.ExitStack() as stack:
        for name in _REPLACED:
            stack.enter_context(mock.patch.object(files, name, getattr(disk, name)))
        for name in _REPLACED_LOCKS:
            stack.enter_context(mock.patch.object(locks, name, getattr(disk, name)))
        yield disk
