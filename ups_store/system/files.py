"""The only calls of the package that change or read files; tests replace them to make files fail.

Locks are in `ups_store.system.locks`, mapped files and memory in `ups_store.system.mappings`. Offsets and
lengths are bytes. Short reads and writes are continued here; Python itself retries on `EINTR`. What takes the
place of another file is in `ups_store.system.replacement`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import resource
import select
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ups_store.errors import (
    AccessError,
    ConfigError,
    DiskFullError,
    FormatError,
    ReadError,
    StoreNotFoundError,
)

PIPE_WAIT_S = 60.0  # a program that makes a configuration has to begin to write by then

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # between these files
_WRITE_ONLY = 2  # SYNC_FILE_RANGE_WRITE: begin, wait for nothing
_PIECE_BYTES = 64 << 20  # of memory at a time: a signal makes the kernel begin a piece again
_NO_WAIT = getattr(os, "RWF_NOWAIT", 8)  # linux/fs.h; Python lacks it with older C libraries
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PROBE_BYTES = 4 << 20  # what lies in the page cache lies there in larger pieces
_STATFS_BYTES = 256  # more than any struct statfs; f_type is its first word

# statfs(2) and linux/magic.h. FUSE and 9p may be local, but that can't be seen from here.
NETWORK_FILE_SYSTEMS = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x73757245: "coda",
    0xAAD7AAEA: "panfs",
    0x20030528: "orangefs",
    0x19830326: "beegfs",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
}


def open_existing(path: Path, *, writable: bool = False) -> int:
    """Open a regular file; the caller owns the descriptor.

    Raises:
        StoreNotFoundError: If there is nothing at the path, or where a link there points to.
        FormatError: If it is a socket, a device without a driver, or a folder that is to be written; kind
            "not_a_file". Other things than files open, and are for the caller to refuse.
        AccessError: If this user may not.
        ReadError: If the system fails; for want of descriptors kind "open_files".
    """
    # O_NONBLOCK: opening a FIFO must not hang; regular files ignore it.
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise dangling_link(path) from error
        raise StoreNotFoundError("no such file", path=path, hint="check the path, or build it") from error
    except OSError as error:
        raise opening_error(path, error) from error


def opening_error(path: Path, error: OSError) -> Exception:
    """What to say of a file that the system doesn't open."""
    if error.errno == errno.ENOTDIR:
        hint = "check the path: a part of it is a file"
        return StoreNotFoundError("no such file", path=path, hint=hint)
    if error.errno == errno.ELOOP:
        problem, hint = "symbolic links that lead in a circle", "remove them"
        return StoreNotFoundError(problem, kind="dangling_link", path=path, hint=hint)
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.EISDIR):
        what = "a folder" if error.errno == errno.EISDIR else "not a regular file"
        return FormatError(f"it is {what}", path=path, kind="not_a_file", hint="check the path")
    if isinstance(error, PermissionError):
        problem = f"it can't be opened ({os.strerror(error.errno or 0).lower()})"
        hint = "check its permissions, and those of its folders (`ls -l`)"
        denied = AccessError(problem, path=path, hint=hint)
        denied.errno, denied.strerror = error.errno, error.strerror
        return denied
    kind, hint = None, "check the disk, or the connection to it (`dmesg`), and open it again"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        kind, hint = "open_files", "close stores that aren't needed, or raise the limit with `ulimit -n`"
    reason = error.strerror or str(error)
    failed = ReadError(f"it can't be opened ({reason.lower()})", kind=kind, path=path, hint=hint)
    failed.errno, failed.strerror = error.errno, reason
    return failed


def dangling_link(path: Path) -> StoreNotFoundError:
    """The error about a symbolic link to nothing."""
    return StoreNotFoundError(
        "a symbolic link to what isn't there",
        kind="dangling_link",
        path=path,
        found=os.path.realpath(path),
        hint="mount or restore what it points to, or remove the link",
    )


@contextlib.contextmanager
def opened(path: Path, *, writable: bool = False) -> Iterator[int]:
    """The descriptor of a regular file for the duration of a block; raises as `open_existing`."""
    fd = open_existing(path, writable=writable)
    try:
        yield fd
    finally:
        close(fd)


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[BinaryIO]:
    """A file that a person names, for the duration of a block; also a pipe, once something comes through it.

    Raises:
        OSError: If the system fails; ETIMEDOUT if nothing comes within `PIPE_WAIT_S`, ENODATA if a pipe ends
            without anything, such as that of `<(...)` when it is read again.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer must not hang
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        if is_pipe:
            _wait_for_bytes(fd)
        os.set_blocking(fd, True)
        with open(fd, "rb", closefd=False) as file:
            if is_pipe and not file.peek(1):
                raise OSError(errno.ENODATA, "the pipe ended without anything in it")
            yield file
    finally:
        close(fd)


def _wait_for_bytes(fd: int) -> None:
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    if not waiting.poll(PIPE_WAIT_S * 1000):
        raise TimeoutError(errno.ETIMEDOUT, f"nothing came through the pipe within {PIPE_WAIT_S:g} s")


def create_new(path: Path, *, mode: int = 0o666) -> int:
    """Create a file that must not exist yet; the caller owns the descriptor.

    Args:
        path: Its name.
        mode: Permission bits, of which the process's umask takes some away.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def create_anonymous(name: str) -> int:
    """Create a file in memory (memfd_create); the caller owns the descriptor.

    Args:
        name: For those who look at a process's descriptors; names nothing.
    Raises:
        OSError: If the system isn't Linux, or there is no memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "files in memory need Linux")
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def opened_path(fd: int) -> Path | None:
    """Where an open file lies, or lay until it was removed, by proc(5); None where that isn't known."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)"))
    except OSError:
        return None


def descriptor_path(fd: int) -> Path:
    """Path under which processes of this user can open the file again, as long as `fd` is open (proc(5))."""
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def close(fd: int) -> None:
    """Close a descriptor."""
    os.close(fd)


def duplicate(fd: int) -> int:
    """Another descriptor of the same open file; the caller owns it."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def size(fd: int) -> int:
    """Length of the open file."""
    return os.fstat(fd).st_size


def mode(fd: int) -> int:
    """File type and permission bits of the open file."""
    return os.fstat(fd).st_mode


@dataclass(frozen=True)
class Permissions:
    """Which users may do what with a file or folder.

    Attributes:
        mode: Read, write and execute bits of owner, group and others.
        uid: The owner.
        gid: Its group.
    """

    mode: int
    uid: int
    gid: int


def permissions(place: int | Path) -> Permissions | None:
    """The permissions of an open file, or of what is at a path; None where there is nothing."""
    try:
        status = os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Permissions(stat.S_IMODE(status.st_mode) & 0o777, status.st_uid, status.st_gid)


def set_mode(place: int | Path, bits: int) -> None:
    """Set the permission bits of an open file, or of what is at a path."""
    os.chmod(place, bits)


def set_owner(place: int | Path, uid: int, gid: int) -> None:
    """Set owner and group of an open file, or of what is at a path; -1 leaves one as it is."""
    os.chown(place, uid, gid)


def link_target(path: Path) -> Path | None:
    """What a symbolic link at the path points to in the end, there or not; None if it is no link."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else None


def read_at(fd: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes`; less only at the end of the file."""
    first = os.pread(fd, nbytes, offset)
    if len(first) == nbytes or not first:
        return first
    parts, got = [first], len(first)
    while got < nbytes and (part := os.pread(fd, nbytes - got, offset + got)):
        parts.append(part)
        got += len(part)
    return b"".join(parts)


def read_into(fd: int, offset: int, target: memoryview) -> int:
    """Fill `target`, a view of bytes; returns how many there were, fewer only at the end of the file."""
    got = 0
    while got < len(target) and (nbytes := os.preadv(fd, [target[got:]], offset + got)):
        got += nbytes
    return got


def in_page_cache(fd: int, offset: int, nbytes: int) -> bool:
    """Whether a part of a file seems to lie in the page cache; the system begins to read where it doesn't.

    Looks at a byte of every 4 MiB that may not wait (RWF_NOWAIT): mincore answers only processes that could
    write the file. False on file systems that don't know, such as NFS, and where the file ends before.
    """
    byte = bytearray(1)
    try:
        places = (*range(offset, offset + nbytes, _PROBE_BYTES), offset + nbytes - 1)
        return all(os.preadv(fd, [byte], place, _NO_WAIT) for place in places)
    except (OSError, NotImplementedError):  # EAGAIN; file system, kernel or C library don't know the flag
        return False


def write_at(fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`.

    Raises:
        OSError: As the file system says; what was written before is in the file.
    """
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def copy_range(source: int, start: int, fd: int, offset: int, nbytes: int) -> int:
    """Copy bytes from one open file into another; inside the kernel, or by reference, where it can.

    Returns:
        How many there were, fewer only at the end of the source.
    """
    copied = 0
    while copied < nbytes:
        num = min(nbytes - copied, _PIECE_BYTES)
        try:
            got = os.copy_file_range(source, fd, num, start + copied, offset + copied)
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise
            data = read_at(source, start + copied, num)
            write_at(fd, offset + copied, data)
            got = len(data)
        if not got:
            break
        copied += got
    return copied


def allocate(fd: int, nbytes: int) -> None:
    """Reserve the blocks of a new file up to `nbytes`, so that no later write can run out of space."""
    status = os.fstatvfs(fd)
    if status.f_bavail * status.f_frsize < nbytes:  # else the disk would be filled before it is found out
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, 0, nbytes)


def allocate_anonymous(fd: int, nbytes: int) -> None:
    """Take the memory of a file that `create_anonymous` made; no file system has a limit for it."""
    for offset in range(0, nbytes, _PIECE_BYTES):
        os.posix_fallocate(fd, offset, min(_PIECE_BYTES, nbytes - offset))


def seal(fd: int) -> None:
    """Have the kernel refuse every change of a file that `create_anonymous` made, for ever."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def truncate(fd: int, nbytes: int) -> None:
    """Set the length of the open file."""
    os.ftruncate(fd, nbytes)


def open_or_create(path: Path) -> int:
    """Open a file for reading and writing, made empty if it isn't there; the caller owns the descriptor.

    Raises:
        FormatError: If there is something else, such as a link, which isn't followed: others may have put it
            at a name that they can guess; kind "not_a_file".
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hang
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        what = "a symbolic link" if error.errno == errno.ELOOP else "no file"
        raise FormatError(f"it is {what}", path=path, kind="not_a_file", hint="remove it") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError("it is no file", path=path, kind="not_a_file", hint="remove it")
    return fd


def is_own(fd: int) -> bool:
    """Whether the open file belongs to this user, and has one name: others can't have put it there."""
    status = os.fstat(fd)
    return status.st_uid == os.geteuid() and status.st_nlink == 1


def allocated_bytes(file: int | Path) -> int:
    """Bytes that a file takes on the disk, holes left out; 0 if it isn't there."""
    try:
        return os.stat(file).st_blocks * 512  # whatever the size of the file system's own blocks
    except FileNotFoundError:
        return 0


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give back the blocks of a part of a file, which then reads as zeros (fallocate).

    Raises:
        OSError: If the file system can't.
    """
    mode, first, length = ctypes.c_int(_PUNCH_HOLE), ctypes.c_int64(offset), ctypes.c_int64(nbytes)
    if libc().fallocate64(ctypes.c_int(fd), mode, first, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def touch(fd: int) -> None:
    """Have an open file be written now, for those who look at when it was."""
    os.utime(fd)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with written bytes, so that a later `sync_data` has less to wait for.

    A hint: nothing is promised, and no failure is reported here or lost to the sync (sync_file_range).
    """
    call = getattr(libc(), "sync_file_range", None)  # Linux has it
    if call:
        call(ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_WRITE_ONLY))


def sync_data(fd: int) -> None:
    """Make written bytes durable, and the metadata that is needed to read them."""
    os.fdatasync(fd)


def sync(fd: int) -> None:
    """Make written bytes and all metadata durable."""
    os.fsync(fd)


def sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exists(path: Path) -> bool:
    """Whether there is anything at the path."""
    return os.path.lexists(path)


def may_write_into(folder: Path) -> bool:
    """Whether this process may make files in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def modified_s(path: Path) -> float:
    """When the file was last written, seconds since the epoch."""
    return os.stat(path).st_mtime


def last_write(path: Path) -> tuple[int, int] | None:
    """Length of the file at a path, and when it was last written (ns since the epoch); None without one."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def names_in(folder: Path) -> list[str]:
    """Names of the files in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def create_folder(folder: Path) -> None:
    """Make a folder; `FileExistsError` if the name is taken."""
    os.mkdir(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, unless there is something in it, or it isn't there."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def rename(old: Path, new: Path) -> None:
    """Replace `new` by `old` in one step."""
    os.rename(old, new)


def link(old: Path, new: Path) -> None:
    """Give the file a second name; `FileExistsError` if that name is taken."""
    os.link(old, new)


def remove(path: Path) -> None:
    """Remove a name; nothing happens if it isn't there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def is_file_at(fd: int, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, for calls that Python lacks; they leave their error in `ctypes.get_errno`."""
    return ctypes.CDLL(None, use_errno=True)


def network_file_system(fd: int) -> str | None:
    """Name of the network file system that the open file lies on; None for local ones (fstatfs)."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc().fstatfs(ctypes.c_int(fd), status):
        return None  # then it isn't known to be one
    magic = int.from_bytes(status.raw[:8], "little") & 0xFFFFFFFF
    return NETWORK_FILE_SYSTEMS.get(magic)


def is_network(path: Path) -> bool:
    """Whether a file or folder lies on a network file system."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return network_file_system(fd) is not None
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Room that an ordinary user has in a folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def disk_full_as_error(
    path: Path, needed_bytes: int, *, kept: str = "nothing that was committed is lost"
) -> Iterator[None]:
    """Turn the file system's "no room" into `DiskFullError` with needed and free bytes, and what is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OUT_OF_SPACE or isinstance(error, DiskFullError):
            raise
        free = free_bytes(path.parent)
        found, hint = _full_in_words(error.errno, free, kept)
        expected = f"{needed_bytes:,} bytes"
        problem = os.strerror(error.errno).lower()
        full = DiskFullError(problem, path=path, expected=expected, found=found, hint=hint)
        full.needed_bytes, full.free_bytes, full.errno = needed_bytes, free, error.errno
        raise full from error


def _full_in_words(code: int, free: int, kept: str) -> tuple[str, str]:
    """What was found, and what to do; a limit of the length of files is no want of room."""
    if code != errno.EFBIG:
        return f"{free:,} free", f"free some space and run again: {kept}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        hint = f"choose a file system that takes files of this length: {kept}"
        return "a limit of the file system", hint
    return f"at most {limit:,} by `ulimit -f`", f"raise that limit and run again: {kept}"


def system_text(path: Path) -> str | None:
    """Text of one of the kernel's own small files; None where it doesn't have it."""
    try:
        return path.read_text()
    except OSError:
        return None


def boot_id() -> bytes:
    """16 bytes that change with every boot of the machine; zeros where the system doesn't say."""
    text = system_text(Path("/proc/sys/kernel/random/boot_id"))
    return bytes(16) if text is None else bytes.fromhex(text.strip().replace("-", ""))


def build_id() -> bytes:
    """16 random bytes."""
    return os.urandom(16)


def advise_sequential(fd: int) -> None:
    """Say that all of the open file will be read, more or less in order: the kernel reads further ahead."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def open_sealed(path: Path) -> int | None:
    """Open a file that `seal` protects, by another process's `descriptor_path`; the caller owns it.

    Returns:
        The descriptor; None if that process has closed it, and if something else lies there now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:  # files that aren't in memory have no seals
        is_sealed = False
    if not is_sealed:
        os.close(fd)
    return fd if is_sealed else None


def check_no_link(folder: Path) -> None:
    """Refuse a folder that is a symbolic link, where what lies in it will be written and removed.

    Raises:
        FormatError: Kind "not_a_file".
    """
    if os.path.islink(folder):
        raise FormatError("it is a symbolic link", path=folder, kind="not_a_file", hint="remove it")


def make_folder(path: Path, *, hint: str) -> None:
    """Make a folder and those above it, unless it is there.

    Raises:
        ConfigError: If it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file system can hold the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"can't make the folder ({reason.lower()})", path=path, hint=hint) from error
