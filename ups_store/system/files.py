"""The only calls of the package that change or read files; tests replace them to make files fail.

Locks are in `ups_store.system.locks`, mapped files and memory in `ups_store.system.memory`. Offsets and
lengths are bytes. Short reads and writes are continued here; Python itself retries on `EINTR`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import resource
import select
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from ups_store.errors import (
    AccessError,
    ConfigError,
    DiskFullError,
    FormatError,
    ReadError,
    StoreError,
    StoreNotFoundError,
)

Progress: TypeAlias = Callable[[int], object]  # takes the number of bytes that were done since the last call

PIPE_WAIT_S = 60.0  # a program that makes a configuration has to begin to write by then
TAKEN = "move it away, or choose another name"
OWN_USE = 0o600  # a file that is being made must be read and written, whatever it will be

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # between these files
_WRITE_ONLY = 2  # SYNC_FILE_RANGE_WRITE: begin, wait for nothing
_PIECE_BYTES = 64 << 20  # of memory at a time: a signal makes the kernel begin a piece again
_NO_WAIT = getattr(os, "RWF_NOWAIT", 8)  # linux/fs.h; Python lacks it with older C libraries
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PROBE_BYTES = 4 << 20  # what lies in the page cache lies there in larger pieces
_STATFS_BYTES = 256  # more than any struct statfs; f_type is its first word
_WRITE_BITS = 0o222
_DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")  # proc(5): opening it opens the file behind it again

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


# --- opening ------------------------------------------------------------------------------------------


def open_existing(path: Path, *, writable: bool = False) -> int:
    """Open a regular file; the caller owns the descriptor.

    Raises what `opening_error` makes. Other things than files may open, and are for the caller to refuse.
    """
    # O_NONBLOCK: opening a FIFO must not hang; regular files ignore it.
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except OSError as error:
        raise opening_error(path, error) from error


def opening_error(path: Path, error: OSError) -> StoreError:
    """Make the error about a file that the system doesn't open."""
    code, reason = error.errno, error.strerror or str(error)
    if code == errno.ENOENT:
        if os.path.islink(path):
            return dangling_link(path)
        return StoreNotFoundError("no such file", path=path, hint="check the path, or build it")
    if code == errno.ENOTDIR:
        return StoreNotFoundError("no such file", path=path, hint="check the path: a part of it is a file")
    if code == errno.ELOOP:
        problem, hint = "symbolic links that lead in a circle", "remove them"
        return StoreNotFoundError(problem, kind="dangling_link", path=path, hint=hint)
    if code in (errno.ENXIO, errno.ENODEV, errno.EISDIR):
        problem = f"it is {'a folder' if code == errno.EISDIR else 'not a regular file'}"
        return FormatError(problem, path=path, kind="not_a_file", hint="check the path")
    problem = f"it can't be opened ({reason.lower()})"
    if isinstance(error, PermissionError):
        hint = "check its permissions, and those of its folders (`ls -l`)"
        return AccessError(problem, path=path, hint=hint, errno=code, strerror=reason)
    kind, hint = None, "check the disk, or the connection to it (`dmesg`), and open it again"
    if code in (errno.EMFILE, errno.ENFILE):
        kind, hint = "open_files", "close stores that aren't needed, or raise the limit with `ulimit -n`"
    return ReadError(problem, kind=kind, path=path, hint=hint, errno=code, strerror=reason)


def dangling_link(path: Path) -> StoreNotFoundError:
    """Make the error about a symbolic link to nothing."""
    return StoreNotFoundError(
        "a symbolic link to what isn't there",
        kind="dangling_link",
        path=path,
        found=os.path.realpath(path),
        hint="mount or restore what it points to, or remove the link",
    )


@contextlib.contextmanager
def opened(path: Path, *, writable: bool = False) -> Iterator[int]:
    """Open a regular file for the duration of a block; raises as `open_existing`."""
    fd = open_existing(path, writable=writable)
    try:
        yield fd
    finally:
        close(fd)


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[BinaryIO]:
    """Open a file that a person names, for a block; also a pipe, once something comes through it.

    OSError if the system fails: ETIMEDOUT if nothing comes within `PIPE_WAIT_S`, ENODATA if a pipe ends
    without anything, such as that of `<(...)` when it is read again.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer must not hang
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        if is_pipe:
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            if not waiting.poll(PIPE_WAIT_S * 1000):
                problem = f"nothing came through the pipe within {PIPE_WAIT_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, problem)
        os.set_blocking(fd, True)
        with open(fd, "rb", closefd=False) as file:
            if is_pipe and not file.peek(1):
                raise OSError(errno.ENODATA, "the pipe ended without anything in it")
            yield file
    finally:
        close(fd)


def open_or_create(path: Path) -> int:
    """Open a file for reading and writing, made empty if it isn't there; the caller owns the descriptor.

    FormatError of kind "not_a_file" if there is something else, such as a link, which isn't followed: others
    may have put it at a name that they can guess.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hang
    problem = "it is no file"
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        problem = "it is a symbolic link" if error.errno == errno.ELOOP else problem
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise FormatError(problem, path=path, kind="not_a_file", hint="remove it")


def create_new(path: Path, *, mode: int = 0o666) -> int:
    """Create a file that must not exist yet; the umask takes bits of `mode` away. The caller owns it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def create_anonymous(name: str) -> int:
    """Create a file in memory (memfd_create), which the name doesn't name; the caller owns the descriptor."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "files in memory need Linux")
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Have the kernel refuse every change of a file that `create_anonymous` made, for ever."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def open_sealed(path: Path) -> int | None:
    """Open a file that `seal` protects, by another process's `descriptor_path`; the caller owns it.

    None if that process has closed it, and if something else lies there now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
    with contextlib.suppress(OSError):  # files that aren't in memory have no seals
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed == needed:
            return fd
    os.close(fd)
    return None


def opened_path(fd: int) -> Path | None:
    """Return where an open file lies, or lay until it was removed (proc(5)); None where that isn't known."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)"))
    except OSError:
        return None


def descriptor_path(fd: int) -> Path:
    """Return where processes of this user can open the file again, as long as `fd` is open (proc(5))."""
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def is_in_memory(path: Path) -> bool:
    """Return whether the path is a `descriptor_path`, of any process, as files in memory have."""
    return _DESCRIPTOR.fullmatch(str(path)) is not None


def duplicate(fd: int) -> int:
    """Return another descriptor of the same open file; the caller owns it."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def close(fd: int) -> None:
    """Close a descriptor."""
    os.close(fd)


# --- reading and writing ------------------------------------------------------------------------------


def size(fd: int) -> int:
    """Return the length of the open file."""
    return os.fstat(fd).st_size


def mode(fd: int) -> int:
    """Return file type and permission bits of the open file."""
    return os.fstat(fd).st_mode


def read_at(fd: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes`; less only at the end of the file."""
    first = os.pread(fd, nbytes, offset)
    if len(first) == nbytes or not first:
        return first
    blocks, num_read = [first], len(first)
    while num_read < nbytes and (block := os.pread(fd, nbytes - num_read, offset + num_read)):
        blocks.append(block)
        num_read += len(block)
    return b"".join(blocks)


def read_into(fd: int, offset: int, target: memoryview) -> int:
    """Fill `target`, a view of bytes; returns how many there were, fewer only at the end of the file."""
    num_read = 0
    while num_read < len(target) and (nbytes := os.preadv(fd, [target[num_read:]], offset + num_read)):
        num_read += nbytes
    return num_read


def in_page_cache(fd: int, offset: int, nbytes: int) -> bool:
    """Guess whether bytes of a file lie in the page cache; the system begins to read where they don't.

    Looks at a byte of every 4 MiB that may not wait (RWF_NOWAIT): mincore answers only processes that could
    write the file. False on file systems that don't know, such as NFS, and where the file ends before.
    """
    byte = bytearray(1)
    try:
        offsets = (*range(offset, offset + nbytes, _PROBE_BYTES), offset + nbytes - 1)
        return all(os.preadv(fd, [byte], probed, _NO_WAIT) for probed in offsets)
    except (OSError, NotImplementedError):  # EAGAIN; file system, kernel or C library don't know the flag
        return False


def write_at(fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`; after an OSError what was written before is in the file."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def copy_range(source: int, start: int, fd: int, offset: int, nbytes: int) -> int:
    """Copy bytes from one open file into another, inside the kernel or by reference where it can.

    Returns how many there were, fewer only at the end of the source.
    """
    copied = 0
    while copied < nbytes:
        num = min(nbytes - copied, _PIECE_BYTES)
        try:
            num = os.copy_file_range(source, fd, num, start + copied, offset + copied)
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise
            data = read_at(source, start + copied, num)
            write_at(fd, offset + copied, data)
            num = len(data)
        if not num:
            break
        copied += num
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


def allocated_bytes(file: int | Path) -> int:
    """Return what a file takes on the disk, holes left out; 0 if it isn't there."""
    try:
        return os.stat(file).st_blocks * 512  # whatever the size of the file system's own blocks
    except FileNotFoundError:
        return 0


def truncate(fd: int, nbytes: int) -> None:
    """Set the length of the open file."""
    os.ftruncate(fd, nbytes)


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give back the blocks of a part of a file, which then reads as zeros; OSError if the system can't."""
    first, length = ctypes.c_int64(offset), ctypes.c_int64(nbytes)
    if libc().fallocate64(ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE), first, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def touch(fd: int) -> None:
    """Have an open file be written now, for those who look at when it was."""
    os.utime(fd)


def advise_sequential(fd: int) -> None:
    """Say that all of the open file will be read, more or less in order: the kernel reads further ahead."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


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


# --- names and folders --------------------------------------------------------------------------------


def exists(path: Path) -> bool:
    """Return whether there is anything at the path."""
    return os.path.lexists(path)


def is_file_at(fd: int, path: Path) -> bool:
    """Return whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def is_own(fd: int) -> bool:
    """Return whether the file belongs to this user, and has one name: others can't have put it there."""
    status = os.fstat(fd)
    return status.st_uid == os.geteuid() and status.st_nlink == 1


def link_target(path: Path) -> Path | None:
    """Return what a symbolic link at the path points to in the end, there or not; None if it is no link."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else None


def modified_s(path: Path) -> float:
    """Return when the file was last written, seconds since the epoch."""
    return os.stat(path).st_mtime


def last_write(path: Path) -> tuple[int, int] | None:
    """Return the length of a file, and when it was last written (ns since the epoch); None without one."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


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


def remove_folder(folder: Path) -> None:
    """Remove a folder, unless there is something in it, or it isn't there."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def make_folder(path: Path, *, hint: str) -> None:
    """Make a folder and those above it, unless it is there; `ConfigError` if it can't be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file system can hold the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"can't make the folder ({reason.lower()})", path=path, hint=hint) from error


def may_write_into(folder: Path) -> bool:
    """Return whether this process may make files in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def check_no_link(folder: Path) -> None:
    """Refuse a folder that is a symbolic link, where what lies in it will be written and removed."""
    if os.path.islink(folder):
        raise FormatError("it is a symbolic link", path=folder, kind="not_a_file", hint="remove it")


# --- taking the place of another file -----------------------------------------------------------------
# Everything that replaces a file by a rename goes through here. Where there was nothing the umask decides. A
# symbolic link stays, and what it points to is replaced, by a rename in the folder of that. Mode bits decide,
# and access(2) isn't asked: root may do anything, and a store without a write bit is to stay all the same.


@dataclass(frozen=True)
class Permissions:
    """Mode bits of owner, group and others, and the numbers of owner and group."""

    mode: int
    uid: int
    gid: int


def permissions(file: int | Path) -> Permissions | None:
    """Return the permissions of an open file, or of what is at a path; None where there is nothing."""
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Permissions(stat.S_IMODE(status.st_mode) & 0o777, status.st_uid, status.st_gid)


def set_mode(file: int | Path, bits: int) -> None:
    """Set the permission bits of an open file, or of what is at a path."""
    os.chmod(file, bits)


def set_owner(file: int | Path, uid: int, gid: int) -> None:
    """Set owner and group of an open file, or of what is at a path; -1 leaves one as it is."""
    os.chown(file, uid, gid)


def real_place(path: Path) -> Path:
    """Return where a file of this path is replaced: behind the link, if there is one.

    StoreNotFoundError of kind "dangling_link" if it points to nothing; it names both.
    """
    target = None if is_in_memory(path) else link_target(path)
    if target is None:
        return path
    if not os.path.exists(target):
        raise dangling_link(path)
    return target


def check_file_or_free(path: Path) -> None:
    """Refuse to take the place of what is no regular file, forced or not: a rename would replace a device."""
    if path.exists() and not path.is_file():
        problem = f"there is {'a folder' if path.is_dir() else 'a pipe, a socket or a device'}"
        raise FormatError(problem, path=path, kind="not_a_file", hint=TAKEN)


def check_not_read_only(path: Path, *, hint: str) -> None:
    """Refuse to replace what has no write bit at all."""
    there = permissions(path)
    if there is not None and not there.mode & _WRITE_BITS:
        raise AccessError(
            "it is read-only",
            kind="read_only",
            exit_code=2,
            path=path,
            expected="a write bit",
            found=f"mode {there.mode:04o}",
            hint=hint,
        )


def create_replacement(temporary: Path, target: Path) -> int:
    """Create the file that will take the target's place, never more open than that; the caller owns it."""
    check_file_or_free(target)
    if permissions(target) is None:
        return create_new(temporary)
    fd = create_new(temporary, mode=OWN_USE)
    take_over_permissions(fd, target, extra=OWN_USE)
    return fd


def take_over_permissions(file: int | Path, target: Path, *, extra: int = 0) -> bool:
    """Give what is about to replace the target the target's mode, and its owner where the system allows that.

    Args:
        file: An open file, or the path of a file or folder.
        target: What is going to be replaced; nothing happens if it isn't there.
        extra: Bits that are set in any case, such as `OWN_USE`.
    Returns:
        Whether anything was changed, which a sync makes durable.
    """
    before, there = permissions(file), permissions(target)
    if there is None or before is None:
        return False
    bits, has_group = there.mode, (before.uid, before.gid) == (there.uid, there.gid)
    for uid in () if has_group else (there.uid, -1):  # owner and group, else the group alone
        with contextlib.suppress(OSError):  # only root may give files away, and only to known users
            set_owner(file, uid, there.gid)
            has_group = True
            break
    if not has_group:
        bits = (bits & ~0o070) | (bits & 0o007) << 3  # another group gets what all others get
    if before.mode != bits | extra:
        set_mode(file, bits | extra)
    return permissions(file) != before


def replace_file(path: Path, data: bytes, *, follow: bool = True) -> None:
    """Write a small file under a temporary name and rename it: no failure leaves a third content.

    Args:
        path: The file; one that is there is replaced, in one step.
        data: All of it.
        follow: Whether a symbolic link there stays, and what it points to is replaced.
    Raises:
        DiskFullError: If the file system has no room for it.
        OSError: As the file system says, with the name of the file.
    """
    target = real_place(path) if follow else path
    temporary = target.with_name(f"{target.name}.{build_id()[:8].hex()}")
    try:
        with disk_full_as_error(target, len(data)):
            fd = create_replacement(temporary, target)
            try:
                write_at(fd, 0, data)
                take_over_permissions(fd, target)
                sync(fd)  # else a power cut could leave the new name without the content
            finally:
                close(fd)
        rename(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        if isinstance(error, StoreError) and isinstance(error, OSError):
            error.filename = str(path)  # not the temporary one
        elif isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def replace_text(path: Path, text: str, *, follow: bool = True) -> None:
    """Write a small file atomically, as `replace_file` does."""
    replace_file(path, text.encode(), follow=follow)


# --- disks and the machine ----------------------------------------------------------------------------


def free_bytes(folder: Path) -> int:
    """Return the room that an ordinary user has in a folder's file system."""
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
        free, limit = free_bytes(path.parent), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit_text, hint = f"{free:,} free", f"free some space and run again: {kept}"
        if error.errno == errno.EFBIG:  # a limit of the length of files is no want of room
            limit_text = f"at most {limit:,} by `ulimit -f`"
            hint = f"raise that limit and run again: {kept}"
            if limit == resource.RLIM_INFINITY:
                limit_text = "a limit of the file system"
                hint = f"choose a file system that takes files of this length: {kept}"
        raise DiskFullError(
            os.strerror(error.errno).lower(),
            path=path,
            expected=f"{needed_bytes:,} bytes",
            found=limit_text,
            hint=hint,
            needed_bytes=needed_bytes,
            free_bytes=free,
            errno=error.errno,
        ) from error


@functools.cache
def libc() -> ctypes.CDLL:
    """Load the C library, for calls that Python lacks; they leave their error in `ctypes.get_errno`."""
    return ctypes.CDLL(None, use_errno=True)


def network_file_system(fd: int) -> str | None:
    """Return the name of the network file system that the open file lies on; None for local ones."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc().fstatfs(ctypes.c_int(fd), status):
        return None  # then it isn't known to be one
    return NETWORK_FILE_SYSTEMS.get(int.from_bytes(status.raw[:8], "little") & 0xFFFFFFFF)


def is_network(path: Path) -> bool:
    """Return whether a file or folder lies on a network file system."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return network_file_system(fd) is not None
    finally:
        os.close(fd)


def system_text(path: Path) -> str | None:
    """Return the text of one of the kernel's own small files; None where it doesn't have it."""
    try:
        return path.read_text()
    except OSError:
        return None


def boot_id() -> bytes:
    """Return 16 bytes that change with every boot of the machine; zeros where the system doesn't say."""
    text = system_text(Path("/proc/sys/kernel/random/boot_id"))
    return bytes(16) if text is None else bytes.fromhex(text.strip().replace("-", ""))


def build_id() -> bytes:
    """Return 16 random bytes."""
    return os.urandom(16)
