"""A shared cache in a folder that several machines see."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from ups_store.errors import FormatError, RemoteError, StoreNotFoundError
from ups_store.remote.shared_cache import TEMPORARY, SharedFile, Stray
from ups_store.sources.download import Progress
from ups_store.sources.origins import CHUNK_BYTES, LocalOrigin, Origin
from ups_store.system import files, locks

_COPY_BYTES = 8 << 20  # at a time: what the file system copies by itself, such as an NFS server
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # renameat2(2)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_FLAGS = (errno.EINVAL, errno.ENOSYS)  # of a rename
_LOCK_AT = 1 << 62  # a byte that no store has


class FolderCache:
    """See `SharedCache`.

    Args:
        folder: Its root, which has to be there.
    """

    is_read_only = False

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """See `SharedCache`."""
        self._check_there()
        found = (SharedFile.at(*each) for each in self._files(self._folder / config_hash))
        return [entry for entry in found if entry]

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """See `SharedCache`."""
        self._check_there()
        entries, strays = [], []
        for each in self._files(self._folder):
            entry = SharedFile.at(*each)
            if entry:
                entries.append(entry)
            else:
                strays.append(Stray(*each, is_temporary=each[0].endswith(f".{TEMPORARY}")))
        return entries, strays

    def origin(self, entry: SharedFile) -> Origin:
        """See `SharedCache`; the file itself has the checksums."""
        return LocalOrigin(self._folder / entry.key)

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """See `SharedCache`; copied beside its place, where a killed push is continued, and linked there."""
        self._check_there()
        place = self._folder / key
        if files.exists(place) and not replace:
            return False
        _make_folders(place.parent)
        with files.opened(path) as source, _unfinished(place, _fingerprint(source)) as (fd, temporary):
            _copy(source, fd, temporary, progress)
            files.sync(fd)  # else a power cut could leave the name without the content
            is_first = _take_name(temporary, place, replace=replace)
            files.remove(temporary)
        files.sync_folder(place.parent)
        return is_first

    def remove(self, key: str, upload_id: str = "") -> None:
        """See `SharedCache`; also the folder that this leaves empty."""
        files.remove(self._folder / key)
        if "/" in key:
            files.remove_folder((self._folder / key).parent)

    def _check_there(self) -> None:
        """No push makes it: where a file system isn't mounted, that would hide that it is missing."""
        if not self._folder.is_dir():
            hint = "check the path and the mount, or make it"
            raise StoreNotFoundError("no such folder", path=self._folder, kind="no_cache", hint=hint)

    def _files(self, folder: Path) -> Iterator[tuple[str, int, float]]:
        """Key, length and time of regular files."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        for at, _, names in os.walk(folder, onerror=fail):
            for name in sorted(names):
                path = Path(at, name)
                with contextlib.suppress(FileNotFoundError):  # removed since
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield path.relative_to(self._folder).as_posix(), status.st_size, status.st_mtime


def _make_folders(folder: Path) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise RemoteError(
            f"can't make the folder ({error.strerror})",
            kind="not_allowed" if isinstance(error, PermissionError) else "refused",
            path=folder,
            hint="check the mount, and who may write there",
        ) from error


def _fingerprint(fd: int) -> str:
    """What tells a store's content from another's, for the name of its copy: a digest of its end.

    The end holds the checksums of everything else.
    """
    from hashlib import sha256

    size = files.size(fd)
    num = min(size, CHUNK_BYTES)
    return sha256(files.read_at(fd, size - num, num)).hexdigest()[:12]


@contextlib.contextmanager
def _unfinished(place: Path, fingerprint: str) -> Iterator[tuple[int, Path]]:
    """A copy in the making, open and locked: what a killed push of the same has left, or a new one."""
    usual = place.with_name(f"{place.name}.{fingerprint}.{TEMPORARY}")
    own = place.with_name(f"{place.name}.{files.build_id()[:6].hex()}.{TEMPORARY}")
    denied: PermissionError | None = None
    # Another machine may be pushing the same, or another user have left it, or a trap.
    for temporary, make in ((usual, files.open_or_create), (own, files.create_new)):
        try:
            fd = make(temporary)
        except PermissionError as error:
            denied = error
            continue
        except FormatError:
            continue
        try:
            is_free = temporary == own or (files.is_own(fd) and _is_locked_by_us(fd))
            if is_free and files.is_file_at(fd, temporary):
                yield fd, temporary
                return
        finally:
            files.close(fd)
    if denied:
        hint = "check who may write there"
        raise RemoteError("can't write there", kind="not_allowed", path=place, hint=hint) from denied
    raise RemoteError("another push took its name", kind="refused", path=own, hint="push it again")


def _is_locked_by_us(fd: int) -> bool:
    try:
        return locks.try_lock(fd, _LOCK_AT)
    except OSError:  # a file system without locks: then the name of this process has to do
        return False


def _copy(source: int, fd: int, temporary: Path, progress: Progress) -> None:
    """Make the copy whole; what is there already stays as far as it is the same."""
    size = files.size(source)
    progress.doing("comparing")
    at = _num_same(source, fd, progress)
    if files.size(fd) > size:
        files.truncate(fd, size)  # never more: without locks another machine may be writing the same bytes
    progress.doing("copying")
    while at < size:
        num = min(_COPY_BYTES, size - at)
        with files.disk_full_as_error(temporary, size - at):
            files.copy_range(source, at, fd, at, num)
        at += num
        progress.progressed(num)


def _num_same(source: int, fd: int, progress: Progress) -> int:
    """How many bytes an unfinished copy has, in whole chunks, that are those of the source."""
    at, there = 0, min(files.size(fd), files.size(source))
    while at < there:
        num = min(_COPY_BYTES, there - at)
        if files.read_at(fd, at, num) != files.read_at(source, at, num):
            break
        at += num
        progress.progressed(num)
    return at


def _take_name(temporary: Path, place: Path, *, replace: bool) -> bool:
    """Give a whole copy its name, without replacing another one unless that is wanted."""
    if replace:
        files.rename(temporary, place)
        return True
    try:
        files.link(temporary, place)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_without_replacing(temporary, place)
    return True


def _rename_without_replacing(old: Path, new: Path) -> bool:
    """For file systems without hard links."""
    paths = os.fsencode(old), os.fsencode(new)
    failed = files.libc().renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_NOREPLACE)
    number = ctypes.get_errno() if failed else 0
    if number == errno.EEXIST or (number in _NO_FLAGS and files.exists(new)):
        return False
    if number in _NO_FLAGS:
        files.rename(old, new)  # of two that race the last one stays; both are of the same identity
    elif number:
        raise OSError(number, os.strerror(number), str(new))
    return True
