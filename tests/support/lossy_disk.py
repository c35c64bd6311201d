"""A disk in memory that tells written from durable bytes, and what may be left of it after a power loss.

`installed` puts it in the place of `ups_store.system.files` and `ups_store.system.locks`. What a file system
may do to unsynced writes is what this disk does: drop any of them, keep any of them, in any order, whole, in
part, or sector by sector. Names of a folder appear and vanish in order, as a journal does it, and a sync of
the folder keeps them. Everything that was synced stays.

Libraries such as HDF5 write files by themselves. The disk watches a real folder for that: what it finds there
before each operation are unsynced writes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from unsynced import Change, Resize, Write, variants_of

from ups_store.errors import StoreNotFoundError
from ups_store.system import files, locks

# Of files that aren't on the disk.
_read_really, _size_really, _close_really = files.read_at, files.size, files.close
_BLOCK_BYTES = 4096  # of what a library wrote: a write by itself
_NUM_MIXTURES = 4  # of several unsynced files


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


Names = dict[Path, _Inode]


@dataclass(frozen=True)
class _NameChange:
    """What an operation does to the names in a folder; a rename of a folder takes along what is below it."""

    folder: Path
    on: Callable[[Names], object]


def _set_name(names: Names, path: Path, inode: _Inode | None) -> None:
    if inode is None:
        names.pop(path, None)
    else:
        names[path] = inode


def _move(names: Names, old: Path, new: Path) -> None:
    for name in [name for name in names if name == old or old in name.parents]:
        names[new / name.relative_to(old)] = names.pop(name)


class Disk:
    """A file system in memory; its methods are those of `ups_store.system.files`.

    Args:
        names: Files that are there, durable.
        lose_power_at: Number of the changing operation before which the power is lost; None for never.
        watched: A real folder, in which libraries write by themselves; what is there now is durable.
    """

    def __init__(
        self,
        names: dict[Path, bytes] | None = None,
        *,
        lose_power_at: int | None = None,
        watched: Path | None = None,
    ) -> None:
        self._watched = watched
        self._real = {} if watched is None else _content_of(watched)
        names = {**self._real, **(names or {})}
        inodes = {path: _Inode(bytearray(raw), bytearray(raw)) for path, raw in names.items()}
        self._names, self._durable_names = dict(inodes), dict(inodes)
        self._pending_names: list[_NameChange] = []
        self._folders: set[Path] = set()  # that were made here
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

    def names(self) -> list[Path]:
        """The files that programs see."""
        return sorted(self._names.keys() - self._folders)

    def go_on(self) -> None:
        """After `PowerLoss`: it was only the process that died; what it had written is still there."""
        self.is_off, self.lose_power_at = False, None

    def after_power_loss(self, *, seed: int = 0) -> Iterator[dict[Path, bytes]]:
        """Everything that may be found after the power came back, as files by name."""
        if not self.is_off:
            self._take_in()
        chance = random.Random(seed)
        for changes in self._kept_changes():
            names = dict(self._durable_names)
            for change in changes:
                change.on(names)
            lost = self._folders - names.keys()
            for path in [path for path in names if path in self._folders or lost.intersection(path.parents)]:
                del names[path]
            dirty = [inode for inode in dict.fromkeys(names.values()) if inode.pending]
            for kept in _kept_writes(dirty, chance):
                left = {inode: inode.left_after(kept.get(inode, [])) for inode in names.values()}
                yield {path: bytes(left[inode].content) for path, inode in names.items()}

    def _kept_changes(self) -> Iterator[list[_NameChange]]:
        """Which changes of names may be there: the first, and all but those in one of several folders."""
        pending = self._pending_names
        for num in range(len(pending) + 1):
            yield pending[:num]
        folders = {change.folder for change in pending}
        for folder in sorted(folders) if len(folders) > 1 else []:
            yield [change for change in pending if change.folder != folder]

    def _take_in(self) -> None:
        """What happened in the watched folder since the last operation."""
        if self._watched is None:
            return
        found = _content_of(self._watched)
        for path in self._real.keys() - found.keys():
            self._change_name(path, functools.partial(_set_name, path=path, inode=None))
        for path, raw in found.items():
            inode = self._names.get(path)
            if inode is None:
                inode = _Inode()
                self._change_name(path, functools.partial(_set_name, path=path, inode=inode))
            for change in _changes_to(bytes(inode.content), raw):
                inode.change(change)
        self._real = found

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
        self._change_name(path, functools.partial(_set_name, path=path, inode=inode))
        return self._new_fd(inode)

    def open_or_create(self, path: Path) -> int:
        """Stands in for `files.open_or_create`."""
        return self.open_existing(path) if path in self._names else self.create_new(path)

    def close(self, fd: int) -> None:
        """Stands in for `files.close`."""
        if self._open.pop(fd, None) is None:
            _close_really(fd)
        self._locks = [lock for lock in self._locks if lock[0] != fd]

    def size(self, fd: int) -> int:
        """Stands in for `files.size`."""
        return len(self._open[fd].content) if fd in self._open else _size_really(fd)

    def mode(self, fd: int) -> int:
        """Stands in for `files.mode`."""
        return stat.S_IFREG | 0o644

    def read_at(self, fd: int, offset: int, nbytes: int) -> bytes:
        """Stands in for `files.read_at`."""
        self._check_power()
        if fd not in self._open:  # of a store that was opened before
            return _read_really(fd, offset, nbytes)
        return bytes(self._open[fd].content[offset : offset + nbytes])

    def read_into(self, fd: int, offset: int, target: memoryview) -> int:
        """Stands in for `files.read_into`."""
        found = self.read_at(fd, offset, len(target))
        target[: len(found)] = found
        return len(found)

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
        for change in self._pending_names:
            if change.folder == path:
                change.on(self._durable_names)
        self._pending_names = [change for change in self._pending_names if change.folder != path]

    def rename(self, old: Path, new: Path) -> None:
        """Stands in for `files.rename`."""
        self._change()
        if self._watched is not None:
            self._forget(new)
            if old.exists():
                old.rename(new)
            self._real = _content_of(self._watched)
        self._change_name(new, functools.partial(_move, old=old, new=new))

    def link(self, old: Path, new: Path) -> None:
        """Stands in for `files.link`."""
        self._change()
        if new in self._names:
            raise FileExistsError(new)
        inode = self._names[old]
        if self._watched is not None and old.exists():
            os.link(old, new)
            self._real[new] = self._real[old]
        self._change_name(new, functools.partial(_set_name, path=new, inode=inode))

    def remove(self, path: Path) -> None:
        """Stands in for `files.remove`."""
        if self.is_off:
            return
        self._change()
        self._forget(path)
        self._change_name(path, functools.partial(_set_name, path=path, inode=None))

    def copy_range(self, source: int, start: int, fd: int, offset: int, nbytes: int) -> int:
        """Stands in for `files.copy_range`."""
        data = self.read_at(source, start, nbytes)
        self.write_at(fd, offset, data)
        return len(data)

    def last_write(self, path: Path) -> tuple[int, int] | None:
        """Stands in for `files.last_write`; all times are equal, so that none shows what a power loss did."""
        inode = self._names.get(path)
        return None if inode is None else (len(inode.content), 0)

    def names_in(self, folder: Path) -> list[str]:
        """Stands in for `files.names_in`."""
        return sorted(path.name for path in self._names if path.parent == folder)

    def create_folder(self, folder: Path) -> None:
        """Make a folder; other folders are always there."""
        self._change()
        if self.exists(folder):
            raise FileExistsError(folder)
        self._folders.add(folder)
        self._change_name(folder, functools.partial(_set_name, path=folder, inode=_Inode()))

    def remove_folder(self, folder: Path) -> None:
        """Stands in for `files.remove_folder`; nothing happens to others than `create_folder` made."""
        if self.is_off:
            return
        if folder in self._folders & self._names.keys() and not self.names_in(folder):
            self._change_name(folder, functools.partial(_set_name, path=folder, inode=None))

    def exists(self, path: Path) -> bool:
        """Stands in for `files.exists`."""
        return path in self._names or any(path in name.parents for name in self._names)

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

    def _forget(self, path: Path) -> None:
        """Remove a file from the watched folder, too."""
        if self._real.pop(path, None) is not None:
            path.unlink()

    def _change_name(self, path: Path, on: Callable[[Names], object]) -> None:
        on(self._names)
        self._pending_names.append(_NameChange(path.parent, on))

    def _change(self) -> None:
        self._check_power()
        if self.num_changes == self.lose_power_at:
            self.is_off = True
            raise PowerLoss
        self.num_changes += 1

    def _check_power(self) -> None:
        if self.is_off:
            raise PowerLoss
        self._take_in()


def _content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _changes_to(old: bytes, new: bytes) -> Iterator[Change]:
    """What makes one content out of another, in the order of the file."""
    if len(new) < len(old):
        yield Resize(len(new), only_grow=False)
    for first in range(0, len(new), _BLOCK_BYTES):
        block = slice(first, first + _BLOCK_BYTES)
        if old[block] != new[block]:
            yield Write(first, new[block])


def _kept_writes(dirty: list[_Inode], chance: random.Random) -> Iterator[dict[_Inode, list[Change]]]:
    """Which unsynced changes of files may have reached them; of several files no product, but a choice."""
    every = {inode: list(variants_of(inode.pending, chance)) for inode in dirty}
    if len(dirty) <= 1:
        yield from (dict.fromkeys(dirty, kept) for kept in every[dirty[0]]) if dirty else [{}]
        return
    whole = {inode: inode.pending for inode in dirty}
    yield from ({}, whole)
    yield from ({**whole, inode: []} for inode in dirty)
    for _ in range(_NUM_MIXTURES):
        yield {inode: chance.choice(every[inode]) for inode in dirty}


_REPLACED = [
    "open_existing",
    "permissions",
    "create_new",
    "open_or_create",
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
    "last_write",
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
